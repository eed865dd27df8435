package queue

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// channelModel lists the messages, by number, that a channel must and must not deliver.
type channelModel struct {
	since int          // the number of the last message before the channel was created
	owed  map[int]bool // must be delivered and is not finished
	done  map[int]bool // must not be delivered again
	twice map[int]bool // may be delivered more than once: sought, and carried forward before
	saved bool         // the snapshot has the channel
	last  int          // highest first delivery in this process, where order is kept
}

// crashes is a topic over a log, the processes that own the topic one after another, and the slow model.
type crashes struct {
	rt  rapid.TB
	rng *rand.Rand
	cfg Config

	top      *Topic
	now      mono.Time
	fx       Effects
	log      disk
	disk     bool // the owner has orders to write and read, and has work left
	snapshot []byte
	ordered  bool // no operation changes the order of acceptance
	consumer ConsumerID
	n        int // messages accepted
	expiry   Expiry
	dead     []Dead // dead letters that the owner has not stored yet

	channels map[string]*channelModel
	kept     map[string]map[int]bool // finished when the snapshot was saved
	offsets  map[int]Offset
	copied   map[int]bool // carried forward
	carried  bool         // a message was carried forward since the snapshot
	retains  bool         // no written message is trimmed
	released map[int]bool // some channel had the message
	gone     map[int]bool // released when the snapshot was saved
	taken    bool         // another process's log was brought in: numbers have several offsets
}

// settle does the owner's work after a step.
func (c *crashes) settle() {
	for {
		deliveries := slices.Clone(c.fx.Deliveries)
		c.dead = append(c.dead, c.fx.Dead...)
		c.disk = c.disk || c.fx.Disk
		c.fx.Reset()
		if wants := c.wants(); wants && !c.disk {
			c.rt.Fatal("something is to be read, and the owner has no order")
		} else if !wants && !c.top.log.Unwritten() {
			c.disk = false // the owner rests
		}
		testkit.Must(c.rt, c.top.checkInvariants(c.now))
		if len(deliveries) == 0 {
			if len(c.dead) == 0 || c.rng.IntN(3) == 0 {
				return
			}
			c.bury(c.rng.IntN(len(c.dead)), c.rng.IntN(3) > 0)
		}
		for _, d := range deliveries {
			c.delivered(d)
		}
	}
}

// wants reports whether a cursor has messages to read.
func (c *crashes) wants() bool {
	_, n := c.top.wants()
	for _, ch := range c.top.cursors.channels {
		_, more := ch.wants()
		n = max(n, more)
	}
	return n > 0
}

func (c *crashes) delivered(d Delivery) {
	for _, ch := range c.top.cursors.channels {
		if ch.consumers.byID[d.Consumer] == nil {
			continue
		}
		m, n := c.channels[ch.cursor.name], number(d.Message)
		if !ch.MarkSent(d) {
			return
		}
		if c.expiry.MaxAttempts > 0 && int(d.Attempts) > c.expiry.MaxAttempts {
			c.rt.Fatalf("channel %s gets %d for the %dth time", ch.cursor.name, n, d.Attempts)
		}
		if c.expiry.ended(d.Message.Arrival, d.it.delivered) {
			c.rt.Fatalf("channel %s gets %d, whose TTL is over", ch.cursor.name, n)
		}
		c.released[n] = true
		switch {
		case m.done[n]:
			c.rt.Fatalf("channel %s gets %d again, which was done", ch.cursor.name, n)
		case !d.Message.isFor(ch.cursor.name):
			c.rt.Fatalf("channel %s gets %d, which is for %s", ch.cursor.name, n, *d.Message.Only)
		case c.ordered && d.Attempts == 1 && d.Message.Defer == 0:
			if n < m.last {
				c.rt.Fatalf("channel %s gets %d after %d", ch.cursor.name, n, m.last)
			}
			m.last = n
		}
		// The consumer does one of four things with the message.
		switch c.rng.IntN(4) {
		case 0: // keeps the message
		case 1:
			delay := time.Duration(c.rng.IntN(3)) * time.Millisecond
			testkit.Must(c.rt, c.top.Requeue(c.now, ch, d.Consumer, d.Message.ID, delay, &c.fx))
		default:
			c.finish(ch, d.Consumer, d.Message.ID, n)
		}
	}
}

// bury does the owner's work for a dead letter.
func (c *crashes) bury(i int, stored bool) {
	d := c.dead[i]
	c.dead = slices.Delete(c.dead, i, i+1)
	n, name := number(d.Message), d.Channel()
	if int(d.Attempts) < c.expiry.MaxAttempts {
		c.rt.Fatalf("channel %s gives %d up after %d attempts", name, n, d.Attempts)
	}
	m := c.channels[name]
	if m != nil && m.done[n] {
		c.rt.Fatalf("channel %s gives %d up, which was done", name, n)
	}
	if m != nil && stored {
		delete(m.owed, n) // a dead letter now has the message, whatever happens to this copy
		before := c.top.Channel(name).Counters().DeadLettered
		defer func() {
			if c.top.Channel(name).Counters().DeadLettered > before { // the message was still the owner's
				m.done[n] = !m.twice[n]
			}
		}()
	}
	c.top.Bury(c.now, d, stored, time.Millisecond, &c.fx)
}

func (c *crashes) finish(ch *Channel, consumer ConsumerID, id MessageID, n int) {
	testkit.Must(c.rt, c.top.Finish(c.now, ch, consumer, id, &c.fx))
	m := c.channels[ch.cursor.name]
	m.done[n] = !m.twice[n]
	delete(m.owed, n)
}

// make adds a channel to the model and subscribes a consumer.
func (c *crashes) make(name string) {
	ch := c.top.CreateChannel(c.now, name, &c.fx)
	if c.channels[name] == nil {
		c.channels[name] = &channelModel{since: c.n, owed: map[int]bool{}, done: map[int]bool{}, twice: map[int]bool{}}
		if len(c.channels) > 1 {
			for n := range c.released {
				c.channels[name].done[n] = true // released before the channel was created
			}
		}
	}
	c.consumer++
	ch.consumers.Add(c.consumer, 2*time.Millisecond, 0, Near)
	_ = c.top.SetReady(c.now, ch, c.consumer, c.rng.IntN(4), &c.fx)
}

func (c *crashes) publish() {
	var batch []*Message
	for range 1 + c.rng.IntN(3) {
		m := message(c.n+len(batch)+1, c.now.Add(-time.Duration(c.rng.IntN(300))*time.Microsecond))
		if c.rng.IntN(6) == 0 {
			m.Defer = time.Duration(1+c.rng.IntN(3)) * time.Millisecond
		}
		batch = append(batch, m)
	}
	if c.cfg.WriteThrough {
		if c.top.Admit(c.now, 0, len(batch), batch[0].Arrival, batch[len(batch)-1].Arrival) != nil {
			return
		}
		c.top.Disk().Appended(c.now, c.log.append(c.top.log.End(), batch...), &c.fx, batch...)
	} else if c.top.Put(c.now, &c.fx, batch...) != nil {
		return
	}
	for _, m := range batch {
		c.n++
		c.offsets[c.n] = m.Offset
		for _, m := range c.channels {
			m.owed[c.n] = c.expiry.TTL == 0
		}
	}
}

func (c *crashes) save() {
	for c.top.log.Carrying() {
		c.log.write(c.top, c.now, 100, true, &c.fx)
	}
	c.snapshot, c.carried = c.top.cursors.Snapshot(nil, wallOf), false
	c.trim()
	c.kept, c.gone = map[string]map[int]bool{}, maps.Clone(c.released)
	for name, m := range c.channels {
		c.kept[name] = maps.Clone(m.done)
		m.saved = true
	}
}

// trim deletes finished messages that the snapshot does not need. Messages carried forward since the snapshot are needed
// at their old places.
func (c *crashes) trim() {
	if c.retains || c.carried {
		return
	}
	low := min(c.top.cursors.Low(), c.log.next())
	c.log.messages = slices.DeleteFunc(c.log.messages, func(m *Message) bool { return m.Offset < low })
	c.log.first = max(c.log.first, low)
}

// seek moves a channel's cursor and saves the cursor at once.
func (c *crashes) seek() {
	if c.taken {
		return
	}
	ch := c.top.cursors.channels[c.rng.IntN(len(c.top.cursors.channels))]
	to := Offset(c.rng.IntN(int(c.top.log.End()) + 2))
	records := c.rng.IntN(3) // an estimate
	for _, m := range c.log.messages {
		if m.Offset >= to {
			records++
		}
	}
	there := map[int]bool{}
	for _, m := range c.log.messages {
		there[number(m)] = there[number(m)] || m.Only == nil
	}
	m := c.channels[ch.cursor.name]
	m.last = 0
	for n := range c.copied {
		m.twice[n] = true
	}
	for _, d := range c.dead { // the owner may store the dead letter after the repeated message is finished
		if d.Channel() == ch.cursor.name {
			m.twice[number(d.Message)] = true
		}
	}
	for n := 1; n <= c.n; n++ {
		o, is := c.offsets[n]
		if !is {
			continue // a crash lost the message, and another message has its offset
		}
		tail := cmp.Or(c.top.log.tail.window.get(o), c.top.cursors.inMemory(o))
		there := there[n] || tail != nil && tail.Only == nil
		switch {
		case o >= c.top.log.front || c.top.backlog.window.get(o) != nil || o >= c.top.backlog.window.end() && c.top.backlog.behind:
			// not released yet
		case c.top.log.isSkipped(o):
			delete(m.owed, n)
		case o < to:
			delete(m.owed, n)
			delete(m.done, n) // the message was perhaps carried forward, and its copy is not finished
		default:
			delete(m.done, n)
			delete(m.owed, n)
			if there {
				m.owed[n] = c.expiry.TTL == 0
			}
		}
	}
	m.since = 0
	testkit.Must(c.rt, c.top.Seek(c.now, ch, to, records, &c.fx))
	c.save()
}

