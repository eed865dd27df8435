package share_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// arrival is a message's arrival at a broker.
type arrival struct {
	at     mono.Time
	broker int
	excess bool // the publisher, or another on the same broker, exceeds the publisher's part at this time
}

// event happens to brokers, by number, at an instant.
type event struct {
	at          mono.Time
	place       []share.Placed // the new placement; nil: unchanged
	down, up    []int          // stopping brokers; brokers that start as new processes
	cut, frozen []int          // brokers cut off from the adaptor; among these, completely frozen brokers
	whole       []int          // brokers whose cut or freeze ends
	dead        []int          // brokers whose process is known to have ended
}

// scenario is a topic's traffic over its brokers, and the events of the brokers.
type scenario struct {
	name     string
	contract tokenbucket.Share
	start    []share.Placed
	arrivals []arrival // by time
	events   []event   // by time
	trouble  mono.Time // when the trouble begins

	created, unaccepted int           // messages; messages without a broker when they were made
	noBroker            time.Duration // the longest time that a publisher had no broker
}

// slo is the access delay that 99 % of the messages must keep. defaultFlex is the adaptor's default.
const (
	slo         = 20 * time.Millisecond
	defaultFlex = ledger.Permille(50)
)

const (
	publishers = 200
	each       = 20 // msg/s
)

// visit places a publisher at a broker from an instant on; -1: no broker. Without a broker the
// publisher keeps its messages. Once the publisher has a broker again, it sends the kept messages at
// once.
type visit struct {
	from   mono.Time
	broker int
}

type publisher struct {
	visits []visit
	rate   func(t mono.Time) float64 // rate factor of each publisher, at most 4
	excess func(t mono.Time) bool
}

func seconds(s float64) mono.Time { return mono.Time(s * 1e9) }

func broker(number int) string { return fmt.Sprintf("b%03d", number) }

// number is the inverse of broker.
func number(id string) int {
	n, err := strconv.Atoi(id[1:])
	if err != nil {
		panic("broker " + id)
	}
	return n
}

// place gives each broker a part of the contract in proportion to publishers.
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

// troubleAt is when the trouble begins, in seconds: between two reports, after a window.
const troubleAt = 12.4

const half = publishers / 2

// scene is a scenario of trouble. Times are in seconds after the trouble begins.
type scene struct {
	name    string
	lasts   float64
	start   []int // publishers by broker at first, in turn
	changes []change
	events  []event
}

// change applies to the publishers whose number modulo every is offset.
type change struct {
	every, offset int
	// The publishers go to broker to, each at a random instant in from .. until. If gone, the
	// publishers have no broker since the trouble; until is 0 for no move. A later change to the same
	// broker replaces this change.
	to          int
	from, until float64
	gone        bool
	// excess: the publishers exceed their part at these times.
	excess *span
	// rate is the factor of the publishers' usual rate at these times, and other the factor at all
	// other times.
	rate  *span
	other float64
}

// span is value in the seconds from .. to.
type span struct{ from, to, value float64 }

func (s *span) holds(t mono.Time) bool {
	return s != nil && t >= after(s.from) && t < after(s.to)
}

// after is an instant, seconds after the trouble begins.
func after(s float64) mono.Time { return seconds(troubleAt + s) }

const (
	allHistory = -1e6 // seconds ago
	forever    = 1e6
)

