package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/srtm-io/srtm/admission/wire"
)

// maxOutstanding bounds the questions that wait for one server. More than a window of
// the server's answers could not be sent again.
const maxOutstanding = 2048

// link asks one server.
type link struct {
	address  string
	hash     uint32 // of the address, by which servers name each other
	conn     *net.UDPConn
	attempts int
	paper    bool
	done     chan struct{} // closed with the link
	read     sync.WaitGroup

	mu      sync.Mutex
	sealer  *wire.Sealer
	out     [wire.MaxQuestion]byte
	session uint64 // 0 until the server has issued one
	number  uint64 // of the last question
	waiting map[uint64]*call
	trip    roundTrip
}

// call is a question on its way.
type call struct {
	q      wire.Question
	sent   int
	issued int // sessions
	first  time.Time
	end    chan answer // of one
}

// answer is one of a server's, and what it grants.
type answer struct {
	wire.Answer
	grant wire.Grant
}

func dial(address string, cfg Config) (*link, error) {
	sealer, err := wire.NewSealer(cfg.Keys)
	if err != nil {
		return nil, err
	}
	answers, err := wire.NewSealer(cfg.Keys)
	if err != nil {
		return nil, err
	}
	conn, err := net.Dial("udp", address)
	if err != nil {
		return nil, fmt.Errorf("admission server: %w", err)
	}
	l := &link{
		address: address, hash: wire.HashOf(address), conn: conn.(*net.UDPConn), attempts: cfg.Attempts, paper: cfg.PaperTimers, done: make(chan struct{}), sealer: sealer,
		number: uint64(time.Now().Unix()) << 32, waiting: make(map[uint64]*call),
	}
	l.read.Go(func() { l.receive(answers) })
	return l, nil
}

func (l *link) close() {
	close(l.done)
	l.conn.Close()
	l.read.Wait()
}

// ask reports false if no server decided.
func (l *link) ask(ctx context.Context, q wire.Question) (answer, bool) {
	c := &call{q: q, end: make(chan answer, 1)}
	l.mu.Lock()
	if len(l.waiting) >= maxOutstanding {
		l.mu.Unlock()
		return answer{}, false
	}
	l.number++
	c.q.Number = l.number
	l.waiting[c.q.Number] = c
	wait := l.send(c)
	l.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case a := <-c.end:
			return a, true
		case <-timer.C:
			l.mu.Lock()
			if c.sent < l.attempts {
				timer.Reset(l.send(c))
				l.mu.Unlock()
				continue
			}
			l.mu.Unlock()
		case <-ctx.Done():
		case <-l.done:
		}
		l.mu.Lock()
		delete(l.waiting, c.q.Number)
		l.mu.Unlock()
		select { // it may have come meanwhile
		case a := <-c.end:
			return a, true
		default:
			return answer{}, false
		}
	}
}

// send sends the question, and returns how long to wait for the answer. An error
// such as a refused port counts as lost. Requires: mu held.
func (l *link) send(c *call) time.Duration {
	if c.sent == 0 {
		c.first = time.Now()
	} else {
		c.q.Flags |= wire.Retry
	}
	c.sent++
	c.q.Session = l.session
	l.conn.Write(l.sealer.AppendQuestion(l.out[:0], c.q))
	return l.trip.wait(c.sent, l.paper)
}

func (l *link) receive(sealer *wire.Sealer) {
	var in [wire.GrantSize + 1]byte // what is longer is malformed
	for {
		n, err := l.conn.Read(in[:])
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // a refused port
			continue
		}
		if a, g, err := sealer.ParseAnswer(in[:n]); err == nil {
			l.got(answer{a, g})
		}
	}
}

func (l *link) got(a answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.waiting[a.Number]
	switch {
	case c == nil: // too late, or never asked
	case a.Kind == wire.Issued:
		l.session = a.Session
		if c.q.Session != a.Session && c.issued < DefaultAttempts { // asked without it, which does not count as lost
			c.issued++
			c.sent--
			l.send(c)
		}
	case a.Kind != wire.Busy && a.Session == c.q.Session:
		if c.q.Flags&wire.Retry == 0 {
			l.trip.saw(time.Since(c.first))
		}
		delete(l.waiting, a.Number)
		c.end <- a
	}
}
