package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestParse(t *testing.T) {
	file := testkit.File(t, "c.toml", "window = \"20s\"\nseed = 7\n")
	var o, first options
	_, _, err := o.program().Parse([]string{"--config", file, "--tbadaptor-address", "h:4180", "--report-interval=500ms"}, io.Discard)
	testkit.Must(t, err)
	if o.window != 20*time.Second || o.seed != 7 || o.tbadaptorAddress != "h:4180" || o.reportInterval != 500*time.Millisecond ||
		o.addresses.GRPC != "127.0.0.1:4170" || o.controllerConfig(slog.New(slog.DiscardHandler), nil).Fitting != tuner.ModeFast || o.addresses.HTTP != "127.0.0.1:4161" {
		t.Errorf("got %+v", o)
	}
	_, _, err = first.program().Parse(nil, io.Discard)
	testkit.Must(t, err)
	if first.seed == 0 {
		t.Error("no seed was drawn")
	}
	var out bytes.Buffer
	if _, _, err := new(options).program().Parse([]string{"-version"}, &out); err == nil || !strings.HasPrefix(out.String(), "nsqlookupd v1.3.0+srtm.") {
		t.Errorf("--version: %v\n%s", err, out.String())
	}
	out.Reset()
	if _, _, err := new(options).program().Parse([]string{"--help"}, &out); err == nil || !strings.Contains(out.String(), "-tbadaptor-address") {
		t.Errorf("--help: %v\n%s", err, out.String())
	}
}

func TestFaultsAreNamedTogether(t *testing.T) {
	err := new(options).program().Execute(t.Context(), []string{
		"--report-interval=1ms", "--prepare-timeout=0", "--window=0", "--log-level=loud", "--store=tape", "--tbadaptor-address=nowhere:port",
		"--inactive-producer-timeout=0", "--fitting=slow", "--fitting-round=2h", "--takeover-after=-1s",
		"--evacuate-after=-1s", "--consumer-wait=-1s", "--tombstone-lifetime=0", "--max-auto-topics=0", "--max-auto-tenant-topics=0",
		"--rebalance-after=0", "--rebalance-cooldown=0", "--rebalance-step=2", "--rebalance-capture=-1s", "--flex-lease=-1s",
	})
	if !errors.As(err, new(program.UsageError)) {
		t.Fatalf("got %v", err)
	}
	for _, part := range []string{
		"--report-interval 1ms: want 10ms to 1m0s", "--prepare-timeout 0s", "--window 0s: want 10ms to 1h", "loud", "--tbadaptor-address", "--inactive-producer-timeout 0s", "--store", "--fitting ",
		"--fitting-round 2h", "--takeover-after -1s", "--evacuate-after -1s: want 10ms to 24h", "--consumer-wait -1s", "--tombstone-lifetime 0s", "--max-auto-topics 0", "--max-auto-tenant-topics 0",
		"--rebalance-after 0s", "--rebalance-cooldown 0s", "--rebalance-step 2", "--rebalance-capture -1s", "--flex-lease and --clock-bound together",
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v\ndoes not say %q", err, part)
		}
	}
}

// The settings of the embedded adaptor are named as the loaddistributor's flags, each once.
func TestFaultsOfTheEmbeddedAdaptor(t *testing.T) {
	err := new(options).program().Execute(t.Context(), []string{"--share-period=-1s", "--prepare-timeout=2h", "--clock-bound=-1s", "--flex-percent=101"})
	for _, part := range []string{"--share-period -1s: want 1ms to 1h", "--prepare-timeout 2h0m0s: want", "--clock-bound -1s", "--flex-percent 101"} {
		if err == nil || strings.Count(err.Error(), part) != 1 {
			t.Errorf("%v\ndoes not say %q once", err, part)
		}
	}
}

func TestFaultsOfEtcdsFlags(t *testing.T) {
	empty := testkit.File(t, "empty", "\n")
	authority := testkit.NewAuthority(t)
	for name, c := range map[string]struct {
		flags []string
		want  string
	}{
		"a user without a password":  {[]string{"--etcd-user=u"}, "--etcd-user and --etcd-password-file"},
		"a password without a user":  {[]string{"--etcd-password-file=" + empty}, "--etcd-user and --etcd-password-file"},
		"a password that is none":    {[]string{"--etcd-user=u", "--etcd-password-file=" + empty}, "is empty"},
		"a password that is nowhere": {[]string{"--etcd-user=u", "--etcd-password-file=" + empty + "r"}, "--etcd-password-file"},
		"no port to be found at":     {[]string{"--grpc-address=127.0.0.1:0"}, "--advertise-address 127.0.0.1:0"},
		"an authority that is none":  {[]string{"--etcd-tls-ca=" + empty}, "--etcd-tls-ca"},
		"half a pair":                {[]string{"--etcd-tls-ca=" + authority.File, "--etcd-tls-cert=" + authority.File}, "--etcd-tls-cert and --etcd-tls-key"},
		"certificates, but in clear": {[]string{"--etcd-tls-ca=" + authority.File, "--etcd-endpoint=http://127.0.0.1:1"}, "want https"},
	} {
		_, _, err := new(options).program().Parse(append([]string{"--store=etcd", "--etcd-endpoint=127.0.0.1:2379"}, c.flags...), io.Discard)
		testkit.ErrorHas(t, err, c.want, "%s", name)
	}
}

