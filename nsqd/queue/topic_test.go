package queue

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Finish is FinishBatch of one message, with its error.
func (t *Topic) Finish(now mono.Time, c *Channel, id ConsumerID, m MessageID, fx *Effects) error {
	ids, errs := [1]MessageID{m}, [1]error{}
	return t.FinishBatch(now, c, id, ids[:], fx, errs[:0])[0]
}

func newTest(capacity int) *Topic {
	return NewTopic(Config{
		Capacity: capacity, MaxInFlight: time.Minute, MaxBackdating: backdating, Rand: rand.New(rand.NewPCG(1, 2)),
	})
}

const backdating = 250 * time.Millisecond

func message(n int, at mono.Time) *Message {
	m := &Message{Arrival: at, Source: stamp.Exact}
	m.SetContent([]byte{byte(n)}, attributeOf(n))
	binary.BigEndian.PutUint64(m.ID[8:], uint64(n))
	return m
}

// attributeOf returns the attribute of the message with number n.
func attributeOf(n int) []byte { return bytes.Repeat([]byte{byte(n)}, n%3) }

// number panics if the message has lost its content.
func number(m *Message) int {
	n := int(binary.BigEndian.Uint64(m.ID[8:]))
	if !bytes.Equal(m.Body, []byte{byte(n)}) || !bytes.Equal(m.Attribute(), attributeOf(n)) {
		panic(fmt.Sprintf("message %d has body %v and attribute %v", n, m.Body, m.Attribute()))
	}
	return n
}

// A backlog has many messages: see Message.
func TestAMessageFitsIntoItsSizeClass(t *testing.T) {
	if size := unsafe.Sizeof(Message{}); size > 112 {
		t.Errorf("a message has %d bytes, want at most 112", size)
	}
}

// bench drives a topic and records its effects.
type bench struct {
	t   *testing.T
	top *Topic
	now mono.Time
	fx  Effects
	n   int
}

func (b *bench) put(want error) {
	b.t.Helper()
	b.n++
	if err := b.top.Put(b.now, &b.fx, message(b.n, b.now)); !errors.Is(err, want) {
		b.t.Fatalf("put %d: %v, want %v", b.n, err, want)
	}
	b.check()
}

func (b *bench) check() {
	b.t.Helper()
	testkit.Must(b.t, b.top.checkInvariants(b.now))
}

func (b *bench) at(d time.Duration) {
	b.t.Helper()
	b.now = mono.Time(d)
	b.top.Tick(b.now, &b.fx)
	b.check()
}

// expect compares the deliveries since the last call with "n@consumer:attempts", and hands them over.
func (b *bench) expect(want ...string) {
	b.t.Helper()
	var got []string
	for _, d := range b.deliveries() {
		got = append(got, fmt.Sprintf("%d@%d:%d", number(d.Message), d.Consumer, d.Attempts))
		b.hand(d, true)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		b.t.Fatalf("at %v: delivered %v, want %v", time.Duration(b.now), got, want)
	}
}

// deliveries returns the deliveries since the last call.
func (b *bench) deliveries() []Delivery {
	d := slices.Clone(b.fx.Deliveries)
	b.fx.Reset()
	return d
}

// hand hands a delivery over to its consumer.
func (b *bench) hand(d Delivery, want bool) {
	b.t.Helper()
	for _, c := range b.top.cursors.channels {
		if c.consumers.byID[d.Consumer] != nil {
			if got := c.MarkSent(d); got != want {
				b.t.Fatalf("handing %d to consumer %d: %v, want %v", number(d.Message), d.Consumer, got, want)
			}
			b.check()
		}
	}
}

func (b *bench) channel(name string) *Channel {
	b.t.Helper()
	c := b.top.CreateChannel(b.now, name, &b.fx)
	b.check()
	return c
}

func (b *bench) consumer(c *Channel, id ConsumerID, timeout time.Duration, ready int) {
	b.t.Helper()
	c.consumers.Add(id, timeout, 0, Near)
	testkit.Must(b.t, b.top.SetReady(b.now, c, id, ready, &b.fx))
	b.check()
}

