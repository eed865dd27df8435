package server

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// datagramsAtOnce is how many questions a loop takes and answers in two system calls.
const datagramsAtOnce = 32

// idleSession is after what silence an asker gives up its place for another: no copy of what it sent
// is on its way any more (RFC 793: a segment lives 2 minutes).
const idleSession = 2 * time.Minute

// loop reads a socket and answers.
type loop struct {
	server   *Server
	conn     *rawfd.UDP
	sealer   *wire.Sealer
	cookies  *wire.Sessions
	sessions map[rawfd.Address]*session
	now      table.Now // of the question that is looked at
	out      [wire.MaxQuestion]byte
}

// session is an asker that has proved its address.
type session struct {
	id   uint64        // while it is known there is no other for its address
	last time.Duration // when it last asked, wall clock; the loop's

	mu      sync.Mutex // lookups end questions, too
	answers table.Window[answered]
}

// answered is what is kept of an answer: the rest is in the question. There are up to
// table.WindowSize for each asker.
type answered struct {
	kind         wire.Kind
	flags        uint8
	value, epoch uint32
}

func (l *loop) run() {
	for {
		n, err := l.conn.Receive(l.now.Mono)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		for i := range n { // none after an error, such as a full table of neighbours
			d, from := l.conn.Datagram(i)
			if a, keyID, ok := l.handle(d, from); ok {
				l.conn.Queue(l.sealer.AppendAnswer(l.out[:0], a, keyID), from)
			}
		}
		l.conn.Flush()
	}
}

// handle returns the answer to a datagram, if there is one now.
func (l *loop) handle(d []byte, from rawfd.Address) (a wire.Answer, keyID uint16, answer bool) {
	s := l.server
	l.now = s.cfg.Now()
	q, keyID, err := l.sealer.ParseQuestion(d)
	if err != nil {
		if errors.Is(err, wire.ErrMAC) {
			s.metrics.badMAC.Inc()
		} else {
			s.metrics.malformed.Inc()
		}
		return a, 0, false
	}
	a = wire.Answer{Session: q.Session, Number: q.Number}
	asker := l.sessions[from]
	if q.Kind == wire.Hello || asker == nil || asker.id != q.Session {
		at := from.AddrPort()
		if q.Kind == wire.Hello || asker != nil || !l.cookies.Good(q.Session, at, l.now.Wall) {
			s.metrics.hellos.Inc()
			if a.Kind, a.Session = wire.Issued, l.cookies.Issue(at, l.now.Wall); asker != nil {
				a.Session = asker.id
			}
			return a, keyID, true
		}
		if asker = l.admit(from, q.Session); asker == nil {
			s.metrics.busy.Inc()
			a.Kind = wire.Busy
			return a, keyID, true
		}
	}
	asker.last = l.now.Wall

	if q.Kind == wire.Lease {
		v, _ := s.decide(q.Key, 0, l.now.Mono, true)
		if a, g, ok := s.leases.grant(&q, &v); ok {
			l.conn.Queue(l.sealer.AppendGrant(l.out[:0], a, g, keyID), from)
			return a, 0, false
		}
		q.Cost, q.Flags = 0, q.Flags|wire.Peek // decided as by Ask
	}

	asker.mu.Lock()
	standing, before := asker.answers.Begin(q.Number)
	asker.mu.Unlock()
	switch standing {
	case table.Answered:
		s.metrics.again.Inc()
		a.Kind, a.Flags, a.Value, a.Epoch = before.kind, before.flags, before.value, before.epoch
		return a, keyID, true
	case table.Pending:
		s.metrics.again.Inc()
		return a, 0, false
	case table.Old:
		s.metrics.old.Inc()
		return a, 0, false
	}
	peek := q.Flags&wire.Peek != 0
	v, here := s.decide(q.Key, q.Cost, l.now.Mono, peek)
	if !v.Known && here && s.lookups.add(string(q.Key), pending{loop: l, asker: asker, from: from, keyID: keyID, number: q.Number, cost: q.Cost, peek: peek}) {
		return a, 0, false
	}
	return s.answer(q.Key, asker, q.Number, &v, here), keyID, true
}

// answer makes the answer to a question by its verdict, and keeps it. Of a key that is not
// known here, yet, that is busy, and forgets the question, which may come again. Or it is
// where the key is decided, which is kept: the asker has asked there when a copy that was
// late comes, and this server may own the key then.
func (s *Server) answer(key []byte, asker *session, number uint64, v *table.Verdict, here bool) wire.Answer {
	a := wire.Answer{Kind: wire.Busy, Session: asker.id, Number: number}
	if v.Known {
		a.Kind = wire.Reply
		a.Flags, a.Value = answerOf(v)
		s.metrics.decided(v)
	} else if !here {
		a = s.elsewhere(key, a)
	}
	asker.mu.Lock()
	defer asker.mu.Unlock()
	switch a.Kind {
	case wire.Busy:
		s.metrics.busy.Inc()
		asker.answers.Cancel(number)
		return a
	case wire.Moved:
		s.metrics.moved.Inc()
	}
	asker.answers.End(number, answered{a.Kind, a.Flags, a.Value, a.Epoch})
	return a
}

// admit takes an asker in, nil if there is no room: there is that of those that have
// asked this loop nothing for long.
func (l *loop) admit(from rawfd.Address, id uint64) *session {
	known, limit := &l.server.askers, int64(l.server.cfg.MaxSessions)
	if known.Add(1) > limit {
		for other, asker := range l.sessions {
			if l.now.Wall-asker.last > idleSession {
				delete(l.sessions, other)
				known.Add(-1)
			}
		}
		if known.Load() > limit {
			known.Add(-1)
			return nil
		}
	}
	asker := &session{id: id}
	l.sessions[from] = asker
	return asker
}
