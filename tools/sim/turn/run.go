package turn

import (
	"math/rand/v2"
	"slices"
	"time"
)

// sim is the state of a simulation.
type sim struct {
	Config
	rng        *rand.Rand
	now        time.Duration
	loops      []*loop
	sender     sender
	subscriber subscriber
	threads    []*thread // the urgent threads first

	stallAt            time.Duration
	replied, delivered latencies
	turns, reads       int
	busy, used         time.Duration // of all loops; of all processors
}

// thread is a thread with one step at a time.
type thread struct {
	running bool
	left    time.Duration // processor time to the end of the step
	done    func()        // the end of the step
	share   float64       // of a processor
}

func (t *thread) step(cost time.Duration, done func()) { t.running, t.left, t.done = true, cost, done }
func (t *thread) sleep()                               { t.running = false }

// never is later than all instants of a simulation.
const never = time.Duration(1 << 62)

// latencies are the measured times of messages.
type latencies struct {
	from time.Duration // first due time that counts
	all  []time.Duration
}

func (l *latencies) add(due, now time.Duration) {
	if due >= l.from {
		l.all = append(l.all, now-due)
	}
}

func (l *latencies) quantiles() (q [3]time.Duration) {
	slices.Sort(l.all)
	for i, at := range []float64{.5, .99, .999} {
		if n := len(l.all); n > 0 {
			q[i] = l.all[min(n-1, int(at*float64(n)))]
		}
	}
	return q
}

// sender writes frames at random instants to random connections.
type sender struct {
	thread
	due    time.Duration // of the next frame
	storm  int           // frames left at that instant
	wakeAt time.Duration // while it sleeps
	conns  []*conn
	idle   []int // if Closed: connections that have their replies
}

// subscriber reads all messages of its socket, and finishes them with one write.
type subscriber struct {
	thread
	sim    *sim
	socket []time.Duration // due times of messages
	conn   conn
}

// Run simulates the turns of a broker. It returns after all messages are delivered and answered.
func Run(c Config, rng *rand.Rand) Result {
	c.Together, c.Storm, c.Commands = max(1, c.Together), max(1, c.Storm), max(1, c.Commands)
	s := &sim{Config: c, rng: rng, stallAt: never}
	s.replied.from, s.delivered.from = c.Duration/10, c.Duration/10
	s.subscriber.sim, s.subscriber.conn.subscriber = s, true
	s.threads = []*thread{&s.sender.thread, &s.subscriber.thread}
	for i := range c.Loops {
		l := &loop{sim: s, first: i == 0}
		s.loops = append(s.loops, l)
		s.threads = append(s.threads, &l.thread)
	}
	for i := range c.Connections {
		s.sender.conns = append(s.sender.conns, &conn{number: i})
		s.sender.idle = append(s.sender.idle, i)
	}
	if s.nextDue(); s.Closed {
		s.sender.due = 0
	}
	s.sender.wakeAt = s.sender.due
	s.nextStall()
	for s.advance() {
	}
	return Result{
		Delivered: s.delivered.quantiles(), Replied: s.replied.quantiles(), Messages: len(s.delivered.all), Answers: len(s.replied.all), Rate: float64(len(s.replied.all)) / (s.now - s.replied.from).Seconds(),
		Busy:  float64(s.busy) / float64(s.now) / float64(c.Loops),
		Load:  float64(s.used) / float64(s.now) / float64(c.Processors),
		Turns: s.turns, Reads: float64(s.reads) / float64(max(1, s.turns)),
	}
}

// nextDue draws the instant of the next frames.
func (s *sim) nextDue() {
	each := float64(s.Together*s.Storm) / s.Rate
	s.sender.due += time.Duration(s.rng.ExpFloat64() * each * 1e9)
	s.sender.storm = s.Storm
	if s.sender.due >= s.Duration {
		s.sender.due = never
	}
}

func (s *sim) nextStall() {
	if s.StallEvery > 0 {
		s.stallAt = s.now + time.Duration(s.rng.ExpFloat64()*float64(s.StallEvery))
	}
}

// advance goes on to the next end of a step, or to the next instant of the schedule. It returns
// false at the end of the simulation.
func (s *sim) advance() bool {
	s.dealProcessors()
	next := s.sender.wakeAt
	if s.sender.running {
		next = never
	}
	var ends *thread
	for _, t := range s.threads {
		if t.running && t.share > 0 {
			if at := s.now + time.Duration(float64(t.left)/t.share) + 1; at < next {
				next, ends = at, t
			}
		}
	}
	if next == never {
		return false
	}
	if s.stallAt < next {
		next, ends = max(s.now, s.stallAt), nil
	}
	passed := next - s.now
	for i, t := range s.threads {
		if t.running {
			part := time.Duration(float64(passed) * t.share)
			t.left = max(0, t.left-part)
			s.used += part
			if i >= 2 {
				s.busy += passed
			}
		}
	}
	s.now = next
	switch {
	case ends != nil:
		ends.done()
	case s.now == s.sender.wakeAt && !s.sender.running && s.stallAt > s.now:
		s.sender.step(s.Wake, s.send)
	default: // all threads stop
		s.now += s.Stall
		s.nextStall()
	}
	return true
}

// dealProcessors divides the processors, first among the urgent threads, then among the loops.
func (s *sim) dealProcessors() {
	free := float64(s.Processors)
	for _, group := range [][]*thread{s.threads[:2], s.threads[2:]} {
		running := 0.
		for _, t := range group {
			if t.running {
				running++
			}
		}
		for _, t := range group {
			t.share = min(1, free/max(1, running))
		}
		free = max(0, free-running)
	}
}

// send writes all frames that are due, and sleeps.
func (s *sim) send() {
	if s.Closed {
		s.converse()
		return
	}
	if s.now < s.sender.due {
		s.sender.wakeAt = s.sender.due
		if s.sender.due != never {
			s.sender.wakeAt = max(s.sender.due, s.now+s.Pause)
		}
		s.sender.sleep()
		return
	}
	s.sender.step(s.Send, func() {
		due := s.sender.due
		if s.sender.storm--; s.sender.storm == 0 {
			s.nextDue()
		}
		i := s.rng.IntN(len(s.sender.conns))
		s.loops[i%s.Loops].receive(s.sender.conns[i], slices.Repeat([]time.Duration{due}, s.Together)...)
		s.send()
	})
}

// converse writes a frame to each connection that has its reply, and sleeps.
func (s *sim) converse() {
	if s.sender.wakeAt = never; len(s.sender.idle) == 0 || s.now >= s.Duration {
		s.sender.sleep()
		return
	}
	i, due := s.sender.idle[0], s.now
	s.sender.idle = s.sender.idle[1:]
	s.sender.step(s.Send, func() {
		s.loops[i%s.Loops].receive(s.sender.conns[i], due)
		s.converse()
	})
}

func (s *subscriber) wake() {
	if !s.running {
		s.step(s.sim.Wake, s.receive)
	}
}

// receive reads all messages, and finishes them.
func (s *subscriber) receive() {
	if len(s.socket) == 0 {
		s.sleep()
		return
	}
	s.step(s.sim.Receive, func() {
		due := s.socket
		s.socket = nil
		for _, at := range due {
			s.sim.delivered.add(at, s.sim.now)
		}
		s.step(s.sim.Acknowledge+time.Duration(len(due))*s.sim.Received, func() {
			s.sim.loops[0].receive(&s.conn, due...)
			s.receive()
		})
	})
}
