// Package fake holds small real servers for tests of publishers: a broker with the V2
// protocol over a socket, and a loaddistributor with the PlacementService. By default the
// servers behave like the real ones. On request they misbehave: they withhold answers,
// refuse, hang up, or move a publisher. They keep everything in memory and have no rate
// limit.
package fake

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Kinds of events.
const (
	Connect = "connect" // IDENTIFY was read
	Pub     = "pub"     // a PUB, MPUB or DPUB was read
	Answer  = "answer"  // the OK or error is about to be written
	Nop     = "nop"     // a NOP was read
	Pace    = "pace"    // a PACE was read
	Auth    = "auth"    // an AUTH was read; the body is the secret
	Close   = "close"   // the connection ended
)

// Event is an event at a broker.
type Event struct {
	Broker, Kind, Client, Topic string
	Bodies                      [][]byte
	Delay                       time.Duration
}

// Log orders the events of several brokers. An answer is logged before it is written, and a
// publish after it is read. So an event always follows its cause. The zero value is ready.
type Log struct {
	mu struct {
		sync.Mutex
		events []Event
	}
}

func (l *Log) add(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.events = append(l.mu.events, e)
}

// Events returns the events so far.
func (l *Log) Events() []Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.mu.events)
}

// Broker is a broker with one queue per topic. The methods are safe for concurrent use.
type Broker struct {
	// set once
	name string
	log  *Log
	ln   net.Listener
	all  sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		conns  map[*conn]bool
		queues map[string]*queue
		hold   bool
		paces  bool
		refuse func(topic string, body []byte) *wire.Error
		copies int // number of deliveries of each message
		nextID uint64
	}
}

type queue struct {
	waiting [][]byte
	subs    []*conn
}

// conn is a connection. Broker.mu guards all fields except out.
type conn struct {
	net.Conn
	client   string
	topic    string // subscription
	credit   int
	inFlight map[wire.MessageID]bool
	held     []reply // withheld answers, oldest first
	leaving  bool    // input is discarded

	out sync.Mutex
}

type reply struct {
	event Event
	err   *wire.Error
}

// NewBroker starts a broker on a free port of 127.0.0.1. Several brokers may share log.
func NewBroker(name string, log *Log) (*Broker, error) {
	return NewBrokerAt(name, log, "127.0.0.1:0")
}

// NewBrokerAt starts a broker on the given address, such as a closed broker's.
func NewBrokerAt(name string, log *Log, address string) (*Broker, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("broker %s: %w", name, err)
	}
	b := &Broker{name: name, log: log, ln: ln}
	b.mu.conns = map[*conn]bool{}
	b.mu.queues = map[string]*queue{}
	b.mu.copies = 1
	b.all.Go(b.accept)
	return b, nil
}

// Address returns host:port.
func (b *Broker) Address() string { return b.ln.Addr().String() }

// Close closes all connections and waits for all goroutines.
func (b *Broker) Close() {
	b.mu.Lock()
	b.mu.closed = true
	b.mu.Unlock()
	_ = b.ln.Close() // best effort
	b.HangUp()
	b.all.Wait()
}

// HangUp closes all connections without sending withheld answers.
func (b *Broker) HangUp() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.mu.conns {
		_ = c.Conn.Close() // best effort
	}
}

// Abort closes all connections with a reset, as if the host died.
func (b *Broker) Abort() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.mu.conns {
		_ = c.Conn.(*net.TCPConn).SetLinger(0) // fails only after a close
		_ = c.Conn.Close()
	}
}

// GiveAway ends all connections like a broker that hands its publishers over: it answers
// what it has read, reads no more commands, and half-closes.
func (b *Broker) GiveAway() {
	b.Hold(false)
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.mu.conns {
		c.leaving = true
		_ = c.Conn.(*net.TCPConn).CloseWrite() // fails only after a close
	}
}

// Hold(true) withholds all answers to publishes. Hold(false) sends the withheld answers and
// continues.
func (b *Broker) Hold(hold bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.hold = hold
	if hold {
		return
	}
	for c := range b.mu.conns {
		for _, r := range c.held {
			b.answerLocked(c, r)
		}
		c.held = nil
	}
}

