package conn

import (
	"cmp"
	"crypto/tls"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// State is where a client is, by NSQ's numbers.
type State int32

// The states of a client.
const (
	StateInit       State = 0 // no SUB yet
	StateSubscribed State = 3
	StateClosing    State = 4 // after CLS
)

// Info is a client as operators see it.
type Info struct {
	session.Identity // client id and hostname are the peer's address until IDENTIFY
	Remote           string
	Connected        time.Time
	State            State
	TLS              *tls.ConnectionState // nil without TLS
	Grant            *auth.Grant          // nil without AUTH
	Origin           *origin.Origin       // for whom a client that is a broker acts; nil: the client is none

	// Of a subscriber.
	Topic, Channel               string // "" without SUB
	Ready, InFlight              int
	Messages, Finished, Requeued uint64 // written, finished, given back

	// Of a publisher: messages by topic, in the order in which they were first
	// published to.
	Published []PubCount
}

// PubCount is how many messages a client has published to a topic.
type PubCount struct {
	Topic string
	Count uint64
}

// connStats is what a client is told apart by and has done so far. One goroutine
// writes each part, the reader or the writer of its connection; any other reads.
type connStats struct {
	// Set once.
	connected time.Time

	// Atomic: set by the reader when it changes.
	identity atomic.Pointer[session.Identity] // nil until IDENTIFY
	tls      atomic.Pointer[tls.ConnectionState]
	grant    atomic.Pointer[auth.Grant]
	sub      atomic.Pointer[subscribed]
	state    atomic.Int32
	origin   atomic.Pointer[origin.Origin] // nil: the client is no other broker

	// Atomic: messages are counted by the writer, the others by the reader.
	messages, finished, requeued atomic.Uint64

	// The reader adds topics; only it reads without the lock.
	mu        sync.Mutex
	published []*pubCount
}

type subscribed struct {
	subscription
	topic, channel string
}

// local returns the subscription to a topic of this broker; nil: the topic is on others.
func (s *subscribed) local() *broker.Subscription {
	sub, _ := s.subscription.(*broker.Subscription)
	return sub
}

type pubCount struct {
	topic string
	count atomic.Uint64 // by the reader
}

// maxPubCounts bounds the topics that are counted one by one for a client. The
// last place is for all others together.
const maxPubCounts = 256

// otherTopics names that place; it is no topic's name.
const otherTopics = "*"

// counter returns where messages to the topic are counted. The reader calls it
// when a client turns to another topic.
func (l *connStats) counter(topic string) *pubCount {
	if len(l.published) >= maxPubCounts {
		topic = otherTopics
	}
	for _, p := range l.published {
		if p.topic == topic {
			return p
		}
	}
	p := &pubCount{topic: topic}
	l.mu.Lock()
	l.published = append(l.published, p)
	l.mu.Unlock()
	return p
}

// add is an Add where only one goroutine writes.
func add(c *atomic.Uint64, n int) { c.Store(c.Load() + uint64(n)) }

// info is safe to call while the client goes on.
func (c *client) info() Info {
	l := &c.stats
	host := c.remoteIP()
	i := Info{
		Identity:  session.Identity{ClientID: host, Hostname: host},
		Remote:    c.remote,
		Connected: l.connected,
		State:     State(l.state.Load()),
		TLS:       l.tls.Load(),
		Grant:     l.grant.Load(),
		Origin:    l.origin.Load(),
		Messages:  l.messages.Load(),
		Finished:  l.finished.Load(),
		Requeued:  l.requeued.Load(),
	}
	if id := l.identity.Load(); id != nil {
		i.Identity = *id
	}
	if sub := l.sub.Load(); sub != nil {
		i.Topic, i.Channel = sub.topic, sub.channel
		i.Ready, i.InFlight = sub.Holds()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.published {
		i.Published = append(i.Published, PubCount{p.topic, p.count.Load()})
	}
	return i
}

// Clients returns the open connections, oldest first.
func (s *Server) Clients() []Info {
	var all []Info
	s.clients.each(func(c *client) { all = append(all, c.info()) })
	slices.SortStableFunc(all, func(a, b Info) int { return cmp.Or(a.Connected.Compare(b.Connected), cmp.Compare(a.Remote, b.Remote)) })
	return all
}
