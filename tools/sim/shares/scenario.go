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

// trouble is when it begins, in seconds: between two reports, after a window.
const trouble = 12.4

const half = publishers / 2

// scene is a scenario of trouble. Times are in seconds after the trouble begins.
type scene struct {
	name    string
	lasts   float64
	start   []int // publishers by broker at first, in turn
	changes []change
	events  []Event
}

// change is what becomes of the publishers whose number modulo every is offset.
type change struct {
	every, offset int
	// They go to a broker, each at an instant of its own in from .. until, and have
	// none since the trouble if gone; until is 0 if they stay. A later change to the
	// same broker counts in place of this one.
	to          int
	from, until float64
	gone        bool
	// excess: they do not keep to their part at these times.
	excess *span
	// rate is how much of their usual rate they send at these times, and other
	// otherwise.
	rate  *span
	other float64
}

// span is value in the seconds from .. to.
type span struct{ from, to, value float64 }

func (s *span) holds(at mono.Time) bool {
	return s != nil && at >= after(s.from) && at < after(s.to)
}

// after is an instant, seconds after the trouble begins.
func after(s float64) mono.Time { return seconds(trouble + s) }

const (
	everything = -1e6 // seconds ago
	forever    = 1e6
)

func scenes(contract tokenbucket.Share) []scene {
	two := []int{half, half}
	third := func(retiring ...int) []share.Placed { return place(contract, []int{0, half, half}, retiring...) }
	since := &span{0, forever, 1}
	return []scene{
		// One of two brokers is drained; its publishers follow to a third.
		{"drain", 20, two, []change{{every: 2, to: 2, from: 0.02, until: 0.08}}, []Event{{At: after(0), Place: third(0)}}},
		// All publishers are on one broker, and move to another; each tenth is of a stock
		// client, which the old one cuts after the grace.
		{"move", 20, []int{publishers}, []change{{every: 1, to: 1, from: 0.02, until: 0.08}, {every: 10, to: 1, from: 1, until: 1.1}},
			[]Event{{At: after(0), Place: place(contract, []int{0, publishers}, 0)}}},
		// The process of one is killed; that it is gone is known after a second, and its
		// publishers have another broker after two.
		{"crash", 40, two, []change{{every: 2, gone: true, to: 2, from: 2, until: 2.5, excess: &span{everything, 20, 1}}},
			[]Event{{At: after(0), Down: []int{0}}, {At: after(1), Dead: []int{0}}, {At: after(2), Place: third()}}},
		// It is killed, and started again after eight seconds, before anything has moved;
		// its publishers send then what they have made meanwhile.
		{"return", 60, two, []change{{every: 2, gone: true, to: 0, from: 8, until: 8.5, excess: since}},
			[]Event{{At: after(0), Down: []int{0}}, {At: after(8), Up: []int{0}}}},
		// For five seconds half of the publishers of a broker send four times as much.
		{"flash crowd", 60, two, []change{{every: 2, excess: since}, {every: 4, rate: &span{0, 5, 4}, other: 1}}, nil},
		// Traffic shifts: 90 % of it comes to one broker.
		{"90/10", 40, two, []change{{every: 2, rate: &span{0, forever, 1.8}, other: 1}, {every: 2, offset: 1, rate: &span{0, forever, 0.2}, other: 1}}, nil},
		// The publishers of one broker were silent, and come back.
		{"silent and back", 40, two, []change{{every: 2, rate: since}}, nil},
		// One host is frozen for half a minute. Nothing proves that it is dead, so that its
		// publishers are placed elsewhere after three seconds with what is free.
		{"frozen host", 60, two, []change{{every: 2, gone: true, to: 2, from: 3, until: 3.5, excess: since}},
			[]Event{{At: after(0), Frozen: []int{0}}, {At: after(3), Place: third(0)}, {At: after(30), Whole: []int{0}}}},
		// The control plane is away for a minute.
		{"control plane away", 80, two, nil, []Event{{At: after(0), Cut: []int{0, 1}}, {At: after(60), Whole: []int{0, 1}}}},
	}
}

// Names returns the names of Scenarios.
func Names() (names []string) {
	for _, s := range scenes(tokenbucket.Share{Rate: tokenbucket.PerSecond(publishers), Burst: publishers}) {
		names = append(names, s.name)
	}
	return names
}

// Scenarios are those of trouble: a topic of 200 Poisson publishers at 20 msg/s, which
// is the given part (0 to 1) of its contract, with a burst of 100, over two brokers.
// They are those that are named, all without a name.
func Scenarios(seed uint64, load float64, only ...string) (list []Scenario) {
	contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(publishers * each / load), Burst: 100} // of 5,000 at 0.8
	for number, of := range scenes(contract) {
		if len(only) > 0 && !slices.Contains(only, of.name) {
			continue
		}
		rng := rand.New(rand.NewPCG(seed, uint64(number+1)))
		all := make([]publisher, publishers)
		for i := range all {
			all[i].stays = []stay{{0, i % len(of.start)}}
			for _, c := range of.changes {
				if i%c.every == c.offset {
					all[i].apply(c, rng)
				}
			}
		}
		s := Scenario{Name: of.name, Contract: contract, Start: place(contract, of.start), Trouble: after(0), Events: of.events}
		s.fill(rng, all, after(of.lasts))
		list = append(list, s)
	}
	return list
}

func (p *publisher) apply(c change, rng *rand.Rand) {
	if c.excess != nil {
		p.excess = c.excess.holds
	}
	if c.rate != nil {
		p.rate = func(at mono.Time) float64 {
			if c.rate.holds(at) {
				return c.rate.value
			}
			return c.other
		}
	}
	if c.until == 0 {
		return
	}
	if last := p.stays[len(p.stays)-1]; last.from > 0 && last.broker == c.to {
		p.stays = p.stays[:len(p.stays)-1]
	}
	if c.gone {
		p.stays = append(p.stays, stay{after(0), -1})
	}
	p.stays = append(p.stays, stay{seconds(trouble + c.from + rng.Float64()*(c.until-c.from)), c.to})
}

// fill makes the publishers' messages.
func (s *Scenario) fill(rng *rand.Rand, all []publisher, until mono.Time) {
	const most = 4
	for _, p := range all {
		for at := mono.Time(0); ; {
			at = at.Add(time.Duration(rng.ExpFloat64() / (most * each) * 1e9))
			if at >= until {
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
