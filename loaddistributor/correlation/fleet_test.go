package correlation

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// message is an arriving message.
type message struct {
	at mono.Time
	id string
}

// fleet is groups of publishers that fire together, each about once a second.
type fleet struct {
	groups, size int
	periodic     bool
	noise        time.Duration
	lasts        time.Duration
	batch        int
	bursts       time.Duration // within this time each publisher sends twice more
	holes        bool          // only 2 of 20 seconds are received
	from         time.Duration
	name         string
}

const second = float64(time.Second)

// messages draws the messages of f, in order.
func (f fleet) messages(rng *rand.Rand) (all []message) {
	for g := range f.groups {
		at := rng.ExpFloat64() * second
		if f.periodic {
			at = rng.Float64() * second
		}
		for at < float64(f.lasts) {
			for i := range f.size {
				when := at
				if f.noise > 0 {
					when += rng.Float64() * float64(f.noise)
				}
				if f.bursts > 0 {
					for range 2 {
						again := float64(f.from) + when + rng.Float64()*float64(f.bursts)
						all = append(all, message{mono.Time(again), fmt.Sprintf("%s%d.%d", f.name, g, i)})
					}
				}
				for range max(1, f.batch) {
					all = append(all, message{mono.Time(float64(f.from) + when), fmt.Sprintf("%s%d.%d", f.name, g, i)})
				}
			}
			if f.periodic {
				at += second
			} else {
				at += rng.ExpFloat64() * second
			}
		}
	}
	if f.holes {
		all = slices.DeleteFunc(all, func(m message) bool { return int(time.Duration(m.at-mono.Time(f.from)).Seconds())%20 >= 2 })
	}
	return sorted(all)
}

func sorted(all []message) []message {
	slices.SortStableFunc(all, func(a, b message) int { return cmp.Compare(a.at, b.at) })
	return all
}

func (l *Learner) arriveAll(all []message) {
	for _, m := range all {
		l.Arrive(m.id, m.at)
	}
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }
