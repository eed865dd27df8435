package commitlog_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// progress is the state of a message in a channel.
type progress struct {
	done     bool          // the message must not come again
	attempts uint16        // number of deliveries
	due      time.Duration // earliest delivery, by the test's clock
}

// channelOwner is the only consumer of a channel. It models, by number, the messages that the channel must and must not
// deliver.
type channelOwner struct {
	sub  *broker.Subscription
	owed map[int]bool // must be delivered and is not finished
	now  map[int]progress
	// saved is the minimum that a crash leaves of the present state.
	saved map[int]progress
	// discarded are the messages that a seek or an order to empty has removed since saved was written.
	discarded map[int]bool

	held map[int]wire.MessageID // in flight, as far as the consumer knows
	last int                    // highest message whose first delivery was in this process
}

// lives runs a broker over a failing disk, restarts the broker again and again, and keeps a model of the acknowledged
// operations.
type lives struct {
	rng      *rand.Rand
	fsync    bool // the machine crashes; otherwise the process
	through  bool
	retain   bool
	sizes    [2]int // limits of messages in memory, and of unfinished messages
	metadata string
	begin    time.Time
	log      []string

	sim *commitlog.SimDisk
	bad bool // disk operations fail at times
	was bool // disk operations have failed in this process
	st  *broker.Storage
	b   *broker.Broker
	top *broker.Topic

	n        int          // messages published, including refused messages
	waits    map[int]bool // published while the topic is paused
	paused   bool
	durable  map[int]bool          // accepted, and present after a crash
	gone     map[int]bool          // emptied from the topic
	due      map[int]time.Duration // of deferred messages, by the test's clock
	known    int                   // number of the last message certainly released, after a crash
	channels map[string]*channelOwner
	// undeleted has the channels whose deletion failed with the power. The next process may have such a channel in its old
	// state, or anew.
	undeleted map[string]*channelOwner
	checked   int // deliveries
}

type broken string

func (l *lives) note(format string, args ...any) {
	l.log = append(l.log, l.now().String()+" "+fmt.Sprintf(format, args...))
}

func (l *lives) fatalf(format string, args ...any) {
	l.note(format, args...)
	panic(broken(strings.Join(l.log[max(0, len(l.log)-120):], "\n")))
}

func (l *lives) now() time.Duration { return time.Since(l.begin) }

// ok reports whether an operation succeeded for good. The only excuses for a failure are a loss of power and a failing
// disk.
func (l *lives) ok(what string, err error) bool {
	dead := l.sim.Dead()
	l.note("%s: %v, power gone: %v, disk fails: %v", what, err, dead, l.bad)
	if err != nil && !dead && !l.bad {
		l.fatalf("%s: %v", what, err)
	}
	return !dead && !l.bad
}

// fails makes disk operations fail at times, or with 0 no longer.
func (l *lives) fails(percent int) {
	l.bad, l.was = percent > 0, l.was || percent > 0
	l.sim.Fail(percent, l.fsync) // without fsync, the model makes no claim about a system that forgets failed writes
	l.note("%d %% of what the disk does fails", percent)
}

func (l *lives) open() {
	now := func() mono.Time { return mono.Time(time.Hour) + mono.Time(l.now()) }
	disk := l.sim.Disk()
	cfg := broker.StorageConfig{
		Path: filepath.Dir(l.metadata), Metadata: l.metadata, SegmentBytes: 1 << 10, MaxRecord: 1 << 12, Overflow: 20,
		MaxUnfinished: l.sizes[1], WriteThrough: l.through, Fsync: l.fsync, Log: slog.New(slog.DiscardHandler), Disk: &disk,
		Clocks: func() (mono.Time, mono.Wall) { return now(), mono.Wall(time.Now().UnixNano()) },
	}
	if l.retain {
		cfg.Retain = metadata.Retention{Bytes: 1 << 13}
	}
	restore := func() (err error) {
		l.st, l.b = nil, nil
		if l.st, err = broker.OpenStorage(cfg); err != nil {
			return err
		}
		if l.b, err = broker.New(broker.Config{Capacity: l.sizes[0], MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: l.st, Now: now}); err != nil {
			return err
		}
		if err = l.b.Restore(); err == nil {
			l.top, err = l.b.CreateTopic("t")
		}
		return err
	}
	for err := restore(); err != nil; err = restore() {
		if l.ok("open", err) {
			l.fatalf("open: %v", err)
		}
		_ = l.close()
		l.revive()
		disk = l.sim.Disk()
	}
	names := l.top.ChannelNames()
	for name := range l.channels {
		if !slices.Contains(names, name) {
			l.fatalf("channel %s is gone, there are %v", name, names)
		}
	}
	l.top.Unpause()
	l.paused = false
	clear(l.waits)
	l.note("opened, there are %v", names)
	for _, name := range names {
		l.subscribe(name)
	}
	clear(l.undeleted)
}

