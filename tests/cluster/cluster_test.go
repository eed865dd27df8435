package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// start starts brokers of 1,000 msg/s each with all other processes of a cluster.
func start(t *testing.T, brokers int) *local.Cluster {
	t.Helper()
	c, err := local.StartCluster(t.Context(), local.ClusterConfig{
		Brokers: brokers, Mcap: 1000, BinDir: localtest.Folder(t, "nsqd", "loaddistributor", "tbadaptor"), LogDir: t.TempDir(), StartTimeout: local.Patience,
		// None of these brokers fails. A broker takes longer than the default to read 70,000 groups
		// while others use the processors.
		LoaddistributorFlags: []string{fmt.Sprint("--prepare-timeout=", local.Patience)},
	})
	testkit.Must(t, err)
	t.Cleanup(func() {
		testkit.NoError(t, c.Stop())
	})
	return c
}

func create(ctx context.Context, c *local.Cluster, spec *srtmv1.TopicSpec) (*srtmv1.Topic, error) {
	return localtest.CreateTopic(ctx, c.Conn, &srtmv1.CreateTopicRequest{Spec: spec})
}

func spec(name string, rate, burst int64, groups ...*srtmv1.PublisherGroup) *srtmv1.TopicSpec {
	return &srtmv1.TopicSpec{
		Name: name,
		Contract: &srtmv1.Contract{
			RateMilli: rate * 1000, Burst: burst,
			Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)},
		},
		Groups:   groups,
		Channels: []string{"archive"},
	}
}

// Follows a topic and its messages through the real processes, with an unmodified consumer behind the
// lookup, and our publisher library.
func TestATopicFromCreationToDelivery(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	c := start(t, 3)

	// 1500 msg/s need two brokers of 1000; each group is split over both.
	const publishers, each = 20, 50
	topic, err := create(ctx, c, spec("sensors", 1500, 40,
		&srtmv1.PublisherGroup{Key: "north", Count: publishers / 2, Rate: 10},
		&srtmv1.PublisherGroup{Key: "south", Count: publishers / 2, Rate: 10}))
	testkit.Must(t, err)
	var rate, burst int64
	for _, q := range topic.GetQuotas() {
		rate += q.GetShare().GetRateMilli()
		burst += q.GetShare().GetBurst()
		if q.GetGroups()["north"] != publishers/4 || q.GetGroups()["south"] != publishers/4 {
			t.Errorf("%s gets %v of the groups, want half of each", q.GetBrokerId(), q.GetGroups())
		}
	}
	if len(topic.GetQuotas()) != 2 || rate != 1_500_000 || burst != 40 || topic.GetState() != srtmv1.TopicState_TOPIC_STATE_ACTIVE {
		t.Fatalf("%d brokers, rate %d, burst %d, %v", len(topic.GetQuotas()), rate, burst, topic.GetState())
	}

	var seen sync.Map // number -> times
	var got sync.WaitGroup
	got.Add(publishers * each)
	localtest.Consume(t, "sensors", "archive", nsq.HandlerFunc(func(m *nsq.Message) error {
		n := binary.BigEndian.Uint32(m.Body)
		if _, again := seen.LoadOrStore(n, true); again {
			t.Errorf("message %d was delivered twice", n)
			return nil
		}
		got.Done()
		return nil
	}), func(c *nsq.Config) { c.LookupdPollInterval, c.MaxInFlight = 200*time.Millisecond, 100 }, "http://"+c.Lookup)

	lib, err := client.New(client.Config{Address: c.GRPC})
	testkit.Must(t, err)
	defer func() {
		testkit.NoError(t, lib.Close(ctx))
	}()
	brokers := map[string]int{}
	var wg sync.WaitGroup
	for i := range publishers {
		id := fmt.Sprintf("%s.%d", []string{"north", "south"}[i%2], i/2)
		p, err := lib.Publisher(ctx, "sensors", id)
		if err != nil {
			t.Fatalf("publisher %s: %v", id, err)
		}
		brokers[p.Broker()]++
		wg.Go(func() {
			for j := range each {
				if err := p.Publish(ctx, binary.BigEndian.AppendUint32(nil, uint32(i*each+j))); err != nil {
					t.Errorf("%s: %v", id, err)
				}
			}
		})
	}
	wg.Wait()
	if len(brokers) != 2 {
		t.Errorf("publishers by broker: %v, want both", brokers)
	}
	delivered := make(chan struct{})
	go func() {
		got.Wait()
		close(delivered)
	}()
	select {
	case <-delivered:
	case <-ctx.Done():
		t.Fatal("messages are missing")
	}

	admin := srtmv1.NewAdminServiceClient(c.Conn)
	_, err = admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "sensors"})
	testkit.Must(t, err)
	if body, code, err := localtest.Ask(http.MethodGet, "http://"+c.Lookup+"/lookup?topic=sensors", ""); code != http.StatusNotFound {
		t.Errorf("lookup of a deleted topic: %d %s %v", code, body, err)
	}
}

