package registry

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Defaults of a Config. The first two are nsqlookupd's.
const (
	DefaultInactiveAfter    = 5 * time.Minute
	DefaultTombstoneFor     = 45 * time.Second
	DefaultMaxNodes         = 10_000
	DefaultMaxRegistrations = 100_000
	DefaultMaxNames         = 1_000_000
)

// Config bounds a registry. 0 stands for the default.
type Config struct {
	// InactiveAfter is the silence after which a node is no longer listed.
	InactiveAfter time.Duration
	// TombstoneFor is the lifetime of a tombstone.
	TombstoneFor time.Duration
	// MaxNodes bounds the connections, identified or not.
	MaxNodes int
	// MaxRegistrations bounds the topics and channels of one node.
	MaxRegistrations int
	// MaxNames bounds the topics and channels of all nodes. Topics and channels outlive
	// their nodes.
	MaxNames int
	// Self is the answer to IDENTIFY.
	Self Node
}

// Validate returns all problems at once.
func (c Config) Validate() error {
	var errs []error
	if c.InactiveAfter < 0 || c.TombstoneFor < 0 {
		errs = append(errs, fmt.Errorf("inactive producer timeout %v and tombstone lifetime %v must not be negative", c.InactiveAfter, c.TombstoneFor))
	}
	if c.MaxNodes < 0 || c.MaxRegistrations < 0 || c.MaxNames < 0 {
		errs = append(errs, fmt.Errorf("most nodes %d, registrations %d and names %d must not be negative", c.MaxNodes, c.MaxRegistrations, c.MaxNames))
	}
	return errors.Join(errs...)
}

// ErrFull: MaxNodes is reached.
var ErrFull = errors.New("too many nodes")

// ErrChannelUnknown: no topic has the channel.
var ErrChannelUnknown = errors.New("channel is unknown")

// ErrNames: MaxNames is reached.
var ErrNames = errors.New("too many topics and channels")

// ID identifies a connection.
type ID uint64

// key is a registration: a topic, or one of its channels.
type key struct{ topic, channel string } // channel "": the topic itself

// node is a connection.
type node struct {
	identity    Node
	remote      string
	identified  bool
	lastMessage mono.Time
	keys        map[key]bool
}

// topic is a registered or created topic.
type topic struct {
	// producers are the nodes that registered the topic or one of its channels.
	producers map[ID]bool
	// channels maps each channel to the nodes that registered it. A channel outlives its
	// nodes, unless the channel is ephemeral.
	channels map[string]map[ID]bool
}

// tombstone hides a node as the producer of a topic.
type tombstone struct {
	topic, host string
	httpPort    int
}

// Registry is the state. Make it with New. Its owner locks it.
//
// Invariant: node.keys agrees with topic.producers and topic.channels. Invariant: names
// is the number of topics and channels.
type Registry struct {
	cfg    Config
	last   ID
	nodes  map[ID]*node
	topics map[string]*topic
	names  int
	// tombstones maps each tombstone to its end.
	tombstones map[tombstone]mono.Time
}

// New returns an empty registry. Requires: cfg is valid.
func New(cfg Config) *Registry {
	cfg.InactiveAfter = cmp.Or(cfg.InactiveAfter, DefaultInactiveAfter)
	cfg.TombstoneFor = cmp.Or(cfg.TombstoneFor, DefaultTombstoneFor)
	cfg.MaxNodes = cmp.Or(cfg.MaxNodes, DefaultMaxNodes)
	cfg.MaxRegistrations = cmp.Or(cfg.MaxRegistrations, DefaultMaxRegistrations)
	cfg.MaxNames = cmp.Or(cfg.MaxNames, DefaultMaxNames)
	return &Registry{cfg: cfg, nodes: map[ID]*node{}, topics: map[string]*topic{}, tombstones: map[tombstone]mono.Time{}}
}

// Join opens a connection from the address remote.
func (r *Registry) Join(now mono.Time, remote string) (ID, error) {
	if len(r.nodes) >= r.cfg.MaxNodes {
		return 0, ErrFull
	}
	r.last++
	r.nodes[r.last] = &node{remote: remote, lastMessage: now, keys: map[key]bool{}}
	return r.last, nil
}

// Leave closes a connection and removes its registrations.
func (r *Registry) Leave(id ID) {
	n := r.nodes[id]
	if n == nil {
		return
	}
	delete(r.nodes, id)
	// order: what is removed with one key does not depend on the others
	for k := range n.keys {
		r.drop(id, k)
	}
}

// Handle handles a command of a connection and returns the answer. After an *Error the
// connection ends. Requires: id has joined and not left.
func (r *Registry) Handle(now mono.Time, id ID, c Command) ([]byte, error) {
	n := r.nodes[id]
	if n == nil {
		panic(fmt.Sprintf("registry: a command of connection %d, which is not one of %d", id, len(r.nodes)))
	}
	n.lastMessage = now
	switch c.Verb {
	case Identify:
		if n.identified {
			return nil, refuse(CodeInvalid, "cannot IDENTIFY again")
		}
		n.identity, n.identified = c.Node, true
		answer, err := json.Marshal(r.cfg.Self)
		if err != nil {
			panic("registry: an answer that does not encode: " + err.Error())
		}
		return answer, nil
	case Register, Unregister:
		if !n.identified {
			return nil, refuse(CodeInvalid, "client must IDENTIFY")
		}
		k := key{c.Topic, c.Channel}
		if c.Verb == Unregister {
			r.unregister(id, n, k)
		} else if err := r.register(id, n, k); err != nil {
			return nil, err
		}
	}
	return []byte("OK"), nil
}