func scenes(contract tokenbucket.Share) []scene {
	two := []int{half, half}
	third := func(retiring ...int) []share.Placed { return place(contract, []int{0, half, half}, retiring...) }
	since := &span{0, forever, 1}
	return []scene{
		// One of two brokers is drained; its publishers move to a third broker.
		{"drain", 20, two, []change{{every: 2, to: 2, from: 0.02, until: 0.08}}, []event{{at: after(0), place: third(0)}}},
		// All publishers are on one broker, and move to another. Every tenth is a stock client. The
		// old broker disconnects stock clients after the grace.
		{"move", 20, []int{publishers}, []change{{every: 1, to: 1, from: 0.02, until: 0.08}, {every: 10, to: 1, from: 1, until: 1.1}},
			[]event{{at: after(0), place: place(contract, []int{0, publishers}, 0)}}},
		// The process of a broker is killed. After a second the end is known, and after two seconds
		// the publishers have another broker.
		{"crash", 40, two, []change{{every: 2, gone: true, to: 2, from: 2, until: 2.5, excess: &span{allHistory, 20, 1}}},
			[]event{{at: after(0), down: []int{0}}, {at: after(1), dead: []int{0}}, {at: after(2), place: third()}}},
		// The process is killed, and started again after eight seconds, before anything has moved. The
		// publishers then send the messages made meanwhile.
		{"return", 60, two, []change{{every: 2, gone: true, to: 0, from: 8, until: 8.5, excess: since}},
			[]event{{at: after(0), down: []int{0}}, {at: after(8), up: []int{0}}}},
		// For five seconds half of the publishers of a broker send four times as much.
		{"flash crowd", 60, two, []change{{every: 2, excess: since}, {every: 4, rate: &span{0, 5, 4}, other: 1}}, nil},
		// Traffic shifts: 90 % of the traffic comes to one broker.
		{"90/10", 40, two, []change{{every: 2, rate: &span{0, forever, 1.8}, other: 1}, {every: 2, offset: 1, rate: &span{0, forever, 0.2}, other: 1}}, nil},
		// The publishers of a broker were silent, and resume.
		{"silent and back", 40, two, []change{{every: 2, rate: since}}, nil},
		// A host is frozen for half a minute. Nothing proves that the host is dead, so after three
		// seconds its publishers are placed elsewhere with the free part of the contract.
		{"frozen host", 60, two, []change{{every: 2, gone: true, to: 2, from: 3, until: 3.5, excess: since}},
			[]event{{at: after(0), frozen: []int{0}}, {at: after(3), place: third(0)}, {at: after(30), whole: []int{0}}}},
		// The control plane is down for a minute.
		{"control plane away", 80, two, nil, []event{{at: after(0), cut: []int{0, 1}}, {at: after(60), whole: []int{0, 1}}}},
	}
}

// contractAt returns a contract. The topic's 200 Poisson publishers, at 20 msg/s each, use the part
// load of the contract: 0 to 1. The contract is 5,000 msg/s at 0.8.
func contractAt(load float64) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.PerSecond(publishers * each / load), Burst: 100}
}

// scenarios draws the named scenarios at a load (contractAt); without a name, all scenarios.
func scenarios(seed uint64, load float64, only ...string) (list []scenario) {
	contract := contractAt(load)
	for number, scene := range scenes(contract) {
		if len(only) > 0 && !slices.Contains(only, scene.name) {
			continue
		}
		rng := rand.New(rand.NewPCG(seed, uint64(number+1)))
		all := make([]publisher, publishers)
		for i := range all {
			all[i].visits = []visit{{0, i % len(scene.start)}}
			for _, c := range scene.changes {
				if i%c.every == c.offset {
					all[i].apply(c, rng)
				}
			}
		}
		s := scenario{name: scene.name, contract: contract, start: place(contract, scene.start), trouble: after(0), events: scene.events}
		s.fill(rng, all, after(scene.lasts))
		list = append(list, s)
	}
	return list
}

func (p *publisher) apply(c change, rng *rand.Rand) {
	if c.excess != nil {
		p.excess = c.excess.holds
	}
	if c.rate != nil {
		p.rate = func(t mono.Time) float64 {
			if c.rate.holds(t) {
				return c.rate.value
			}
			return c.other
		}
	}
	if c.until == 0 {
		return
	}
	if last := p.visits[len(p.visits)-1]; last.from > 0 && last.broker == c.to {
		p.visits = p.visits[:len(p.visits)-1]
	}
	if c.gone {
		p.visits = append(p.visits, visit{after(0), -1})
	}
	p.visits = append(p.visits, visit{seconds(troubleAt + c.from + rng.Float64()*(c.until-c.from)), c.to})
}

// fill makes the publishers' messages.
func (s *scenario) fill(rng *rand.Rand, all []publisher, until mono.Time) {
	const maxRate = 4
	for _, p := range all {
		for t := mono.Time(0); ; {
			t = t.Add(time.Duration(rng.ExpFloat64() / (maxRate * each) * 1e9))
			if t >= until {
				break
			}
			now := 1.
			if p.rate != nil {
				now = p.rate(t)
			}
			if rng.Float64()*maxRate >= now {
				continue
			}
			s.created++
			a := arrival{at: t, excess: p.excess != nil && p.excess(t)}
			i := len(p.visits) - 1
			for p.visits[i].from > t {
				i--
			}
			if p.visits[i].broker < 0 {
				s.unaccepted++
				s.noBroker = max(s.noBroker, p.visits[i+1].from.Sub(p.visits[i].from))
				i++
				a.at = p.visits[i].from
			}
			a.broker = p.visits[i].broker
			s.arrivals = append(s.arrivals, a)
		}
	}
	slices.SortStableFunc(s.arrivals, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
}
