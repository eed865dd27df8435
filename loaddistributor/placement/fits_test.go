package placement_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// drawTight draws a demand that mostly does not fit: for nearly all capacity or more, with a small
// burst, few publishers or many brokers.
func drawTight(t *rapid.T, brokers []placement.Broker) placement.Demand {
	d := placement.Demand{
		Topic: "t", Rate: drawRate(t, brokers, placement.MaxRate), Burst: rapid.Int64Range(1, 6).Draw(t, "burst"),
		AtLeast: rapid.IntRange(0, 5).Draw(t, "at least"),
	}
	if rapid.Bool().Draw(t, "too much") {
		d.Rate = min(placement.MaxRate, d.Rate+rapid.Int64Range(1, d.Rate).Draw(t, "more"))
	}
	spread(&d, rapid.IntRange(0, 5).Draw(t, "publishers"))
	return d
}

// spread gives the demand n publishers that together send all of its rate.
func spread(d *placement.Demand, n int) {
	d.Publishers = nil
	for i := range n {
		d.Publishers = append(d.Publishers, placement.Publisher{ID: fmt.Sprint(i), Rate: float64(d.Rate) / float64(n)})
	}
}

// A reported fit is feasible, and one step beyond is not.
func TestWhatIsSaidToFitDoes(t *testing.T) {
	mentioned := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		brokers := drawBrokers(t, 6, rapid.SampledFrom([]int64{5, 1000, 1e9}).Draw(t, "size"))
		d := drawTight(t, brokers)
		policy := rapid.SampledFrom(placement.Policies()).Draw(t, "policy")
		place := func(brokers []placement.Broker, d placement.Demand) error {
			_, err := placement.Place(policy, brokers, d, seeded(1))
			return err
		}
		var bound *placement.Infeasible
		if err := place(brokers, d); !errors.As(err, &bound) {
			t.Skip("it fits: ", err)
		}
		n := len(d.Publishers)
		try := func(name string, value, step int64, with func(int64) ([]placement.Broker, placement.Demand)) {
			if value == 0 {
				return
			}
			mentioned[bound.Bound+" "+name]++
			if err := place(with(value)); err != nil {
				t.Fatalf("%s of %d: %v", name, value, err)
			}
			if value+step == 0 {
				return
			}
			if err := place(with(value + step)); !errors.As(err, new(*placement.Infeasible)) {
				t.Fatalf("%s of %d is said to be the limit, and with %d: %v", name, value, value+step, err)
			}
		}
		f := bound.Fits
		try("rate", f.Rate, 1, func(v int64) ([]placement.Broker, placement.Demand) {
			d := d
			d.Rate = v
			spread(&d, n)
			return brokers, d
		})
		try("burst", f.Burst, -1, func(v int64) ([]placement.Broker, placement.Demand) {
			d := d
			d.Burst = v
			return brokers, d
		})
		try("publishers", f.Publishers, -1, func(v int64) ([]placement.Broker, placement.Demand) {
			d := d
			spread(&d, int(v))
			return brokers, d
		})
		try("more brokers", f.MoreBrokers, -1, func(v int64) ([]placement.Broker, placement.Demand) {
			all := slices.Clone(brokers)
			for i := range v {
				all = append(all, placement.Broker{ID: fmt.Sprintf("more%d", i), Mcap: f.Mcap})
			}
			return all, d
		})
		// The report is complete: if the bound alone prevents the placement, its remedy is named.
		alone := func(set func(*placement.Demand)) bool {
			d := d
			set(&d)
			return place(brokers, d) == nil
		}
		if f.Burst == 0 && alone(func(d *placement.Demand) { d.Burst = 1000 }) {
			t.Fatalf("%v: a greater burst would do", bound)
		}
		if f.Rate == 0 && alone(func(d *placement.Demand) { d.Rate = 1; spread(d, n) }) {
			t.Fatalf("%v: 1 msg/s would do", bound)
		}
	})
	for _, name := range []string{
		"rcap rate", "rcap more brokers", "burst rate", "burst burst", "publishers rate", "publishers publishers", "brokers more brokers",
	} {
		if mentioned[name] == 0 {
			t.Errorf("%s was never said: %v", name, mentioned)
		}
	}
}

func TestWhatWouldFitInWords(t *testing.T) {
	for want, f := range map[string]placement.Fits{
		"":                                       {},
		"r up to 60 msg/s, or b from 2 messages": {Rate: 60, Burst: 2},
		"2 publishers that send as much together, or 1 more broker of 50 msg/s": {Publishers: 2, MoreBrokers: 1, Mcap: 50},
		"3 more brokers of 50 msg/s": {MoreBrokers: 3, Mcap: 50},
	} {
		testkit.Equal(t, f.String(), want)
	}
}