func (b *bench) finish(c *Channel, id ConsumerID, n int, want error) {
	b.t.Helper()
	if err := b.top.Finish(b.now, c, id, message(n, 0).ID, &b.fx); !errors.Is(err, want) {
		b.t.Fatalf("finish %d: %v, want %v", n, err, want)
	}
	b.check()
}

// A subscriber that sets RDY and leaves, again and again on an idle channel, must leave no state behind.
func TestRemovedConsumersLeaveNoState(t *testing.T) {
	b := &bench{t: t, top: newTest(20)}
	c := b.channel("c")
	for id := range ConsumerID(1000) {
		b.consumer(c, id, time.Second, 5)
		b.top.RemoveConsumer(b.now, c, id, &b.fx)
	}
	b.check()
	testkit.MustEqual(t, c.consumers.credited[Near].Len(), 0, "consumers are listed, and none is there")
}

func TestASamplingConsumerGetsAboutItsShare(t *testing.T) {
	b := &bench{t: t, top: newTest(20)}
	c := b.channel("c")
	c.consumers.Add(1, time.Second, 30, Near)
	testkit.Must(t, b.top.SetReady(0, c, 1, 5, &b.fx))
	const total = 10_000
	delivered := 0
	for range total {
		b.put(nil)
		for _, d := range b.deliveries() {
			delivered++
			b.hand(d, true)
			b.finish(c, 1, number(d.Message), nil)
		}
	}
	// Five standard deviations of a binomial around 30 %.
	if mean, sd := 0.3*total, 46.0; float64(delivered) < mean-5*sd || float64(delivered) > mean+5*sd {
		t.Errorf("%d of %d delivered, want about %g", delivered, total, mean)
	}
	if got := c.Counters().Sampled; int(got) != total-delivered {
		t.Errorf("%d left out, want %d", got, total-delivered)
	}
}