// close closes the broker and returns the error of Broker.Close.
func (l *lives) close() (err error) {
	if l.b != nil {
		err = l.b.Close()
	}
	if l.st != nil {
		err = errors.Join(err, l.st.Close())
	}
	return err
}

// revive turns the disk into the disk that the next process finds.
func (l *lives) revive() {
	if l.fsync {
		l.sim = l.sim.Crash()
	} else {
		l.sim.Kill()
	}
}

// subscribe creates a channel, or subscribes to an existing channel.
func (l *lives) subscribe(name string) {
	sub, err := l.top.Subscribe(name, broker.Subscriber{MsgTimeout: 50 * time.Millisecond}, func() {})
	if err == nil {
		err = sub.Ready(1 + l.rng.IntN(10))
	}
	if err != nil {
		l.fatalf("subscribe to %s: %v", name, err)
	}
	l.b.Recorded()
	c := l.channels[name]
	if c == nil {
		c = &channelOwner{owed: map[int]bool{}, now: map[int]progress{}, saved: map[int]progress{}, discarded: map[int]bool{}}
		if len(l.channels) > 0 {
			for n := 1; n <= l.n; n++ {
				switch {
				case l.waits[n]:
					if durable, accepted := l.durable[n]; accepted {
						c.owed[n] = durable
					}
				case n <= l.known:
					c.now[n], c.saved[n] = progress{done: true}, progress{done: true}
				}
			}
		}
		if old := l.undeleted[name]; old != nil {
			for n := range c.now {
				if !old.saved[n].done || old.discarded[n] {
					delete(c.now, n)
					delete(c.saved, n)
				}
			}
		}
		l.channels[name] = c
		l.note("channel %s is new", name)
	}
	c.sub, c.held = sub, map[int]wire.MessageID{}
}

func (l *lives) publish() {
	for range 1 + l.rng.IntN(4) {
		if l.sim.Dead() {
			return
		}
		l.n++
		var stored broker.Stored
		p := broker.Published{Body: []byte(strconv.Itoa(l.n) + strings.Repeat(" ", l.rng.IntN(200))), Arrival: stamp.Arrival{At: l.b.Now(), Source: stamp.Read}, Stored: &stored}
		p.Attribute = attributeOf(l.n)
		if l.rng.IntN(6) == 0 {
			p.Defer = time.Duration(1+l.rng.IntN(300)) * time.Millisecond
		}
		if p.Defer > 0 {
			l.due[l.n] = l.now() + p.Defer
		}
		l.waits[l.n] = l.paused // a refused message may be stored, too
		err := l.top.Publish(l.b.Now(), mono.Wall(time.Now().UnixNano()), p)
		if err == nil {
			err = l.top.Sync(stored)
		}
		if l.was && errors.Is(err, queue.ErrFull) { // also for a while after the disk has failed
			l.note("publish %d: %v", l.n, err)
			continue
		}
		// An answer counts even if the power failed right after the answer.
		if l.ok(fmt.Sprint("publish ", l.n, " for ", p.Defer), err) || err == nil {
			l.durable[l.n] = l.through || l.fsync
			for _, c := range l.channels {
				c.owed[l.n] = true
			}
		}
	}
}

// attributeOf returns the attribute of the message with number n.
func attributeOf(n int) []byte {
	if n%3 == 0 {
		return nil
	}
	return fmt.Appendf(nil, "attribute of %d", n)
}

// attributed encodes a message as frame with its attribute.
type attributed struct{}

func (attributed) AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte {
	return wire.AppendAttributed(dst, m, attribute)
}

