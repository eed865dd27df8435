package queue

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Scenarios of testdata. A step prints its deliveries as message@consumer:attempts, then the access
// delays above 0 of the released messages, then its error. Deliveries are sent at once, except
// after "hold": then "send 2" sends the oldest held delivery of message 2. Messages 1-3 are put one
// by one, "batch 1-3" puts all or none. "write 4 failing" takes four messages for the log and
// cannot write them; "take 4" takes them, and "written" ends that write.
func TestScenarios(t *testing.T) {
	testkit.Scenarios(t, "*.txt", func(t *testing.T) func([]string) (string, error) {
		s := &script{}
		s.topic("20")
		return func(words []string) (string, error) {
			s.out.Reset()
			err := s.command(words[0], words[1:])
			if s.bad == nil {
				s.bad = s.top.checkInvariants(s.now)
			}
			s.results(err)
			return s.out.String(), s.bad
		}
	})
}

// script is a scenario's topic, with a disk.
type script struct {
	top       *Topic
	now       mono.Time
	fx        Effects
	disk      disk
	consumers map[ConsumerID]*Channel // also of deleted channels
	hold      bool
	dead      []Dead // not buried yet
	held      []Delivery
	snapshot  []byte
	taken     []*Message // by "take"
	upTo      Offset
	out       strings.Builder
	bad       error // of the script itself
}

// topic begins with a new topic, at time 0. arg is the capacity and, with a disk, the overflow.
func (s *script) topic(arg string) {
	capacity, overflow, _ := strings.Cut(arg, "/")
	s.top = newTest(s.number(capacity))
	if overflow != "" {
		s.top = withDisk(s.number(capacity), s.number(overflow))
	}
	s.now, s.disk, s.consumers, s.hold, s.held = 0, disk{}, make(map[ConsumerID]*Channel), false, nil
	s.dead = nil
}

func (s *script) number(word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		s.bad = errors.Join(s.bad, err)
	}
	return n
}

func (s *script) duration(word string) time.Duration {
	d, err := time.ParseDuration(word)
	if err != nil {
		s.bad = errors.Join(s.bad, err)
	}
	return d
}

func (s *script) time(word string) mono.Time {
	if word == "never" {
		return mono.Never
	}
	return mono.Time(s.duration(word))
}

// messages returns the messages of the words: numbers, ranges such as 1-3, and options.
func (s *script) messages(words []string) (msgs []*Message) {
	arrival, deferral := s.now, time.Duration(0)
	for _, w := range words { // options come first
		if v, is := strings.CutPrefix(w, "arrived="); is {
			arrival = mono.Time(s.duration(v))
		} else if v, is := strings.CutPrefix(w, "defer="); is {
			deferral = s.duration(v)
		} else {
			first, last, is := strings.Cut(w, "-")
			if !is {
				last = first
			}
			for n := s.number(first); n <= s.number(last); n++ {
				m := message(n, arrival)
				m.Defer = deferral
				msgs = append(msgs, m)
			}
		}
	}
	return msgs
}

// share parses rate/burst of messages per second and messages.
func (s *script) share(word string) tokenbucket.Share {
	rate, burst, _ := strings.Cut(word, "/")
	return tokenbucket.Share{Rate: tokenbucket.PerSecond(float64(s.number(rate))), Burst: int64(s.number(burst))}
}

