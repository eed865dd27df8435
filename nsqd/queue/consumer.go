package queue

import (
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/container"
)

// Distance is how far a consumer is from the broker.
type Distance uint8

// The distances. If distances are not measured, all consumers are near.
const (
	Near      Distance = iota // in the broker's zone
	Neighbour                 // in another zone of its region
	Far                       // in another region
)

// Distances is the number of distances.
const Distances = int(Far) + 1

// ConsumerID names a consumer. The broker gives each subscription its own id.
type ConsumerID uint64

type consumer struct {
	id       ConsumerID
	timeout  time.Duration
	sample   int // percent of messages to deliver; 0: all
	ready    int
	inFlight int
	held     *item // list of the consumer's messages, the last delivered first
	distance Distance
	listed   bool // is in Consumers.credited
	stalled  bool // see Consumers
}

func (c *consumer) credit() bool { return c.inFlight < c.ready && !c.stalled }

// take gives an item to the consumer; release takes the item back.
func (c *consumer) take(it *item) {
	it.holder, it.next = c, c.held
	if c.held != nil {
		c.held.prev = it
	}
	c.held = it
	c.inFlight++
}

func (c *consumer) release(it *item) {
	if it.prev != nil {
		it.prev.next = it.next
	} else {
		c.held = it.next
	}
	if it.next != nil {
		it.next.prev = it.prev
	}
	it.holder, it.prev, it.next = nil, nil, nil
	c.inFlight--
	if !it.sent {
		// The delivery was cancelled. A client library gives a message up after a number of
		// attempts, so a cancelled delivery must not count.
		it.attempts--
		c.stalled = true
	}
	it.delivery, it.sent = 0, false
}

// Consumers are the consumers of a channel, and their order.
//
// Invariants, checked by check in tests:
//   - a consumer's inFlight is the number of items that it holds, and was below its ready at each
//     delivery;
//   - a consumer with a cancelled delivery is stalled and has no credit until it takes a
//     delivery. So deliveries that a consumer does not take stay below twice its maximum ready;
//   - each consumer with credit is in the ring of its distance, once. The ring may also list
//     consumers without credit and removed consumers, which nearest skips.
type Consumers struct {
	byID     map[ConsumerID]*consumer
	credited [Distances]container.Queue[*consumer] // FIFOs, so that consumers take turns
}

// Len returns the number of consumers.
func (cs *Consumers) Len() int { return len(cs.byID) }

// Readers returns the number of consumers with RDY above 0.
func (cs *Consumers) Readers() (n int) {
	// order: a sum
	for _, w := range cs.byID {
		if w.ready > 0 {
			n++
		}
	}
	return n
}

// IDs returns the consumers' ids, the oldest first.
func (cs *Consumers) IDs() []ConsumerID { return slices.Sorted(maps.Keys(cs.byID)) }

// Add registers a consumer without credit. timeout is how long the consumer may hold a
// message. sample is the percentage of messages to deliver to the consumer, 0 for all; the
// channel finishes the other messages in the consumer's turn without a delivery. A message goes
// to the nearest consumer with credit. Requires: the id is not in use.
func (cs *Consumers) Add(id ConsumerID, timeout time.Duration, sample int, distance Distance) {
	if cs.byID[id] != nil {
		panic("queue: consumer id in use")
	}
	cs.byID[id] = &consumer{id: id, timeout: timeout, sample: sample, distance: distance}
}

// take removes a consumer and returns its messages, the last delivered first.
func (cs *Consumers) take(id ConsumerID) (held []*item) {
	w := cs.byID[id]
	if w == nil {
		return nil
	}
	delete(cs.byID, id)
	w.ready = 0
	// Remove stale entries once they outnumber the consumers, so that neither the rings nor the
	// cost of a removal grow. Every removal looks at every ring: a consumer that is not listed
	// leaves, too, and then an older entry may be one too many.
	for d := range cs.credited {
		ring := &cs.credited[d]
		if ring.Len() <= 2*len(cs.byID) {
			continue
		}
		for range ring.Len() {
			if h := ring.Pop(); cs.byID[h.id] == h {
				ring.Push(h)
			} else {
				h.listed = false
			}
		}
	}
	for it := w.held; it != nil; it = it.next {
		held = append(held, it)
	}
	return held
}

// Holds returns a consumer's ready count and its number of messages in flight, or zeros for an
// unknown consumer.
func (cs *Consumers) Holds(id ConsumerID) (ready, inFlight int) {
	if w := cs.byID[id]; w != nil {
		return w.ready, w.inFlight
	}
	return 0, 0
}

// Stalled reports whether a delivery to the consumer was cancelled since its last Resume.
func (cs *Consumers) Stalled(id ConsumerID) bool {
	w := cs.byID[id]
	return w != nil && w.stalled
}

func (cs *Consumers) resume(id ConsumerID) {
	if w := cs.byID[id]; w != nil {
		w.stalled = false
		cs.list(w)
	}
}

func (cs *Consumers) setReady(id ConsumerID, n int) error {
	w := cs.byID[id]
	if w == nil {
		return ErrUnknownConsumer
	}
	w.ready = n
	cs.list(w)
	return nil
}

func (cs *Consumers) list(w *consumer) {
	if w.credit() && !w.listed {
		w.listed = true
		cs.credited[w.distance].Push(w)
	}
}

// nearest removes the nearest consumer with credit from its ring and returns it. Consumers at the
// same distance take turns. nearest returns nil if no consumer has credit.
func (cs *Consumers) nearest() *consumer {
	for d := range cs.credited {
		for ring := &cs.credited[d]; ring.Len() > 0; {
			w := ring.Pop()
			w.listed = false
			if w.credit() {
				return w
			}
		}
	}
	return nil
}

func (cs *Consumers) hasCredit() bool {
	for d := range cs.credited {
		for ring := &cs.credited[d]; ring.Len() > 0; {
			if ring.Front().credit() {
				return true
			}
			ring.Pop().listed = false
		}
	}
	return false
}
