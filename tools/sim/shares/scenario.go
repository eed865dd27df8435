package shares

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Arrival is a message that arrives at a broker.
type Arrival struct {
	At     mono.Time
	Broker int
	// Excess: its publisher does not keep to its part then, or shares a broker with
	// some that do not.
	Excess bool
}

// Event is what happens to the brokers at an instant; what is not set does not.
type Event struct {
	At mono.Time
	// Place is a new placement, Brokers by number.
	Place []share.Placed
	// Down are brokers that stop, Up those that start as new processes.
	Down, Up []int
	// Cut are brokers that the adaptor neither hears nor reaches from then on, Frozen
	// those that do nothing besides; Whole ends that.
	Cut, Frozen, Whole []int
	// Dead are brokers of which it is known that their process is gone.
	Dead []int
}

// Phase is a part of a scenario of which figures are wanted.
type Phase struct {
	Name     string
	From, To mono.Time
}

// Scenario is a topic's traffic over its brokers, and what happens to them.
type Scenario struct {
	Name     string
	Contract tokenbucket.Share
	Start    []share.Placed
	Arrivals []Arrival // by time
	Events   []Event   // by time
	Phases   []Phase
	// Trouble is when it begins; Unaccepted of Made messages found no broker when
	// they were made, and NoBroker is how long a publisher had none at most.
	Trouble          mono.Time
	Unaccepted, Made int
	NoBroker         time.Duration
}

// SLO is what 99 % of messages of the scenarios of trouble are to keep.
const SLO = 20 * time.Millisecond

const (
	publishers = 200
	each       = 20 // msg/s
)

// stay is that a publisher is at a broker from an instant on; -1: it has none. What
// it makes then it sends when it has one again, at once.
type stay struct {
	from   mono.Time
	broker int
}

type publisher struct {
	stays  []stay
	rate   func(at mono.Time) float64 // of each, at most 4
	excess func(at mono.Time) bool
}

func seconds(s float64) mono.Time { return mono.Time(s * 1e9) }

func broker(number int) string { return fmt.Sprintf("b%03d", number) }

// number is broker's inverse.
func number(id string) int {
	n, err := strconv.Atoi(id[1:])
	if err != nil {
		panic("shares: broker " + id)
	}
	return n
}

// Evenly places as many publishers on each of n brokers.
func Evenly(contract tokenbucket.Share, n int) []share.Placed {
	return place(contract, slices.Repeat([]int{1}, n))
}

// place gives each broker its part of the contract by publishers.
func place(contract tokenbucket.Share, publishers []int, retiring ...int) []share.Placed {
	var placed []share.Placed
	var weights []int64
	for i, n := range publishers {
		if n == 0 && slices.Contains(retiring, i) {
			// As placement.WithRetiring: a twentieth of a fair part.
			weights = append(weights, int64(max(1, 200/20/len(publishers))))
			placed = append(placed, share.Placed{Broker: broker(i), Publishers: 1, Retiring: true})
		} else if n > 0 {
			weights = append(weights, int64(n))
			placed = append(placed, share.Placed{Broker: broker(i), Publishers: n})
		}
	}
	quotas, err := share.Proportion(contract, weights)
	if err != nil {
		panic(err)
	}
	for i := range placed {
		placed[i].Quota = quotas[i]
		if placed[i].Retiring {
			placed[i].Quota.Burst = 1
			for j := range placed {
				if !placed[j].Retiring {
					placed[j].Quota.Burst += quotas[i].Burst - 1
					break
				}
			}
		}
	}
	return placed
}

// Names returns the names of Scenarios.
func Names() []string {
	return []string{"drain", "move", "crash", "return", "flash crowd", "90/10", "silent and back", "frozen host", "control plane away"}
}

