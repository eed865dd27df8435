package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
)

// openTopic creates a topic for any publisher, and returns the number of the topic's single broker.
func openTopic(t *testing.T, c *localtest.Cluster, name string) int {
	t.Helper()
	topic := testkit.Result(localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name:     name,
		Contract: &srtmv1.Contract{RateMilli: 5_000_000, Burst: 1000, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		Channels: []string{"archive"},
	}})).Must(t)
	testkit.MustEqual(t, len(topic.Quotas), 1)
	return brokerOf(topic.Quotas[0].BrokerId)
}

func brokerOf(id string) (number int) {
	_, _ = fmt.Sscanf(id, "b%d", &number)
	return number - 1
}

// pipe is a stock NSQ producer's connection. It sends ahead of the answers.
type pipe struct {
	t  *testing.T
	nc net.Conn
	r  *bufio.Reader
}

func newPipe(t *testing.T, address, clientID string) *pipe {
	t.Helper()
	nc := testkit.Result(net.Dial("tcp", address)).Must(t)
	t.Cleanup(func() { nc.Close() })
	testkit.Must(t, nc.SetDeadline(time.Now().Add(testkit.Hang)))
	p := &pipe{t, nc, bufio.NewReader(nc)}
	p.send(append(wire.AppendMagic(nil), wire.AppendIdentify(nil, []byte(fmt.Sprintf(`{"client_id":%q}`, clientID)))...))
	p.want("OK")
	return p
}

func (p *pipe) send(b []byte) {
	p.t.Helper()
	testkit.Result(p.nc.Write(b)).Must(p.t)
}

// answer returns the next answer and skips heartbeats.
func (p *pipe) answer() string {
	p.t.Helper()
	for {
		_, data, err := frames.Read(p.r, 1<<16)
		testkit.Must(p.t, err)
		if string(data) != wire.Heartbeat {
			return string(data)
		}
	}
}

func (p *pipe) want(answer string) {
	p.t.Helper()
	testkit.MustEqual(p.t, p.answer(), answer)
}

// Stock producers at every broker publish to topics on other brokers, by PUB, MPUB and DPUB, and by
// HTTP. A producer's messages keep their order, in pipelines, and when they alternate between a local
// topic and a topic on another broker.
func TestAnyBrokerTakesAnyTopic(t *testing.T) {
	c := localtest.Start(t, 3, nil, "--mcap=100000")
	home := openTopic(t, c, "t")
	local := c.Brokers[(home+1)%3]
	for i := range 20 { // the producer's broker has one of the topics
		if name := fmt.Sprint("own", i); openTopic(t, c, name) == (home+1)%3 {
			t.Logf("%s is at the producer's broker", name)
			break
		}
		if i == 19 {
			t.Fatal("no topic is placed at the producer's broker")
		}
	}
	var own string
	for i := range 20 {
		text, _, err := localtest.Ask(http.MethodGet, "http://"+local.HTTP+"/stats?format=json", "")
		testkit.Must(t, err)
		if own = fmt.Sprint("own", i); strings.Contains(text, fmt.Sprintf("%q", own)) {
			break
		}
	}
	received, mine := make(localtest.Bodies, 10_000), &inOrder{}
	localtest.Consume(t, "t", "archive", received, nil, "http://"+c.Web)
	localtest.Consume(t, own, "archive", mine, func(cfg *nsq.Config) { cfg.MaxInFlight = 1 }, "http://"+c.Web)

	var want []string
	for i, b := range c.Brokers {
		p := localtest.Producer(t, b.TCP, fmt.Sprint("stock", i))
		one, two, three, four := fmt.Sprintf("%d pub", i), fmt.Sprintf("%d mpub 1", i), fmt.Sprintf("%d mpub 2", i), fmt.Sprintf("%d dpub", i)
		testkit.Must(t, p.Publish("t", []byte(one)))
		testkit.Must(t, p.MultiPublish("t", [][]byte{[]byte(two), []byte(three)}))
		testkit.Must(t, p.DeferredPublish("t", time.Millisecond, []byte(four)))
		five, six, seven := fmt.Sprintf("%d http", i), fmt.Sprintf("%d http 1", i), fmt.Sprintf("%d http 2", i)
		testkit.MustEqual(t, localtest.MustAsk(t, http.MethodPost, "http://"+b.HTTP+"/pub?topic=t", five), "OK")
		testkit.MustEqual(t, localtest.MustAsk(t, http.MethodPost, "http://"+b.HTTP+"/mpub?topic=t", six+"\n"+seven), "OK")
		want = append(want, one, two, three, four, five, six, seven)
	}
	received.Want(t, want...)

	// A pipeline alternates between a local topic and a remote topic.
	p := newPipe(t, local.TCP, "pipeline")
	const n = 2000
	var text []byte
	want = want[:0]
	for i := range n {
		body := fmt.Sprintf("%06d", i)
		text = wire.AppendPub(text, "t", []byte(body))
		text = wire.AppendPub(text, own, []byte(body))
		want = append(want, body)
	}
	go func() { _, _ = p.nc.Write(text) }() // the answers show a failure
	for range 2 * n {
		p.want("OK")
	}
	received.Want(t, want...)
	mine.want(t, n)

	for i, b := range c.Brokers {
		text, _, err := localtest.Ask(http.MethodGet, "http://"+b.HTTP+"/metrics", "")
		testkit.Must(t, err)
		series := fmt.Sprintf("srtm_nsqd_forwarded_total{result=\"accepted\",target=%q}", c.Brokers[home].TCP)
		if has := strings.Contains(text, series); has != (i != home) {
			t.Errorf("b%d, where the topic is at b%d: has %s: %v", i+1, home+1, series, has)
		}
	}
	// The producer learns of a broker's refusal.
	p = newPipe(t, local.TCP, "pipeline")
	p.send(wire.AppendPub(nil, "no!topic", []byte("x")))
	if answer := p.answer(); !strings.HasPrefix(answer, "E_BAD_TOPIC") && !strings.HasPrefix(answer, "E_INVALID") {
		t.Error(answer)
	}
}