// For any steps, no message is lost or finished twice, the bounds hold, and the releases keep the contract.
func TestRandomStepsKeepTheInvariants(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		capacity := rapid.IntRange(1, 12).Draw(rt, "capacity")
		top := NewTopic(Config{
			Capacity:    capacity,
			Overflow:    rapid.SampledFrom([]int{0, 5, 1000}).Draw(rt, "overflow"),
			ReadAhead:   rapid.SampledFrom([]int{0, 3 * Overhead, 1 << 20}).Draw(rt, "ahead"),
			MaxInFlight: time.Minute,
			Rand:        rand.New(rand.NewPCG(1, 2)),
		})
		top.log.SetTight(rapid.Bool().Draw(rt, "tight"))
		heldBytes := 0
		var log disk
		now := mono.Time(1) // 0 stands for no delivery
		var fx Effects
		next := 0
		type holding struct {
			channel  string
			consumer ConsumerID
			id       int
		}
		outbox := map[ConsumerID][]Delivery{}
		attempts := map[holding]uint16{} // handed over; consumer 0
		finished := map[holding]int{}    // consumer 0
		accepted := map[int]bool{}
		free := map[*Message]bool{}
		consumers := map[ConsumerID]string{}
		channels := []string{"a", "b"}
		const mostReady = 4
		settle := func() {
			for _, d := range fx.Deliveries {
				// In memory, only the lack of consumers delays the delivery of a released message.
				if wait := now.Sub(d.Message.Released); d.Waited < 0 || d.Waited > wait || d.Attempts == 1 && d.Message.Defer == 0 && top.log.cfg.Overflow == 0 && d.Waited != wait {
					rt.Fatalf("%d waited for a consumer for %v of %v", number(d.Message), d.Waited, wait)
				}
				outbox[d.Consumer] = append(outbox[d.Consumer], d)
				if n := len(outbox[d.Consumer]); n > 2*mostReady {
					rt.Fatalf("%d deliveries pile up for consumer %d", n, d.Consumer)
				}
			}
			for _, m := range fx.Free {
				if free[m] {
					rt.Fatalf("%d is given back twice", number(m))
				}
				free[m] = true
				m.ID, m.Body = MessageID{}, nil // any user of the freed message fails
			}
			heldBytes += fx.Held
			fx.Reset()
			testkit.Must(rt, top.checkInvariants(now))
			sum := 0
			for m, n := range top.held() {
				if m.refs.holders() != n {
					rt.Fatalf("%d is in %d places and counts %d refs", number(m), n, m.refs.holders())
				}
				sum += m.Size()
			}
			if sum != heldBytes {
				rt.Fatalf("messages take %d bytes, counted %d", sum, heldBytes)
			}
		}
		pickHeld := func() (holding, bool) {
			var all []holding
			for _, ch := range top.Channels() {
				for _, it := range ch.items.due {
					if it.holder != nil {
						all = append(all, holding{ch.cursor.name, it.holder.id, number(it.msg)})
					}
				}
			}
			if len(all) == 0 {
				return holding{}, false
			}
			return rapid.SampledFrom(all).Draw(rt, "held"), true
		}
		if rapid.Bool().Draw(rt, "limited") {
			top.Limit(OverLimit{})
			top.SetShare(0, tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 3}, 0, &fx)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { settle() },
			"advance": func(rt *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(rt, "us")) * time.Microsecond)
				top.Tick(now, &fx)
			},
			"put": func(rt *rapid.T) {
				var batch []*Message
				for range rapid.IntRange(1, 3).Draw(rt, "n") {
					next++
					m := message(next, now.Add(-time.Duration(rapid.IntRange(0, 300).Draw(rt, "late"))*time.Microsecond))
					m.Defer = time.Duration(rapid.SampledFrom([]int{0, 0, 0, 4}).Draw(rt, "defer")) * time.Millisecond
					batch = append(batch, m)
				}
				if err := top.Put(now, &fx, batch...); err == nil {
					for _, m := range batch {
						accepted[number(m)] = true
					}
				}
			},
			"disk": func(rt *rapid.T) {
				log.write(top, now, rapid.IntRange(0, 4).Draw(rt, "write"), rapid.IntRange(0, 3).Draw(rt, "full") > 0, &fx)
				log.read(top, now, &fx)
			},
			"empty": func(rt *rapid.T) {
				if len(top.Channels()) == 0 || rapid.IntRange(0, 4).Draw(rt, "often") > 0 {
					rt.Skip()
				}
				ch := rapid.SampledFrom(top.Channels()).Draw(rt, "channel")
				top.EmptyChannel(now, ch, &fx)
			},
			"channel": func(rt *rapid.T) {
				top.CreateChannel(now, rapid.SampledFrom(channels).Draw(rt, "name"), &fx)
			},
			"consumer": func(rt *rapid.T) {
				if len(top.Channels()) == 0 || len(consumers) > 50 {
					rt.Skip()
				}
				ch := rapid.SampledFrom(top.Channels()).Draw(rt, "channel")
				id := ConsumerID(len(consumers) + 1)
				consumers[id] = ch.cursor.name
				ch.consumers.Add(id, 3*time.Millisecond, 0, Distance(rapid.IntRange(0, Distances-1).Draw(rt, "distance")))
			},
			"ready": func(rt *rapid.T) {
				if len(consumers) == 0 {
					rt.Skip()
				}
				id := ConsumerID(rapid.IntRange(1, len(consumers)).Draw(rt, "id"))
				_ = top.SetReady(now, top.Channel(consumers[id]), id, rapid.IntRange(0, mostReady).Draw(rt, "rdy"), &fx)
			},
			"hand": func(rt *rapid.T) {
				if len(consumers) == 0 {
					rt.Skip()
				}
				id := ConsumerID(rapid.IntRange(1, len(consumers)).Draw(rt, "id"))
				ch := top.Channel(consumers[id])
				for range rapid.IntRange(1, mostReady).Draw(rt, "n") {
					if len(outbox[id]) == 0 {
						break
					}
					d := outbox[id][0]
					outbox[id] = outbox[id][1:]
					if !ch.MarkSent(d) {
						continue
					}
					key := holding{channel: ch.cursor.name, id: number(d.Message)}
					if attempts[key]++; d.Attempts != attempts[key] {
						rt.Fatalf("%v handed over as attempt %d, it is number %d", key, d.Attempts, attempts[key])
					}
					if finished[key] > 0 {
						rt.Fatalf("%v handed over after it was finished", key)
					}
				}
				if ch.consumers.Stalled(id) {
					outbox[id] = slices.DeleteFunc(outbox[id], func(d Delivery) bool { return !d.IsCurrent() })
					top.Resume(now, ch, id, &fx)
				}
			},
			"leave": func(rt *rapid.T) {
				if len(consumers) == 0 {
					rt.Skip()
				}
				id := ConsumerID(rapid.IntRange(1, len(consumers)).Draw(rt, "id"))
				top.RemoveConsumer(now, top.Channel(consumers[id]), id, &fx)
			},
			"finish": func(rt *rapid.T) {
				h, ok := pickHeld()
				if !ok {
					rt.Skip()
				}
				ended := func(id int) {
					key := holding{channel: h.channel, id: id}
					if finished[key]++; finished[key] > 1 || !accepted[id] {
						rt.Fatalf("%v finished %d times, accepted %v", key, finished[key], accepted[id])
					}
				}
				if rapid.Bool().Draw(rt, "alone") {
					testkit.Must(rt, top.Finish(now, top.Channel(h.channel), h.consumer, message(h.id, 0).ID, &fx))
					ended(h.id)
					return
				}
				ids := []int{h.id}
				for range rapid.IntRange(0, 3).Draw(rt, "more") {
					if o, _ := pickHeld(); o.channel == h.channel && o.consumer == h.consumer {
						ids = append(ids, o.id) // some of the ids twice
					}
				}
				var batch []MessageID
				for _, id := range ids {
					batch = append(batch, message(id, 0).ID)
				}
				for i, err := range top.FinishBatch(now, top.Channel(h.channel), h.consumer, batch, &fx, nil) {
					again := slices.Contains(ids[:i], ids[i])
					if again != errors.Is(err, ErrNotInFlight) || !again && err != nil {
						rt.Fatalf("%d of %v: %v", i, ids, err)
					}
					if !again {
						ended(ids[i])
					}
				}
			},
			"requeue": func(rt *rapid.T) {
				h, ok := pickHeld()
				if !ok {
					rt.Skip()
				}
				delay := time.Duration(rapid.IntRange(0, 3).Draw(rt, "ms")) * time.Millisecond
				testkit.Must(rt, top.Requeue(now, top.Channel(h.channel), h.consumer, message(h.id, 0).ID, delay, &fx))
			},
			"touch": func(rt *rapid.T) {
				h, ok := pickHeld()
				if !ok {
					rt.Skip()
				}
				testkit.Must(rt, top.Touch(now, top.Channel(h.channel), h.consumer, message(h.id, 0).ID))
			},
			"pause": func(rt *rapid.T) {
				if rapid.Bool().Draw(rt, "pause") {
					top.Pause()
				} else {
					top.Unpause(now, &fx)
				}
			},
		})
	})
}