// begin starts the next process.
func (c *crashes) begin() {
	c.dead = nil
	top, fx := restart(c.rt, c.cfg, c.snapshot, c.now, &c.log, slices.Sorted(maps.Keys(c.channels))...)
	c.top, c.fx = top, fx
	c.retain()
	c.limit()
	for _, name := range slices.Sorted(maps.Keys(c.channels)) {
		c.make(name)
	}
}

func (c *crashes) retain() {
	if c.top.log.SetRetained(c.retains); c.retains {
		c.top.log.SetFirst(0)
	}
}

func (c *crashes) limit() {
	c.top.SetExpiry(c.now, c.expiry, &c.fx)
	if !c.ordered {
		c.top.Limit(OverLimit{})
		c.top.SetShare(c.now, tokenbucket.Share{Rate: tokenbucket.PerSecond(5000), Burst: 5}, 0, &c.fx)
	}
}

// crash ends the process: messages only in memory are lost.
func (c *crashes) crash() {
	c.lose()
	c.begin()
}

// takeOver ends a process whose log another process brings into its own log.
func (c *crashes) takeOver() {
	if !c.cfg.WriteThrough {
		return
	}
	c.lose()
	old, left := NewTopic(c.cfg), c.log
	var fx Effects
	restoring, err := old.Disk().Restore(c.now, c.snapshot, c.log.first, func(w mono.Wall) mono.Time { return mono.Time(w) }, func(string) bool { return true }, &fx)
	testkit.Must(c.rt, err)
	only := func(m *Message) string {
		if m.Only == nil {
			return ""
		}
		return *m.Only
	}
	for _, m := range left.messages {
		if m.Offset >= restoring.From {
			restoring.Found(m.Offset, only(m))
		}
	}
	c.top, c.fx, c.log, c.taken, c.dead = NewTopic(c.cfg), Effects{}, disk{}, true, nil
	c.retain()
	c.limit()
	for _, name := range slices.Sorted(maps.Keys(c.channels)) {
		c.make(name)
	}
	for _, m := range left.messages {
		undone, waits := old.cursors.Undone(nil, m.Offset, only(m))
		if waits {
			k := copyOf(m)
			c.top.Disk().Appended(c.now, c.log.append(c.top.log.End(), k), &c.fx, k)
			c.settle()
		}
		for _, u := range undone {
			k := copyOf(m)
			k.Only, k.Attempts = &u.Channel, u.Attempts
			if u.Fresh {
				u.Due, u.Attempts = m.Arrival.Add(m.Defer), m.Attempts
			}
			c.top.Disk().TakenOver(c.now, c.log.append(c.top.log.End(), k), []Undone{u}, &c.fx)
			c.settle()
		}
	}
	c.save()
}

// lostNothing checks that all messages in the log could be read.
func (c *crashes) lostNothing() {
	lost := c.top.backlog.Counters().Lost
	for _, ch := range c.top.cursors.channels {
		lost += ch.Counters().Lost
	}
	if lost > 0 {
		c.rt.Fatalf("%d are counted as lost", lost)
	}
}

// lose removes from the model the facts that no next process can know.
func (c *crashes) lose() {
	c.lostNothing()
	there := map[int]bool{}
	for _, m := range c.log.messages {
		there[number(m)] = true
	}
	maps.DeleteFunc(c.offsets, func(n int, _ Offset) bool { return !there[n] })
	for name, m := range c.channels {
		for n := range m.owed {
			if !there[n] {
				delete(m.owed, n)
			}
		}
		for n := range m.done { // unknown since the snapshot
			if !c.kept[name][n] {
				delete(m.done, n)
				if n > m.since && there[n] {
					m.owed[n] = false // the message may come again
				}
			}
		}
		m.last = 0
	}
	c.released = maps.Clone(c.gone)
}

