package lookup

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/registry"
)

// Cluster is the set of brokers with an agent. *controller.View implements it.
type Cluster interface {
	Nodes() []controller.Node
	Connected() []controller.Node // Nodes without their topics
	TopicNames() []string
	Producers(topic string) (nodes []controller.Node, channels []string, found bool)
	// Informed reports whether the cluster's knowledge is complete: the store can be read.
	Informed() (now bool, changed <-chan struct{})
}

// Directory joins the brokers of a cluster with the registered nodes. If a node is also a
// broker of the cluster, the cluster's data counts: the node registers all its topics,
// and the cluster knows which of them consumers should read.
type Directory struct {
	cluster Cluster // set by NewDirectory

	mu struct {
		sync.Mutex
		registry *registry.Registry
	}
}

// NewDirectory returns a directory without registrations. Requires: cfg is valid.
func NewDirectory(cluster Cluster, cfg registry.Config) *Directory {
	d := &Directory{cluster: cluster}
	d.mu.registry = registry.New(cfg)
	return d
}

// producer is a broker in the form of nsqlookupd's answers.
type producer struct {
	RemoteAddress    string `json:"remote_address"`
	Hostname         string `json:"hostname"`
	BroadcastAddress string `json:"broadcast_address"`
	TCPPort          int    `json:"tcp_port"`
	HTTPPort         int    `json:"http_port"`
	Version          string `json:"version"`
}

// node is a producer in the answer to /nodes. tombstones[i] belongs to topics[i].
type node struct {
	producer
	Tombstones []bool   `json:"tombstones"`
	Topics     []string `json:"topics"`
}

// place is the address that identifies a producer.
type place struct {
	host string
	port int
}

func (p producer) place() place { return place{p.BroadcastAddress, p.TCPPort} }

func ofCluster(n controller.Node) producer {
	// The hello was checked, so both addresses parse.
	host, tcp, _ := controller.HostPort(n.TCPAddress)
	_, http, _ := controller.HostPort(n.HTTPAddress)
	return producer{
		RemoteAddress: n.Remote, Hostname: cmp.Or(n.Hostname, host), BroadcastAddress: host,
		TCPPort: tcp, HTTPPort: http, Version: n.Version,
	}
}

func registered(n registry.Registered) producer {
	return producer{
		RemoteAddress: n.Remote, Hostname: n.Hostname, BroadcastAddress: n.BroadcastAddress,
		TCPPort: n.TCPPort, HTTPPort: n.HTTPPort, Version: n.Version,
	}
}

// nodes returns the brokers and the nodes that are not brokers.
func (d *Directory) nodes() []node {
	members := d.cluster.Nodes()
	now := clock.Mono()
	d.mu.Lock()
	defer d.mu.Unlock()
	nodes := []node{}
	seen := map[place]bool{}
	add := func(p producer, topics []string) {
		node := node{producer: p, Topics: orEmpty(topics), Tombstones: make([]bool, len(topics))}
		for i, topic := range topics {
			node.Tombstones[i] = d.mu.registry.Tombstoned(now, topic, p.BroadcastAddress, p.HTTPPort)
		}
		nodes = append(nodes, node)
	}
	for _, n := range members {
		p := ofCluster(n)
		seen[p.place()] = true
		add(p, n.Topics)
	}
	for _, n := range d.mu.registry.Nodes(now) {
		if p := registered(n); !seen[p.place()] {
			add(p, n.Topics)
		}
	}
	return nodes
}

// topics returns all topic names, sorted.
func (d *Directory) topics() []string {
	set := map[string]bool{}
	for _, name := range d.cluster.TopicNames() {
		set[name] = true
	}
	d.mu.Lock()
	for _, name := range d.mu.registry.Topics() {
		set[name] = true
	}
	d.mu.Unlock()
	return slices.Sorted(maps.Keys(set))
}

// lookup returns the producers that consumers may read, and the sorted channels. found
// means that a producer has, or had, the topic.
func (d *Directory) lookup(topic string) (producers []producer, channels []string, found bool) {
	list, channels, found := d.producers(topic)
	now := clock.Mono()
	d.mu.Lock()
	defer d.mu.Unlock()
	producers = []producer{}
	for _, p := range list {
		if !d.mu.registry.Tombstoned(now, topic, p.BroadcastAddress, p.HTTPPort) {
			producers = append(producers, p)
		}
	}
	return producers, channels, found
}

// producers is lookup including the producers hidden by a tombstone.
func (d *Directory) producers(topic string) (producers []producer, channels []string, found bool) {
	members, channels, found := d.cluster.Producers(topic)
	for _, n := range members {
		producers = append(producers, ofCluster(n))
	}
	d.mu.Lock()
	external, names, has := d.mu.registry.Producers(clock.Mono(), topic)
	d.mu.Unlock()
	brokers := map[place]bool{}
	if len(external) > 0 {
		for _, n := range d.cluster.Connected() {
			brokers[ofCluster(n).place()] = true
		}
	}
	for _, n := range external {
		if p := registered(n); !brokers[p.place()] {
			producers = append(producers, p)
		}
	}
	channels = append(slices.Clone(channels), names...)
	slices.Sort(channels)
	return producers, slices.Compact(channels), found || has
}

// tombstone hides a producer of a topic, named by broadcast address and HTTP port. An
// unknown producer is not hidden when it appears later, as in nsqlookupd.
func (d *Directory) tombstone(topic, address string) {
	producers, _, _ := d.producers(topic)
	for _, p := range producers {
		if net.JoinHostPort(p.BroadcastAddress, strconv.Itoa(p.HTTPPort)) == address {
			d.mu.Lock()
			d.mu.registry.Tombstone(clock.Mono(), topic, p.BroadcastAddress, p.HTTPPort)
			d.mu.Unlock()
			return
		}
	}
}

// change runs a function on the registry under the lock.
func (d *Directory) change(apply func(*registry.Registry) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return apply(d.mu.registry)
}

// orEmpty replaces nil, so JSON has [] instead of null.
func orEmpty(names []string) []string {
	if names == nil {
		return []string{}
	}
	return names
}
