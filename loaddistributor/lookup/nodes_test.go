package lookup

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/registry"
)

// members is a Cluster of brokers with their topics.
type members struct {
	nodes    []controller.Node
	channels map[string][]string
}

func (m members) Nodes() []controller.Node     { return m.nodes }
func (m members) Connected() []controller.Node { return m.nodes }

func (m members) TopicNames() (names []string) {
	for _, n := range m.nodes {
		names = append(names, n.Topics...)
	}
	return names
}

func (m members) Producers(topic string) (nodes []controller.Node, channels []string, found bool) {
	for _, n := range m.nodes {
		if slices.Contains(n.Topics, topic) {
			nodes = append(nodes, n)
		}
	}
	return nodes, m.channels[topic], len(nodes) > 0
}

func (members) Informed() (bool, <-chan struct{}) { return true, nil }

func member(address string, topics ...string) controller.Node {
	host, _, _ := strings.Cut(address, ":")
	return controller.Node{
		Broker: catalog.Broker{ID: address, TCPAddress: address, HTTPAddress: host + ":4151", Version: "0.1.0"},
		Remote: "192.0.2.9:9", Topics: topics,
	}
}

// pipes is a listener in memory, for virtual time.
type pipes struct {
	dialled chan net.Conn
	closed  chan struct{}
	context.CancelFunc
}

func newPipes() *pipes {
	ctx, cancel := context.WithCancel(context.Background())
	p := &pipes{dialled: make(chan net.Conn), closed: make(chan struct{}), CancelFunc: cancel}
	context.AfterFunc(ctx, func() { close(p.closed) })
	return p
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.dialled:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.CancelFunc(); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// peer is a node.
type peer struct {
	net.Conn
	t *testing.T
}

func (p *pipes) dial(t *testing.T) peer {
	local, remote := net.Pipe()
	p.dialled <- remote
	return peer{local, t}
}

func (p peer) read() string {
	p.t.Helper()
	var size [4]byte
	if _, err := io.ReadFull(p, size[:]); err != nil {
		return "the end"
	}
	text := make([]byte, binary.BigEndian.Uint32(size[:]))
	testkit.Result(io.ReadFull(p, text)).Must(p.t)
	return string(text)
}

func (p peer) send(text, want string) {
	p.t.Helper()
	if _, err := io.WriteString(p, text); err != nil {
		p.t.Fatalf("%.40q: %v", text, err)
	}
	if got := p.read(); !strings.HasPrefix(got, want) {
		p.t.Errorf("%.40q: answered %q, want %q", text, got, want)
	}
}

func hello(host string, tcp int) string {
	body := fmt.Sprintf(`{"broadcast_address":%q,"hostname":"h","http_port":4151,"tcp_port":%d,"version":"1.3.0"}`, host, tcp)
	return "IDENTIFY\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
}

// bubble runs Nodes on virtual time.
func bubble(t *testing.T, cluster Cluster, cfg registry.Config, test func(t *testing.T, d *Directory, p *pipes, metrics *prometheus.Registry)) {
	testkit.Bubble(t, func(t *testing.T) {
		d := NewDirectory(cluster, cfg)
		metrics := prometheus.NewRegistry()
		n := NewNodes(d, cfg, slog.New(slog.DiscardHandler), metrics)
		ctx, stop := context.WithCancel(t.Context())
		p := newPipes()
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx, p) }()
		test(t, d, p, metrics)
		stop()
		testkit.NoError(t, <-done)
	})
}

// pass lets virtual time go by.
func pass(d time.Duration) { <-time.NewTimer(d).C }

func hosts(producers []producer) (all []string) {
	for _, p := range producers {
		all = append(all, fmt.Sprintf("%s:%d", p.BroadcastAddress, p.TCPPort))
	}
	return all
}

func TestBothSourcesAreOne(t *testing.T) {
	cluster := members{
		nodes:    []controller.Node{member("b1:4150", "placed"), member("b2:4150")},
		channels: map[string][]string{"placed": {"archive"}},
	}
	bubble(t, cluster, registry.Config{}, func(t *testing.T, d *Directory, p *pipes, _ *prometheus.Registry) {
		upstream, broker := p.dial(t), p.dial(t)
		defer upstream.Close()
		defer broker.Close()
		upstream.send("  V1"+hello("n1", 4150), "{")
		upstream.send("REGISTER placed tail\n", "OK")
		upstream.send("REGISTER own\n", "OK")
		// b2 is a broker of the cluster that also registers. Consumers must not read the rest of
		// "placed" on b2.
		broker.send("  V1"+hello("b2", 4150), "{")
		broker.send("REGISTER placed c\n", "OK")

		for topic, want := range map[string]string{
			"placed": "[b1:4150 n1:4150] [archive c tail] true",
			"own":    "[n1:4150] [] true",
			"never":  "[] [] false",
		} {
			producers, channels, found := d.lookup(topic)
			testkit.Equal(t, fmt.Sprint(hosts(producers), channels, found), want, "%s", topic)
		}
		testkit.EqualSlices(t, d.topics(), []string{"own", "placed"}, "topics")
		shown := map[string][]string{}
		for _, n := range d.nodes() {
			shown[n.BroadcastAddress] = n.Topics
		}
		testkit.Equal(t, fmt.Sprint(shown), "map[b1:[placed] b2:[] n1:[own placed]]", "nodes")

		// A tombstone also hides a broker of the cluster until the tombstone expires.
		d.tombstone("placed", "b1:4151")
		d.tombstone("placed", "never:4151")
		if producers, _, _ := d.lookup("placed"); len(producers) != 1 || producers[0].BroadcastAddress != "n1" {
			t.Errorf("with a tombstone: %v", hosts(producers))
		}
		if n := d.nodes()[0]; n.BroadcastAddress != "b1" || !n.Tombstones[0] {
			t.Errorf("the tombstone does not show: %+v", n)
		}
		pass(registry.DefaultTombstoneFor)
		if producers, _, _ := d.lookup("placed"); len(producers) != 2 {
			t.Errorf("after its time: %v", hosts(producers))
		}
	})
}