// Held returns the number of withheld answers.
func (b *Broker) Held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for c := range b.mu.conns {
		n += len(c.held)
	}
	return n
}

// Paces makes new connections accept PACE.
func (b *Broker) Paces() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.paces = true
}

// Refuse makes f decide on each message; nil accepts all. If f refuses a message of an
// MPUB, the whole MPUB is refused.
func (b *Broker) Refuse(f func(topic string, body []byte) *wire.Error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.refuse = f
}

// DeliverEach makes the broker deliver every message n times; 0 loses all messages.
func (b *Broker) DeliverEach(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.copies = n
}

// Deliver adds a message to a topic's queue, like a publish.
func (b *Broker) Deliver(topic string, body []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	q := b.queueLocked(topic)
	q.waiting = append(q.waiting, body)
	b.deliverLocked(q)
}

// Clients returns the client ids of the open connections, sorted.
func (b *Broker) Clients() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ids []string
	for c := range b.mu.conns {
		if c.client != "" {
			ids = append(ids, c.client)
		}
	}
	slices.Sort(ids)
	return ids
}

// Heartbeat sends a heartbeat to every connection.
func (b *Broker) Heartbeat() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.mu.conns {
		c.send(wire.AppendResponse(nil, wire.Heartbeat))
	}
}

// Say sends arbitrary bytes to every connection.
func (b *Broker) Say(frame []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.mu.conns {
		c.send(frame)
	}
}

func (b *Broker) accept() {
	for {
		nc, err := b.ln.Accept()
		if err != nil {
			return // the listener is closed
		}
		c := &conn{Conn: nc, inFlight: map[wire.MessageID]bool{}}
		b.mu.Lock()
		if b.mu.closed {
			b.mu.Unlock()
			_ = nc.Close() // the broker is closed
			return
		}
		b.mu.conns[c] = true
		b.mu.Unlock()
		b.all.Go(func() { b.read(c) })
	}
}

func (b *Broker) read(c *conn) {
	defer b.drop(c)
	limits := wire.DefaultLimits()
	limits.MaxRdy = 100_000
	b.mu.Lock()
	limits.Pace = b.mu.paces
	b.mu.Unlock()
	var input []byte
	chunk := make([]byte, 64<<10)
	magic := true
	for {
		n, err := c.Read(chunk)
		if err != nil {
			return
		}
		input = append(input, chunk[:n]...)
		for {
			if magic {
				n, err := wire.ParseMagic(input)
				if err != nil {
					return
				}
				if n == 0 {
					break
				}
				input, magic = input[n:], false
			}
			var cmd wire.Command
			n, _, err := cmd.Parse(input, &limits, new(wire.Walk))
			if err != nil {
				if refusal, ok := errors.AsType[*wire.Error](err); ok {
					c.send(wire.AppendError(nil, refusal))
				}
				return
			}
			if n == 0 {
				break
			}
			b.handle(c, cmd)
			input = input[n:]
		}
	}
}

func (b *Broker) drop(c *conn) {
	_ = c.Conn.Close() // best effort
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.conns, c)
	if q := b.mu.queues[c.topic]; q != nil {
		q.subs = slices.DeleteFunc(q.subs, func(s *conn) bool { return s == c })
	}
	b.log.add(Event{Broker: b.name, Kind: Close, Client: c.client})
}

