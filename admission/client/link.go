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
	silent int // copies since the server gave a sign of life
	rests  int // times that the server said that the question waits
	rest   bool
	busy   bool // the server has said so: it decides nothing now, and is not waited for
	issued int  // sessions
	first  time.Time
	until  time.Time   // the end of the asker's patience
	end    chan answer // of one
}

// answer is one of a server's. If no answer came, it says which question
// went to which link.
type answer struct {
	wire.Answer
	from *link
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

// ask reports false if no server decided until then.
func (l *link) ask(ctx context.Context, q wire.Question, until time.Time) (answer, bool) {
	c := &call{q: q, until: until, end: make(chan answer, 1)}
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
			wait, more := l.again(c)
			l.mu.Unlock()
			if more {
				timer.Reset(wait)
				continue
			}
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
			return answer{Answer: wire.Answer{Number: c.q.Number}, from: l}, false
		}
	}
}

// again sends the question another time, if the server has not said that the question waits, and
// returns how long to wait then. It reports false when the asker has waited long enough, or no copy
// had a sign of life from the server. Requires: mu held.
func (l *link) again(c *call) (wait time.Duration, more bool) {
	left := time.Until(c.until)
	switch {
	case left <= 0:
		return 0, false
	case c.rest:
		c.rest = false
		c.rests++
		return min(left, shortestRest<<min(c.rests-1, 10), longestRest), true
	case c.silent >= l.attempts:
		return 0, false
	}
	return l.send(c), true
}

// send sends the question, and returns how long to wait for the answer. An error
// such as a refused port counts as lost. Requires: mu held.
func (l *link) send(c *call) time.Duration {
	now := time.Now()
	if c.sent == 0 {
		c.first = now
	} else {
		c.q.Flags |= wire.Retry
	}
	c.sent++
	c.silent++
	c.q.Session = l.session
	left := c.until.Sub(now)
	// The answer takes a while, too.
	c.q.Wait = uint32(max(0, (left - l.trip.wait(1, l.paper)).Milliseconds()))
	l.conn.Write(l.sealer.AppendQuestion(l.out[:0], c.q))
	return max(0, min(left, l.trip.wait(c.silent, l.paper)))
}

// cancel tells the server that a question was denied for want of an answer.
func (l *link) cancel(number uint64, cost uint32, key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session == 0 { // the server has decided none
		return
	}
	l.conn.Write(l.sealer.AppendQuestion(l.out[:0], wire.Question{Kind: wire.Cancel, Session: l.session, Number: number, Cost: cost, Key: []byte(key)}))
}

func (l *link) receive(sealer *wire.Sealer) {
	var in [wire.AnswerSize + 1]byte // what is longer is malformed
	for {
		n, err := l.conn.Read(in[:])
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // a refused port
			continue
		}
		if a, err := sealer.ParseAnswer(in[:n]); err == nil {
			l.got(answer{a, l})
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
			c.silent--
			l.send(c)
		}
	case a.Session != c.q.Session:
	case a.Kind == wire.Busy:
		c.busy, c.rest = true, false
	case a.Kind == wire.Waiting && l.paper: // whose client waits for no look-up
	default:
		if c.q.Flags&wire.Retry == 0 && c.rests == 0 && !c.rest {
			l.trip.saw(time.Since(c.first))
		}
		if a.Kind == wire.Waiting {
			if !c.busy {
				c.rest, c.silent = true, 0
			}
			return
		}
		delete(l.waiting, a.Number)
		c.end <- a
	}
}
