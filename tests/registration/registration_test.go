package registration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// each runs a test with our nsqd and with NSQ's own.
func each(t *testing.T, test func(t *testing.T, nsqd string)) {
	t.Run("ours", func(t *testing.T) { test(t, localtest.Program(t, "nsqd")) })
	t.Run("upstream", func(t *testing.T) { test(t, testkit.Upstream(t, "nsqd")) })
}

// site is a loaddistributor and its addresses.
type site struct {
	*local.Process
	tcp, web, rpc string
}

func start(t *testing.T, s site) site {
	t.Helper()
	s.Process = localtest.Run(t, localtest.Program(t, "loaddistributor"), s.web+"/ping",
		"--grpc-address="+s.rpc, "--http-address="+s.web, "--tcp-address="+s.tcp, "--broadcast-address=127.0.0.1")
	return s
}

func fresh(t *testing.T) site {
	t.Helper()
	free := localtest.Ports(t, 3)
	return start(t, site{tcp: free[0], web: free[1], rpc: free[2]})
}

func node(t *testing.T, nsqd string, s site) *local.Process {
	t.Helper()
	return localtest.NSQD(t, nsqd, "--lookupd-tcp-address="+s.tcp)
}

func request(t *testing.T, method, url string) string {
	t.Helper()
	text, _, err := localtest.Ask(method, url, "body")
	testkit.Must(t, err)
	return text
}

// found is an answer of /lookup.
type found struct {
	Channels  []string `json:"channels"`
	Producers []struct {
		BroadcastAddress string `json:"broadcast_address"`
		TCPPort          int    `json:"tcp_port"`
		HTTPPort         int    `json:"http_port"`
		Version          string `json:"version"`
	} `json:"producers"`
}

func (f found) addresses() (all []string) {
	for _, p := range f.Producers {
		all = append(all, fmt.Sprintf("%s:%d", p.BroadcastAddress, p.TCPPort))
	}
	slices.Sort(all)
	return all
}

// eventually waits until right accepts the answer of /lookup.
func (s site) eventually(t *testing.T, topic, what string, right func(found) bool) {
	t.Helper()
	text := ""
	defer func() {
		if t.Failed() {
			t.Logf("%s: %s, want %s", topic, text, what)
		}
	}()
	testkit.WaitFor(t, "such producers", func() bool {
		text = request(t, http.MethodGet, "http://"+s.web+"/lookup?topic="+topic)
		var f found
		if err := json.Unmarshal([]byte(text), &f); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		return right(f)
	})
}

func (s site) produced(t *testing.T, topic string, want ...string) {
	t.Helper()
	slices.Sort(want)
	s.eventually(t, topic, fmt.Sprint(want), func(f found) bool { return slices.Equal(f.addresses(), want) })
}

func TestANodeIsFoundAndForgotten(t *testing.T) {
	each(t, func(t *testing.T, nsqd string) {
		s := fresh(t)
		a, b := node(t, nsqd, s), node(t, nsqd, s)
		request(t, http.MethodPost, "http://"+a.HTTP+"/topic/create?topic=t")
		request(t, http.MethodPost, "http://"+a.HTTP+"/channel/create?topic=t&channel=c")
		s.produced(t, "t", a.TCP)
		s.eventually(t, "t", "channel c", func(f found) bool {
			return slices.Equal(f.Channels, []string{"c"}) && f.Producers[0].Version != "" && fmt.Sprintf("127.0.0.1:%d", f.Producers[0].HTTPPort) == a.HTTP
		})

		// A topic that is new on b begins with the channels that the topic has on other nodes.
		request(t, http.MethodPost, "http://"+b.HTTP+"/pub?topic=t")
		s.produced(t, "t", a.TCP, b.TCP)
		if stats := request(t, http.MethodGet, "http://"+b.HTTP+"/stats?format=json&topic=t"); !strings.Contains(stats, `"channel_name":"c"`) {
			t.Errorf("the second node has no channel c: %s", stats)
		}

		// The topic is hidden, then deleted, as nsqadmin removes a topic from a node.
		request(t, http.MethodPost, "http://"+s.web+"/topic/tombstone?topic=t&node="+a.HTTP)
		s.produced(t, "t", b.TCP)
		request(t, http.MethodPost, "http://"+a.HTTP+"/topic/delete?topic=t")
		request(t, http.MethodPost, "http://"+a.HTTP+"/topic/create?topic=t")
		s.produced(t, "t", a.TCP, b.TCP)

		testkit.Must(t, a.Kill())
		s.produced(t, "t", b.TCP)
		request(t, http.MethodPost, "http://"+b.HTTP+"/channel/create?topic=t&channel=d")
		s.eventually(t, "t", "channels c, d", func(f found) bool { return slices.Equal(f.Channels, []string{"c", "d"}) })
		request(t, http.MethodPost, "http://"+b.HTTP+"/topic/delete?topic=t")
		s.produced(t, "t")
	})
}