// copyOf returns a message as the log returns it from disk.
func copyOf(m *Message) *Message {
	c := *m
	c.refs = 0
	return &c
}

// disk is a simple model of a log.
type disk struct {
	messages []*Message
	first    Offset // earlier messages are trimmed
}

// next returns the offset after all written messages.
func (d *disk) next() Offset {
	if n := len(d.messages); n > 0 {
		return d.messages[n-1].Offset + 1
	}
	return d.first
}

func (d *disk) append(first Offset, msgs ...*Message) Offset {
	for i, m := range msgs {
		c := copyOf(m)
		c.Offset = first + Offset(i)
		d.messages = append(d.messages, c)
	}
	return first
}

// write writes at most so many messages, or fails.
func (d *disk) write(top *Topic, now mono.Time, most int, works bool, fx *Effects) {
	msgs, upTo := top.Disk().TakeUnwritten(now, nil, most, 1<<30, fx)
	if works && len(msgs) > 0 {
		for _, m := range msgs {
			d.append(m.Offset, m)
		}
		top.Disk().Written(now, upTo, fx)
	}
	fx.Unref(msgs)
}

// read reads the messages that the topic wants, and returns their number.
func (d *disk) read(top *Topic, now mono.Time, fx *Effects) int {
	from, n, end := top.Disk().Want()
	if n == 0 {
		return 0
	}
	var msgs []*Message
	upTo := end
	for _, m := range d.messages {
		if m.Offset < from {
			continue
		}
		if len(msgs) == n {
			upTo = m.Offset
			break
		}
		msgs = append(msgs, copyOf(m))
	}
	top.Disk().Refill(now, from, upTo, msgs, fx)
	return len(msgs)
}

