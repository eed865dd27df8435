package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

// member is one of several loaddistributors, with the addresses of its services.
type member struct {
	rpc, web  string
	conn      *grpc.ClientConn
	admin     srtmv1.AdminServiceClient
	placement srtmv1.PlacementServiceClient
	brokers   srtmv1.BrokerServiceClient
	grants    srtmv1.GrantServiceClient
	health    healthv1.HealthClient
}

// startMember runs a loaddistributor until the test ends, and waits until the loaddistributor serves.
func startMember(t *testing.T, flags ...string) *member {
	t.Helper()
	m := &member{rpc: testkit.Address(t), web: testkit.Address(t)}
	testkit.Run(t, func(ctx context.Context) error {
		return new(options).program().Execute(ctx, append([]string{"--grpc-address", m.rpc, "--http-address", m.web, "--tcp-address=", "--log-level=error", "--report-interval=50ms"}, flags...))
	})
	m.conn = testkit.Result(grpc.NewClient(m.rpc, grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	t.Cleanup(func() { m.conn.Close() })
	m.admin, m.placement = srtmv1.NewAdminServiceClient(m.conn), srtmv1.NewPlacementServiceClient(m.conn)
	m.brokers, m.grants = srtmv1.NewBrokerServiceClient(m.conn), srtmv1.NewGrantServiceClient(m.conn)
	m.health = healthv1.NewHealthClient(m.conn)
	return m
}

// status returns the health of a service; "" stands for the whole process.
func (m *member) status(ctx context.Context, service string) string {
	r, err := m.health.Check(ctx, &healthv1.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
	if err != nil {
		return status.Code(err).String()
	}
	return r.Status.String()
}

// receive returns the error that ends a stream, or nil when a message comes first.
func receive[M any](stream interface{ Recv() (*M, error) }, err error) error {
	if err == nil {
		_, err = stream.Recv()
	}
	return err
}

// Two loaddistributors share an etcd with certificates and passwords. One leads. The other answers
// reads, redirects every other request to the leader, and reports the leader.
func TestWhatAFollowerSays(t *testing.T) {
	const service = "srtm.v1."
	authority := testkit.NewAuthority(t)
	url := etcdtest.Start(t, etcdtest.Config{Authority: authority, User: "ld", Password: "open sesame", Prefix: "/ld/"}).URL
	password := testkit.File(t, "password", "open sesame\n")
	cert := authority.Certificate("ld")
	flags := []string{
		"--store=etcd", "--etcd-prefix=/ld/", "--etcd-user=ld", "--etcd-password-file=" + password,
		"--etcd-tls-ca=" + authority.File, "--etcd-tls-cert=" + cert.CertFile, "--etcd-tls-key=" + cert.KeyFile,
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	leader := startMember(t, append(flags, "--etcd-lease=60s", "--etcd-endpoint="+url)...) // long enough to keep the lead on a busy machine
	testkit.WaitFor(t, "it leads", func() bool { return leader.status(ctx, service+"BrokerService") == "SERVING" })
	join(ctx, t, leader)
	spec := &srtmv1.TopicSpec{
		Name: "t", Contract: &srtmv1.Contract{RateMilli: 10_000, Burst: 10, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		Publishers: []*srtmv1.Publisher{{Id: "p", Rate: 1}},
	}
	create, err := leader.admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: spec})
	for err == nil {
		_, err = create.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}

	etcd := strings.TrimPrefix(url, "https://")
	way, err := local.NewProxy(etcd)
	testkit.Must(t, err)
	t.Cleanup(way.Close)
	follower := startMember(t, append(flags, "--etcd-lease=1s", "--flex-lease=600ms", "--clock-bound=100ms", "--etcd-endpoint=https://"+way.Address())...)
	testkit.WaitFor(t, "the follower has read the topic", func() bool {
		_, err := follower.placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: "t", PublisherId: "p"}, grpc.WaitForReady(true))
		return err == nil
	})
	testkit.WaitFor(t, "the follower knows who leads", func() bool {
		_, err := follower.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "t"})
		return leaderOf(err) != ""
	})

	// Every method of every service.
	answers := map[string]func() error{
		"AdminService/ListTopics": func() error {
			r, err := follower.admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{})
			if err == nil && len(r.Topics) != 1 {
				err = fmt.Errorf("%d topics", len(r.Topics))
			}
			return err
		},
		"PlacementService/FindBrokers": func() error {
			r, err := follower.placement.FindBrokers(ctx, &srtmv1.FindBrokersRequest{Topic: "t"})
			if err == nil && len(r.TcpAddresses) != 1 {
				err = fmt.Errorf("brokers %v", r.TcpAddresses)
			}
			return err
		},
		"AdminService/ListChannels": func() error {
			_, err := follower.admin.ListChannels(ctx, &srtmv1.ListChannelsRequest{Topic: "t"})
			return err
		},
		"AdminService/ListBrokers": func() error {
			r, err := follower.admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
			if err == nil && (len(r.Brokers) != 1 || !r.Brokers[0].Connected) {
				err = fmt.Errorf("brokers %v", r.Brokers)
			}
			return err
		},
		"PlacementService/Resolve": func() error {
			_, err := follower.placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: "t", PublisherId: "p"})
			return err
		},
		"PlacementService/Watch": func() error {
			return receive(follower.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: "t"}))
		},
	}
	refusals := map[string]proto.Message{ // requests of unary calls
		"AdminService/GetTopic":           &srtmv1.GetTopicRequest{Name: "t"},
		"AdminService/ListPublisherMoves": &srtmv1.ListPublisherMovesRequest{Topic: "t"},
		"AdminService/DeleteTopic":        &srtmv1.DeleteTopicRequest{Name: "t"},
		"AdminService/UpdateTopic":        &srtmv1.UpdateTopicRequest{Spec: spec},
		"AdminService/DrainBroker":        &srtmv1.DrainBrokerRequest{BrokerId: "b1"},
		"AdminService/SetBrokerCapacity":  &srtmv1.SetBrokerCapacityRequest{BrokerId: "b1", Mcap: 1},
		"AdminService/RemoveBroker":       &srtmv1.RemoveBrokerRequest{BrokerId: "b1"},
		"AdminService/SeekChannel":        &srtmv1.SeekChannelRequest{Topic: "t", Channel: "c", To: &srtmv1.Place{To: &srtmv1.Place_Offset{}}},
		"AdminService/CreateChannel":      &srtmv1.CreateChannelRequest{Topic: "t", Channel: "c"},
		"AdminService/PauseChannel":       &srtmv1.PauseChannelRequest{Topic: "t", Channel: "c"},
		"AdminService/UnpauseChannel":     &srtmv1.UnpauseChannelRequest{Topic: "t", Channel: "c"},
		"AdminService/DeleteChannel":      &srtmv1.DeleteChannelRequest{Topic: "t", Channel: "c"},
		"AdminService/EmptyChannel":       &srtmv1.EmptyChannelRequest{Topic: "t", Channel: "c"},
		"AdminService/MovePublishers":     &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: []string{"p"}, BrokerId: "b1"},
		"GrantService/SetContract":        &srtmv1.SetContractRequest{Topic: "t"},
		"GrantService/RemoveContract":     &srtmv1.RemoveContractRequest{Topic: "t"},
		"GrantService/ListShares":         &srtmv1.ListSharesRequest{},
		"GrantService/Lead":               &srtmv1.LeadRequest{},
		"GrantService/ReportEnd":          &srtmv1.ReportEndRequest{BrokerId: "b1"},
		"GrantService/ForgetBroker":       &srtmv1.ForgetBrokerRequest{BrokerId: "b1"},
	}
	refusedStreams := map[string]func() error{
		"AdminService/ExportCluster": func() error {
			return receive(follower.admin.ExportCluster(ctx, &srtmv1.ExportClusterRequest{}))
		},
		"AdminService/ImportCluster": func() error {
			stream, err := follower.admin.ImportCluster(ctx)
			if err == nil {
				_, err = stream.CloseAndRecv()
			}
			return err
		},
		"AdminService/ProfileTopic": func() error {
			return receive(follower.admin.ProfileTopic(ctx, &srtmv1.ProfileTopicRequest{Name: "t", Lasts: durationpb.New(time.Minute)}))
		},
		"GrantService/Session": func() error { return receive(follower.grants.Session(ctx)) },
		"AdminService/CreateTopic": func() error {
			return receive(follower.admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: spec}))
		},
		"BrokerService/Session": func() error {
			session, err := follower.brokers.Session(ctx)
			if err == nil {
				err = session.Send(hello("b2"))
			}
			return receive(session, err)
		},
	}
	refused := func(name string, err error) {
		testkit.Equal(t, leaderOf(err), leader.rpc, "%s of a follower: %v, which sends us to", name, err)
	}
	for _, desc := range []grpc.ServiceDesc{srtmv1.AdminService_ServiceDesc, srtmv1.PlacementService_ServiceDesc, srtmv1.BrokerService_ServiceDesc, srtmv1.GrantService_ServiceDesc} {
		var methods []string
		for _, m := range desc.Methods {
			methods = append(methods, m.MethodName)
		}
		for _, s := range desc.Streams {
			methods = append(methods, s.StreamName)
		}
		for _, method := range methods {
			name := strings.TrimPrefix(desc.ServiceName, service) + "/" + method
			switch {
			case answers[name] != nil:
				if err := answers[name](); err != nil {
					t.Errorf("%s of a follower: %v", name, err)
				}
			case refusals[name] != nil:
				refused(name, follower.conn.Invoke(ctx, "/"+service+name, refusals[name], new(emptypb.Empty)))
			case refusedStreams[name] != nil:
				refused(name, refusedStreams[name]())
			default:
				t.Errorf("%s: what a follower does is not listed", name)
			}
		}
	}
	if err := follower.conn.Invoke(ctx, "/srtm.v1.NoService/Do", &srtmv1.GetTopicRequest{}, &srtmv1.GetTopicResponse{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a service that does not exist: %v", err)
	}

	for name, want := range map[string][2]string{
		"":                           {"SERVING", "SERVING"},
		service + "AdminService":     {"SERVING", "SERVING"},
		service + "PlacementService": {"SERVING", "SERVING"},
		service + "BrokerService":    {"SERVING", "NOT_SERVING"},
		service + "GrantService":     {"SERVING", "NOT_SERVING"},
	} {
		testkit.WaitFor(t, "the leader's health of "+name, func() bool { return leader.status(ctx, name) == want[0] })
		testkit.Equal(t, follower.status(ctx, name), want[1], "a follower's health of %q", name)
	}
	for path, want := range map[string]string{
		"/publisher?topic=t&id=p": `"broker_id":"b1"`, "/lookup?topic=t": `"tcp_port":4150`, "/topics": `["t"]`, "/nodes": `"hostname":"h"`, "/healthz": "ok", "/ping": "OK",
	} {
		if code, body := get(t, "http://"+follower.web+path); code != http.StatusOK || !strings.Contains(string(body), want) {
			t.Errorf("%s of a follower: %d %s", path, code, body)
		}
	}
	var shown struct{ Adaptor json.RawMessage }
	if code, body := get(t, "http://"+follower.web+"/debug/state"); code != http.StatusOK || json.Unmarshal(body, &shown) != nil || shown.Adaptor != nil {
		t.Errorf("/debug/state of a follower: %d %s", code, body)
	}

	// Cut off from its store, the follower does not serve. The follower answers from its knowledge,
	// and denies the existence of nothing.
	way.Retarget(testkit.Address(t)) // an address without a listener
	way.Drop(func(int) bool { return true })
	for _, name := range []string{"", service + "AdminService", service + "PlacementService"} {
		testkit.WaitFor(t, "without its store, health of "+name, func() bool { return follower.status(ctx, name) == "NOT_SERVING" })
	}
	if _, err := follower.placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: "t", PublisherId: "p"}); err != nil {
		t.Errorf("what it knows: %v", err)
	}
	for _, r := range []*srtmv1.ResolveRequest{{Topic: "new", PublisherId: "p"}, {Topic: "t", PublisherId: "new"}} {
		_, resolve := follower.placement.Resolve(ctx, r)
		watch := receive(follower.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: r.Topic, PublisherIds: []string{r.PublisherId}}))
		for _, err := range []error{resolve, watch} {
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "does not know yet") {
				t.Errorf("%v, which may be there by now: %v", r, err)
			}
		}
	}
	both, err := follower.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: "t", PublisherIds: []string{"new", "p"}})
	testkit.Must(t, err)
	if r, err := both.Recv(); err != nil || len(r.Assignments) != 1 || r.Assignments[0].PublisherId != "p" {
		t.Errorf("one that it knows beside one that it does not: %v, %v", r, err)
	}
	way.Retarget(etcd)
	testkit.WaitFor(t, "it serves again", func() bool { return follower.status(ctx, "") == "SERVING" })
	if _, err := follower.placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: "t", PublisherId: "new"}); status.Code(err) != codes.NotFound {
		t.Errorf("a publisher that is not there: %v", err)
	}
}