func (b *Broker) handle(c *conn, cmd wire.Command) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.leaving {
		return
	}
	switch cmd.Verb {
	case wire.VerbIdentify:
		var id wire.IdentifyRequest
		if err := json.Unmarshal(cmd.Body, &id); err != nil {
			c.send(wire.AppendError(nil, wire.NewError(wire.CodeBadBody, "IDENTIFY is no JSON")))
			return
		}
		c.client = id.ClientID
		b.log.add(Event{Broker: b.name, Kind: Connect, Client: c.client})
		answer := []byte(wire.OK)
		if id.FeatureNegotiation {
			var err error
			if answer, err = json.Marshal(wire.IdentifyResponse{MaxRdyCount: 100_000, Version: "fake"}); err != nil {
				panic(err) // cannot fail for this struct
			}
		}
		c.send(wire.AppendResponse(nil, answer))
	case wire.VerbAuth:
		b.log.add(Event{Broker: b.name, Kind: Auth, Client: c.client, Bodies: [][]byte{slices.Clone(cmd.Body)}})
		c.send(wire.AppendResponse(nil, []byte("{}")))
	case wire.VerbPub, wire.VerbDpub:
		b.publishLocked(c, string(cmd.Topic), [][]byte{slices.Clone(cmd.Body)}, cmd.Delay)
	case wire.VerbMpub:
		var bodies [][]byte
		cmd.Batch.Each(func(body []byte) { bodies = append(bodies, slices.Clone(body)) })
		b.publishLocked(c, string(cmd.Topic), bodies, 0)
	case wire.VerbSub:
		c.topic = string(cmd.Topic)
		q := b.queueLocked(c.topic)
		q.subs = append(q.subs, c)
		c.send(wire.AppendResponse(nil, wire.OK))
	case wire.VerbRdy:
		c.credit = cmd.Ready
		b.deliverLocked(b.queueLocked(c.topic))
	case wire.VerbFin:
		if !c.inFlight[cmd.ID] {
			c.send(wire.AppendError(nil, wire.NewError(wire.CodeFinFailed, "not in flight")))
			return
		}
		delete(c.inFlight, cmd.ID)
		b.deliverLocked(b.queueLocked(c.topic))
	case wire.VerbCls:
		c.credit = 0
		c.send(wire.AppendResponse(nil, wire.CloseWait))
	case wire.VerbPace:
		b.log.add(Event{Broker: b.name, Kind: Pace, Client: c.client})
		c.send(wire.AppendResponse(nil, wire.OK))
	case wire.VerbNop:
		b.log.add(Event{Broker: b.name, Kind: Nop, Client: c.client})
	default:
		c.send(wire.AppendError(nil, wire.NewError(wire.CodeInvalid, cmd.Verb.String()+" is not for a fake")))
	}
}

func (b *Broker) queueLocked(topic string) *queue {
	q := b.mu.queues[topic]
	if q == nil {
		q = &queue{}
		b.mu.queues[topic] = q
	}
	return q
}

func (b *Broker) publishLocked(c *conn, topic string, bodies [][]byte, delay time.Duration) {
	e := Event{Broker: b.name, Kind: Pub, Client: c.client, Topic: topic, Bodies: bodies, Delay: delay}
	b.log.add(e)
	var refusal *wire.Error
	for _, body := range bodies {
		if b.mu.refuse != nil && refusal == nil {
			refusal = b.mu.refuse(topic, body)
		}
	}
	if refusal == nil {
		q := b.queueLocked(topic)
		for _, body := range bodies {
			for range b.mu.copies {
				q.waiting = append(q.waiting, body)
			}
		}
		b.deliverLocked(q)
	}
	e.Kind = Answer
	r := reply{e, refusal}
	if b.mu.hold {
		c.held = append(c.held, r)
		return
	}
	b.answerLocked(c, r)
}

func (b *Broker) answerLocked(c *conn, r reply) {
	b.log.add(r.event)
	if r.err != nil {
		c.send(wire.AppendError(nil, r.err))
		if r.err.Fatal {
			_ = c.Conn.Close() // a fatal error ends the connection
		}
		return
	}
	c.send(wire.AppendResponse(nil, wire.OK))
}

func (b *Broker) deliverLocked(q *queue) {
	for len(q.waiting) > 0 {
		i := slices.IndexFunc(q.subs, func(c *conn) bool { return c.credit > len(c.inFlight) })
		if i < 0 {
			return
		}
		c := q.subs[i]
		b.mu.nextID++
		var id wire.MessageID
		copy(id[:], fmt.Sprintf("%016x", b.mu.nextID))
		c.inFlight[id] = true
		c.send(wire.AppendMessage(nil, time.Now().UnixNano(), 1, id, q.waiting[0]))
		q.waiting = q.waiting[1:]
	}
}

// send writes with a deadline, so a peer that does not read cannot block the broker for
// long. A fake may do I/O under its lock, which keeps the log in the order of the wire.
func (c *conn) send(frame []byte) {
	c.out.Lock()
	defer c.out.Unlock()
	_ = c.SetWriteDeadline(time.Now().Add(5 * time.Second)) // fails only after a close
	_, _ = c.Write(frame)                                   // the reader notices the end
}