// take lets a channel's consumer receive its messages and answer them at random.
func (l *lives) take(name string) {
	c := l.channels[name]
	out := broker.Outgoing{Encoder: attributed{}}
	for {
		out.Reset()
		if !c.sub.Take(&out, 1<<20) {
			l.fatalf("the subscription to %s is closed", name)
		}
		if out.Messages() == 0 {
			return
		}
		c.sub.Wrote(&out)
		for in := out.Frames; len(in) > 0; {
			_, data, size, err := wire.ParseFrame(in, 1<<20)
			if err != nil {
				l.fatalf("frame: %v", err)
			}
			in = in[size:]
			m, err := wire.ParseMessage(data)
			if err != nil {
				l.fatalf("message: %v", err)
			}
			attribute, body, _ := wire.CutAttribute(m.Body)
			n, err := strconv.Atoi(strings.TrimRight(string(body), " "))
			if err != nil || n > l.n || !bytes.Equal(attribute, attributeOf(n)) {
				l.fatalf("message %q was never published", m.Body)
			}
			l.delivered(name, n, m)
		}
	}
}

func (l *lives) delivered(name string, n int, m wire.Message) {
	c := l.channels[name]
	was := c.now[n]
	l.checked++
	l.note("%s gets %d, attempt %d", name, n, m.Attempts)
	switch {
	case was.done:
		l.fatalf("channel %s gets %d again, which was done", name, n)
	case l.gone[n]:
		l.fatalf("channel %s gets %d, which was emptied from the topic", name, n)
	case l.now() < max(was.due, l.due[n]):
		l.fatalf("channel %s gets %d at %v, before %v", name, n, l.now(), max(was.due, l.due[n]))
	case m.Attempts <= was.attempts:
		l.fatalf("channel %s gets %d with attempt %d, which it had in attempt %d", name, n, m.Attempts, was.attempts)
	case m.Attempts == 1 && l.due[n] == 0:
		if n < c.last {
			l.fatalf("channel %s gets %d after %d", name, n, c.last)
		}
		c.last = n
	}
	c.now[n] = progress{attempts: m.Attempts}
	c.held[n] = m.ID
	switch l.rng.IntN(5) {
	case 0: // until the message times out, or later
	case 1:
		delay := time.Duration(l.rng.IntN(4)) * 100 * time.Millisecond
		if l.ok(fmt.Sprint("requeue ", n, " for ", delay), c.sub.Requeue(m.ID, delay)); delay > 0 {
			c.now[n] = progress{attempts: m.Attempts, due: l.now() + delay}
		}
		delete(c.held, n)
	case 2:
		l.ok(fmt.Sprint("touch ", n), c.sub.Touch(m.ID))
	default:
		l.finish(c, n)
	}
}

func (l *lives) finish(c *channelOwner, n int) {
	id := c.held[n]
	delete(c.held, n)
	if err := c.sub.FinishBatch(l.b.Now(), []wire.MessageID{id}, nil)[0]; err != nil {
		return // the message has timed out
	}
	l.note("finished %d", n)
	p := c.now[n]
	p.done = true
	c.now[n] = p
	delete(c.owed, n)
}

// saved records that the disk has the present state of the channels.
func (l *lives) saved() {
	if !l.paused {
		l.known = l.n
	}
	for _, c := range l.channels {
		c.saved = maps.Clone(c.now)
		clear(c.discarded)
	}
}

func (l *lives) random() string {
	return slices.Sorted(maps.Keys(l.channels))[l.rng.IntN(len(l.channels))]
}