// A leader that loses its store continues as a follower. The follower answers from its knowledge, does
// not deny the existence of unknown topics, and refuses no connection.
func TestALeaderThatLosesItsStoreAnswers(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Config{})
	way, err := local.NewProxy(strings.TrimPrefix(etcd.URL, "http://"))
	testkit.Must(t, err)
	t.Cleanup(way.Close)
	m := startMember(t, "--store=etcd", "--etcd-endpoint=http://"+way.Address(), "--etcd-lease=5s", "--flex-lease=600ms", "--clock-bound=100ms")
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	testkit.WaitFor(t, "it leads", func() bool { return m.status(ctx, "srtm.v1.BrokerService") == "SERVING" })
	join(ctx, t, m)
	create, err := m.admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name: "known", Contract: &srtmv1.Contract{RateMilli: 10_000, Burst: 10, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		Publishers: []*srtmv1.Publisher{{Id: "p", Rate: 1}},
	}})
	for err == nil {
		_, err = create.Recv()
	}
	testkit.ErrorIs(t, err, io.EOF)
	way.Cut(true)
	refused := func(err error) {
		if errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	client := &http.Client{Timeout: testkit.Hang, Transport: &http.Transport{DisableKeepAlives: true}}
	testkit.WaitFor(t, "it leads no more", func() bool {
		for _, address := range []string{m.rpc, m.web} {
			conn, err := net.Dial("tcp", address)
			refused(err)
			if err == nil {
				conn.Close()
			}
		}
		res, err := client.Get("http://" + m.web + "/healthz")
		refused(err)
		if err != nil { // the stream ended at that moment
			return false
		}
		defer res.Body.Close()
		text, _ := io.ReadAll(res.Body)
		return res.StatusCode == http.StatusServiceUnavailable && strings.Contains(string(text), "cut off from the store")
	})
	for range 10 { // the leader still tries to resign, in vain
		_, err := m.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: "t"}, grpc.WaitForReady(true))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "does not know yet") {
			t.Errorf("a topic: %v", err)
		}
		_, err = m.placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: "known", PublisherId: "p"}, grpc.WaitForReady(true))
		testkit.NoError(t, err, "a publisher that it knows")
		_, err = m.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "t"}, grpc.WaitForReady(true))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "does not lead") {
			t.Errorf("a change: %v", err)
		}
	}
	way.Cut(false)
	testkit.WaitFor(t, "it leads again", func() bool { return m.status(ctx, "srtm.v1.BrokerService") == "SERVING" })
}