func withDisk(capacity, overflow int) *Topic {
	return NewTopic(Config{Capacity: capacity, Overflow: overflow, MaxInFlight: time.Minute, Rand: rand.New(rand.NewPCG(1, 2))})
}

// restart returns the topic as the next process restores the topic. Without channels, restart creates the channels of
// the snapshot.
func restart(t interface {
	Helper()
	Fatal(...any)
}, cfg Config, snapshot []byte, now mono.Time, log *disk, channels ...string) (*Topic, Effects) {
	t.Helper()
	var fx Effects
	top := NewTopic(cfg)
	for _, c := range channels {
		top.CreateChannel(now, c, &fx)
	}
	mono := func(w mono.Wall) mono.Time { return mono.Time(w) }
	restoring := testkit.Result(top.Disk().Restore(now, snapshot, log.first, mono, func(string) bool { return len(channels) == 0 }, &fx)).Must(t)
	for _, m := range log.messages {
		if m.Offset >= restoring.From {
			only := ""
			if m.Only != nil {
				only = *m.Only
			}
			restoring.Found(m.Offset, only)
		}
	}
	restoring.Done(now, log.next(), &fx)
	testkit.Must(t, top.checkInvariants(now))
	return top, fx
}

func wallOf(m mono.Time) mono.Wall { return mono.Wall(m) }

func TestEmptyDiscardsMessagesThatAreBeingReadOrWritten(t *testing.T) {
	b, d := &bench{t: t, top: withDisk(1, 3)}, disk{}
	for range 4 {
		b.put(nil)
	}
	d.write(b.top, b.now, 2, true, &b.fx)
	from, _, _ := b.top.Disk().Want()
	msgs, upTo := b.top.Disk().TakeUnwritten(b.now, nil, 3, 1000000, &b.fx)
	testkit.MustEqual(t, b.top.Empty(b.now, &b.fx), 4, "emptied")
	for _, m := range msgs {
		d.append(m.Offset, m)
	}
	b.top.Disk().Written(b.now, upTo, &b.fx)
	b.fx.Unref(msgs)
	b.top.Disk().Refill(b.now, from, 4, []*Message{copyOf(d.messages[0]), copyOf(d.messages[1])}, &b.fx)
	b.check()
	b.put(nil)
	testkit.MustEqual(t, b.top.backlog.Waiting(), 1, "wait")
}