func (l *lives) step() {
	switch l.rng.IntN(20) {
	default:
		l.publish()
	case 6, 7, 8:
		l.wait(time.Duration(l.rng.IntN(120)) * time.Millisecond)
	case 9, 10:
		for _, c := range l.channels {
			for _, n := range slices.Sorted(maps.Keys(c.held)) {
				if l.rng.IntN(2) == 0 {
					l.finish(c, n)
				}
			}
		}
	case 11, 12: // long enough for a save, and seldom so long that no message is in flight
		changes := make(map[string]map[int]progress)
		for name, c := range l.channels {
			changes[name] = maps.Clone(c.now)
		}
		known := l.n
		paused := l.paused
		l.wait(450 * time.Millisecond)
		if l.ok("save", nil) {
			if !paused {
				l.known = known
			}
			for name, c := range l.channels {
				c.saved = changes[name]
				clear(c.discarded)
			}
		}
	case 13:
		if l.paused = !l.paused; l.paused {
			l.top.Pause()
		} else {
			l.top.Unpause()
			clear(l.waits)
		}
		l.note("paused: %v", l.paused)
	case 14:
		name := l.random()
		c := l.channels[name]
		ok := l.ok("empty "+name, l.top.EmptyChannel(name))
		l.discards(c, ok)
	case 15:
		if l.was { // messages that could not be read when the topic was unpaused still wait in the topic
			return
		}
		l.top.Empty()
		ok := l.ok("empty the topic", nil)
		for n := range l.waits {
			if l.waits[n] {
				if l.gone[n] = ok; !ok {
					l.doubt(n)
					continue
				}
				for _, c := range l.channels {
					delete(c.owed, n)
				}
			}
		}
		clear(l.waits)
	case 16:
		if name := "c" + strconv.Itoa(l.rng.IntN(2)); l.channels[name] == nil {
			l.subscribe(name)
		} else if !l.bad { // or the channel may come back with its old state
			l.delete(name)
		}
	case 17:
		name := l.random()
		c := l.channels[name]
		if l.rng.IntN(2) == 0 {
			_, err := l.top.Seek(name, broker.Place{End: true})
			l.discards(c, l.ok("seek the end of "+name, err))
			break
		}
		_, err := l.top.Seek(name, broker.Place{})
		l.ok("seek the beginning of "+name, err)
		// All retained messages may come again, and so may emptied messages that are not retained but still on disk.
		if !l.retain {
			clear(l.gone)
		}
		for _, m := range []map[int]progress{c.now, c.saved} {
			clear(m)
		}
		c.last = 0
		clear(c.held)
	case 18:
		if l.rng.IntN(2) == 0 {
			l.sim.DieSoon(1 + l.rng.IntN(25))
		} else {
			l.fails(l.rng.IntN(2) * (1 + l.rng.IntN(60)))
		}
	case 19:
		if l.rng.IntN(2) == 0 {
			l.sim.Die()
		} else {
			l.stop()
		}
	}
}

// delete deletes a channel. An answer counts even if the power failed right after the answer.
func (l *lives) delete(name string) {
	err := l.top.DeleteChannel(name)
	l.b.Recorded()
	if !l.ok("delete "+name, err) && err != nil {
		l.undeleted[name] = l.channels[name]
	}
	delete(l.channels, name)
}

// doubt records that the model does not know whether message n is owed.
func (l *lives) doubt(n int) {
	delete(l.durable, n)
	for _, c := range l.channels {
		delete(c.owed, n)
	}
}

// discards records that a channel need not deliver any released message, and must not if the operation succeeded for
// good. If the disk failed, messages that the channel never had may wait in the topic: a message refused though stored,
// or a message not read when the topic was unpaused.
func (l *lives) discards(c *channelOwner, ok bool) {
	for n := 1; n <= l.n; n++ {
		if l.waits[n] {
			continue
		}
		delete(c.owed, n)
		if p := c.now[n]; ok && (!l.was || p.attempts > 0) {
			p.done = true
			c.now[n], c.saved[n], c.discarded[n] = p, p, true
		}
	}
	clear(c.held)
}

// stop ends the process in order.
func (l *lives) stop() {
	l.fails(0)
	err := l.close()
	var undurable *commitlog.SyncError // of an earlier fsync, reported at the time
	if errors.As(err, &undurable) && l.was || !l.ok("stop", err) {
		l.crash()
		return
	}
	for n := 1; n <= l.n; n++ {
		l.durable[n] = true
	}
	l.saved()
	l.next()
}

// crash ends the process without notice: messages only in memory are lost.
func (l *lives) crash() {
	l.note("crash")
	l.fails(0)
	recorded, err := os.ReadFile(l.metadata)
	l.sim.Die()
	_ = l.close()
	if err == nil {
		if err := os.WriteFile(l.metadata, recorded, 0o600); err != nil {
			l.fatalf("metadata: %v", err)
		}
	}
	l.revive()
	for _, c := range l.channels {
		for n := range c.owed {
			if !l.durable[n] {
				delete(c.owed, n)
			}
		}
		if l.was && !l.through && !l.fsync { // written since for another channel, but without the note that this channel need not have the message
			for n := range c.discarded {
				delete(c.saved, n)
			}
		}
		clear(c.discarded)
		c.now = maps.Clone(c.saved)
	}
	l.next()
}

func (l *lives) next() {
	l.was = false
	<-time.After(time.Millisecond) // ids come from the wall clock, here a virtual clock
	for _, c := range l.channels {
		c.last = 0
	}
	l.open()
}

// wait advances the virtual time while the consumers take their messages.
func (l *lives) wait(d time.Duration) {
	for end := l.now() + d; l.now() < end && !l.sim.Dead(); {
		<-time.After(min(10*time.Millisecond, end-l.now())) // of virtual time
		l.takes()
	}
}

