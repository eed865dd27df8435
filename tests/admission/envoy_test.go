package admission

import (
	"testing"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	service "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// Runs the daemon against Envoy's own service definitions.
func TestEnvoy(t *testing.T) {
	at := localtest.Ports(t, 3)
	localtest.Run(t, localtest.Program(t, "admission"), at[0]+"/healthz", "--data-path="+t.TempDir(),
		"--http-address="+at[0], "--grpc-address="+at[1], "--udp-address="+at[2], "--attempts=10000", "--wait=5s", "--lookup-wait=5s")
	conn := testkit.Result(grpc.NewClient(at[1], grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	defer conn.Close()
	_, err := srtmv1.NewAdmissionAdminClient(conn).SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{
		{Key: "shop|path=/buy|user=7", RefillMilli: 100, Capacity: 5},
	}}, grpc.WaitForReady(true))
	testkit.Must(t, err)
	request := &service.RateLimitRequest{Domain: "shop", HitsAddend: 4, Descriptors: []*ratelimit.RateLimitDescriptor{
		{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: "path", Value: "/buy"}, {Key: "user", Value: "7"}}},
		{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: "path", Value: "/buy"}, {Key: "user", Value: "8"}}, HitsAddend: wrapperspb.UInt64(1)},
	}}
	envoy := service.NewRateLimitServiceClient(conn)
	reply := testkit.Result(envoy.ShouldRateLimit(t.Context(), request)).Must(t)
	if s := reply.GetStatuses(); reply.GetOverallCode() != service.RateLimitResponse_OVER_LIMIT || len(s) != 2 ||
		s[0].GetCode() != service.RateLimitResponse_OK || s[0].GetLimitRemaining() != 1 || s[1].GetCode() != service.RateLimitResponse_OVER_LIMIT {
		t.Fatalf("%v", reply)
	}
	request.Descriptors = request.Descriptors[:1]
	reply = testkit.Result(envoy.ShouldRateLimit(t.Context(), request)).Must(t)
	s, h := reply.GetStatuses()[0], reply.GetResponseHeadersToAdd()
	if reply.GetOverallCode() != service.RateLimitResponse_OVER_LIMIT || s.GetDurationUntilReset().AsDuration().Seconds() < 1 ||
		len(h) != 1 || h[0].GetKey() != "Retry-After" || len(reply.ProtoReflect().GetUnknown()) > 0 {
		t.Errorf("%v", reply)
	}
	testkit.WaitFor(t, "the rule's rate", func() bool {
		reply := testkit.Result(envoy.ShouldRateLimit(t.Context(), request)).Must(t)
		limit := reply.GetStatuses()[0].GetCurrentLimit()
		return limit.GetRequestsPerUnit() == 6 && limit.GetUnit() == service.RateLimitResponse_RateLimit_MINUTE
	})
}
