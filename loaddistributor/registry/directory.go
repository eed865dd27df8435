package registry

import (
	"maps"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// Registered is a node with what it registered.
type Registered struct {
	Node
	Remote string   // the address it calls from
	Topics []string // by name
}

// Nodes returns the nodes that were heard of lately, the first to connect
// first.
func (r *Registry) Nodes(now mono.Time) []Registered {
	var all []Registered
	for _, id := range slices.Sorted(maps.Keys(r.nodes)) {
		if !r.active(now, id) {
			continue
		}
		n := r.nodes[id]
		one := Registered{Node: n.said, Remote: n.remote}
		// order: sorted below
		for k := range n.keys {
			if k.channel == "" {
				one.Topics = append(one.Topics, k.topic)
			}
		}
		slices.Sort(one.Topics)
		all = append(all, one)
	}
	return all
}

func (r *Registry) active(now mono.Time, id ID) bool {
	n := r.nodes[id]
	return n.identified && now.Sub(n.heard) <= r.cfg.InactiveAfter
}

// Topics returns the names of all topics, sorted.
func (r *Registry) Topics() []string { return slices.Sorted(maps.Keys(r.topics)) }

// Producers returns the nodes that have the topic and were heard of lately, the
// first to connect first, tombstoned ones too, and the topic's channels, sorted.
// found: it was registered or created.
func (r *Registry) Producers(now mono.Time, name string) (nodes []Registered, channels []string, found bool) {
	t := r.topics[name]
	if t == nil {
		return nil, nil, false
	}
	for _, id := range slices.Sorted(maps.Keys(t.producers)) {
		if r.active(now, id) {
			nodes = append(nodes, Registered{Node: r.nodes[id].said, Remote: r.nodes[id].remote})
		}
	}
	return nodes, slices.Sorted(maps.Keys(t.channels)), true
}

// Stats are for metrics.
type Stats struct{ Connections, Topics, Names, Tombstones int }

// Stats returns how much there is.
func (r *Registry) Stats() Stats {
	return Stats{Connections: len(r.nodes), Topics: len(r.topics), Names: r.names, Tombstones: len(r.tombstones)}
}