// Publishers keep the contract, and the broker reads their messages late and in any order. No message waits for a token,
// and each is released when read.
func TestLateReadersDoNotDelayAConformingTopic(t *testing.T) {
	rng := testkit.Rand(t)
	share := tokenbucket.Share{Rate: tokenbucket.PerSecond(10_000), Burst: 5}
	shaper := tokenbucket.NewFull(share, 0)
	type reading struct{ arrival, at mono.Time }
	var all []reading
	now := 0.0
	for range 5000 {
		now += rng.ExpFloat64() * 100e3 // as many as there are tokens
		a := shaper.Take(mono.Time(now))
		all = append(all, reading{a, a.Add(time.Duration(rng.Int64N(100e6)))})
	}
	slices.SortStableFunc(all, func(a, b reading) int { return cmp.Compare(a.at, b.at) })

	b := &bench{t: t, top: newTest(10_000)}
	c := b.channel("c")
	b.consumer(c, 1, time.Minute, 10_000)
	b.top.Limit(OverLimit{Reject: true})
	b.top.SetShare(0, share, tokenbucket.Tokens(share.Burst)*tokenbucket.Token, &b.fx)
	for i, r := range all {
		b.now = r.at
		if err := b.top.Put(r.at, &b.fx, message(i, r.arrival)); err != nil {
			t.Fatalf("message %d of %d, read at %d: %v", i, r.arrival, r.at, err)
		}
		if len(b.fx.Released) != 1 || b.fx.Released[0].Access != 0 {
			t.Fatalf("message %d of %d, read at %d: %v", i, r.arrival, r.at, b.fx.Released)
		}
		b.fx.Reset()
	}
	b.check()
}

// The topic finds the messages of a leaving consumer without a look at other consumers' messages or at deferred
// messages.
func TestRemovingAConsumerDoesNotSearchOtherMessages(t *testing.T) {
	leaving := func(deferred int) time.Duration {
		top := NewTopic(Config{Capacity: 1 << 20, MaxInFlight: time.Minute, Rand: rand.New(rand.NewPCG(1, 2))})
		var fx Effects
		c := top.CreateChannel(0, "c", &fx)
		for i := range deferred {
			m := message(i, 0)
			m.Defer = time.Hour
			testkit.Must(t, top.Put(0, &fx, m))
			fx.Reset()
		}
		best := time.Duration(math.MaxInt64)
		for range 20 {
			began := time.Now()
			for id := range ConsumerID(50) {
				c.consumers.Add(id, time.Second, 0, Near)
				top.RemoveConsumer(0, c, id, &fx)
			}
			best = min(best, time.Since(began))
		}
		return best
	}
	if few, many := leaving(10), leaving(100_000); many > 100*few {
		t.Errorf("it takes %v beside 100,000 deferred messages, %v beside 10", many, few)
	}
}

func TestAStepAllocatesNothing(t *testing.T) {
	top := newTest(1000)
	var fx Effects
	c := top.CreateChannel(0, "c", &fx)
	c.consumers.Add(1, time.Second, 0, Near)
	testkit.Must(t, top.SetReady(0, c, 1, 100, &fx))
	m := message(1, 0)
	now := mono.Time(0)
	cycle := func() {
		now++
		testkit.Must(t, top.Put(now, &fx, m))
		if !c.MarkSent(fx.Deliveries[0]) {
			t.Fatal("the delivery came to nothing")
		}
		testkit.Must(t, top.Finish(now, c, 1, m.ID, &fx))
		fx.Reset()
	}
	cycle()
	testkit.Equal(t, testing.AllocsPerRun(1000, cycle), 0, "allocations per message")
}

func TestFirstSnapshotOfAnImportedLog(t *testing.T) {
	var d disk
	for n := range 5 {
		m := message(n+1, 0)
		if n == 1 {
			only := "b"
			m.Only, m.Attempts = &only, 3
		}
		d.append(Offset(n), m)
	}
	b := &bench{t: t}
	b.top, b.fx = restart(t, *withDisk(10, 10).log.cfg, FirstSnapshot(3, 5, []string{"a", "b"}), 0, &d, "a", "b")
	x, y := b.top.Channel("a"), b.top.Channel("b")
	b.top.Pause()
	if x.Depth() != 2 || y.Depth() != 3 {
		t.Fatalf("a has %d, b %d", x.Depth(), y.Depth())
	}
	for d.read(b.top, 0, &b.fx) > 0 {
		b.check()
	}
	b.top.Unpause(0, &b.fx)
	b.consumer(x, 1, time.Second, 10)
	b.expect("1@1:1", "3@1:1", "4@1:1", "5@1:1")
	b.consumer(y, 2, time.Second, 10)
	b.expect("1@2:1", "2@2:4", "3@2:1", "4@2:1", "5@2:1")
}
