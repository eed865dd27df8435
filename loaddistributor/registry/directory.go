package registry

import (
	"maps"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// Registered is a node with its registrations.
type Registered struct {
	Node
	Remote string   // remote address of the connection
	Topics []string // by name
}

// Nodes returns the active nodes, in the order of their connections.
func (r *Registry) Nodes(now mono.Time) []Registered {
	var all []Registered
	for _, id := range slices.Sorted(maps.Keys(r.nodes)) {
		if !r.active(now, id) {
			continue
		}
		n := r.nodes[id]
		entry := Registered{Node: n.identity, Remote: n.remote}
		// order: sorted below
		for k := range n.keys {
			if k.channel == "" {
				entry.Topics = append(entry.Topics, k.topic)
			}
		}
		slices.Sort(entry.Topics)
		all = append(all, entry)
	}
	return all
}

func (r *Registry) active(now mono.Time, id ID) bool {
	n := r.nodes[id]
	return n.identified && now.Sub(n.lastMessage) <= r.cfg.InactiveAfter
}

// Topics returns the names of all topics, sorted.
func (r *Registry) Topics() []string { return slices.Sorted(maps.Keys(r.topics)) }

// Producers returns the active nodes with the topic, in the order of their connections
// and including tombstoned nodes, and the topic's sorted channels. found means that the
// topic was registered or created.
func (r *Registry) Producers(now mono.Time, name string) (nodes []Registered, channels []string, found bool) {
	t := r.topics[name]
	if t == nil {
		return nil, nil, false
	}
	for _, id := range slices.Sorted(maps.Keys(t.producers)) {
		if r.active(now, id) {
			nodes = append(nodes, Registered{Node: r.nodes[id].identity, Remote: r.nodes[id].remote})
		}
	}
	return nodes, slices.Sorted(maps.Keys(t.channels)), true
}

// Stats are sizes for metrics.
type Stats struct{ Connections, Topics, Names, Tombstones int }

// Stats returns the present sizes.
func (r *Registry) Stats() Stats {
	return Stats{Connections: len(r.nodes), Topics: len(r.topics), Names: r.names, Tombstones: len(r.tombstones)}
}
