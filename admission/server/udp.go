package server

import (
	"errors"
	"math"
	"net"
	"sync"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// datagramsAtOnce is the maximum number of questions that a loop reads, and answers, in one system
// call.
const datagramsAtOnce = 32

// idleSession is the silence after which a session may be evicted. By then no copy of the asker's
// datagrams is on its way any more (RFC 793: a segment lives 2 minutes).
const idleSession = 2 * time.Minute

// loop reads questions from one socket and answers them.
type loop struct {
	server   *Server
	conn     *rawfd.UDP
	sealer   *wire.Sealer
	cookies  *wire.Sessions
	sessions map[rawfd.Address]*session
	now      table.Now // time of the current question
	out      [wire.MaxQuestion]byte
}

// session is an asker that has proved its address.
type session struct {
	id   uint64        // unique for the address while the session exists
	last time.Duration // wall clock of the last question; owned by the loop

	mu      sync.Mutex // guards answers: lookups finish questions, too
	answers table.Window[answered]
}

// answered is the part of an answer that is kept; the rest is in the question. Each session keeps up to
// table.WindowSize of them.
type answered struct {
	kind    wire.Kind
	flags   uint8
	value   uint32
	charged uint32    // credits taken, see cancel
	taken   mono.Time // when the credits were taken
	last    uint64    // the answer's Wait, or its Epoch if kind is Moved
}

func (k *answered) answer(a wire.Answer) wire.Answer {
	if a.Kind, a.Flags, a.Value, a.Wait = k.kind, k.flags, k.value, k.last; a.Kind == wire.Moved {
		a.Wait, a.Epoch = 0, uint32(k.last)
	}
	return a
}

func (l *loop) run() {
	for {
		n, err := l.conn.Receive(l.now.Mono)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		for i := range n { // n is 0 after an error, such as a full neighbour table
			d, from := l.conn.Datagram(i)
			if a, keyID, ok := l.handle(d, from); ok {
				l.conn.Queue(l.sealer.AppendAnswer(l.out[:0], a, keyID), from)
			}
		}
		l.conn.Flush()
	}
}

// handle returns the answer to a datagram, or false if there is no answer now.
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
		if q.Kind == wire.Hello || asker != nil || !l.cookies.Valid(q.Session, at, l.now.Wall) {
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

	if q.Kind == wire.Cancel {
		s.cancel(&q, asker, l.now.Mono)
		return a, 0, false
	}
	asker.mu.Lock()
	standing, before := asker.answers.Begin(q.Number)
	asker.mu.Unlock()
	switch standing {
	case table.Answered:
		s.metrics.repeated.Inc()
		return before.answer(a), keyID, true
	case table.Pending:
		s.metrics.repeated.Inc()
		a.Kind = wire.Waiting
		return a, keyID, true
	case table.Old:
		s.metrics.old.Inc()
		return a, 0, false
	}
	peek := q.Flags&wire.Peek != 0
	v, owned := s.decide(q.Key, q.Cost, l.now.Mono, peek)
	if v.Known || !owned {
		return s.answer(q.Key, asker, q.Number, &v, owned, chargeOf(&v, q.Cost, peek), l.now.Mono), keyID, true
	}
	wait := time.Duration(q.Wait) * time.Millisecond
	a.Kind = wire.Waiting
	switch s.lookups.add(string(q.Key), pending{
		loop: l, asker: asker, client: from, keyID: keyID, number: q.Number, cost: q.Cost, peek: peek,
		deadline: l.now.Mono.Add(min(wait, s.cfg.Lookup)), denied: l.now.Mono.Add(wait),
	}) {
	case noKey:
		a.Kind = wire.Busy
		fallthrough
	case noRoom: // the asker retries if it has time
		asker.mu.Lock()
		asker.answers.Cancel(q.Number)
		asker.mu.Unlock()
	}
	if a.Kind == wire.Busy {
		s.metrics.busy.Inc()
	} else {
		s.metrics.waiting.Inc()
	}
	return a, keyID, true
}

// decide decides a question from memory. It returns false if this server does not decide for the key.
// It checks this under the shard's lock, so that a hand-over includes every decision made before.
func (s *Server) decide(key []byte, cost uint32, now mono.Time, peek bool) (v table.Verdict, owned bool) {
	p := rule.Partition(key, rule.Partitions)
	sh := &s.shards[p%shardCount]
	sh.Lock()
	if owned = s.owners.Load().owned[p]; owned {
		v = sh.keys.Ask(key, int64(cost), now, peek)
	}
	sh.Unlock()
	return v, owned
}

// chargeOf returns the credits that a verdict takes from the key's bucket.
func chargeOf(v *table.Verdict, cost uint32, peek bool) uint32 {
	if v.Denied || peek {
		return 0
	}
	return cost
}

// cancel refunds a question whose asker got no answer in time and denied the request. A later copy of
// the question is not decided, either.
func (s *Server) cancel(q *wire.Question, asker *session, now mono.Time) {
	s.metrics.cancelled.Inc()
	asker.mu.Lock()
	standing, before := asker.answers.Begin(q.Number)
	if standing != table.Old {
		asker.answers.Replace(q.Number, answered{kind: wire.Busy})
	}
	asker.mu.Unlock()
	if standing == table.Answered {
		s.refund(q.Key, before.charged, before.taken, now)
	}
}

// answer turns a verdict into the answer to a question and keeps the answer for copies of the question.
//   - If the key is unknown here, the answer is Busy. The server forgets the question, so the asker may
//     send it again.
//   - If another server owns the key, the answer is Moved and is kept: when a late copy arrives, the
//     asker may have asked the other server, and this server may own the key again.
//   - If the question was cancelled meanwhile, its charge is refunded.
func (s *Server) answer(key []byte, asker *session, number uint64, v *table.Verdict, owned bool, charged uint32, now mono.Time) wire.Answer {
	a := wire.Answer{Kind: wire.Busy}
	if v.Known {
		a = answerOf(v)
		s.metrics.decided(v)
	} else if !owned {
		a = s.elsewhere(key, a)
	}
	a.Session, a.Number = asker.id, number
	if a.Kind == wire.Busy {
		s.metrics.busy.Inc()
		asker.mu.Lock()
		asker.answers.Cancel(number)
		asker.mu.Unlock()
		return a
	}
	stored := answered{kind: a.Kind, flags: a.Flags, value: a.Value, last: a.Wait, charged: charged, taken: now}
	if a.Kind == wire.Moved {
		s.metrics.moved.Inc()
		stored.last = uint64(a.Epoch)
	}
	asker.mu.Lock()
	ended := asker.answers.End(number, stored)
	asker.mu.Unlock()
	if !ended {
		s.refund(key, charged, now, now)
		return wire.Answer{Kind: wire.Busy, Session: asker.id, Number: number}
	}
	return a
}

func answerOf(v *table.Verdict) wire.Answer {
	var flags uint8
	if v.Default {
		flags |= wire.ByDefault
	}
	if v.Shadow && v.Denied {
		flags |= wire.Shadow
	}
	a := wire.Answer{Kind: wire.Reply, Value: uint32(max(0, v.Left))}
	switch {
	case v.Admit:
		flags |= wire.Admit
	case v.Retry == math.MaxInt64:
		flags |= wire.Never
	default:
		a.Wait = table.Millis(v.Retry)
	}
	if a.Flags = flags; flags&(wire.Admit|wire.Never) != 0 && v.Full != math.MaxInt64 {
		a.Wait = table.Millis(v.Full)
	}
	return a
}

// refund returns a charge to the key's bucket, if this server has the key. Charges older than
// strictOver are not refunded: a failover may have restored the key without the charge, and no failover
// is faster.
func (s *Server) refund(key []byte, cost uint32, charged, now mono.Time) {
	age := now.Sub(charged)
	if cost == 0 || age > strictOver {
		return
	}
	p := rule.Partition(key, rule.Partitions)
	s.shards.each(p%shardCount, func(keys *table.Shard) {
		if s.owners.Load().owned[p] {
			keys.Refund(key, int64(cost), age, now)
		}
	})
}

// admit creates a session for a new asker. If the session table is full, admit first evicts sessions of
// this loop that have been idle for idleSession. If the table is still full, admit returns nil.
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
