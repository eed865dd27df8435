package cluster

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A newcomer's case: a fresh cluster, a missing topic, stock producers at all brokers, and a stock
// consumer with the lookup.
func TestATopicIsCreatedByItsFirstPublish(t *testing.T) {
	c := localtest.Start(t, 3, []string{`--default-topic={"contract":{"slo":{"quantile":0.95,"latency":"0.2s"},"over_limit":"OVER_LIMIT_POLICY_DELAY"},"auto":{"max_rate_milli":2000000,"min_burst":5,"max_burst":500}}`}, "--mcap=100000")
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(t, c.RPC))
	received := make(localtest.Bodies, 1000)
	localtest.Consume(t, "new", "archive", received, func(cfg *nsq.Config) { cfg.LookupdPollInterval = 100 * time.Millisecond }, "http://"+c.Web)
	const each = 20
	var want []string
	var all sync.WaitGroup
	for i, b := range c.Brokers {
		for j := range each {
			p := localtest.Producer(t, b.TCP, fmt.Sprintf("p-%d-%d", i, j))
			body := fmt.Sprintf("%d %d", i, j)
			want = append(want, body)
			all.Go(func() { testkit.NoError(t, p.Publish("new", []byte(body))) })
		}
	}
	all.Wait()
	received.Want(t, want...)
	topic := testkit.Result(admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: "new"})).Must(t).GetTopic()
	spec := topic.GetSpec()
	slo, auto := spec.GetContract().GetSlo(), spec.GetAuto()
	if slo.GetQuantile() != 0.95 || slo.GetLatency().AsDuration() != 200*time.Millisecond || spec.GetContract().GetOverLimit() != srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY ||
		auto.GetMaxRateMilli() != 2_000_000 || auto.GetMinBurst() != 5 || auto.GetMaxBurst() != 500 || spec.GetContract().GetRateMilli() > 2_000_000 {
		t.Errorf("created as %v", spec)
	}
	if made, err := localtest.Metric(&local.Process{HTTP: c.Web}, "srtm_topics_auto_created_total"); err != nil || made != 1 {
		t.Errorf("%v creations of one topic, %v", made, err)
	}

	// By a subscription, and over HTTP.
	sub := newPipe(t, c.Brokers[0].TCP, "consumer")
	sub.send([]byte("SUB other archive\n"))
	_ = sub.answer() // the answer depends on the topic's broker
	testkit.Result(admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: "other"})).Must(t)
	localtest.MustAsk(t, http.MethodPost, "http://"+c.Brokers[1].HTTP+"/pub?topic=web", "x")
	testkit.Result(admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: "web"})).Must(t)

	// A deleted topic is created again.
	p := localtest.Producer(t, c.Brokers[2].TCP, "again")
	testkit.Must(t, p.Publish("web", []byte("1")))
	testkit.Result(admin.DeleteTopic(t.Context(), &srtmv1.DeleteTopicRequest{Name: "web"})).Must(t)
	testkit.WaitFor(t, "a publish to the topic that was deleted", func() bool { return p.Publish("web", []byte("2")) == nil })
}

// Thousands of publishers publish to a new topic at once. The cluster creates the topic once. Many new
// topics are created at the same time, within bounds, and operators still get their turn.
func TestStormsOfNewTopics(t *testing.T) {
	const most = 200
	c := localtest.Start(t, 2, []string{fmt.Sprint("--max-auto-topics=", most), "--max-auto-tenant-topics=5", "--fitting=off"}, "--mcap=1000000")
	openTopic(t, c, "first") // the cluster is not waiting for brokers with more topics
	conn := localtest.Dial(t, c.RPC)
	placement := srtmv1.NewPlacementServiceClient(conn)
	resolve := func(topic, tenant string) error {
		_, err := placement.Resolve(t.Context(), &srtmv1.ResolveRequest{Topic: topic, Create: true, Tenant: tenant})
		return err
	}
	autoCreated := func() float64 {
		n, err := localtest.Metric(&local.Process{HTTP: c.Web}, "srtm_topics_auto_created_total")
		testkit.Must(t, err)
		return n
	}
	var all sync.WaitGroup
	for range 2000 {
		all.Go(func() { testkit.NoError(t, resolve("one", "")) })
	}
	all.Wait()
	testkit.MustEqual(t, autoCreated(), 1)

	var refused int
	var created []string
	var mu sync.Mutex
	for i := range 2 * most {
		all.Go(func() {
			name := fmt.Sprintf("storm-%d", i)
			err := resolve(name, "")
			mu.Lock()
			defer mu.Unlock()
			switch status.Code(err) {
			case codes.OK:
				created = append(created, name)
			case codes.ResourceExhausted:
				refused++
				if !strings.Contains(err.Error(), "--max-auto-topics") {
					t.Error(err)
				}
			default:
				t.Error(err)
			}
		})
	}
	openTopic(t, c, "operators") // gets its turn in the middle
	all.Wait()
	if n := len(created); n < most-3 || n > most-2 || n+refused != 2*most {
		t.Fatalf("%d topics created beside 3, %d refused: at most %d", n, refused, most)
	}
	p := localtest.Producer(t, c.Brokers[0].TCP, "late")
	if err := p.Publish("another", []byte("x")); err == nil || !strings.Contains(err.Error(), "--max-auto-topics") {
		t.Errorf("a topic beyond the bound: %v", err)
	}
	if text, code, err := localtest.Ask(http.MethodPost, "http://"+c.Brokers[0].HTTP+"/pub?topic=another", "x"); err != nil || code != http.StatusServiceUnavailable || !strings.Contains(text, "TOPIC_NOT_CREATED") {
		t.Errorf("a topic beyond the bound: %d %s, %v", code, text, err)
	}
	openTopic(t, c, "operators-second") // operators may still create topics

	admin := srtmv1.NewAdminServiceClient(conn)
	for _, name := range created[:50] {
		testkit.Result(admin.DeleteTopic(t.Context(), &srtmv1.DeleteTopicRequest{Name: name})).Must(t)
	}
	made := 0
	for i := range 10 {
		if err := resolve(fmt.Sprintf("tenants-%d", i), "acme"); err == nil {
			made++
		} else if !strings.Contains(err.Error(), "--max-auto-tenant-topics") {
			t.Error(err)
		}
	}
	testkit.Equal(t, made, 5, "topics of one tenant")
	testkit.NoError(t, resolve("of-another", "umbrella"))
}

func TestAutoCreateOff(t *testing.T) {
	c := localtest.Start(t, 2, []string{"--auto-create=off"}, "--mcap=100000")
	topic := openTopic(t, c, "known")
	p := localtest.Producer(t, c.Brokers[0].TCP, "stock")
	if err := p.Publish("unknown", []byte("x")); err == nil || !strings.Contains(err.Error(), "E_BAD_TOPIC") || !strings.Contains(err.Error(), "srtm topic create") {
		t.Errorf("published to an unknown topic: %v", err)
	}
	if text, code, err := localtest.Ask(http.MethodPost, "http://"+c.Brokers[0].HTTP+"/pub?topic=unknown", "x"); err != nil || code != http.StatusNotFound {
		t.Errorf("published to an unknown topic: %d %s, %v", code, text, err)
	}
	p = localtest.Producer(t, c.Brokers[1-topic].TCP, "stock")
	testkit.NoError(t, p.Publish("known", []byte("x")))
}
