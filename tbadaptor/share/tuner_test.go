package share

import (
	"errors"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// steady makes a broker report the same number of messages for several seconds.
func steady(t *Tuner, broker string, from, seconds int, offered uint64, backlog int64) {
	for i := range seconds {
		t.Report(broker, Step{At: mono.Time(from+i+1) * 1e9, Length: time.Second, Offered: offered, MaxBacklog: backlog, Backlog: backlog, Peak: 20})
	}
}

func quota(rate, burst int64) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(rate * 1000), Burst: burst}
}

// proposed returns the proposed shares of a contract of 5,000 msg/s and 100.
func proposed(t *testing.T, tuner *Tuner, second int) map[string]tokenbucket.Share {
	t.Helper()
	shares, err := tuner.Propose(mono.Time(second)*1e9, quota(5000, 100), func(string) Holding { return Holding{} })
	testkit.Must(t, err)
	proposal := map[string]tokenbucket.Share{}
	for _, a := range shares {
		proposal[a.Broker] = a.Share
	}
	return proposal
}

func TestDemandMovesWithPublishers(t *testing.T) {
	const window = 10 * time.Second
	tuner := (*Tuner)(nil).Place(0, Sqrt, window, []Placed{
		{Broker: "a", Publishers: 100, Quota: quota(2500, 50)}, {Broker: "b", Publishers: 100, Quota: quota(2500, 50)}})
	if proposal := proposed(t, tuner, 1); len(proposal) != 0 {
		t.Errorf("before anything was seen: %v", proposal)
	}
	steady(tuner, "a", 0, 10, 2000, 0)
	steady(tuner, "b", 0, 10, 2000, 0)

	// All publishers of a move to c. The tuner no longer uses a's earlier traffic in the window.
	successor := tuner.Place(10e9, Sqrt, window, []Placed{
		{Broker: "a", Publishers: 1, Quota: quota(80, 1), Retiring: true},
		{Broker: "b", Publishers: 100, Quota: quota(2460, 50)}, {Broker: "c", Publishers: 100, Quota: quota(2460, 49)}})
	proposal := proposed(t, successor, 10)
	if proposal["b"].Rate < 2100_000 || proposal["c"].Rate < 2100_000 || proposal["a"].Rate < 500_000 {
		t.Errorf("b and c need 2,000 msg/s each, a the rest for what still comes there: %v", proposal)
	}
	// The old tuner is unchanged, because a move may fail.
	if proposal := proposed(t, tuner, 10); proposal["a"].Rate != 2_500_000 {
		t.Errorf("the placement before: %v", proposal)
	}
	steady(successor, "b", 10, 1, 2000, 0)
	successor.Report("a", Step{At: 10.5e9, Length: time.Second, Offered: 1500}) // mostly from the epoch before
	if proposal = proposed(t, successor, 11); proposal["c"].Rate < 2100_000 || proposal["b"].Rate < 2100_000 {
		t.Errorf("c has not been seen, and none of its publishers: %v", proposal)
	}
	steady(successor, "a", 11, 1, 0, 0)
	if proposal = proposed(t, successor, 12); proposal["a"].Rate > 90_000 || proposal["a"].Burst != 1 || proposal["c"].Rate < 2_400_000 {
		t.Errorf("a has nothing left, c keeps its quota: %v", proposal)
	}
	steady(successor, "a", 12, 1, 0, 40)
	if proposal = proposed(t, successor, 13); proposal["a"].Rate < 200_000 || proposal["c"].Rate < 2_300_000 {
		t.Errorf("a has 40 messages left, to be released in 0.2 s: %v", proposal)
	}
	// Once c's traffic is measured, c has enough.
	steady(successor, "a", 13, 3, 0, 0)
	steady(successor, "b", 11, 5, 2000, 0)
	steady(successor, "c", 13, 3, 1100, 0)
	if proposal = proposed(t, successor, 16); proposal["c"].Rate >= proposal["b"].Rate || proposal["c"].Rate < 1_155_000 {
		t.Errorf("c turned out to have 1,100 msg/s: %v", proposal)
	}
}

func TestABrokerThatIsNotSeenInAWindowHasNothing(t *testing.T) {
	tuner := (*Tuner)(nil).Place(0, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 9, Quota: quota(2500, 50)}, {Broker: "b", Publishers: 9, Quota: quota(2500, 50)}})
	steady(tuner, "a", 0, 9, 3000, 0)
	steady(tuner, "b", 0, 9, 100, 0)
	if proposal := proposed(t, tuner, 9); proposal["b"].Rate < 1_600_000 {
		t.Errorf("less than half of b's publishers' rate has come: %v", proposal)
	}
	steady(tuner, "a", 9, 2, 3000, 0)
	steady(tuner, "b", 9, 2, 100, 0)
	if proposal := proposed(t, tuner, 11); proposal["b"].Rate > 1_000_000 {
		t.Errorf("it has been waited for long enough: %v", proposal)
	}
}