// Scenarios are those of trouble: a topic of 200 Poisson publishers at 20 msg/s, which
// is the given part (0 to 1) of its contract, with a burst of 100, over two brokers.
// They are those that are named, all without a name.
func Scenarios(seed uint64, load float64, only ...string) []Scenario {
	contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(publishers * each / load), Burst: 100} // of 5,000 at 0.8
	const trouble = 12.4                                                                             // between two reports, after a window
	begin := func(name string, number uint64) (*Scenario, *rand.Rand, []publisher) {
		all := make([]publisher, publishers)
		for i := range all {
			all[i].stays = []stay{{0, i % 2}}
		}
		half := publishers / 2
		return &Scenario{Name: name, Contract: contract, Start: place(contract, []int{half, half}), Trouble: seconds(trouble)},
			rand.New(rand.NewPCG(seed, number)), all
	}
	within := func(rng *rand.Rand, from, to float64) mono.Time {
		return seconds(trouble + from + rng.Float64()*(to-from))
	}
	half := publishers / 2
	var list []Scenario
	add := func(s *Scenario, rng *rand.Rand, all []publisher, until float64) {
		if !slices.Contains(Names(), s.Name) {
			panic("shares: " + s.Name + " is not named")
		}
		if len(only) == 0 || slices.Contains(only, s.Name) {
			s.fill(rng, all, until)
			list = append(list, *s)
		}
	}

	// One of two brokers is drained; its publishers follow to a third.
	s, rng, all := begin("drain", 1)
	for i := range all {
		if i%2 == 0 {
			all[i].stays = append(all[i].stays, stay{within(rng, 0.02, 0.08), 2})
		}
	}
	s.Events = []Event{{At: seconds(trouble), Place: place(contract, []int{0, half, half}, 0)}}
	add(s, rng, all, trouble+20)

	// All publishers are on one broker, and move to another; each tenth is of a stock
	// client, which the old one cuts after the grace.
	s, rng, all = begin("move", 2)
	s.Start = place(contract, []int{publishers})
	for i := range all {
		to := within(rng, 0.02, 0.08)
		if i%10 == 0 {
			to = within(rng, 1, 1.1)
		}
		all[i].stays = []stay{{0, 0}, {to, 1}}
	}
	s.Events = []Event{{At: seconds(trouble), Place: place(contract, []int{0, publishers}, 0)}}
	add(s, rng, all, trouble+20)

	// The process of one is killed; that it is gone is known after a second, and its
	// publishers have another broker after two.
	s, rng, all = begin("crash", 3)
	for i := range all {
		if i%2 == 0 {
			all[i].stays = append(all[i].stays, stay{seconds(trouble), -1}, stay{within(rng, 2, 2.5), 2})
			all[i].excess = func(at mono.Time) bool { return at < seconds(trouble+20) }
		}
	}
	s.Events = []Event{
		{At: seconds(trouble), Down: []int{0}},
		{At: seconds(trouble + 1), Dead: []int{0}},
		{At: seconds(trouble + 2), Place: place(contract, []int{0, half, half})},
	}
	add(s, rng, all, trouble+40)

	// It is killed, and started again after eight seconds, before anything has moved;
	// its publishers send then what they have made meanwhile.
	s, rng, all = begin("return", 4)
	for i := range all {
		if i%2 == 0 {
			all[i].stays = append(all[i].stays, stay{seconds(trouble), -1}, stay{within(rng, 8, 8.5), 0})
			all[i].excess = func(at mono.Time) bool { return at >= seconds(trouble) }
		}
	}
	s.Events = []Event{{At: seconds(trouble), Down: []int{0}}, {At: seconds(trouble + 8), Up: []int{0}}}
	add(s, rng, all, trouble+60)

	// For five seconds half of the publishers of a broker send four times as much.
	s, rng, all = begin("flash crowd", 5)
	for i := range all {
		if i%2 == 0 {
			all[i].excess = func(at mono.Time) bool { return at >= seconds(trouble) }
		}
		if i%4 == 0 {
			all[i].rate = func(at mono.Time) float64 {
				if at >= seconds(trouble) && at < seconds(trouble+5) {
					return 4
				}
				return 1
			}
		}
	}
	add(s, rng, all, trouble+60)

	// Traffic shifts: 90 % of it comes to one broker.
	s, rng, all = begin("90/10", 6)
	for i := range all {
		then := 1.8
		if i%2 == 1 {
			then = 0.2
		}
		all[i].rate = func(at mono.Time) float64 {
			if at < seconds(trouble) {
				return 1
			}
			return then
		}
	}
	add(s, rng, all, trouble+40)

	// The publishers of one broker were silent, and come back.
	s, rng, all = begin("silent and back", 7)
	for i := range all {
		if i%2 == 0 {
			all[i].rate = func(at mono.Time) float64 {
				if at < seconds(trouble) {
					return 0
				}
				return 1
			}
		}
	}
	add(s, rng, all, trouble+40)

	// One host is frozen for half a minute. Nothing proves that it is dead, so that its
	// publishers are placed elsewhere after three seconds with what is free.
	s, rng, all = begin("frozen host", 8)
	for i := range all {
		if i%2 == 0 {
			all[i].stays = append(all[i].stays, stay{seconds(trouble), -1}, stay{within(rng, 3, 3.5), 2})
			all[i].excess = func(at mono.Time) bool { return at >= seconds(trouble) }
		}
	}
	s.Events = []Event{
		{At: seconds(trouble), Frozen: []int{0}},
		{At: seconds(trouble + 3), Place: place(contract, []int{0, half, half}, 0)},
		{At: seconds(trouble + 30), Whole: []int{0}},
	}
	add(s, rng, all, trouble+60)

	// The control plane is away for a minute.
	s, rng, all = begin("control plane away", 9)
	s.Events = []Event{{At: seconds(trouble), Cut: []int{0, 1}}, {At: seconds(trouble + 60), Whole: []int{0, 1}}}
	add(s, rng, all, trouble+80)
	return list
}

// fill makes the publishers' messages.
func (s *Scenario) fill(rng *rand.Rand, all []publisher, until float64) {
	const most = 4
	for _, p := range all {
		for at := mono.Time(0); ; {
			at = at.Add(time.Duration(rng.ExpFloat64() / (most * each) * 1e9))
			if at >= seconds(until) {
				break
			}
			now := 1.
			if p.rate != nil {
				now = p.rate(at)
			}
			if rng.Float64()*most >= now {
				continue
			}
			s.Made++
			a := Arrival{At: at, Excess: p.excess != nil && p.excess(at)}
			i := len(p.stays) - 1
			for p.stays[i].from > at {
				i--
			}
			if p.stays[i].broker < 0 {
				s.Unaccepted++
				s.NoBroker = max(s.NoBroker, p.stays[i+1].from.Sub(p.stays[i].from))
				i++
				a.At = p.stays[i].from
			}
			a.Broker = p.stays[i].broker
			s.Arrivals = append(s.Arrivals, a)
		}
	}
	slices.SortStableFunc(s.Arrivals, func(a, b Arrival) int { return cmp.Compare(a.At, b.At) })
}