func (l *lives) settle() {
	synctest.Wait()
	if l.sim.Dead() {
		l.crash()
	}
	l.takes()
}

func (l *lives) takes() {
	synctest.Wait()
	for _, name := range slices.Sorted(maps.Keys(l.channels)) {
		l.take(name)
	}
	synctest.Wait()
}

func (l *lives) run(steps int) {
	defer func() { _ = l.close() }()
	l.open()
	l.subscribe("a")
	l.subscribe("b")
	for range steps {
		l.step()
		l.settle()
	}
	// All owed messages come in the end.
	l.note("the end")
	l.fails(0)
	l.top.Unpause()
	left := func() (n int) {
		for _, c := range l.channels {
			n += len(c.owed)
		}
		return n
	}
	for i := 0; i < 200 && left() > 0; i++ {
		l.wait(100 * time.Millisecond)
		l.settle()
		for _, c := range l.channels {
			for n := range maps.Clone(c.held) {
				l.finish(c, n)
			}
		}
	}
	for name, c := range l.channels {
		if len(c.owed) > 0 {
			l.fatalf("channel %s did not get %v: %+v, disk %v", name, slices.Sorted(maps.Keys(c.owed)), l.top.Stats(), l.b.Health())
		}
	}
}

// Messages emptied from a channel while only in memory are written later for another channel. A crash right after the
// write does not bring the messages back to the first channel.
func TestWhatWasEmptiedInMemoryStaysSoThroughACrash(t *testing.T) {
	path := t.TempDir()
	testkit.Bubble(t, func(t *testing.T) {
		l := &lives{
			rng: rand.New(rand.NewPCG(1, 1)), sizes: [2]int{2, 0}, begin: time.Now(), metadata: filepath.Join(path, "metadata.json"),
			sim: commitlog.NewSimDisk(rand.New(rand.NewPCG(1, 2))), channels: map[string]*channelOwner{},
		}
		l.open()
		defer func() { _ = l.close() }()
		for _, name := range []string{"emptied", "other"} {
			testkit.Must(t, l.top.CreateChannel(name))
		}
		l.b.Recorded()
		publish := func() {
			testkit.Must(t, l.top.Publish(l.b.Now(), mono.Wall(time.Now().UnixNano()), broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: l.b.Now()}}))
			synctest.Wait()
		}
		publish()
		publish()
		testkit.Must(t, l.top.EmptyChannel("emptied"))
		publish() // more than memory has room for
		publish()
		l.crash()
		synctest.Wait()
		held := map[string]int{}
		for _, c := range l.top.Stats().Channels {
			held[c.Name] = c.Ready + c.Beyond + c.InFlight
		}
		if held["other"] < 3 || held["emptied"] != held["other"]-2 {
			t.Errorf("the channels have %v messages after the crash; one was emptied of the first two", held)
		}
	})
}

