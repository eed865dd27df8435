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

// Cluster is what is known of the brokers that have an agent;
// *controller.Controller is one.
type Cluster interface {
	Nodes() []controller.Node
	Connected() []controller.Node // Nodes without their topics
	TopicNames() []string
	Producers(topic string) (nodes []controller.Node, channels []string, found bool)
	// Informed reports whether that is all there is: the store can be read.
	Informed() (now bool, changed <-chan struct{})
}

// Directory is the brokers of a cluster and the nodes that registered. A node
// that is also a broker of the cluster counts as what the cluster says: it
// registers what it has, and the cluster knows what of that is to be read.
type Directory struct {
	cluster Cluster // set once

	mu struct {
		sync.Mutex
		registry *registry.Registry
	}
}

// NewDirectory returns a directory without registrations. Requires:
// cfg is valid.
func NewDirectory(cluster Cluster, cfg registry.Config) *Directory {
	d := &Directory{cluster: cluster}
	d.mu.registry = registry.New(cfg)
	return d
}

// producer is a broker as the clients know it.
type producer struct {
	RemoteAddress    string `json:"remote_address"`
	Hostname         string `json:"hostname"`
	BroadcastAddress string `json:"broadcast_address"`
	TCPPort          int    `json:"tcp_port"`
	HTTPPort         int    `json:"http_port"`
	Version          string `json:"version"`
}

// node is a producer in the answer to /nodes. tombstones[i] belongs to
// topics[i].
type node struct {
	producer
	Tombstones []bool   `json:"tombstones"`
	Topics     []string `json:"topics"`
}

// place is where a producer is reached, which tells one from another.
type place struct {
	host string
	port int
}

func (p producer) place() place { return place{p.BroadcastAddress, p.TCPPort} }

func ofCluster(n controller.Node) producer {
	// The hello was checked: both parse.
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

// nodes returns the brokers and the nodes that are none.
func (d *Directory) nodes() []node {
	members := d.cluster.Nodes()
	now := clock.Mono()
	d.mu.Lock()
	defer d.mu.Unlock()
	all := []node{}
	known := map[place]bool{}
	add := func(p producer, topics []string) {
		one := node{producer: p, Topics: orEmpty(topics), Tombstones: make([]bool, len(topics))}
		for i, topic := range topics {
			one.Tombstones[i] = d.mu.registry.Tombstoned(now, topic, p.BroadcastAddress, p.HTTPPort)
		}
		all = append(all, one)
	}
	for _, n := range members {
		p := ofCluster(n)
		known[p.place()] = true
		add(p, n.Topics)
	}
	for _, n := range d.mu.registry.Nodes(now) {
		if p := registered(n); !known[p.place()] {
			add(p, n.Topics)
		}
	}
	return all
}

// topics returns all names, sorted.
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

// lookup returns who can be read, and the channels, sorted. found: a producer has
// the topic, or had it.
func (d *Directory) lookup(topic string) (producers []producer, channels []string, found bool) {
	all, channels, found := d.producers(topic)
	now := clock.Mono()
	d.mu.Lock()
	defer d.mu.Unlock()
	producers = []producer{}
	for _, p := range all {
		if !d.mu.registry.Tombstoned(now, topic, p.BroadcastAddress, p.HTTPPort) {
			producers = append(producers, p)
		}
	}
	return producers, channels, found
}

// producers is lookup with those that a tombstone hides.
func (d *Directory) producers(topic string) (all []producer, channels []string, found bool) {
	members, channels, found := d.cluster.Producers(topic)
	for _, n := range members {
		all = append(all, ofCluster(n))
	}
	d.mu.Lock()
	others, names, has := d.mu.registry.Producers(clock.Mono(), topic)
	d.mu.Unlock()
	brokers := map[place]bool{}
	if len(others) > 0 {
		for _, n := range d.cluster.Connected() {
			brokers[ofCluster(n).place()] = true
		}
	}
	for _, n := range others {
		if p := registered(n); !brokers[p.place()] {
			all = append(all, p)
		}
	}
	channels = append(slices.Clone(channels), names...)
	slices.Sort(channels)
	return all, slices.Compact(channels), found || has
}

// tombstone hides a producer, named by broadcast address and HTTP port, of a
// topic. One that is none is not hidden when it becomes one, as in nsqlookupd.
func (d *Directory) tombstone(topic, address string) {
	all, _, _ := d.producers(topic)
	for _, p := range all {
		if net.JoinHostPort(p.BroadcastAddress, strconv.Itoa(p.HTTPPort)) == address {
			d.mu.Lock()
			d.mu.registry.Tombstone(clock.Mono(), topic, p.BroadcastAddress, p.HTTPPort)
			d.mu.Unlock()
			return
		}
	}
}

// change does something to the registry.
func (d *Directory) change(do func(*registry.Registry) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return do(d.mu.registry)
}

// orEmpty makes JSON say [] and not null.
func orEmpty(names []string) []string {
	if names == nil {
		return []string{}
	}
	return names
}
