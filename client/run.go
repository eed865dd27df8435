package client

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// sender is what Publisher.run owns: the only place that decides what is sent
// where.
//
// Invariant: requests are answered, or fail, in the order in which they came,
// except that one whose context ends is taken out.
// Invariant: at most one of cur and old has open requests, and nothing is
// written to cur while old has any.
type sender struct {
	p *Publisher

	epoch  uint64
	target string // where the publisher belongs; "" before the first assignment, and while it has no place
	gone   error  // the topic does not exist now

	// cur is in use, or nil. next is connected and takes over when cur has no
	// open request; until then nothing is written.
	cur, next *route
	// retired: cur is of a topic that is gone, where a publish would create the
	// topic anew without its contract, or of a publisher that has no place now.
	// Nothing is written to it, and it is closed after its last answer.
	retired  bool
	paces    bool   // the assignment says that brokers know PACE
	unpaced  string // the address of one that did not
	dialling bool
	wait     *backoff
	retry    *time.Timer
	drain    *time.Timer // runs while next, or another assignment, waits for cur
	// queue is to be sent again, before anything new.
	queue []*request
}

// run is the publisher's life.
func (p *Publisher) run() {
	defer close(p.over)
	s := &sender{p: p, wait: newBackoff(), retry: stopped(), drain: stopped()}
	defer s.end()
	for {
		var requests <-chan *request
		closing := p.closing
		select {
		case <-p.closing:
			if s.idle() {
				return
			}
			closing = nil
		default:
			if s.canTake() {
				requests = p.requests
			}
		}
		select {
		case r := <-requests:
			s.queue = append(s.queue, r)
		case <-p.notify:
			s.readInbox()
		case d := <-p.dialled:
			s.connected(d)
		case <-s.retry.C:
			s.connect()
		case <-s.drain.C:
			if s.cur != nil && (s.next != nil || s.retired) {
				s.lose(s.cur, fmt.Errorf("no last answer within %v", p.drain))
			}
		case <-closing:
		case <-p.life.Done():
			return
		}
		s.receive(s.cur)
		s.receive(s.next)
		s.send()
	}
}

func stopped() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// canTake: a new request could be sent now, or fail at once.
func (s *sender) canTake() bool {
	return len(s.queue) == 0 && (s.gone != nil || s.canSend())
}

func (s *sender) canSend() bool {
	return s.cur != nil && s.next == nil && !s.retired && s.gone == nil && len(s.cur.open) < s.p.limit
}

// idle: nothing is under way.
func (s *sender) idle() bool {
	return len(s.queue) == 0 && (s.cur == nil || len(s.cur.open) == 0)
}

var errClosedUnanswered = fmt.Errorf("%w: the publisher was closed", ErrUnanswered)

// end gives up what is left.
func (s *sender) end() {
	s.retry.Stop()
	s.drain.Stop()
	for _, r := range s.queue {
		if r.again {
			r.done <- errClosedUnanswered
		} else {
			r.done <- ErrClosed
		}
	}
	for _, rt := range []*route{s.cur, s.next} {
		if rt == nil {
			continue
		}
		for _, r := range rt.open {
			r.done <- errClosedUnanswered
		}
		rt.close()
	}
	s.p.giveUp()
	if s.dialling {
		if d := <-s.p.dialled; d.route != nil {
			d.route.close()
		}
	}
	s.p.conns.Wait()
	s.p.client.leave(s.p)
}

// readInbox acts on a new assignment.
func (s *sender) readInbox() {
	p := s.p
	p.inbox.Lock()
	a, gone := p.inbox.assignment, p.inbox.gone
	p.inbox.assignment = nil
	p.inbox.Unlock()
	if gone != nil && s.gone == nil {
		p.log.Warn("topic or publisher is gone", "error", gone)
		for _, r := range s.queue {
			r.done <- gone
		}
		s.queue = nil
		// Where it comes back, and from which epoch on, is another matter.
		s.epoch = 0
		s.leave()
	}
	s.gone = gone
	if a == nil || a.Epoch < s.epoch {
		return
	}
	s.epoch, s.paces = a.Epoch, a.Pacing
	if a.TcpAddress == s.target {
		s.connect() // it may be paced only now
		return
	}
	if a.TcpAddress == "" {
		p.log.Info("no place for now", "from", s.target, "epoch", a.Epoch)
		s.leave()
		return
	}
	if s.target != "" {
		p.log.Info("moving", "from", s.target, "address", a.TcpAddress, "epoch", a.Epoch)
	}
	s.target = a.TcpAddress
	if s.next != nil {
		s.next.close()
		s.next = nil
		s.drain.Stop()
	}
	s.wait.reset()
	s.connect()
}