// A record that is carried forward is on stable storage at its new place before its old place is deleted.
func TestWhatIsCarriedForwardStaysThroughALossOfPower(t *testing.T) {
	carried := 0
	for n := range 60 {
		path := t.TempDir()
		testkit.Bubble(t, func(t *testing.T) {
			l := &lives{
				rng: rand.New(rand.NewPCG(uint64(n), 1)), fsync: true, sizes: [2]int{1000, 0}, begin: time.Now(), metadata: filepath.Join(path, "metadata.json"),
				sim: commitlog.NewSimDisk(rand.New(rand.NewPCG(uint64(n), 2))), channels: map[string]*channelOwner{},
			}
			l.open()
			defer func() { _ = l.close() }()
			sub := testkit.Result(l.top.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(t)
			testkit.Must(t, sub.Ready(1000))
			l.b.Recorded()
			publish := func(after time.Duration) {
				var stored broker.Stored
				testkit.Must(t, l.top.Publish(l.b.Now(), mono.Wall(time.Now().UnixNano()), broker.Published{
					Body: []byte("x"), Arrival: stamp.Arrival{At: l.b.Now()}, Defer: after, Stored: &stored,
				}))
				testkit.Must(t, l.top.Sync(stored))
			}
			publish(time.Hour)
			for range 300 {
				publish(0)
			}
			var out broker.Outgoing
			for finished := 0; finished < 300; {
				out.Reset()
				sub.Take(&out, 1<<20)
				sub.Wrote(&out)
				for in := out.Frames; len(in) > 0; finished++ {
					_, data, size, err := wire.ParseFrame(in, 1<<20)
					testkit.Must(t, err)
					in = in[size:]
					m := testkit.Result(wire.ParseMessage(data)).Must(t)
					testkit.Must(t, sub.FinishBatch(l.b.Now(), []wire.MessageID{m.ID}, nil)[0])
				}
				synctest.Wait()
			}
			l.sim.DieSoon(1 + n)
			<-time.After(time.Second) // virtual time, during which the records are carried
			synctest.Wait()
			if l.top.Stats().Disk.First > 0 {
				carried++
			}
			l.crash()
			synctest.Wait()
			if c := l.top.Stats().Channels[0]; c.Deferred+c.Beyond+c.Ready == 0 {
				t.Errorf("operation %d: of the message that was accepted, and is deferred, there is %+v", n, c)
			}
		})
	}
	if carried == 0 {
		t.Error("nothing was carried forward")
	}
}

// The power fails during a deletion. The next process may still have the channel, with the messages that the channel had.
func TestADeletionThatFailedMayLeaveTheChannel(t *testing.T) {
	left := 0
	for n := range 10 {
		path := t.TempDir()
		testkit.Bubble(t, func(t *testing.T) {
			l := &lives{
				rng: rand.New(rand.NewPCG(1, 1)), fsync: true, sizes: [2]int{1000, 0}, begin: time.Now(), metadata: filepath.Join(path, "metadata.json"),
				sim:   commitlog.NewSimDisk(rand.New(rand.NewPCG(1, 2))),
				waits: map[int]bool{}, durable: map[int]bool{}, gone: map[int]bool{}, due: map[int]time.Duration{},
				channels: map[string]*channelOwner{}, undeleted: map[string]*channelOwner{},
			}
			defer func() {
				if r := recover(); r != nil {
					t.Fatal(r)
				}
			}()
			defer func() { _ = l.close() }()
			l.open()
			l.subscribe("a")
			l.subscribe("b")
			for range 5 {
				l.publish()
			}
			l.stop() // the messages are on the disk, and both channels have them
			l.sim.DieSoon(1 + n)
			l.delete("b")
			if l.sim.Dead() {
				failed := l.undeleted["b"] != nil
				l.crash()
				if failed && slices.Contains(l.top.ChannelNames(), "b") {
					left++
				}
			}
			l.takes()
		})
	}
	if left == 0 {
		t.Error("no deletion failed")
	}
}

// The test runs the broker's store over real logs and fails any write, fsync or rename, kills the process or cuts the
// power at any of them. Each channel gets every accepted message, in order, with its attempts and not before its time. A
// message finished before the last snapshot does not come again. Emptied, deleted and sought state stays so.
func TestABrokerThroughAnyCrash(t *testing.T) {
	path := t.TempDir()
	lived := 0
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		if err := checks.Value.Set("25"); err != nil { // the flag may ask for more
			t.Fatal(err)
		}
		defer checks.Value.Set(checks.DefValue)
	}
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		rng := rand.New(rand.NewPCG(seed, 1))
		mode := rapid.SampledFrom([]string{"memory", "through", "fsync"}).Draw(rt, "mode")
		l := &lives{
			rng: rng, fsync: mode == "fsync", through: mode == "through", retain: rapid.Bool().Draw(rt, "retains"),
			sizes:    [2]int{rapid.SampledFrom([]int{2, 10, 1000}).Draw(rt, "capacity"), rapid.SampledFrom([]int{0, 5, 40}).Draw(rt, "unfinished")},
			metadata: filepath.Join(path, strconv.Itoa(lived), "metadata.json"),
			sim:      commitlog.NewSimDisk(rand.New(rand.NewPCG(seed, 2))), waits: map[int]bool{}, durable: map[int]bool{}, gone: map[int]bool{}, due: map[int]time.Duration{},
			channels: map[string]*channelOwner{}, undeleted: map[string]*channelOwner{},
		}
		lived++
		testkit.Must(rt, os.Mkdir(filepath.Dir(l.metadata), 0o700))
		steps := rapid.IntRange(1, 60).Draw(rt, "steps")
		var failed broken
		testkit.Bubble(t, func(*testing.T) {
			defer func() {
				if r := recover(); r != nil {
					var is bool
					if failed, is = r.(broken); !is {
						panic(r)
					}
				}
			}()
			l.begin = time.Now()
			l.run(steps)
		})
		if failed != "" {
			rt.Fatal(string(failed))
		}
	})
}