func (s *script) command(name string, args []string) error {
	t := s.top
	id := func() ConsumerID { return ConsumerID(s.number(args[0])) }
	switch name {
	case "topic":
		s.topic(args[0])
	case "put":
		var errs []error
		for _, m := range s.messages(args) {
			errs = append(errs, t.Put(s.now, &s.fx, m))
		}
		return errors.Join(errs...)
	case "batch":
		return t.Put(s.now, &s.fx, s.messages(args)...)
	case "at":
		s.now = mono.Time(s.duration(args[0]))
		t.Tick(s.now, &s.fx)
	case "clock": // without a tick
		s.now = mono.Time(s.duration(args[0]))
	case "channel":
		t.CreateChannel(s.now, args[0], &s.fx)
	case "consumer": // ID CHANNEL TIMEOUT READY [DISTANCE]
		distance := Near
		if len(args) > 4 {
			distance = Distance(slices.Index([]string{"near", "neighbour", "far"}, args[4]))
		}
		c := t.Channel(args[1])
		c.consumers.Add(id(), s.duration(args[2]), 0, distance)
		s.consumers[id()] = c
		return t.SetReady(s.now, c, id(), s.number(args[3]), &s.fx)
	case "ready":
		return t.SetReady(s.now, s.consumers[id()], id(), s.number(args[1]), &s.fx)
	case "finish":
		var errs []error
		for _, m := range s.messages(args[1:]) {
			errs = append(errs, t.Finish(s.now, s.consumers[id()], id(), m.ID, &s.fx))
		}
		return errors.Join(errs...)
	case "requeue":
		return t.Requeue(s.now, s.consumers[id()], id(), message(s.number(args[1]), 0).ID, s.duration(args[2]), &s.fx)
	case "touch":
		return t.Touch(s.now, s.consumers[id()], id(), message(s.number(args[1]), 0).ID)
	case "remove":
		t.RemoveConsumer(s.now, s.consumers[id()], id(), &s.fx)
	case "resume":
		t.Resume(s.now, s.consumers[id()], id(), &s.fx)
	case "hold":
		s.hold = true
	case "deliver":
		s.hold = false
	case "send":
		return s.send(s.number(args[0]))
	case "limit":
		over := OverLimit{Reject: len(args) > 0}
		if over.Reject {
			over.MaxDelay = s.duration(args[0])
		}
		t.Limit(over)
	case "share":
		t.SetShare(s.now, s.share(args[0]), tokenbucket.Tokens(s.number(args[1]))*tokenbucket.Token, &s.fx)
	case "lease": // SHARE BASE FLEXUNTIL UNTIL TOKENS
		l := Lease{Base: s.share(args[1]), FlexUntil: s.time(args[2]), Until: s.time(args[3])}
		t.SetLeased(s.now, s.share(args[0]), l, tokenbucket.Tokens(s.number(args[4]))*tokenbucket.Token, &s.fx)
	case "renew": // FLEXUNTIL UNTIL
		if !t.Renew(s.now, s.time(args[0]), s.time(args[1]), &s.fx) {
			fmt.Fprintln(&s.out, "no flexible part")
		}
	case "hold-from":
		at := s.time(args[0])
		t.contract.holdFrom = func() mono.Time { return at }
	case "expiry": // TTL MAXATTEMPTS [dead-letters]
		t.SetExpiry(s.now, Expiry{TTL: s.duration(args[0]), MaxAttempts: s.number(args[1]), DeadLetters: len(args) > 2}, &s.fx)
	case "bury": // MESSAGE [RETRY]: the oldest dead letter of the message, stored or not
		i := slices.IndexFunc(s.dead, func(d Dead) bool { return number(d.Message) == s.number(args[0]) })
		d, retry := s.dead[i], time.Duration(0)
		if s.dead = slices.Delete(s.dead, i, i+1); len(args) > 1 {
			retry = s.duration(args[1])
		}
		t.Bury(s.now, d, len(args) == 1, retry, &s.fx)
		fmt.Fprintln(&s.out, "freed", len(s.fx.Free))
	case "unlimit":
		t.Unlimit(s.now, &s.fx)
	case "burst":
		fmt.Fprintln(&s.out, "burst needed", t.contract.BurstNeeded(t.backlog.TakeMaxWaiting()))
	default:
		return s.operate(name, args)
	}
	return nil
}

// operate carries out the commands of operators and of the disk.
func (s *script) operate(name string, args []string) error {
	t := s.top
	channel := func() *Channel { return t.Channel(args[0]) }
	switch name {
	case "pause":
		if len(args) > 0 {
			channel().Pause()
		} else {
			t.Pause()
		}
	case "unpause":
		if len(args) > 0 {
			t.UnpauseChannel(s.now, channel(), &s.fx)
		} else {
			t.Unpause(s.now, &s.fx)
		}
	case "empty":
		n := 0
		if len(args) > 0 {
			n = t.EmptyChannel(s.now, channel(), &s.fx)
		} else {
			n = t.Empty(s.now, &s.fx)
		}
		fmt.Fprintln(&s.out, "emptied", n)
	case "delete":
		return t.DeleteChannel(s.now, args[0], &s.fx)
	case "write":
		s.disk.write(t, s.now, s.number(args[0]), len(args) == 1, &s.fx)
	case "take":
		s.taken, s.upTo = t.Disk().TakeUnwritten(s.now, nil, s.number(args[0]), 1<<30, &s.fx)
		fmt.Fprintln(&s.out, "taken", len(s.taken))
	case "written":
		for _, m := range s.taken {
			s.disk.append(m.Offset, m)
		}
		t.Disk().Written(s.now, s.upTo, &s.fx)
		s.fx.Unref(s.taken)
	case "read":
		fmt.Fprintln(&s.out, "read", s.disk.read(t, s.now, &s.fx))
	case "lose":
		lost := s.messages(args)
		s.disk.messages = slices.DeleteFunc(s.disk.messages, func(m *Message) bool {
			return slices.ContainsFunc(lost, func(l *Message) bool { return l.ID == m.ID })
		})
	case "snapshot":
		t.Stop()
		t.cursors.StoreLast(&s.fx)
		s.disk.write(t, s.now, 100, true, &s.fx)
		s.snapshot = t.cursors.Snapshot(nil, wallOf)
	case "log": // of another process, after the snapshot
		for _, m := range s.messages(args) {
			s.disk.append(s.disk.next(), m)
		}
	case "restart": // [CHANNEL...]: the topic has these channels, else the channels of the snapshot
		s.fx.Reset()
		s.now, s.hold = 0, false
		s.top, s.fx = restart(scriptFatal{s}, *t.log.cfg, s.snapshot, s.now, &s.disk, args...)
	case "show":
		s.show()
	default:
		s.bad = fmt.Errorf("unknown command %q", name)
	}
	return nil
}

