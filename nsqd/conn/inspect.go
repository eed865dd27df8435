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

// State is a client's state, with NSQ's numbers.
type State int32

// States of a client.
const (
	StateInit       State = 0 // no SUB yet
	StateSubscribed State = 3
	StateClosing    State = 4 // after CLS
)

// Info describes a client for operators.
type Info struct {
	session.Identity // before IDENTIFY, client id and hostname are the peer's address
	Remote           string
	Protocol         string // V2 (NSQ), or of mqtt.Client.Protocol
	Connected        time.Time
	State            State
	TLS              *tls.ConnectionState // nil without TLS
	Grant            *auth.Grant          // nil without AUTH
	Origin           *origin.Origin       // the publisher for whom another broker forwards; nil: the client is not a broker

	// Subscribers only.
	Topic, Channel               string // "" without SUB
	Ready, InFlight              int
	Messages, Finished, Requeued uint64 // written, finished, requeued

	// Published counts the messages by topic, in the order of the first publishes.
	Published []PubCount
}

// PubCount is the number of messages that a client has published to a topic.
type PubCount struct {
	Topic string
	Count uint64
}

// connStats holds a client's identity and counters. Each part has one writing goroutine: the
// connection's reader or its writer. Any goroutine may read.
type connStats struct {
	// Set once.
	connected time.Time

	// Atomic. Written by the reader.
	identity atomic.Pointer[session.Identity] // nil until IDENTIFY
	tls      atomic.Pointer[tls.ConnectionState]
	grant    atomic.Pointer[auth.Grant]
	sub      atomic.Pointer[subscribed]
	state    atomic.Int32
	origin   atomic.Pointer[origin.Origin] // nil: the client is not another broker

	// Atomic. The writer counts messages, the reader counts the others.
	messages, finished, requeued atomic.Uint64

	// mu guards published. Only the reader adds topics; only the reader may read without the lock.
	mu        sync.Mutex
	published []*pubCount
}

type subscribed struct {
	deliveries
	topic, channel string
}

// local returns the subscription if the topic is on this broker, and nil otherwise.
func (s *subscribed) local() *broker.Subscription {
	sub, _ := s.deliveries.(*broker.Subscription)
	return sub
}

type pubCount struct {
	topic string
	count atomic.Uint64 // written by the reader
	moved atomic.Bool   // the publisher has moved: publishes are forwarded, although the topic is here; MQTT
}

// maxPubCounts limits the separately counted topics of a client. The last place counts all further
// topics together.
const maxPubCounts = 256

// otherTopics names the last place. It is not a valid topic name.
const otherTopics = "*"

// counter returns the counter for messages to topic. The reader calls it when a client turns to
// another topic.
func (s *connStats) counter(topic string) *pubCount {
	if len(s.published) >= maxPubCounts {
		topic = otherTopics
	}
	for _, p := range s.published {
		if p.topic == topic {
			return p
		}
	}
	p := &pubCount{topic: topic}
	s.mu.Lock()
	s.published = append(s.published, p)
	s.mu.Unlock()
	return p
}

// add is a cheaper Add for a counter with a single writer.
func add(c *atomic.Uint64, n int) { c.Store(c.Load() + uint64(n)) }

// info may run while the client is active.
func (c *client) info() Info {
	stats := &c.stats
	host := hostOf(c.remote)
	i := Info{
		Identity:  session.Identity{ClientID: host, Hostname: host},
		Remote:    c.remote,
		Protocol:  "V2",
		Connected: stats.connected,
		State:     State(stats.state.Load()),
		TLS:       stats.tls.Load(),
		Grant:     stats.grant.Load(),
		Origin:    stats.origin.Load(),
		Messages:  stats.messages.Load(),
		Finished:  stats.finished.Load(),
		Requeued:  stats.requeued.Load(),
	}
	if id := stats.identity.Load(); id != nil {
		i.Identity = *id
	}
	if c.mqtt != nil {
		i.Protocol = c.mqtt.Protocol()
	}
	if sub := stats.sub.Load(); sub != nil {
		i.Topic, i.Channel = sub.topic, sub.channel
		i.Ready, i.InFlight = sub.Holds()
	}
	stats.mu.Lock()
	defer stats.mu.Unlock()
	for _, p := range stats.published {
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