// inOrder expects the numbers 0, 1, ... in order.
type inOrder struct {
	next     atomic.Int64
	disorder atomic.Int64
}

func (o *inOrder) HandleMessage(m *nsq.Message) error {
	if string(m.Body) != fmt.Sprintf("%06d", o.next.Load()) {
		o.disorder.Add(1)
	}
	o.next.Add(1)
	return nil
}

func (o *inOrder) want(t *testing.T, n int) {
	t.Helper()
	testkit.WaitFor(t, "all messages", func() bool { return o.next.Load() >= int64(n) })
	testkit.Equal(t, o.disorder.Load(), 0, "messages out of order")
}

func auth(secret string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte("AUTH\n"), uint32(len(secret))), secret...)
}

// The broker of an open topic sees the topic's true publishers, and the broker through which they
// come. No client can publish in the name of another.
func TestForwardedPublishersKeepTheirIdentity(t *testing.T) {
	dir := t.TempDir()
	node, tokens := filepath.Join(dir, "node"), filepath.Join(dir, "tokens")
	testkit.Must(t, os.WriteFile(node, []byte("node node-0123456789abcdef\n"), 0o600))
	testkit.Must(t, os.WriteFile(tokens, []byte("node node-0123456789abcdef\nadmin admin-0123456789abcdef\n"), 0o600))
	allow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"ttl":60,"identity":%q,"authorizations":[{"topic":".*","channels":[".*"],"permissions":["publish","subscribe"]}]}`, "who-has-"+r.FormValue("secret"))
	}))
	defer allow.Close()
	ports := localtest.Ports(t, 2)
	localtest.Run(t, localtest.Program(t, "loaddistributor"), ports[1]+"/ping", "--grpc-address="+ports[0], "--http-address="+ports[1], "--tcp-address=", "--store=memory", "--token-file="+tokens, "--fitting=off")
	conn := testkit.Result(grpc.NewClient(ports[0], grpc.WithTransportCredentials(insecure.NewCredentials()), client.Token("admin-0123456789abcdef"))).Must(t)
	defer conn.Close()
	c := &localtest.Cluster{RPC: ports[0]}
	for i := range 2 {
		c.Brokers = append(c.Brokers, localtest.NSQD(t, "", "--loaddistributor-address="+c.RPC, fmt.Sprintf("--broker-id=b%d", i+1), "--mcap=100000",
			"--control-token-file="+node, "--auth-http-address="+allow.Listener.Addr().String()))
	}
	testkit.WaitFor(t, "brokers that have joined", func() bool {
		r, err := srtmv1.NewAdminServiceClient(conn).ListBrokers(t.Context(), &srtmv1.ListBrokersRequest{})
		return err == nil && len(r.Brokers) == 2
	})
	topic := testkit.Result(localtest.CreateTopic(t.Context(), conn, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name:     "t",
		Contract: &srtmv1.Contract{RateMilli: 5_000_000, Burst: 1000, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
	}})).Must(t)
	home := brokerOf(topic.Quotas[0].BrokerId)
	away := c.Brokers[1-home]

	p := newPipe(t, away.TCP, "sensor")
	p.send(auth("secret-a"))
	if answer := p.answer(); !strings.Contains(answer, "who-has-secret-a") {
		t.Fatal(answer)
	}
	testkit.WaitFor(t, "the publisher as it is, in what the topic has learned", func() bool {
		p.send(wire.AppendPub(nil, "t", []byte("x")))
		p.want("OK")
		r, err := srtmv1.NewAdminServiceClient(conn).GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: "t"})
		testkit.Must(t, err)
		for _, is := range r.GetTopic().GetLearned().GetPublishers() {
			if is.Id == "sensor" && is.SendsTo == fmt.Sprint("b", home+1) && is.Forwarder == fmt.Sprint("b", 2-home) {
				return true
			}
		}
		return false
	})
	for _, b := range c.Brokers {
		forger := newPipe(t, b.TCP, "forger")
		forger.send(auth(origin.Secret([]byte("a guess"), origin.Origin{ClientID: "sensor", Kind: "auth", ID: "who-has-secret-a", Broker: "b1"}.String())))
		if answer := forger.answer(); !strings.HasPrefix(answer, "E_AUTH_FAILED") {
			t.Error(answer)
		}
	}
}

// With forwarding off, a broker refuses other brokers' topics.
func TestForwardingOff(t *testing.T) {
	c := localtest.Start(t, 2, nil, "--forward=off", "--mcap=100000")
	home := openTopic(t, c, "t")
	p := localtest.Producer(t, c.Brokers[1-home].TCP, "stock")
	if err := p.Publish("t", []byte("x")); err == nil || !strings.Contains(err.Error(), "E_BAD_TOPIC") {
		t.Errorf("published at the wrong broker: %v", err)
	}
	text, code, err := localtest.Ask(http.MethodPost, "http://"+c.Brokers[1-home].HTTP+"/pub?topic=t", "x")
	if err != nil || code != http.StatusNotFound {
		t.Errorf("published at the wrong broker: %d %s, %v", code, text, err)
	}
}

// judge compares acknowledged messages with received messages.
type judge struct {
	mu     sync.Mutex
	acked  map[uint32][]uint32 // by producer, in order
	came   map[uint64][]int64  // by producer and number: when brokers accepted the message
	failed int                 // publishes with an error, or without an answer
}

func (j *judge) HandleMessage(m *nsq.Message) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	key := binary.BigEndian.Uint64(m.Body)
	if !slices.Contains(j.came[key], m.Timestamp) { // otherwise a redelivery
		j.came[key] = append(j.came[key], m.Timestamp)
	}
	return nil
}

func (j *judge) missing() (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for producer, numbers := range j.acked {
		for _, number := range numbers {
			if _, came := j.came[uint64(producer)<<32|uint64(number)]; !came {
				n++
			}
		}
	}
	return n
}

// disorder counts the acknowledged messages that were accepted only before an earlier acknowledged
// message of the same producer. If a broker is killed after accepting a message and before the answer,
// the message is sent again, and so accepted twice.
func (j *judge) disorder() (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for producer, numbers := range j.acked {
		last := int64(0)
		for _, number := range numbers {
			next := int64(math.MaxInt64)
			for _, at := range j.came[uint64(producer)<<32|uint64(number)] {
				if at >= last {
					next = min(next, at)
				}
			}
			if next == math.MaxInt64 {
				n++
			} else {
				last = next
			}
		}
	}
	return n
}

func (j *judge) acknowledged() (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, numbers := range j.acked {
		n += len(numbers)
	}
	return n
}

// produce publishes over a stock producer's connection to a broker, window messages ahead of the
// answers. It reconnects after an error, until ctx ends.
func (j *judge) produce(ctx context.Context, address string, producer uint32, window int) {
	number := uint32(0)
	for ctx.Err() == nil {
		func() {
			nc, err := net.DialTimeout("tcp", address, time.Second)
			if err != nil {
				return
			}
			defer nc.Close()
			defer context.AfterFunc(ctx, func() { _ = nc.SetReadDeadline(time.Now().Add(15 * time.Second)) })()
			r := bufio.NewReader(nc)
			var open []uint32
			_, err = nc.Write(append(wire.AppendMagic(nil), wire.AppendIdentify(nil, []byte(fmt.Sprintf(`{"client_id":"stock-%d"}`, producer)))...))
			if err != nil {
				return
			}
			if _, data, err := frames.Read(r, 1<<16); err != nil || string(data) != "OK" {
				return
			}
			defer func() {
				j.mu.Lock()
				j.failed += len(open)
				j.mu.Unlock()
			}()
			for ctx.Err() == nil || len(open) > 0 {
				var out []byte
				for ctx.Err() == nil && len(open) < window {
					out = wire.AppendPub(out, "t", binary.BigEndian.AppendUint64(nil, uint64(producer)<<32|uint64(number)))
					open = append(open, number)
					number++
				}
				if _, err := nc.Write(out); err != nil {
					return
				}
				_, data, err := frames.Read(r, 1<<16)
				switch {
				case err != nil:
					return
				case string(data) == wire.Heartbeat:
					if _, err := io.WriteString(nc, "NOP\n"); err != nil {
						return
					}
				case string(data) == "OK":
					j.mu.Lock()
					j.acked[producer] = append(j.acked[producer], open[0])
					j.mu.Unlock()
					open = open[1:]
				case bytes.HasPrefix(data, []byte("E_QUEUE_FULL")), bytes.HasPrefix(data, []byte("E_RATE_LIMITED")):
					open = open[1:]
				default:
					return
				}
			}
		}()
	}
}

// move drains and kills brokers under the topic t, whose publishers and consumers report to j. Publishes must
// continue after each step. At first the topic is at broker home. Broker front, which clients are connected to,
// drains as well, and is not killed. The killed broker comes back.
func (j *judge) move(t *testing.T, c *localtest.Cluster, home, front int) {
	t.Helper()
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(t, c.RPC))
	at := func() int {
		r, err := admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: "t"})
		if err != nil || len(r.GetTopic().GetQuotas()) != 1 {
			return -1
		}
		return brokerOf(r.Topic.Quotas[0].BrokerId)
	}
	leaves := func(victim int) {
		t.Helper()
		testkit.WaitFor(t, fmt.Sprintf("the topic on another broker than b%d", victim+1), func() bool { is := at(); return is >= 0 && is != victim })
	}
	progress := func(what string) {
		t.Helper()
		from := j.acknowledged()
		testkit.WaitFor(t, "publishes after "+what, func() bool { return j.acknowledged() > from+200 })
		t.Logf("%s: %d acknowledged, %d of them missing, %d failed, at b%d", what, j.acknowledged(), j.missing(), j.failed, at()+1)
	}
	drain := func(victim int) {
		t.Helper()
		id := fmt.Sprint("b", victim+1)
		testkit.WaitFor(t, "a drain of "+id, func() bool {
			_, err := admin.DrainBroker(t.Context(), &srtmv1.DrainBrokerRequest{BrokerId: id})
			return err == nil
		})
		leaves(victim)
		progress("a drain of " + id)
		testkit.Result(admin.DrainBroker(t.Context(), &srtmv1.DrainBrokerRequest{BrokerId: id, Undo: true})).Must(t)
	}
	progress("the start")
	for _, victim := range []int{home, front, 3 - home - front} {
		drain(victim)
	}
	if at() == front {
		drain(front)
	}
	victim := at()
	killed := c.Brokers[victim]
	testkit.Must(t, killed.Kill())
	leaves(victim)
	progress("kill -9")
	again := testkit.Result(local.NSQDAt(localtest.Program(t, "nsqd"), killed.Dir, killed.TCP, killed.HTTP, killed.Flags[:len(killed.Flags)]...)).Must(t)
	localtest.Watch(t, again, nil)
	progress("the return of the dead broker")
}

// Producers with only one known broker lose no acknowledged message, and keep their order, while the
// topic moves around the cluster, its broker drains, and its broker is killed.
func TestForwardingThroughMovesDrainsAndCrashes(t *testing.T) {
	c := localtest.Start(t, 3, []string{"--evacuate-after=1s", "--report-interval=200ms", "--fitting=off"},
		"--mcap=100000", "--durability=fsync", "--mem-queue-size=100000", "--nudge-consumers-after=0s")
	home := openTopic(t, c, "t")
	j := &judge{acked: map[uint32][]uint32{}, came: map[uint64][]int64{}}
	localtest.Consume(t, "t", "archive", j, func(cfg *nsq.Config) {
		cfg.MaxInFlight, cfg.LookupdPollInterval, cfg.LookupdPollJitter = 2000, 200*time.Millisecond, 0
	}, "http://"+c.Web)
	ctx, stop := context.WithCancel(t.Context())
	var producers sync.WaitGroup
	defer producers.Wait()
	defer stop()
	front := (home + 1) % 3 // the only broker known to producers, never killed
	for i := range 4 {
		producers.Go(func() { j.produce(ctx, c.Brokers[front].TCP, uint32(i+1), 1+15*(i%2)) })
	}
	j.move(t, c, home, front)
	stop()
	producers.Wait()
	testkit.WaitFor(t, "all that was acknowledged", func() bool { return j.missing() == 0 })
	// Until now, only one of the accepting brokers may have delivered a message that was accepted
	// twice.
	testkit.WaitFor(t, "every producer's messages in the order in which they were accepted", func() bool { return j.disorder() == 0 })
	t.Logf("%d messages acknowledged, %d failed", j.acknowledged(), j.failed)
}
