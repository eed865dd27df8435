package controller

import (
	"maps"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Node is a connected broker with its topics.
type Node struct {
	catalog.Broker
	Remote string   // address from which the broker connects
	Topics []string // by name
}

// Nodes returns the connected brokers, by id.
func (r *View) Nodes() []Node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	nodes := make([]Node, 0, len(r.brokers.sessions))
	for _, id := range r.cat.connected() {
		node := r.node(id)
		node.Topics = slices.Sorted(maps.Keys(r.listed(id)))
		nodes = append(nodes, node)
	}
	return nodes
}

// Connected is Nodes without Topics.
func (r *View) Connected() []Node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	ids := r.cat.connected()
	nodes := make([]Node, len(ids))
	for i, id := range ids {
		nodes[i] = r.node(id)
	}
	return nodes
}

// connected returns the brokers with a session, by id. On a follower it returns the
// brokers with a session at the leader.
func (p *pipeline) connected() []string {
	var ids []string
	for _, b := range p.shown.Brokers() {
		if b.Connected {
			ids = append(ids, b.ID)
		}
	}
	return ids
}

// listed returns the topics that consumers can read from a connected broker: active
// topics placed on it, and reported topics that are placed nowhere. It ignores reports
// about placed topics: the copy may be a leftover, or be about to be removed.
func (r *View) listed(id string) map[string]bool {
	set := map[string]bool{}
	for _, name := range r.cat.shown.Placed(id) {
		if topic, _ := r.cat.shown.Topic(name); topic.Open() {
			set[name] = true
		}
	}
	for name := range r.brokers.reported(id).Topics() {
		if _, managed := r.cat.shown.Topic(name); !managed {
			set[name] = true
		}
	}
	return set
}

func (r *View) node(id string) Node {
	b, _ := r.cat.shown.Broker(id)
	node := Node{Broker: b}
	if s := r.brokers.sessions[id]; s != nil {
		node.Remote = s.remote
	}
	return node
}

// TopicNames returns the names of all topics that consumers can read, placed or only
// reported, sorted.
func (r *View) TopicNames() []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	set := map[string]bool{}
	for _, id := range r.cat.connected() {
		maps.Copy(set, r.listed(id))
	}
	return slices.Sorted(maps.Keys(set))
}

// Producers returns the connected brokers with the topic, by id, and the topic's
// channels, sorted: for a placed topic the durable channels of the catalog and the
// ephemeral channels that brokers report. found means that a broker has the topic, or
// that the topic is placed and active.
func (r *View) Producers(topic string) (nodes []Node, channels []string, found bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	set := map[string]bool{}
	placed, managed := r.cat.shown.Topic(topic)
	if managed {
		if !placed.Open() {
			return nil, nil, false
		}
		for _, channel := range placed.Channels {
			set[channel.Name] = true
		}
	}
	for _, id := range r.cat.connected() {
		reported := r.brokers.reported(id)
		if t := reported.Topic(topic); t != nil {
			for _, channel := range t.Channels {
				if !managed || wire.Ephemeral(channel) { // the catalog has the durable ones
					set[channel] = true
				}
			}
		}
		if managed && r.cat.shown.Shows(topic, id) || !managed && reported.Has(topic) {
			nodes = append(nodes, r.node(id))
		}
	}
	return nodes, slices.Sorted(maps.Keys(set)), managed || len(nodes) > 0
}

// BrokerTopics returns the topics that are placed on the broker or have messages left
// there, by name.
func (r *View) BrokerTopics(id string) []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.cat.shown.Placed(id)
}