func TestANodeThatGoesIsNotShown(t *testing.T) {
	bubble(t, members{}, registry.Config{}, func(t *testing.T, d *Directory, p *pipes, metrics *prometheus.Registry) {
		node := p.dial(t)
		node.send("  V1"+hello("n1", 4150), "{")
		node.send("REGISTER t c\n", "OK")
		testkit.Equal(t, testkit.Metric(t, metrics, "srtm_lookup_names"), 2, "names")
		node.Close()
		synctest.Wait()
		producers, channels, found := d.lookup("t")
		if len(producers) != 0 || !slices.Equal(channels, []string{"c"}) || !found {
			t.Errorf("%v, %q, %v", hosts(producers), channels, found)
		}
		testkit.Equal(t, testkit.Metric(t, metrics, "srtm_lookup_nodes_connected"), 0, "connected")
	})
}

func TestSilentNodesAreDisconnected(t *testing.T) {
	cfg := registry.Config{InactiveAfter: time.Minute}
	bubble(t, members{}, cfg, func(t *testing.T, d *Directory, p *pipes, metrics *prometheus.Registry) {
		shy, silent, busy := p.dial(t), p.dial(t), p.dial(t)
		for _, c := range []peer{shy, silent, busy} {
			defer c.Close()
		}
		silent.send("  V1"+hello("n1", 4150), "{")
		busy.send("  V1"+hello("n2", 4150), "{")
		silent.send("REGISTER t\n", "OK")
		busy.send("REGISTER t\n", "OK")
		begin := time.Now()
		if got := shy.read(); got != "the end" || time.Since(begin) != greetTimeout {
			t.Errorf("without a magic: %q after %v", got, time.Since(begin))
		}
		for range 5 {
			pass(15 * time.Second)
			busy.send("PING\n", "OK")
		}
		if producers, _, _ := d.lookup("t"); fmt.Sprint(hosts(producers)) != "[n2:4150]" {
			t.Errorf("shown: %v", hosts(producers))
		}
		if got := silent.read(); got != "the end" || time.Since(begin) != silence*time.Minute {
			t.Errorf("silent: %q after %v", got, time.Since(begin))
		}
		synctest.Wait()
		testkit.Equal(t, testkit.Metric(t, metrics, "srtm_lookup_nodes_faulted_total"), 2, "faulted")
		busy.send("PING\n", "OK")
	})
}

func TestWhoDoesNotReadIsCutOff(t *testing.T) {
	bubble(t, members{}, registry.Config{}, func(t *testing.T, _ *Directory, p *pipes, metrics *prometheus.Registry) {
		unread := p.dial(t)
		defer unread.Close()
		begin := time.Now()
		testkit.Result(io.WriteString(unread, "  V1PING\n")).Must(t)
		_, err := unread.Write(bytes.Repeat([]byte("PING\n"), 1000))
		if !errors.Is(err, io.ErrClosedPipe) || time.Since(begin) != writeTimeout {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		synctest.Wait()
		testkit.Equal(t, testkit.Metric(t, metrics, "srtm_lookup_nodes_connected"), 0, "connected")
	})
}

func TestTooManyNodes(t *testing.T) {
	bubble(t, members{}, registry.Config{MaxNodes: 1}, func(t *testing.T, _ *Directory, p *pipes, metrics *prometheus.Registry) {
		first := p.dial(t)
		first.send("  V1PING\n", "OK")
		second := p.dial(t)
		testkit.Equal(t, second.read(), "the end", "the second")
		testkit.Equal(t, testkit.Metric(t, metrics, "srtm_lookup_nodes_refused_total"), 1, "refused")
		first.send("PING\n", "OK")
		first.Close()
		synctest.Wait()
		third := p.dial(t)
		third.send("  V1PING\n", "OK")
		third.Close()
	})
}

// failing is a listener that fails once, as if without descriptors, and then for good.
type failing struct {
	*pipes
	errs []error
}

func (f *failing) Accept() (net.Conn, error) {
	err := f.errs[0]
	f.errs = f.errs[1:]
	return nil, err
}

func TestAListenerThatFails(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		d := NewDirectory(members{}, registry.Config{})
		n := NewNodes(d, registry.Config{}, slog.New(slog.DiscardHandler), nil)
		begin := time.Now()
		err := n.Run(t.Context(), &failing{newPipes(), []error{errors.New("too many open files"), net.ErrClosed}})
		if !errors.Is(err, net.ErrClosed) || time.Since(begin) != 100*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
	})
}