func (r *Registry) register(id ID, n *node, k key) error {
	topicKey := key{topic: k.topic} // a channel's node also produces the topic
	fresh := 0
	for _, k := range slices.Compact([]key{topicKey, k}) {
		if !n.keys[k] {
			fresh++
		}
	}
	if len(n.keys)+fresh > r.cfg.MaxRegistrations {
		return refuse(CodeInvalid, "REGISTER more than %d topics and channels", r.cfg.MaxRegistrations)
	}
	if err := r.create(k.topic, k.channel); err != nil {
		return refuse(CodeInvalid, "REGISTER %v", err)
	}
	t := r.topics[k.topic]
	t.producers[id] = true
	n.keys[topicKey], n.keys[k] = true, true
	if k.channel != "" {
		t.channels[k.channel][id] = true
	}
	return nil
}

// unregister removes the registration of a channel, or of a topic with all its channels.
// Unregistering a topic also removes the node's tombstone.
func (r *Registry) unregister(id ID, n *node, k key) {
	var gone []key
	if k.channel != "" {
		if n.keys[k] {
			gone = append(gone, k)
		}
	} else {
		// order: what is removed with one key does not depend on the others
		for entry := range n.keys {
			if entry.topic == k.topic {
				gone = append(gone, entry)
			}
		}
		delete(r.tombstones, tombstone{k.topic, n.identity.BroadcastAddress, n.identity.HTTPPort})
	}
	for _, k := range gone {
		delete(n.keys, k)
		r.drop(id, k)
	}
}

// drop removes a registration from its topic. An ephemeral topic or channel disappears
// with its last registration.
func (r *Registry) drop(id ID, k key) {
	t := r.topics[k.topic]
	if t == nil {
		return
	}
	if k.channel == "" {
		delete(t.producers, id)
	} else if holders := t.channels[k.channel]; holders != nil {
		delete(holders, id)
		if len(holders) == 0 && wire.Ephemeral(k.channel) {
			delete(t.channels, k.channel)
			r.names--
		}
	}
	if len(t.producers) == 0 && wire.Ephemeral(k.topic) {
		r.names -= 1 + len(t.channels)
		delete(r.topics, k.topic)
	}
}

// create adds a missing topic and, unless channel is "", a missing channel.
func (r *Registry) create(name, channel string) error {
	t := r.topics[name]
	fresh := 0
	if t == nil {
		fresh++
	}
	if channel != "" && (t == nil || t.channels[channel] == nil) {
		fresh++
	}
	if r.names+fresh > r.cfg.MaxNames {
		return ErrNames
	}
	r.names += fresh
	if t == nil {
		t = &topic{producers: map[ID]bool{}, channels: map[string]map[ID]bool{}}
		r.topics[name] = t
	}
	if channel != "" && t.channels[channel] == nil {
		t.channels[channel] = map[ID]bool{}
	}
	return nil
}

// CreateTopic adds a topic, with or without producers.
func (r *Registry) CreateTopic(name string) error { return r.create(name, "") }

// CreateChannel adds a channel and its topic.
func (r *Registry) CreateChannel(name, channel string) error { return r.create(name, channel) }

// DeleteTopic forgets a topic with its channels and producers, until a producer registers
// the topic again.
func (r *Registry) DeleteTopic(name string) {
	t := r.topics[name]
	if t == nil {
		return
	}
	r.names -= 1 + len(t.channels)
	delete(r.topics, name)
	// order: each node forgets its own
	for id := range t.producers {
		delete(r.nodes[id].keys, key{topic: name})
	}
	// order: each channel and node forgets its own
	for channel, holders := range t.channels {
		// order: the same
		for id := range holders {
			delete(r.nodes[id].keys, key{name, channel})
		}
	}
}

// DeleteChannel forgets a channel until a node registers it again.
func (r *Registry) DeleteChannel(name, channel string) error {
	t := r.topics[name]
	if t == nil || t.channels[channel] == nil {
		return ErrChannelUnknown
	}
	// order: each node forgets its own
	for id := range t.channels[channel] {
		delete(r.nodes[id].keys, key{name, channel})
	}
	delete(t.channels, channel)
	r.names--
	return nil
}

// Tombstone hides the node with the given broadcast address and HTTP port as a producer
// of a topic, for Config.TombstoneFor or until the node unregisters the topic. The caller
// checks that such a producer exists, because each tombstone takes memory during its
// lifetime.
func (r *Registry) Tombstone(now mono.Time, topic, host string, httpPort int) {
	// order: each entry is judged by itself
	for t, end := range r.tombstones {
		if !now.Before(end) {
			delete(r.tombstones, t)
		}
	}
	r.tombstones[tombstone{topic, host, httpPort}] = now.Add(r.cfg.TombstoneFor)
}

// Tombstoned reports whether a tombstone hides the producer.
func (r *Registry) Tombstoned(now mono.Time, topic, host string, httpPort int) bool {
	end, found := r.tombstones[tombstone{topic, host, httpPort}]
	return found && now.Before(end)
}
