package client

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// sender holds the state of Publisher.run, which alone decides what is sent where.
//
// Invariant: requests are answered, or fail, in their order of arrival, except requests
// whose context ends.
// Invariant: only cur has open requests. While next is set, nothing is written.
type sender struct {
	p *Publisher

	epoch   uint64
	target  string // assigned broker; empty before the first assignment, and while the publisher has no place
	unknown error  // the topic does not exist now

	// cur is the route in use, or nil. next is connected and replaces cur when cur has no
	// open requests. Until then nothing is written.
	cur, next *route
	// retired: the topic of cur is gone, or the publisher has no place. A publish on cur
	// could create the topic again without its contract. Nothing is written to cur, and cur
	// is closed after its last answer.
	retired  bool
	paces    bool   // the assignment says that brokers support PACE
	unpaced  string // address of a broker without PACE
	dialling bool
	wait     *backoff
	retry    *time.Timer
	drain    *time.Timer // runs while next, or another assignment, waits for cur
	// queue holds requests to send, before any new request.
	queue []*request
}

// run is the publisher's main loop.
func (p *Publisher) run() {
	defer close(p.finished)
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
		case <-p.ctx.Done():
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

// canTake reports whether a new request could be sent now, or would fail immediately.
func (s *sender) canTake() bool {
	return len(s.queue) == 0 && (s.unknown != nil || s.canSend())
}

func (s *sender) canSend() bool {
	return s.cur != nil && s.next == nil && !s.retired && s.unknown == nil && len(s.cur.open) < s.p.limit
}

// idle reports whether no request is in progress.
func (s *sender) idle() bool {
	return len(s.queue) == 0 && (s.cur == nil || len(s.cur.open) == 0)
}

var errClosedUnanswered = fmt.Errorf("%w: the publisher was closed", ErrUnanswered)

// end fails the remaining requests and closes the connections.
func (s *sender) end() {
	s.retry.Stop()
	s.drain.Stop()
	for _, r := range s.queue {
		if r.resend {
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

// readInbox handles a new assignment.
func (s *sender) readInbox() {
	p := s.p
	p.inbox.Lock()
	a, unknown := p.inbox.assignment, p.inbox.unknown
	p.inbox.assignment = nil
	p.inbox.Unlock()
	if unknown != nil && s.unknown == nil {
		p.log.Warn("topic or publisher is gone", "error", unknown)
		for _, r := range s.queue {
			r.done <- unknown
		}
		s.queue = nil
		// A new topic of this name may start at any broker and epoch.
		s.epoch = 0
		s.leave()
	}
	s.unknown = unknown
	if a == nil || a.Epoch < s.epoch {
		return
	}
	s.epoch, s.paces = a.Epoch, a.Pacing
	if a.TcpAddress == s.target {
		s.connect() // the assignment may be paced only now
		return
	}
	if a.TcpAddress == "" {
		p.log.Info("no broker for the publisher; waiting for an assignment", "from", s.target, "epoch", a.Epoch)
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

// leave closes the connection after its last answer. Requests wait for another assignment.
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

// weight returns the weight for requesting advice from the target; 0: no request.
func (s *sender) weight() uint8 {
	if c := &s.p.client.cfg; c.Pacing != PacingOff && (s.paces || c.BrokersPace) && s.target != s.unpaced {
		return max(c.Weight, 1)
	}
	return 0
}

// settled reports whether the current route leads to the target, and is paced if required.
// PACE cannot be sent on a route in use, since a broker without PACE would hang up.
func (s *sender) settled() bool {
	return s.cur != nil && s.cur.address == s.target && (s.cur.paced || s.weight() == 0)
}

// connect dials the target, unless settled or already dialling.
func (s *sender) connect() {
	if s.dialling || s.next != nil || s.target == "" || s.cur != nil && s.retired || s.settled() {
		return
	}
	s.retry.Stop()
	s.dialling = true
	p, address, weight := s.p, s.target, s.weight()
	cfg := p.cfg
	if p.principal != "" {
		vouched := *cfg
		vouched.AuthSecret = p.client.cfg.Vouch(p.principal)
		cfg = &vouched
	}
	p.conns.Go(func() {
		r, err := dial(p.ctx, address, cfg, p.limit, weight, p.pacer.advise, p.notify, &p.conns)
		p.dialled <- dialled{r, err}
	})
}

// connected handles the result of a dial.
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
		s.retry.Reset(s.wait.advance())
		return
	}
	if d.route.address != s.target || s.settled() {
		d.route.close() // the target has changed in the meantime
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

// takeOver makes next the current route.
//
// Requires: cur is nil or has no open requests.
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

// errElsewhere: the broker does not have the topic now. The broker refused the oldest open request
// and executes no later request, so all open requests may be sent again.
var errElsewhere = errors.New("the topic is not on this broker now")

// movedAway reports whether the broker's answer is that it does not have the topic. In a
// cluster this is temporary.
func (s *sender) movedAway(a answer) bool {
	return a.refused != nil && a.refused.Code == string(wire.CodeBadTopic) && s.p.client.cfg.Broker == ""
}

// receive handles the answers on a route.
func (s *sender) receive(r *route) {
	if r == nil {
		return
	}
	answers, cause := r.drain()
	for _, a := range answers {
		if len(r.open) == 0 {
			cause = errSurplus
			break
		}
		if s.movedAway(a) {
			cause = errElsewhere
			break
		}
		first := r.open[0]
		r.open = r.open[1:]
		settle(first, a)
		if a.refused != nil && wire.ErrorCode(a.refused.Code).Fatal() {
			// The broker closes the connection next; writes would be lost.
			cause = a.refused
			break
		}
		s.wait.reset() // the broker works
	}
	if cause != nil {
		s.lose(r, cause)
		return
	}
	switch {
	case r != s.cur || len(r.open) > 0:
	case s.next != nil: // even if cur is retired: the publisher has a place again
		s.takeOver()
	case s.retired:
		s.retire()
	}
}

// retire closes a retired route after its last answer.
func (s *sender) retire() {
	if len(s.cur.open) == 0 {
		s.cur.close()
		s.cur, s.retired = nil, false
		s.drain.Stop()
		s.connect()
	}
}

// lose handles the unexpected end of a route. Open requests are queued again if that is
// safe, and fail otherwise.
func (s *sender) lose(r *route, cause error) {
	p := s.p
	r.close()
	if r == s.next {
		s.next = nil
		s.drain.Stop()
		s.retry.Reset(s.wait.advance())
		return
	}
	p.log.Warn("connection lost", "address", r.address, "count", len(r.open), "error", cause)
	elsewhere := errors.Is(cause, errElsewhere)
	resend := elsewhere || p.resend == ResendAlways || p.resend == ResendOrderly && orderly(cause)
	var queue []*request
	for _, req := range r.open {
		req.resend = !elsewhere
		switch {
		case !resend:
			req.done <- fmt.Errorf("%w: broker %s: %w", ErrUnanswered, r.address, cause)
		case s.unknown != nil:
			req.done <- s.unknown
		case req.state.CompareAndSwap(sent, queued): // otherwise the caller has given up
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
	// Not immediately: a broker may accept connections only to close them.
	s.retry.Reset(s.wait.advance())
}

// send writes the queued requests that may be written.
func (s *sender) send() {
	for len(s.queue) > 0 {
		r := s.queue[0]
		cmd := r.cmd
		switch {
		case r.state.Load() == abandoned:
			s.queue = s.queue[1:]
		case s.unknown != nil:
			s.queue = s.queue[1:]
			r.done <- s.unknown
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

// writeFailed handles a request whose write failed. Part of the request may have been sent,
// but not its end, so the broker cannot have accepted it. With a compressor the end of the
// request may have been sent.
func (s *sender) writeFailed(r *route, err error) {
	last := r.open[len(r.open)-1]
	r.open = r.open[:len(r.open)-1]
	// Answers before the break count, and so does an orderly end.
	answers, cause := r.drain()
	for _, a := range answers {
		if len(r.open) == 0 {
			break
		}
		if s.movedAway(a) {
			cause = errElsewhere
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
	if cause != nil {
		err = cause
	}
	s.lose(r, err)
}
