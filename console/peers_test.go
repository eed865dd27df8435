package console

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// decides is a server of admission as the console reaches it.
type decides struct {
	grpc.ClientConnInterface
	calls   atomic.Int64
	replies map[string]proto.Message // by method; a method without an entry answers codes.Unimplemented
}

func (d *decides) Invoke(ctx context.Context, method string, request, reply any, _ ...grpc.CallOption) error {
	d.calls.Add(1)
	if sent, _ := metadata.FromOutgoingContext(ctx); len(sent) > 0 {
		return status.Errorf(codes.Internal, "the server gets the console's metadata %v", sent)
	}
	answer, found := d.replies[method]
	if !found {
		return status.Error(codes.Unimplemented, method)
	}
	if list, is := request.(*srtmv1.ListRulesRequest); is && list.Prefix == "none/" {
		answer = &srtmv1.ListRulesResponse{}
	}
	proto.Merge(reply.(proto.Message), answer)
	return nil
}

// The page of admission shows the rules, the keys near their limit of all servers, and the servers: also
// owners of partitions that the console cannot reach, routers, and servers that do not answer.
func TestAdmissionPage(t *testing.T) {
	router := &decides{replies: map[string]proto.Message{
		srtmv1.AdmissionAdmin_ListRules_FullMethodName: &srtmv1.ListRulesResponse{NextPageToken: "user/9" + evil, Rules: []*srtmv1.AdmissionRule{
			{Key: "ip/*", RefillMilli: 5000, Capacity: 20, Shadow: true}, {Key: "user/9" + evil, RefillMilli: 100_000, RefillPeriodS: 86400, Capacity: 100, Strict: true, FailOpen: true}, {Key: "user/banned"},
		}},
		srtmv1.AdmissionAdmin_ListPartitions_FullMethodName: &srtmv1.ListPartitionsResponse{Partitions: []*srtmv1.AdmissionPartitions{
			{First: 0, Last: 999, Server: "one:4193"}, {First: 1000, Last: 1099, Server: "one:4193", Target: "two:4193"}, {First: 1100, Last: 4095, Server: "two:4193"},
		}},
	}}
	server := &decides{replies: map[string]proto.Message{srtmv1.AdmissionState_GetServerState_FullMethodName: &srtmv1.GetServerStateResponse{
		Server: "one:4193", Partitions: 1100, Keys: 12345, KeyLimit: 10_000_000, CheckpointAgeMs: 700, Follower: "two:4193", ReplicationLagMs: 90,
		Nearest: []*srtmv1.AdmissionKey{{Key: evil, Capacity: 100, Denied: 77}, {Key: "ip/1", Left: 19, Capacity: 20, ByDefault: true, Shadow: true}},
	}}}
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Admission = map[string]grpc.ClientConnInterface{"one:4192": server, "router:4192": router}
	})
	_, page := get(t, browser, base+"/ui/admission")
	contains(t, page, `aria-current="page">Admission</a>`, "5 per second", "100 per day", "denies all", "strict", "fails open", "12\u202f345", "1\u202f100, 100 move", "not configured", `<span class="chip good">router</span>`,
		`<td class="n">77</td>`, `<span class="chip bad">no credit</span>`, "default, shadow", "700 ms", `from=user%2F9`)
	if strings.Contains(page, "<script>alert") || strings.Index(page, "&lt;script&gt;") > strings.Index(page, ">ip/1<") {
		t.Errorf("%s", page)
	}
	_, page = get(t, browser, base+"/ui/admission?q=none/")
	contains(t, page, "There is no rule whose key begins with none/.")
	for range 20 { // answers are shared
		get(t, browser, base+"/ui/admission")
	}
	if n := server.calls.Load() + router.calls.Load(); n > 20 {
		t.Errorf("the servers were called %d times", n)
	}

	silent := &decides{replies: map[string]proto.Message{}}
	_, base, browser = serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Admission = map[string]grpc.ClientConnInterface{"one:4192": silent}
	})
	_, page = get(t, browser, base+"/ui/admission")
	contains(t, page, "The rules and partitions are unknown")
}

// The page of gateways shows the queues and servers of all gateways, and gateways that do not answer.
func TestGatewaysPage(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Gateways = []string{"g1:4196", "g2:4196", "g3:4196"}
		c.Gateway = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Host == "g3:4196":
				http.Error(w, "down"+evil, http.StatusBadGateway)
			case r.URL.Path == "/status":
				_, _ = fmt.Fprintf(w, `{"balance":"jbq","scheduler":"mqos","resources":["cpu","disk"],
					"classes":[{"name":"paid","weight":6,"queued":3,"in_flight":2,"sent":900,"used":{"cpu":75,"disk":1}},{"name":"free%[1]s","weight":1,"queued":40,"sent":100,"refused_full":7,"refused_admission":2,"wait_ms_p99":1500,"used":{"cpu":25,"disk":3}}],
					"servers":[{"url":"http://a:80","in_flight":2,"limit":8,"sent":5,"free":{"cpu":30,"disk":100}},{"url":"http://%[2]s:80","ejected":true,"failed":9}]}`, strings.ReplaceAll(evil, `"`, `\"`), r.URL.Host)
			}
		}))
	})
	_, page := get(t, browser, base+"/ui/gateways")
	contains(t, page, `aria-current="page">Gateways</a>`, "of 3 answer", `<td class="whole">weight, for each resource (mqos)</td><td class="whole">the soonest answer (jbq)</td>`, "<small>7 queue full 2 by admission</small>", "1.5 s", "cpu 75 %", "disk 25 %", "cpu 70 %", "disk 0 %", `<span class="chip bad">ejected</span>`, `<span class="chip bad">no answer</span>`, "http://g2:4196:80")
	if free, paid := strings.Index(page, ">free&lt;"), strings.Index(page, ">paid<"); free < 0 || paid < free || strings.Contains(page, "<script>alert") {
		t.Errorf("the longest queue is at %d, another at %d:\n%s", free, paid, page)
	}
	testkit.Equal(t, strings.Count(page, ">g1:4196</td>"), 4, "rows of a gateway")
}

// Without their addresses the pages of admission and of gateways say how to configure them. A broker's
// own console has neither.
func TestPagesSayHowToConfigureThem(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"t"}}, nil)
	for path, flag := range map[string]string{"/ui/admission": "--console-admission-address=127.0.0.1:4192", "/ui/gateways": "--console-gateway-address=127.0.0.1:4196"} {
		_, page := get(t, browser, base+path)
		contains(t, page, "Not configured", flag, `href="`+path+`"`)
	}
	_, base, browser = serve(t, &fake{}, func(c *Config) { c.API, c.Self = nil, "self:1" })
	if code, page := get(t, browser, base+"/ui/admission"); code != http.StatusNotFound || strings.Contains(page, "Gateways") {
		t.Errorf("%d: %s", code, page)
	}
}