// scriptFatal ends a scenario at a fault of restart.
type scriptFatal struct{ s *script }

func (scriptFatal) Helper() {}

func (f scriptFatal) Fatal(args ...any) {
	f.s.bad = errors.Join(f.s.bad, errors.New(fmt.Sprint(args...)))
}

// send sends the oldest held delivery of a message.
func (s *script) send(n int) error {
	i := slices.IndexFunc(s.held, func(d Delivery) bool { return number(d.Message) == n })
	if i < 0 {
		s.bad = fmt.Errorf("no delivery of %d is held", n)
		return nil
	}
	if d := s.held[i]; s.consumers[d.Consumer].MarkSent(d) {
		s.held = slices.Delete(s.held, i, i+1)
	} else {
		fmt.Fprintln(&s.out, "cancelled")
	}
	return nil
}

// results prints what a step has caused.
func (s *script) results(err error) {
	var line []string
	for _, d := range s.fx.Deliveries {
		line = append(line, fmt.Sprintf("%d@%d:%d", number(d.Message), d.Consumer, d.Attempts))
		if s.hold {
			s.held = append(s.held, d)
		} else if !s.consumers[d.Consumer].MarkSent(d) {
			s.bad = fmt.Errorf("a delivery of %d was cancelled in its step", number(d.Message))
		}
	}
	if len(line) > 0 {
		fmt.Fprintln(&s.out, strings.Join(line, " "))
	}
	for _, d := range s.fx.Dead {
		fmt.Fprintf(&s.out, "dead letter %d:%d\n", number(d.Message), d.Attempts)
	}
	s.dead = append(s.dead, s.fx.Dead...)
	for i, n := 0, 1; i < len(s.fx.Released); i, n = i+n, 1 {
		r := s.fx.Released[i]
		for i+n < len(s.fx.Released) && s.fx.Released[i+n].Access == r.Access {
			n++
		}
		if r.Access > 0 {
			fmt.Fprintf(&s.out, "access delay %v of %d\n", r.Access, n)
		}
	}
	if err != nil {
		for _, l := range strings.Split(err.Error(), "\n") {
			fmt.Fprintln(&s.out, "error:", l)
		}
	}
	s.fx.Reset()
}

// show prints the topic's state.
func (s *script) show() {
	deadline := func(at mono.Time) string {
		if at == mono.Never {
			return "never"
		}
		return time.Duration(at).String()
	}
	t, n := s.top, s.top.backlog.Counters()
	fmt.Fprintf(&s.out, "waiting %d beyond memory %d, next release %s, next timeout %s\n",
		t.backlog.Waiting(), t.backlog.Beyond(), deadline(t.ReleaseDeadline()), deadline(t.ChannelDeadline()))
	fmt.Fprintf(&s.out, "accepted %d released %d expired %d refused %d emptied %d lost %d\n", n.Accepted, n.Released, n.Expired, n.Refused, n.Emptied, n.Lost)
	if t.contract.Limited() {
		fmt.Fprintf(&s.out, "share %v/%d\n", t.contract.Share().Rate.PerSecond(), t.contract.Share().Burst)
	}
	for _, c := range t.Channels() {
		n := c.Counters()
		fmt.Fprintf(&s.out, "%s: depth %d ready %d in flight %d deferred %d\n%s: timed out %d dropped %d finished %d expired %d given up %d dead letters %d\n",
			c.Name(), c.Depth(), c.Ready(), c.InFlight(), c.Deferred(), c.Name(), n.TimedOut, n.Dropped, n.Finished, n.Expired, n.GivenUp, n.DeadLettered)
		for _, id := range c.consumers.IDs() {
			if c.consumers.Stalled(id) {
				fmt.Fprintf(&s.out, "%s: consumer %d stalled\n", c.Name(), id)
			}
		}
	}
}