// For any operations on a topic and any ends of its process, each channel gets in order each message that was in the log
// and is not finished. It gets no message finished before the last snapshot.
func TestThroughAnyCrash(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		throughCrashes(rt, history{
			seed:       rapid.Uint64().Draw(rt, "seed"),
			retains:    rapid.Bool().Draw(rt, "retains"),
			ordered:    rapid.Bool().Draw(rt, "ordered"),
			capacity:   rapid.IntRange(1, 12).Draw(rt, "capacity"),
			overflow:   rapid.SampledFrom([]int{5, 1000}).Draw(rt, "overflow"),
			ahead:      rapid.SampledFrom([]int{0, 3 * Overhead, 1 << 20}).Draw(rt, "ahead"),
			through:    rapid.Bool().Draw(rt, "through"),
			unfinished: rapid.SampledFrom([]int{0, 3, 20}).Draw(rt, "unfinished"),
			ttl:        rapid.SampledFrom([]int{0, 0, 3, 20}).Draw(rt, "ttl"),
			attempts:   rapid.SampledFrom([]int{0, 0, 1, 3}).Draw(rt, "attempts"),
			steps:      rapid.IntRange(1, 150).Draw(rt, "steps"),
		})
	})
}

// A release gave a channel room, and the owner got no order to read the messages behind.
func TestReleasesOrderReads(t *testing.T) {
	h := history{retains: true, capacity: 9, overflow: 5, ahead: 1 << 20, unfinished: 3, ttl: 3, attempts: 1}
	for h.seed, h.steps = range map[uint64]int{0x180c4: 38, 0x21113b7: 92} {
		throughCrashes(t, h)
	}
}

// history determines a run of throughCrashes.
type history struct {
	seed                                         uint64
	retains, ordered, through                    bool
	capacity, overflow, ahead, unfinished, steps int
	ttl, attempts                                int // ttl in ms
}