// A leader that is stopped while etcd does not answer ends without an error. The leader's lease
// expires.
func TestALeaderStopsWithoutItsStore(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Config{})
	way, err := local.NewProxy(strings.TrimPrefix(etcd.URL, "http://"))
	testkit.Must(t, err)
	t.Cleanup(way.Close)
	m := startMember(t, "--store=etcd", "--etcd-endpoint=http://"+way.Address(), "--etcd-lease=60s")
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	testkit.WaitFor(t, "it leads", func() bool { return m.status(ctx, "srtm.v1.BrokerService") == "SERVING" })
	way.Cut(true) // testkit.Run stops the leader, and fails the test for an error
}

// Before a process finds its store, the process does not deny the existence of a topic, and reports
// that it is not ready.
func TestAFollowerWithoutItsStore(t *testing.T) {
	m := startMember(t, "--store=etcd", "--etcd-endpoint=http://"+testkit.Address(t))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	_, err := m.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: "t"}, grpc.WaitForReady(true))
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "does not know yet") {
		t.Errorf("a topic: %v", err)
	}
	for _, name := range []string{"", "srtm.v1.AdminService", "srtm.v1.PlacementService", "srtm.v1.BrokerService"} {
		testkit.WaitFor(t, "health of "+name, func() bool { return m.status(ctx, name) == "NOT_SERVING" })
	}
	if code, body := get(t, "http://"+m.web+"/healthz"); code != http.StatusServiceUnavailable {
		t.Errorf("/healthz: %d %s", code, body)
	}
	if code, body := get(t, "http://"+m.web+"/lookup?topic=t"); code != http.StatusServiceUnavailable || !strings.Contains(string(body), "NOT_READ_YET") {
		t.Errorf("/lookup: %d %s", code, body)
	}
	if code, body := get(t, "http://"+m.web+"/publisher?topic=t&id=p"); code != http.StatusServiceUnavailable || !strings.Contains(string(body), "NOT_READ_YET") {
		t.Errorf("/publisher: %d %s", code, body)
	}
}

