package mqtt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/mqtt/packet"
)

const (
	shuttingDown     = 0x8B
	useAnotherServer = 0x9C
)

// sender publishes one message after the other, each when the test permits. After a DISCONNECT it connects to
// the broker that the DISCONNECT names, or else to the same broker, and repeats the message.
type sender struct {
	version  byte
	id       string
	follows  bool
	permits  chan struct{} // capacity 1
	acked    atomic.Int64
	messages []string // acknowledged; read after the end
	ends     []byte   // reasons of the DISCONNECTs; read after the end
	over     chan struct{}

	mu      sync.Mutex
	address string
}

func (s *sender) at() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.address
}

func (s *sender) run(ctx context.Context) error {
	defer close(s.over)
	for n := 0; ctx.Err() == nil; {
		conn, err := net.Dial("tcp", s.at())
		if err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		ending, err := s.publish(ctx, conn, &n)
		stop()
		conn.Close()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%s at %s: %w", s.id, s.at(), err)
		}
		s.ends = append(s.ends, ending.Reason)
		if ending.Reason == shuttingDown {
			return nil
		}
		if ending.Reference != "" {
			s.mu.Lock()
			s.address = ending.Reference
			s.mu.Unlock()
		}
	}
	return nil
}

// publish publishes on a connection until the broker ends it.
func (s *sender) publish(ctx context.Context, conn net.Conn, n *int) (packet.Ending, error) {
	out := packet.AppendConnect(nil, packet.Hello{Version: s.version, ClientID: s.id, Redirect: s.follows})
	var in []byte
	for {
		if _, err := conn.Write(out); err != nil {
			return packet.Ending{}, err
		}
		kind, body, size, err := packet.Parse(in, 1<<16)
		for size == 0 && err == nil {
			buf := make([]byte, 1<<10)
			var count int
			if count, err = conn.Read(buf); err == nil {
				in = append(in, buf[:count]...)
				kind, body, size, err = packet.Parse(in, 1<<16)
			}
		}
		switch {
		case errors.Is(err, io.EOF) && s.version == packet.V311: // which has no DISCONNECT of a broker
			return packet.Ending{Reason: shuttingDown}, nil
		case err != nil:
			return packet.Ending{}, err
		}
		switch kind & 0xF0 {
		case packet.Disconnect:
			return packet.ParseDisconnect(body)
		case packet.Puback:
			_, reason, err := packet.ParsePuback(body)
			if err != nil {
				return packet.Ending{}, err
			}
			if reason == 0 { // otherwise the broker stops, and the message may be accepted or not
				s.messages = append(s.messages, s.text(*n))
				*n++
				s.acked.Add(1)
			}
		}
		in = slices.Clone(in[size:])
		select {
		case <-s.permits:
		case <-ctx.Done():
			return packet.Ending{}, nil
		}
		out = packet.AppendPublish(nil, s.version, "moving", uint16(*n%1000+1), []byte(s.text(*n)))
	}
}

func (s *sender) text(n int) string { return fmt.Sprintf("%s %d", s.id, n) }

// received is the set of messages that consumers have got.
type received struct{ sync.Map }

func (r *received) HandleMessage(m *nsq.Message) error {
	r.Store(string(m.Body), true)
	return nil
}

// A client that follows server references lands at the broker of its publisher, and follows when the topic
// moves. The other clients stay, and their broker forwards. No acknowledged message is lost.
func TestFollowersMoveAndOthersStay(t *testing.T) {
	ports := localtest.Ports(t, 2)
	c := localtest.Start(t, 0, []string{"--report-interval=200ms", "--fitting=off"})
	for _, port := range ports {
		c.Join(t, "--mcap=100000", "--nudge-consumers-after=0s", "--mqtt-address="+port)
	}
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(t, c.RPC))
	first := connect(t, ports[0], "first")
	testkit.Equal(t, first.publish("moving", "first", 1), 0)
	broker := func() int { // index of the topic's broker; -1: between brokers
		r, err := admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: "moving"})
		if err != nil || len(r.GetTopic().GetQuotas()) != 1 {
			return -1
		}
		return slices.Index([]string{"b1", "b2"}, r.Topic.Quotas[0].BrokerId)
	}
	testkit.WaitFor(t, "the topic's broker", func() bool { return broker() >= 0 })
	home := broker()
	away := 1 - home
	all := new(received)
	localtest.Consume(t, "moving", "archive", all, func(cfg *nsq.Config) {
		cfg.MaxInFlight, cfg.LookupdPollInterval, cfg.LookupdPollJitter = 2000, 200*time.Millisecond, 0
	}, "http://"+c.Web)

	senders := []*sender{
		{version: packet.V5, id: "follower", follows: true, address: ports[away]},
		{version: packet.V5, id: "new", address: ports[home]},
		{version: packet.V311, id: "old", address: ports[home]},
		{version: packet.V5, id: "forwarded", address: ports[away]},
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	for _, s := range senders {
		s.over, s.permits = make(chan struct{}), make(chan struct{}, 1)
		running.Go(func() { testkit.NoError(t, s.run(ctx)) })
	}
	// waitFor waits while all senders publish.
	waitFor := func(what string, done func() bool) {
		t.Helper()
		testkit.WaitFor(t, what, func() bool {
			for _, s := range senders {
				select {
				case s.permits <- struct{}{}:
				default:
				}
			}
			return done()
		})
	}
	progress := func(what string) {
		t.Helper()
		for _, s := range senders {
			n := s.acked.Load()
			waitFor(s.id+" "+what, func() bool { return s.acked.Load() > n+10 })
		}
	}
	follower := senders[0]
	waitFor("the follower at its broker", func() bool { return follower.at() == ports[home] })
	progress("at the start")
	testkit.Result(admin.DrainBroker(t.Context(), &srtmv1.DrainBrokerRequest{BrokerId: fmt.Sprint("b", home+1)})).Must(t)
	waitFor("the topic at the other broker", func() bool { return broker() == away })
	waitFor("the follower at the other broker", func() bool { return follower.at() == ports[away] })
	progress("after the drain")
	waitFor("the end of the drain", func() bool {
		r, err := admin.ListBrokers(t.Context(), &srtmv1.ListBrokersRequest{})
		return err == nil && r.Brokers[home].SafeToStop
	})
	progress("through the empty broker")

	// The broker that stops reports this to the clients that have stayed.
	testkit.Must(t, c.Brokers[home].Signal(syscall.SIGTERM))
	for _, stayed := range senders[1:3] {
		waitFor("the end of "+stayed.id, func() bool {
			select {
			case <-stayed.over:
				return true
			default:
				return false
			}
		})
	}
	<-c.Brokers[home].Done()
	stop()
	running.Wait()
	for _, s := range senders {
		testkit.WaitFor(t, "all messages of "+s.id, func() bool {
			return !slices.ContainsFunc(s.messages, func(m string) bool { _, found := all.Load(m); return !found })
		})
	}
	testkit.EqualSlices(t, follower.ends, []byte{useAnotherServer, useAnotherServer})
	for _, stayed := range senders[1:3] {
		testkit.EqualSlices(t, stayed.ends, []byte{shuttingDown}, "of %s", stayed.id)
	}
	testkit.Equal(t, len(senders[3].ends), 0)
	redirects := localtest.MustAsk(t, http.MethodGet, "http://"+c.Brokers[away].HTTP+"/metrics", "")
	testkit.Equal(t, strings.Contains(redirects, "srtm_nsqd_mqtt_redirects_total 1"), true)
}