// A tenant's token is limited, and an operator's token is not. Without an answer of admission the
// default reply counts.
func TestTenantTokensAreLimited(t *testing.T) {
	const acme, operator = "acme-0123456789abcdef", "operator-0123456789abcdef"
	tokens := testkit.File(t, "tokens", "admin "+acme+" acme\nadmin "+operator+"\n")
	rpcAddress, webAddress := testkit.Address(t), testkit.Address(t)
	testkit.Run(t, func(ctx context.Context) error {
		return new(options).program().Execute(ctx, []string{"--grpc-address", rpcAddress, "--http-address", webAddress, "--tcp-address=", "--store=memory", "--log-level=error",
			"--token-file", tokens, "--admission-address", testkit.Address(t), "--tenant-rate=*=10"})
	})
	conn, err := grpc.NewClient(rpcAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testkit.Must(t, err)
	defer conn.Close()
	admin := srtmv1.NewAdminServiceClient(conn)
	for token, want := range map[string]string{acme: "tenant acme: too many changes", operator: "topic t: no such topic"} {
		for name, call := range map[string]func(context.Context) error{
			"update": func(ctx context.Context) error {
				_, err := admin.UpdateTopic(ctx, &srtmv1.UpdateTopicRequest{Spec: &srtmv1.TopicSpec{Name: "t"}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"channels"}}}, grpc.WaitForReady(true))
				return err
			},
			"move": func(ctx context.Context) error {
				_, err := admin.MovePublishers(ctx, &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: []string{"p"}, BrokerId: "b"}, grpc.WaitForReady(true))
				return err
			},
		} {
			err := call(metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token))
			if (status.Code(err) == codes.ResourceExhausted) != (token == acme) {
				t.Errorf("%s: %v, want %s", name, err, want)
			}
		}
	}
	for _, flag := range []string{"--tenant-rate=acme", "--tenant-rate==1", "--tenant-rate=a=-1", "--admission-default-reply=no", "--admission-mac-key-file=/nowhere"} {
		if _, _, err := new(options).program().Parse([]string{flag}, io.Discard); err == nil {
			t.Errorf("%s was taken", flag)
		}
	}
}

func get(t *testing.T, url string) (int, []byte) {
	t.Helper()
	client := &http.Client{Timeout: testkit.Hang, Transport: &http.Transport{DisableKeepAlives: true}}
	r := testkit.Result(client.Get(url)).Must(t)
	defer r.Body.Close()
	body := testkit.Result(io.ReadAll(r.Body)).Must(t)
	return r.StatusCode, body
}

func TestTheDaemonServesUntilItIsStopped(t *testing.T) {
	rpcAddress, webAddress := testkit.Address(t), testkit.Address(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- new(options).program().Execute(ctx, []string{"--grpc-address", rpcAddress, "--http-address", webAddress, "--tcp-address", testkit.Address(t), "--store=memory", "--log-level=error"})
	}()
	conn := testkit.Result(grpc.NewClient(rpcAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	defer conn.Close()
	limit, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()

	watch, err := healthv1.NewHealthClient(conn).Watch(limit, &healthv1.HealthCheckRequest{Service: "srtm.v1.AdminService"}, grpc.WaitForReady(true))
	testkit.Must(t, err)
	for {
		r := testkit.Result(watch.Recv()).Must(t)
		if r.Status == healthv1.HealthCheckResponse_SERVING {
			break
		}
	}
	_, err = srtmv1.NewAdminServiceClient(conn).ListBrokers(limit, &srtmv1.ListBrokersRequest{})
	testkit.NoError(t, err)
	if _, err := srtmv1.NewGrantServiceClient(conn).ListShares(limit, &srtmv1.ListSharesRequest{}); err != nil {
		t.Errorf("the embedded adaptor: %v", err)
	}
	for path, want := range map[string]string{
		"/ping": "OK", "/topics": `{"topics":[]}`, "/healthz": "ok", "/metrics": "srtm_brokers_connected 0", "/debug/pprof/": "goroutine",
	} {
		if code, body := get(t, "http://"+webAddress+path); code != http.StatusOK || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d %.200s, want %q in it", path, code, body, want)
		}
	}
	var shown struct {
		Controller struct{ Topics []any }
		Adaptor    struct{ Connected []string }
	}
	if code, body := get(t, "http://"+webAddress+"/debug/state"); code != http.StatusOK || json.Unmarshal(body, &shown) != nil || shown.Controller.Topics == nil {
		t.Errorf("/debug/state: %d %s", code, body)
	}

	stop()
	if r, err := watch.Recv(); err == nil && r.Status != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health while it stops: %v", r.Status)
	}
	cancel() // the watch would delay the server's stop by the grace period
	testkit.NoError(t, <-done)
}

func TestAnAddressInUse(t *testing.T) {
	taken := testkit.Listen(t)
	err := new(options).program().Execute(t.Context(), []string{"--grpc-address", taken.Addr().String(), "--http-address", "127.0.0.1:0", "--store=memory", "--log-level=error"})
	testkit.ErrorHas(t, err, "--grpc-address", "gRPC")
	err = new(options).program().Execute(t.Context(), []string{"--grpc-address", "127.0.0.1:0", "--http-address", taken.Addr().String(), "--store=memory", "--log-level=error"})
	testkit.ErrorHas(t, err, "--http-address", "HTTP")
	err = new(options).program().Execute(t.Context(), []string{"--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--tcp-address", taken.Addr().String(), "--store=memory", "--log-level=error"})
	testkit.ErrorHas(t, err, "--tcp-address", "TCP")
}