// leaderOf returns the leader's address in a refusal, or "" for any other answer.
func leaderOf(err error) string {
	s := status.Convert(err)
	if s.Code() != codes.Unavailable {
		return ""
	}
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.Reason == "NOT_LEADER" {
			return info.Metadata["leader"]
		}
	}
	return ""
}

// join has a broker, b1, join the leader until the test ends.
func join(ctx context.Context, t *testing.T, leader *member) {
	t.Helper()
	a, err := agent.New(agent.Config{
		LoadDistributor: leader.rpc, BrokerID: "b1", TCPAddress: "h.example:4150", HTTPAddress: "h.example:4151", Mcap: 1000, Version: "1", Hostname: "h",
		Log: slog.New(slog.DiscardHandler),
	}, agenttest.New())
	testkit.Must(t, err)
	testkit.Run(t, a.Run)
	testkit.WaitFor(t, "a broker joins", func() bool {
		r, err := leader.admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
		return err == nil && len(r.Brokers) == 1 && r.Brokers[0].Connected
	})
}

func hello(id string) *srtmv1.BrokerMessage {
	return &srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Hello{Hello: &srtmv1.BrokerHello{
		BrokerId: id, Instance: "1", TcpAddress: "h.example:4150", HttpAddress: "h.example:4151", Version: "1", Mcap: 1000, Hostname: "h",
	}}}
}