// While a disconnected broker keeps its part, the brokers to which the publishers have moved get the
// free part. The other brokers get as much as they need.
func TestWhatIsReservedIsMissedByThoseWhoMoved(t *testing.T) {
	tuner := (*Tuner)(nil).Place(0, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 100, Quota: quota(2500, 50)}, {Broker: "b", Publishers: 100, Quota: quota(2500, 50)}})
	steady(tuner, "a", 0, 10, 2000, 0)
	steady(tuner, "b", 0, 10, 2000, 0)
	tuner = tuner.Place(10e9, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 1, Quota: quota(40, 1), Retiring: true},
		{Broker: "b", Publishers: 100, Quota: quota(2480, 50)}, {Broker: "c", Publishers: 100, Quota: quota(2480, 49)}})
	for second := 10; second < 20; second++ {
		shares, err := tuner.Propose(mono.Time(second)*1e9, quota(5000, 100), func(broker string) Holding {
			return Holding{Disconnected: broker == "a", Reserved: quota(2000, 40)}
		})
		if err != nil || len(shares) != 3 {
			t.Fatalf("%v, %v", shares, err)
		}
		var sum tokenbucket.Share
		for _, a := range shares {
			sum.Rate += a.Share.Rate
			sum.Burst += a.Share.Burst
			if a.Broker == "b" && (a.Share.Rate < 2100_000 || a.Share.Burst < 20) || a.Broker == "c" && a.Share.Rate < 800_000 {
				t.Errorf("second %d: %+v", second, shares)
			}
		}
		testkit.Equal(t, sum, quota(5000, 100), "second %d: they sum to", second)
		steady(tuner, "b", second, 1, 2000, 0)
		steady(tuner, "c", second, 1, 2000, 1000)
	}
}

// No publisher follows from a dead broker. After the return, the broker has its floor, and as much as
// the broker's own reports justify.
func TestNothingIsOnItsWayToADeadBroker(t *testing.T) {
	tuner := (*Tuner)(nil).Place(0, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 100, Quota: quota(2500, 50)}, {Broker: "b", Publishers: 100, Quota: quota(2500, 50)}})
	steady(tuner, "a", 0, 10, 2000, 0)
	steady(tuner, "b", 0, 10, 2000, 0)
	tuner = tuner.Place(10e9, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 1, Quota: quota(80, 1), Retiring: true},
		{Broker: "b", Publishers: 100, Quota: quota(2420, 50)}, {Broker: "c", Publishers: 100, Quota: quota(2500, 49)}})
	testkit.Result(tuner.Propose(10e9, quota(5000, 100), func(broker string) Holding { return Holding{Disconnected: broker == "a"} })).Must(t)
	steady(tuner, "b", 10, 8, 2000, 0)
	steady(tuner, "c", 10, 8, 2000, 0)
	tuner.Join(18e9, "a", "2")
	if proposal := proposed(t, tuner, 18); proposal["a"].Rate > 400_000 || proposal["a"].Burst != 1 {
		t.Errorf("it is back, and has %+v", proposal)
	}
}

// A new process is not judged by the predecessor's traffic, and the backlog of the new process takes
// nothing from the other broker.
func TestABrokerThatComesBackStartsWithItsQuota(t *testing.T) {
	tuner := (*Tuner)(nil).Place(0, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 100, Quota: quota(2500, 50)}, {Broker: "b", Publishers: 100, Quota: quota(2500, 50)}})
	tuner.Join(0, "a", "1")
	tuner.Join(0, "b", "1")
	steady(tuner, "a", 0, 10, 2000, 0)
	steady(tuner, "b", 0, 18, 2000, 0)
	tuner.Join(18e9, "a", "2")
	tuner.Join(18e9, "b", "1")
	if proposal := proposed(t, tuner, 18); proposal["a"].Rate < 2_500_000 || proposal["b"].Rate < 2_100_000 {
		t.Errorf("before anything is seen of it: %v", proposal)
	}
	for i := range 5 {
		steady(tuner, "a", 18+i, 1, 2000, 16_000)
		steady(tuner, "b", 18+i, 1, 2000, 0)
		if proposal := proposed(t, tuner, 19+i); proposal["b"].Rate < 2_100_000 || proposal["b"].Burst < 20 {
			t.Errorf("%d s after its return: %v", i, proposal)
		}
	}
}

