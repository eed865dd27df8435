package gateway

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A posted message takes one credit of admission, and the answer states the remaining credits.
func TestPublishSaysWhatIsLeft(t *testing.T) {
	at := localtest.Ports(t, 3)
	localtest.Run(t, localtest.Program(t, "admission"), at[0]+"/healthz", "--data-path="+t.TempDir(),
		"--http-address="+at[0], "--grpc-address="+at[1], "--udp-address="+at[2])
	_, err := srtmv1.NewAdmissionAdminClient(localtest.Dial(t, at[1])).SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{
		{Key: "ingest", RefillMilli: 1, Capacity: 5}, // one credit in 1000 s
	}}, grpc.WaitForReady(true))
	testkit.Must(t, err)
	broker := localtest.NSQD(t, "")
	control, err := fake.NewPlacement()
	testkit.Must(t, err)
	t.Cleanup(control.Close)
	control.Place("t", broker.TCP, "sensor")
	g := start(t, "[[class]]\nname = \"sensors\"\nadmission = \"ingest\"\n", "--loaddistributor-address="+control.Address(), "--admission-address="+at[2])
	for _, c := range []struct {
		path, body, limit string
		code              int
	}{
		{"/pub?topic=t", "1", `"default";r=4;t=1000`, http.StatusOK},
		{"/mpub?topic=t", "2\n3\n4\n", `"default";r=1;t=4000`, http.StatusOK},
		{"/mpub?topic=t", "5\n6\n", `"default";r=1;t=`, http.StatusTooManyRequests},
		{"/mpub?topic=t", "", "", http.StatusOK}, // no message
		{"/pub?topic=t", "5", `"default";r=0;t=5000`, http.StatusOK},
		{"/pub?topic=t", "6", `"default";r=0;t=`, http.StatusTooManyRequests},
		{"/pub?topic=no%20name", "6", "", http.StatusBadRequest}, // costs nothing
	} {
		req := testkit.Result(http.NewRequestWithContext(t.Context(), http.MethodPost, g.URL+c.path, strings.NewReader(c.body))).Must(t)
		req.Header.Set("X-Publisher-Id", "sensor")
		res := testkit.Result(newClient(t).Do(req)).Must(t)
		text, err := io.ReadAll(res.Body)
		res.Body.Close()
		limit := res.Header.Get("RateLimit")
		if err != nil || res.StatusCode != c.code || limit != c.limit && (c.code != http.StatusTooManyRequests || !strings.HasPrefix(limit, c.limit)) {
			t.Errorf("%s %q: %s, RateLimit %q, %s, %v; want %d, %q", c.path, c.body, res.Status, limit, text, err, c.code, c.limit)
		}
		if c.code != http.StatusTooManyRequests {
			continue
		}
		// The seconds equal Retry-After.
		if retry := res.Header.Get("Retry-After"); limit != c.limit+retry {
			t.Errorf("RateLimit %q, Retry-After %q", limit, retry)
		}
	}
}