// NSQ's nsqd notices a lost connection at its ping, every 15 s.
func TestNodesComeBackToARestartedLoaddistributor(t *testing.T) {
	each(t, func(t *testing.T, nsqd string) {
		t.Parallel()
		s := fresh(t)
		d := node(t, nsqd, s)
		request(t, http.MethodPost, "http://"+d.HTTP+"/channel/create?topic=t&channel=c")
		request(t, http.MethodPost, "http://"+d.HTTP+"/topic/create?topic=t")
		s.produced(t, "t", d.TCP)
		testkit.Must(t, s.Stop())
		s = start(t, s)
		s.nodes(t, 1)
		s.produced(t, "t", d.TCP)
	})
}

// nodes waits until a number of nodes are registered.
func (s site) nodes(t *testing.T, want int) {
	t.Helper()
	testkit.WaitFor(t, fmt.Sprint(want, " nodes"), func() bool {
		return strings.Count(request(t, http.MethodGet, "http://"+s.web+"/nodes"), "tcp_port") == want
	})
}

func TestAStockConsumerReadsFromANodeThatRegistered(t *testing.T) {
	each(t, func(t *testing.T, nsqd string) {
		s := fresh(t)
		d := node(t, nsqd, s)
		request(t, http.MethodPost, "http://"+d.HTTP+"/pub?topic=t")
		s.produced(t, "t", d.TCP)
		s.consumes(t)
	})
}

// consumes reads the message posted to /pub, as a stock consumer that looks t up.
func (s site) consumes(t *testing.T) {
	t.Helper()
	got := make(localtest.Bodies, 1)
	stop := localtest.Consume(t, "t", "c", got, nil, "http://"+s.web)
	defer stop()
	got.Want(t, "body")
}

// Nodes on ports of the system's choice are found everywhere.
func TestPortsOfTheSystem(t *testing.T) {
	d, at, err := local.Listening(localtest.Program(t, "loaddistributor"), t.TempDir(),
		[]string{"--grpc-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--tcp-address=127.0.0.1:0", "--broadcast-address=127.0.0.1"}, "TCP", "HTTP", "GRPC")
	localtest.Watch(t, d, err)
	s := site{Process: d, tcp: at["TCP"], web: at["HTTP"], rpc: at["GRPC"]}
	var want []string
	for _, joins := range []string{"--lookupd-tcp-address=" + s.tcp, "--loaddistributor-address=" + s.rpc} {
		n, _, err := local.Listening(localtest.Program(t, "nsqd"), t.TempDir(), []string{"--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--broadcast-address=127.0.0.1", joins}, "TCP", "HTTP")
		localtest.Watch(t, n, err)
		want = append(want, n.TCP+" "+n.HTTP)
	}
	slices.Sort(want)
	s.nodes(t, len(want))
	var f found
	testkit.Must(t, json.Unmarshal([]byte(request(t, http.MethodGet, "http://"+s.web+"/nodes")), &f))
	var got []string
	for _, p := range f.Producers {
		got = append(got, fmt.Sprintf("127.0.0.1:%d 127.0.0.1:%d", p.TCPPort, p.HTTPPort))
	}
	slices.Sort(got)
	testkit.EqualSlices(t, got, want, "/nodes")
}

// nsqlookupdFile has every setting of an nsqlookupd.
const nsqlookupdFile = `
log_level = "fatal"
log_prefix = "[lookup] "
verbose = false

tcp_address = "127.0.0.1:0"
http_address = "127.0.0.1:1" # the flag wins
broadcast_address = "127.0.0.1"

inactive_producer_timeout = "300s"
tombstone_lifetime = "45s"
`

// The flags and the file of an nsqlookupd start the loaddistributor in its place. The single flag of
// our own only frees the port that gRPC would use.
func TestInPlaceOfAnNsqlookupd(t *testing.T) {
	dir := t.TempDir()
	testkit.Must(t, os.WriteFile(filepath.Join(dir, "nsqlookupd.cfg"), []byte(nsqlookupdFile), 0o600))
	d, at, err := local.Listening(localtest.Program(t, "loaddistributor"), dir,
		[]string{"-config=nsqlookupd.cfg", "-http-address=127.0.0.1:0", "-log-level=INFO", "-verbose", "--grpc-address=127.0.0.1:0"}, "TCP", "HTTP")
	localtest.Watch(t, d, err)
	if !strings.Contains(d.Output(), "nsqlookupd v1.") {
		t.Errorf("no version in %s", d.Output())
	}
	s := site{Process: d, tcp: at["TCP"], web: at["HTTP"]}
	each(t, func(t *testing.T, nsqd string) {
		n := node(t, nsqd, s)
		request(t, http.MethodPost, "http://"+n.HTTP+"/pub?topic=t")
		s.produced(t, "t", n.TCP)
		s.consumes(t)
		request(t, http.MethodPost, "http://"+s.web+"/topic/tombstone?topic=t&node="+n.HTTP)
		s.produced(t, "t")
	})
}