// A refused topic leaves nothing behind, on no broker.
func TestWhatCannotBeCreatedLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	c := start(t, 2)
	group := &srtmv1.PublisherGroup{Key: "g", Count: 10, Rate: 10}
	for name, bad := range map[string]struct {
		spec  *srtmv1.TopicSpec
		code  codes.Code
		field string
		bound string
	}{
		"rate of 0":             {spec: spec("t", 0, 5, group), code: codes.InvalidArgument, field: "rate_milli"},
		"burst of 0":            {spec: spec("t", 100, 0, group), code: codes.InvalidArgument, field: "burst"},
		"publishers above rate": {spec: spec("t", 99, 5, group), code: codes.InvalidArgument, field: "rate"},
		"publisher twice":       {spec: spec("t", 900, 5, group, group), code: codes.InvalidArgument, field: "groups"},
		"name":                  {spec: spec("no spaces", 100, 5, group), code: codes.InvalidArgument, field: "name"},
		"more than there is":    {spec: spec("t", 5000, 5, group), code: codes.ResourceExhausted, bound: "rcap"},
		"burst below k":         {spec: spec("t", 1500, 1, group), code: codes.ResourceExhausted, bound: "burst"},
	} {
		_, err := create(ctx, c, bad.spec)
		s := status.Convert(err)
		if s.Code() != bad.code {
			t.Errorf("%s: %v, want %v", name, err, bad.code)
			continue
		}
		found := false
		for _, d := range s.Details() {
			switch d := d.(type) {
			case *errdetails.BadRequest:
				for _, v := range d.GetFieldViolations() {
					found = found || bad.field != "" && strings.Contains(v.GetField(), bad.field)
				}
			case *srtmv1.Infeasible:
				found = found || d.GetBound() == bad.bound
			}
		}
		if !found {
			t.Errorf("%s: the details %v name neither field %q nor bound %q", name, s.Details(), bad.field, bad.bound)
		}
	}
	admin := srtmv1.NewAdminServiceClient(c.Conn)
	topics, err := admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{})
	if err != nil || len(topics.GetTopics()) != 0 {
		t.Errorf("topics: %v %v", topics, err)
	}
	brokers := testkit.Result(admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})).Must(t)
	for _, b := range brokers.GetBrokers() {
		if b.GetAllocated() != 0 {
			t.Errorf("%s has %d msg/s allocated", b.GetId(), b.GetAllocated())
		}
		if body, _, _ := localtest.Ask(http.MethodGet, "http://"+b.GetHttpAddress()+"/stats?format=json", ""); !strings.Contains(body, `"topics":[]`) {
			t.Errorf("%s: %s", b.GetId(), body)
		}
	}
}

// A topic of very many groups, and many such topics, exceed the size of a gRPC message. Brokers still
// receive the topics, operators see them, and lists come in pages of a size for any client.
func TestManyGroups(t *testing.T) {
	c := start(t, 1)
	groups := func(n int) (all []*srtmv1.PublisherGroup) {
		for i := range n {
			all = append(all, &srtmv1.PublisherGroup{Key: fmt.Sprintf("%s%d-", strings.Repeat("x", 50), i), Count: 1, Rate: 0.005, Weight: 1})
		}
		return all
	}
	place := func(conn grpc.ClientConnInterface, name string, of int) {
		t.Helper()
		is := spec(name, 1, 10, groups(of)...)
		is.Contract.RateMilli = int64(of) * 6
		is.Pacing = srtmv1.PacingMode_PACING_MODE_ADVISE
		testkit.Result(localtest.CreateTopic(t.Context(), conn, &srtmv1.CreateTopicRequest{Spec: is})).Must(t)
	}
	const topics = 20
	for i := range topics {
		place(c.Conn, fmt.Sprint("t", i), 4000)
	}
	admin := srtmv1.NewAdminServiceClient(c.Conn)
	for seen, token := 0, ""; ; {
		page := testkit.Result(admin.ListTopics(t.Context(), &srtmv1.ListTopicsRequest{PageSize: 1000, PageToken: token})).Must(t)
		seen += len(page.Topics)
		if token = page.NextPageToken; token == "" {
			if seen != topics {
				t.Errorf("%d topics of %d", seen, topics)
			}
			break
		}
	}
	place(localtest.Dial(t, c.GRPC), "big", 70_000)
	localtest.Srtm(t, c.GRPC, "topic", "describe", "big")
	localtest.Srtm(t, c.GRPC, "topic", "list")
}