// leave ends the connection after its last answer. What is to be sent waits for
// another assignment.
func (s *sender) leave() {
	s.target = ""
	if s.next != nil {
		s.next.close()
		s.next = nil
		s.drain.Stop()
	}
	if s.cur != nil {
		if !s.retired {
			s.drain.Reset(s.p.drain)
		}
		s.retired = true
		s.retire()
	}
}

// weight is with which the target is asked for its pace; 0: it is not.
func (s *sender) weight() uint8 {
	if c := &s.p.client.cfg; c.Pacing != PacingOff && (s.paces || c.BrokersPace) && s.target != s.unpaced {
		return max(c.Weight, 1)
	}
	return 0
}

// settled: the route in use is the target's, and paced if that is wanted. On a route that
// is in use it cannot be asked for: a broker that does not know PACE would hang up.
func (s *sender) settled() bool {
	return s.cur != nil && s.cur.address == s.target && (s.cur.paced || s.weight() == 0)
}

// connect dials the target unless that is settled or under way.
func (s *sender) connect() {
	if s.dialling || s.next != nil || s.target == "" || s.cur != nil && s.retired || s.settled() {
		return
	}
	s.retry.Stop()
	s.dialling = true
	p, address, weight := s.p, s.target, s.weight()
	cfg := p.cfg
	if p.as != "" {
		vouched := *cfg
		vouched.AuthSecret = p.client.cfg.Vouch(p.as)
		cfg = &vouched
	}
	p.conns.Go(func() {
		r, err := dial(p.life, address, cfg, p.limit, weight, p.pacer.advise, p.notify, &p.conns)
		p.dialled <- dialled{r, err}
	})
}

// connected takes the result of a dial.
func (s *sender) connected(d dialled) {
	s.dialling = false
	p := s.p
	if d.err != nil {
		p.inbox.Lock()
		p.inbox.lastError = d.err
		p.inbox.Unlock()
		p.log.Warn("no connection", "error", d.err)
		if errors.Is(d.err, errNoPace) {
			s.unpaced = s.target
			s.connect()
			return
		}
		s.retry.Reset(s.wait.take())
		return
	}
	if d.route.address != s.target || s.settled() {
		d.route.close() // the target has changed meanwhile
		s.connect()
		return
	}
	s.next = d.route
	if s.cur != nil && len(s.cur.open) > 0 {
		s.drain.Reset(p.drain)
		return
	}
	s.takeOver()
}

// takeOver makes next the route in use.
//
// Requires: cur is nil or has no open request.
func (s *sender) takeOver() {
	if s.cur != nil {
		s.cur.close()
	}
	s.cur, s.next, s.retired = s.next, nil, false
	s.drain.Stop()
	p := s.p
	p.pacer.reset()
	p.broker.Store(&s.cur.address)
	p.log.Info("connected", "address", s.cur.address)
	select {
	case <-p.isReady:
	default:
		close(p.isReady)
	}
}

func settle(r *request, a answer) {
	if a.refused != nil {
		r.done <- a.refused
	} else {
		r.done <- nil
	}
}

// errElsewhere: the broker does not have the topic now. It refused the oldest open request and
// carries out nothing that was sent after that request, so all of them may be sent again.
var errElsewhere = errors.New("the topic is not on this broker now")

// movedAway reports whether the answer says that the broker does not have the topic. Where a
// loaddistributor says which broker has the topic, that passes.
func (s *sender) movedAway(a answer) bool {
	return a.refused != nil && a.refused.Code == string(wire.CodeBadTopic) && s.p.client.cfg.Broker == ""
}

