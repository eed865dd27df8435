package replicated_test

import (
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// servers is a cluster of NATS servers with JetStream, in this process.
type servers struct {
	t       *testing.T
	options []*server.Options
	all     []*server.Server
}

// startServers starts n connected servers, with options that set changes.
func startServers(t *testing.T, n int, set ...func(*server.Options)) *servers {
	t.Helper()
	s := &servers{t: t, all: make([]*server.Server, n)}
	var routes []string
	ports := freePorts(t, 2*n)
	for i := range n {
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[n+i]))
	}
	for i := range n {
		o := &server.Options{
			ServerName: fmt.Sprintf("n%d", i), Host: "127.0.0.1", Port: ports[i], NoSigs: true, NoLog: true,
			JetStream: true, StoreDir: filepath.Join(t.TempDir(), "js"), MaxPayload: 8 << 20,
		}
		if n > 1 {
			o.Cluster = server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: ports[n+i]}
			o.Routes = server.RoutesFromStr(strings.Join(routes, ","))
		}
		for _, change := range set {
			change(o)
		}
		s.options = append(s.options, o)
		s.start(i)
	}
	t.Cleanup(func() {
		for i := range s.all {
			s.stop(i)
		}
	})
	s.ready()
	return s
}

func (s *servers) start(i int) {
	s.t.Helper()
	one := testkit.Result(server.NewServer(s.options[i].Clone())).Must(s.t)
	one.Start()
	s.all[i] = one
}

func (s *servers) stop(i int) {
	if s.all[i] != nil {
		s.all[i].Shutdown()
		s.all[i].WaitForShutdown()
		s.all[i] = nil
	}
}

// ready waits until streams can be created.
func (s *servers) ready() {
	s.t.Helper()
	within(s.t, "the servers elect a leader", func() bool {
		for _, one := range s.all {
			if one != nil && !s.options[0].JetStream {
				return one.ReadyForConnections(time.Minute)
			}
			if one != nil && one.JetStreamEnabled() && (len(s.all) == 1 || one.JetStreamIsLeader()) {
				return true
			}
		}
		return false
	})
}

func (s *servers) url() string {
	var urls []string
	for _, o := range s.options {
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", o.Port))
	}
	return strings.Join(urls, ",")
}

// connect opens a broker's connection to the servers.
func (s *servers) connect(part string) *replicated.Cluster {
	s.t.Helper()
	var c *replicated.Cluster
	within(s.t, "JetStream takes streams", func() (ok bool) {
		var err error
		c, err = replicated.Connect(s.t.Context(), replicated.Config{
			URL: s.url(), Replicas: len(s.all), BrokerID: part, MaxBody: 1 << 20, Log: slog.New(slog.DiscardHandler),
		})
		return err == nil
	})
	s.t.Cleanup(c.Close)
	return c
}

// within waits until holds returns true; the time is long enough for busy machines.
func within(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(60 * time.Second); !holds(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("within a minute: %s", what)
		}
	}
}

func freePorts(t *testing.T, n int) (ports []int) {
	t.Helper()
	for range n {
		l := testkit.Result(net.Listen("tcp", "127.0.0.1:0")).Must(t)
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports
}
