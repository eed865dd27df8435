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

// maxOutstanding bounds the questions that wait for a server. With more questions than a window of
// answers, the server could not repeat all answers.
const maxOutstanding = 2048

// link sends questions to a server.
type link struct {
	address  string
	hash     uint32 // hash of the address, by which servers name each other
	conn     *net.UDPConn
	attempts int
	paper    bool
	done     chan struct{} // closed with the link
	read     sync.WaitGroup

	mu      sync.Mutex
	sealer  *wire.Sealer
	out     [wire.MaxQuestion]byte
	session uint64 // 0: the server has issued none
	number  uint64 // number of the last question
	waiting map[uint64]*call
	trip    roundTrip
}

// call is an open question.
type call struct {
	q        wire.Question
	sent     int
	silent   int // copies since the server's last sign of life
	rests    int // number of answers by which the question waits
	resting  bool
	busy     bool // the server is busy: do not wait for a look-up
	issued   int  // sessions issued during the call
	first    time.Time
	deadline time.Time   // deadline of the decision
	end      chan answer // capacity 1
}

// answer is a server's answer. If no answer came, answer has the number and the link of the question.
type answer struct {
	wire.Answer
	link *link
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

// ask returns false if no server decided until the deadline.
func (l *link) ask(ctx context.Context, q wire.Question, deadline time.Time) (answer, bool) {
	c := &call{q: q, deadline: deadline, end: make(chan answer, 1)}
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
			wait, more := l.retry(c)
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
		select { // the answer may have come meanwhile
		case a := <-c.end:
			return a, true
		default:
			return answer{Answer: wire.Answer{Number: c.q.Number}, link: l}, false
		}
	}
}

// retry returns how long to wait next. Unless the server has answered that the question waits, again sends
// the question another time. If the deadline has passed, or the server gave no sign of life after
// attempts copies, again returns false. Requires: mu held.
func (l *link) retry(c *call) (wait time.Duration, more bool) {
	left := time.Until(c.deadline)
	switch {
	case left <= 0:
		return 0, false
	case c.resting:
		c.resting = false
		c.rests++
		return min(left, shortestRest<<min(c.rests-1, 10), longestRest), true
	case c.silent >= l.attempts:
		return 0, false
	}
	return l.send(c), true
}

// send sends the question, and returns how long to wait for the answer. An error, such as a refused
// port, counts as a lost question. Requires: mu held.
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
	left := c.deadline.Sub(now)
	// The answer also takes time.
	c.q.Wait = uint32(max(0, (left - l.trip.wait(1, l.paper)).Milliseconds()))
	l.conn.Write(l.sealer.AppendQuestion(l.out[:0], c.q))
	return max(0, min(left, l.trip.wait(c.silent, l.paper)))
}

// cancel reports to the server that the client denied a question without an answer.
func (l *link) cancel(number uint64, cost uint32, key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session == 0 { // the server has decided no question
		return
	}
	l.conn.Write(l.sealer.AppendQuestion(l.out[:0], wire.Question{Kind: wire.Cancel, Session: l.session, Number: number, Cost: cost, Key: []byte(key)}))
}

func (l *link) receive(sealer *wire.Sealer) {
	var in [wire.AnswerSize + 1]byte // a longer answer is malformed
	for {
		n, err := l.conn.Read(in[:])
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // for example a refused port
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
	case c == nil: // too late, or an unknown question
	case a.Kind == wire.Issued:
		l.session = a.Session
		if c.q.Session != a.Session && c.issued < DefaultAttempts { // the question lacked the session; the copy does not count
			c.issued++
			c.sent--
			c.silent--
			l.send(c)
		}
	case a.Session != c.q.Session:
	case a.Kind == wire.Busy:
		c.busy, c.resting = true, false
	case a.Kind == wire.Waiting && l.paper: // the paper's client does not wait for look-ups
	default:
		if c.q.Flags&wire.Retry == 0 && c.rests == 0 && !c.resting {
			l.trip.saw(time.Since(c.first))
		}
		if a.Kind == wire.Waiting {
			if !c.busy {
				c.resting, c.silent = true, 0
			}
			return
		}
		delete(l.waiting, a.Number)
		c.end <- a
	}
}

// DefaultAttempts is the default number of times that a Client sends a question.
const DefaultAttempts = 5

// The client waits for an answer as long as RFC 6298 says, and doubles the wait with each attempt, up
// to 5 ms. The paper's client always waits 100 us (Janus, section III.B).
const (
	shortest   = 100 * time.Microsecond
	longest    = 5 * time.Millisecond
	firstGuess = time.Millisecond // before the first answer
)

// DefaultWait is how long a decision waits for a server that looks the key up. MaxWait is the longest
// wait that operators may set: a server does not refund an older question.
const (
	DefaultWait = 500 * time.Millisecond
	MaxWait     = 5 * time.Second
)

// A server that looks a key up sends the answer unasked. The client sends the question again after
// shortestRest, and doubles the wait each time: the answer may be lost, or the server had no room for
// the question.
const (
	shortestRest = 10 * time.Millisecond
	longestRest  = 100 * time.Millisecond
)

// roundTrip estimates how long an answer takes (RFC 6298, section 2).
type roundTrip struct{ smoothed, variation time.Duration }

// saw adds a sample: the time to the answer of a question that was sent once. For a question that was
// sent again, the answered copy is unknown.
func (r *roundTrip) saw(d time.Duration) {
	if r.smoothed == 0 {
		r.smoothed, r.variation = d, d/2
		return
	}
	r.variation += ((r.smoothed - d).Abs() - r.variation) / 4
	r.smoothed += (d - r.smoothed) / 8
}

// wait returns how long to wait for an answer after sent copies of the question.
func (r *roundTrip) wait(sent int, paper bool) time.Duration {
	if paper {
		return shortest
	}
	first := firstGuess
	if r.smoothed != 0 {
		first = max(shortest, r.smoothed+4*r.variation)
	}
	return min(longest, first<<min(sent-1, 10))
}