// receive settles what a route's broker has answered.
func (s *sender) receive(r *route) {
	if r == nil {
		return
	}
	answers, ended := r.take()
	for _, a := range answers {
		if len(r.open) == 0 {
			ended = errSurplus
			break
		}
		if s.movedAway(a) {
			ended = errElsewhere
			break
		}
		first := r.open[0]
		r.open = r.open[1:]
		settle(first, a)
		if a.refused != nil && wire.ErrorCode(a.refused.Code).Fatal() {
			// It ends the connection next; what is written now would be lost.
			ended = a.refused
			break
		}
		s.wait.reset() // it is a broker that works
	}
	if ended != nil {
		s.lose(r, ended)
		return
	}
	switch {
	case r != s.cur || len(r.open) > 0:
	case s.next != nil: // also where cur is retired: there has been a place again since
		s.takeOver()
	case s.retired:
		s.retire()
	}
}

// retire closes a retired route once it has had its last answer.
func (s *sender) retire() {
	if len(s.cur.open) == 0 {
		s.cur.close()
		s.cur, s.retired = nil, false
		s.drain.Stop()
		s.connect()
	}
}

// lose is the end of a route that we did not want. What was open is queued
// again where that is safe, and fails where it is not.
func (s *sender) lose(r *route, cause error) {
	p := s.p
	r.close()
	if r == s.next {
		s.next = nil
		s.drain.Stop()
		s.retry.Reset(s.wait.take())
		return
	}
	p.log.Warn("connection lost", "address", r.address, "count", len(r.open), "error", cause)
	elsewhere := errors.Is(cause, errElsewhere)
	again := elsewhere || p.resend == ResendAlways || p.resend == ResendOrderly && orderly(cause)
	var queue []*request
	for _, req := range r.open {
		req.again = !elsewhere
		switch {
		case !again:
			req.done <- fmt.Errorf("%w: broker %s: %w", ErrUnanswered, r.address, cause)
		case s.gone != nil:
			req.done <- s.gone
		case req.state.CompareAndSwap(sent, queued): // or its caller has given up
			queue = append(queue, req)
		}
	}
	s.queue = append(queue, s.queue...)
	s.cur, s.retired = nil, false
	s.drain.Stop()
	if s.next != nil {
		s.takeOver()
		return
	}
	// Not at once: a broker may accept connections only to end them.
	s.retry.Reset(s.wait.take())
}

// send writes what may be written.
func (s *sender) send() {
	for len(s.queue) > 0 {
		r := s.queue[0]
		cmd := r.cmd
		switch {
		case r.state.Load() == abandoned:
			s.queue = s.queue[1:]
		case s.gone != nil:
			s.queue = s.queue[1:]
			r.done <- s.gone
		case !s.canSend():
			return
		case !r.state.CompareAndSwap(queued, sent):
			s.queue = s.queue[1:] // its context has just ended
		default:
			s.queue = s.queue[1:]
			cur := s.cur
			cur.open = append(cur.open, r)
			if err := cur.conn.Send(cmd); err != nil {
				s.writeFailed(cur, err)
			}
		}
	}
	s.queue = nil
}

// writeFailed settles a publish that could not be written. Part of it may
// have left, but not its end, so the broker cannot have accepted it; unless a
// compressor is between, whose own end may be all that is missing.
func (s *sender) writeFailed(r *route, err error) {
	last := r.open[len(r.open)-1]
	r.open = r.open[:len(r.open)-1]
	// What was answered before the break counts, and so does an end in order.
	answers, ended := r.take()
	for _, a := range answers {
		if len(r.open) == 0 {
			break
		}
		if s.movedAway(a) {
			ended = errElsewhere
			break
		}
		settle(r.open[0], a)
		r.open = r.open[1:]
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // a write has no orderly end
	}
	if s.p.cfg.Deflate || s.p.cfg.Snappy {
		r.open = append(r.open, last)
	} else if last.state.CompareAndSwap(sent, queued) {
		s.queue = append([]*request{last}, s.queue...)
	}
	if ended != nil {
		err = ended
	}
	s.lose(r, err)
}