func throughCrashes(rt rapid.TB, h history) {
	rng := rand.New(rand.NewPCG(h.seed, 1))
	c := &crashes{rt: rt, rng: rng, now: mono.Time(time.Hour), channels: map[string]*channelModel{}, released: map[int]bool{}, offsets: map[int]Offset{}, copied: map[int]bool{}}
	c.retains, c.ordered = h.retains, h.ordered
	c.cfg = Config{
		Capacity:      h.capacity,
		Overflow:      h.overflow,
		ReadAhead:     h.ahead,
		WriteThrough:  h.through,
		MaxUnfinished: h.unfinished,
		MaxInFlight:   time.Minute,
		MaxBackdating: 20 * time.Millisecond,
		Rand:          rng,
	}
	c.expiry = Expiry{TTL: time.Duration(h.ttl) * time.Millisecond, MaxAttempts: h.attempts, DeadLetters: true}
	c.top = NewTopic(c.cfg)
	c.retain()
	c.limit()
	c.make("a")
	c.make("b")
	c.settle()
	c.save()
	var steps map[string]func()
	steps = map[string]func(){
		"publish": c.publish,
		"advance": func() {
			c.now = c.now.Add(time.Duration(rng.IntN(4000)) * time.Microsecond)
			c.top.Tick(c.now, &c.fx)
		},
		"write": func() { c.log.write(c.top, c.now, rng.IntN(6), rng.IntN(5) > 0, &c.fx) },
		"read":  func() { c.log.read(c.top, c.now, &c.fx) },
		"ready": func() {
			for _, ch := range c.top.cursors.channels {
				for _, id := range ch.consumers.IDs() {
					_ = c.top.SetReady(c.now, ch, id, rng.IntN(4), &c.fx)
					c.top.Resume(c.now, ch, id, &c.fx) // the consumer had two copies and finished the other copy
				}
			}
		},
		"leave": func() {
			ch := c.top.cursors.channels[rng.IntN(len(c.top.cursors.channels))]
			for _, id := range ch.consumers.IDs() {
				c.top.RemoveConsumer(c.now, ch, id, &c.fx)
			}
			c.make(ch.cursor.name)
		},
		"finish": func() {
			for _, ch := range c.top.cursors.channels {
				for _, it := range slices.Clone(ch.items.due) {
					if it.holder != nil && it.sent && rng.IntN(2) == 0 {
						c.finish(ch, it.holder.id, it.msg.ID, number(it.msg))
					}
				}
			}
		},
		"pause": func() {
			if rng.IntN(2) == 0 {
				c.top.Pause()
			} else {
				c.top.Unpause(c.now, &c.fx)
			}
		},
		"tight": func() {
			c.top.log.SetTight(rng.IntN(3) == 0)
			c.top.Tick(c.now, &c.fx)
		},
		"channel": func() {
			if rng.IntN(5) == 0 {
				c.make(fmt.Sprint("c", rng.IntN(2)))
			}
		},
		"empty": func() {
			if rng.IntN(5) > 0 {
				return
			}
			if rng.IntN(2) == 0 {
				c.top.Empty(c.now, &c.fx)
				for _, m := range c.channels {
					clear(m.owed)
				}
				return
			}
			ch := c.top.cursors.channels[rng.IntN(len(c.top.cursors.channels))]
			c.top.EmptyChannel(c.now, ch, &c.fx)
			m := c.channels[ch.cursor.name]
			clear(m.owed)
		},
		"delete": func() {
			if ch := c.top.cursors.channels[rng.IntN(len(c.top.cursors.channels))]; len(c.channels) > 2 && rng.IntN(3) == 0 {
				_ = c.top.DeleteChannel(c.now, ch.cursor.name, &c.fx)
				delete(c.channels, ch.cursor.name)
				c.save() // as for a new channel, see Restore
			}
		},
		"carry": func() {
			carried := c.top.cursors.Stuck(nil, 1)
			c.carried = c.carried || len(carried) > 0
			for _, k := range carried {
				c.copied[number(k.Message)] = true
			}
			if !c.cfg.WriteThrough {
				c.top.Disk().Carry(c.now, carried, &c.fx)
				return
			}
			var msgs []*Message
			for _, k := range carried {
				msgs = append(msgs, k.Message)
			}
			first := c.log.append(c.top.log.End(), msgs...)
			if rng.IntN(2) == 0 {
				steps["finish"]()
			}
			c.top.Disk().CarriedTo(c.now, first, carried, rng.IntN(4) > 0, &c.fx)
		},
		"save": c.save,
		"trim": c.trim, // even if the cursors could not be saved
		"stop": func() {
			c.top.Stop()
			c.top.cursors.StoreLast(&c.fx)
			for c.top.log.Unwritten() {
				c.log.write(c.top, c.now, 100, true, &c.fx)
			}
			c.save()
			c.begin()
		},
		"crash":    c.crash,
		"takeover": c.takeOver,
		"seek":     c.seek,
	}
	mix := []string{
		"publish", "publish", "publish", "publish", "advance", "advance", "advance", "write", "write", "read", "read", "ready", "leave",
		"finish", "finish", "pause", "tight", "channel", "empty", "delete", "save", "save", "trim", "stop", "crash", "takeover", "carry", "carry", "seek",
	}
	for range h.steps {
		steps[mix[rng.IntN(len(mix))]]()
		c.settle()
	}

	// All owed messages come in the end.
	c.top.log.SetTight(false)
	c.top.Unpause(c.now, &c.fx)
	for range 2000 {
		steps["finish"]()
		steps["ready"]()
		for len(c.dead) > 0 {
			c.bury(0, true)
		}
		c.settle()
		c.log.write(c.top, c.now, 10, true, &c.fx)
		c.log.read(c.top, c.now, &c.fx)
		c.now = c.now.Add(time.Millisecond)
		c.top.Tick(c.now, &c.fx)
		c.settle()
	}
	if c.top.backlog.Waiting() > 0 || c.top.cursors.Low() != c.top.log.End() || c.top.log.tail.underWay > 0 {
		state := fmt.Sprintf("backlog %d+%d behind %v late %d", c.top.backlog.window.next, c.top.backlog.window.slots.Len(), c.top.backlog.behind, c.top.backlog.late)
		for _, ch := range c.top.cursors.channels {
			from, n := ch.wants()
			state += fmt.Sprintf("; %s %d+%d behind %v late %d absent %d ready %d due %d, wants %d from %d", ch.cursor.name, ch.cursor.window.next, ch.cursor.window.slots.Len(), ch.cursor.behind, ch.cursor.late, ch.cursor.absent.Len(), ch.items.ready.Len(), len(ch.items.due), n, from)
		}
		rt.Fatalf("%d wait, from %d to %d, front %d, tail from %d to %d, %d under way; %s", c.top.backlog.Waiting(), c.top.cursors.Low(), c.top.log.End(), c.top.log.front, c.top.log.tail.window.next, c.top.log.tail.window.end(), c.top.log.tail.underWay, state)
	}
	for name, m := range c.channels {
		if depth := c.top.Channel(name).Depth(); depth > 0 {
			rt.Fatalf("channel %s still has %d", name, depth)
		}
		for n, must := range m.owed {
			if must {
				rt.Fatalf("channel %s did not get %d", name, n)
			}
		}
	}
	c.lostNothing()
}