// After a restart an adaptor knows only the brokers' shares, which were found right. The first
// connected broker is not cut to its quota in favour of brokers that are not connected yet.
func TestARestartTakesNothingFromWhoIsHeardFirst(t *testing.T) {
	third := quota(1667, 33)
	tuner := (*Tuner)(nil).Place(0, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 1, Quota: third}, {Broker: "b", Publishers: 1, Quota: third}, {Broker: "c", Publishers: 1, Quota: third}})
	holdingOf := func(broker string) Holding {
		if broker == "a" {
			return Holding{Target: quota(4000, 60)}
		}
		return Holding{Target: quota(500, 20)}
	}
	steady(tuner, "a", 0, 3, 3500, 0)
	shares, err := tuner.Propose(3e9, quota(5000, 100), holdingOf)
	if err != nil || len(shares) != 3 || shares[0].Share.Rate < 3_675_000 {
		t.Errorf("a sends 3,500 msg/s and has %v, %v", shares, err)
	}
	// A new process holds nothing, whatever the predecessor held.
	tuner.Join(3e9, "b", "one")
	tuner.Join(3e9, "b", "two")
	steady(tuner, "c", 0, 3, 400, 0)
	if shares, err = tuner.Propose(4e9, quota(5000, 100), holdingOf); err != nil || shares[1].Share.Rate < 1_000_000 {
		t.Errorf("b is new, and has %v, %v", shares, err)
	}
}

// The drain of one of two brokers, as a cluster recorded it: the brokers' reports, the placement, and
// the times of the rule. No publisher exceeds its part. The undisturbed broker always has at least its
// traffic. The drained broker has enough for its publishers while they follow, and soon only the
// floor.
func TestADrainAsItWasRecorded(t *testing.T) {
	at := func(ms int) mono.Time { return mono.Time(ms) * 1e6 }
	var tuner *Tuner
	report := func(broker string, ms, length int, offered uint64, backlog int64) {
		tuner.Report(broker, Step{At: at(ms), Length: time.Duration(length) * time.Millisecond, Offered: offered, MaxBacklog: backlog, Backlog: backlog, Peak: 25})
	}
	proposal := map[string]tokenbucket.Share{}
	propose := func(ms int) map[string]tokenbucket.Share {
		t.Helper()
		shares, err := tuner.Propose(at(ms), quota(5000, 100), func(broker string) Holding { return Holding{Target: proposal[broker]} })
		testkit.Must(t, err)
		for _, a := range shares {
			proposal[a.Broker] = a.Share
		}
		if b2 := proposal["b2"]; b2.Rate < 2_000_000 || b2.Burst < 25 {
			t.Errorf("%d ms: b2 sends 2,000 msg/s all the time, and has %+v", ms, b2)
		}
		return proposal
	}
	const window = 10 * time.Second
	tuner = tuner.Place(at(4228), Sqrt, window, []Placed{
		{Broker: "b1", Publishers: 100, Quota: quota(2500, 50)}, {Broker: "b2", Publishers: 100, Quota: quota(2500, 50)}})
	for i, offered := range []uint64{0, 0, 1640, 2004, 1980, 2030, 1992, 1992} { // publishers begin
		report("b1", 5060+1000*i, 1000, offered, 0)
		report("b2", 5100+1000*i, 1000, offered, 0)
	}
	tuner = tuner.Place(at(12_220), Sqrt, window, []Placed{
		{Broker: "b1", Publishers: 1, Quota: quota(84, 1), Retiring: true},
		{Broker: "b2", Publishers: 100, Quota: quota(2416, 49)}, {Broker: "b3", Publishers: 100, Quota: quota(2500, 50)}})
	if proposal := propose(12_220); proposal["b1"].Rate < 600_000 || proposal["b1"].Burst < 20 || proposal["b3"].Rate < 2_000_000 || proposal["b3"].Burst < 20 {
		t.Errorf("b1's publishers are on their way to b3: %+v", proposal)
	}
	// The move is over, although no report shows it yet.
	if proposal := propose(12_550); proposal["b1"].Rate > 330_000 || proposal["b1"].Burst > 1 || proposal["b3"].Rate < 2_300_000 {
		t.Errorf("b1's publishers have gone: %+v", proposal)
	}
	report("b1", 13_060, 1000, 406, 0) // the step is mostly from before the end of the move, and ends after it
	report("b2", 13_099, 1000, 2008, 0)
	report("b3", 13_207, 1000, 1891, 0)
	for ms, limit := 13_500, tokenbucket.Rate(330_000); ms < 17_000; ms, limit = ms+1000, 90_000 {
		if proposal := propose(ms); proposal["b1"].Rate > limit || proposal["b3"].Rate < 2_250_000 {
			t.Errorf("%d ms: %+v", ms, proposal)
		}
		report("b1", ms+560, 1000, 0, 0)
		report("b2", ms+500, 1000, 2000, 0)
		report("b3", ms+600, 1000, 2000, 0)
	}
}

// A broker that was silent, or whose rate rises in the middle of a step, gets up to its quota at once.
// The backlog is worked off within about a second.
func TestARisingRateIsServedAtOnce(t *testing.T) {
	tuner := (*Tuner)(nil).Place(0, Sqrt, 10*time.Second, []Placed{
		{Broker: "a", Publishers: 100, Quota: quota(2500, 50)}, {Broker: "b", Publishers: 100, Quota: quota(2500, 50)}})
	steady(tuner, "a", 0, 12, 0, 0)
	steady(tuner, "b", 0, 13, 2000, 0)
	steady(tuner, "a", 12, 1, 200, 0) // 2,000 msg/s for a tenth of a second
	if proposal := proposed(t, tuner, 13); proposal["a"].Rate < 2_500_000 || proposal["b"].Rate < 2_100_000 {
		t.Errorf("a begins: %v", proposal)
	}
	steady(tuner, "a", 13, 1, 2000, 400)
	steady(tuner, "b", 13, 1, 2000, 0)
	if proposal := proposed(t, tuner, 14); proposal["a"].Rate < 2_500_000 || proposal["b"].Rate < 2_100_000 {
		t.Errorf("a sends 2,000 msg/s, and 400 messages wait: %v", proposal)
	}
}

// Whatever valid reports brokers send, and whichever brokers move or disconnect, the shares sum to the
// contract. The only reason for no shares is a contract that is too small.
func TestWhateverBrokersReportTheSharesAreTheContract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tuner *Tuner
		now := mono.Time(0)
		huge := []uint64{0, 1, 100, 1 << 40, 1<<62 - 1, 1 << 62}
		count := func(name string) uint64 { return rapid.SampledFrom(huge).Draw(t, name) }
		total := tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.SampledFrom([]int64{6, 5_000_000, int64(tokenbucket.MaxRate)}).Draw(t, "r")),
			Burst: rapid.SampledFrom([]int64{6, 100, tokenbucket.MaxBurst}).Draw(t, "b"),
		}
		held := map[string]tokenbucket.Share{}
		for range rapid.IntRange(1, 4).Draw(t, "epochs") {
			var placed []Placed
			for _, broker := range []string{"a", "b", "c", "d", "e", "f"} {
				if publishers := rapid.IntRange(-1, 2).Draw(t, "publishers"); publishers >= 0 {
					placed = append(placed, Placed{Broker: broker, Publishers: max(1, publishers), Retiring: publishers == 0})
				}
			}
			if len(placed) == 0 {
				continue
			}
			quotas := testkit.Result(Proportion(total, slices.Repeat([]int64{1}, len(placed)))).Must(t)
			for i := range placed {
				placed[i].Quota = quotas[i]
			}
			tuner = tuner.Place(now, rapid.SampledFrom([]string{Proportional, Robust, Sqrt}).Draw(t, "rule"), time.Second, placed)
			for range rapid.IntRange(0, 6).Draw(t, "rounds") {
				for _, p := range placed {
					length := rapid.SampledFrom([]time.Duration{1, time.Millisecond, time.Second, time.Hour}).Draw(t, "step")
					now = now.Add(rapid.SampledFrom([]time.Duration{0, 1, length}).Draw(t, "later"))
					tuner.Report(p.Broker, Step{
						At: now, Length: length, Offered: count("offered"), MaxBacklog: int64(count("most")), Backlog: int64(count("waits")), Peak: int64(count("peak")),
					})
				}
				away := rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "away")
				shares, err := tuner.Propose(now, total, func(broker string) Holding {
					return Holding{Disconnected: broker == away, Target: held[broker], Reserved: held[broker]}
				})
				if errors.As(err, new(*TooSmall)) || err == nil && shares == nil {
					continue
				}
				testkit.Must(t, err)
				var sum tokenbucket.Share
				clear(held)
				for _, a := range shares {
					testkit.Must(t, a.Share.Validate())
					held[a.Broker] = a.Share
					sum.Rate += a.Share.Rate
					sum.Burst += a.Share.Burst
				}
				testkit.Equal(t, sum, total, "the shares sum to")
			}
		}
	})
}
