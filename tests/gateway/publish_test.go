package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A message posted to /pub or /mpub reaches the publisher's broker, and is answered as the broker's
// own HTTP API answers.
func TestPublish(t *testing.T) {
	broker := localtest.NSQD(t, "", "--max-msg-size=1048576")
	control := testkit.Result(fake.NewPlacement()).Must(t)
	t.Cleanup(control.Close)
	control.Place("t", broker.TCP, "sensor")
	control.Place("other", broker.TCP, "sensor")
	g := start(t, "[[class]]\nname = \"sensors\"", "--loaddistributor-address="+control.Address(), "--max-publish-bytes=6000000")
	bodies := make(localtest.Bodies, 100)
	localtest.Consume(t, "t", "c", bodies, nil, broker.TCP)
	post := func(at, path, body string) string {
		t.Helper()
		req := testkit.Result(http.NewRequestWithContext(t.Context(), http.MethodPost, at+path, strings.NewReader(body))).Must(t)
		req.Header.Set("X-Publisher-Id", "sensor")
		res := testkit.Result(newClient(t).Do(req)).Must(t)
		defer res.Body.Close()
		text := testkit.Result(io.ReadAll(res.Body)).Must(t)
		return fmt.Sprintf("%d %s %s %s", res.StatusCode, res.Header.Get("Content-Type"), res.Header.Get("X-NSQ-Content-Type"), text)
	}
	binary := "\x00\x00\x00\x02\x00\x00\x00\x02b1\x00\x00\x00\x02b2"
	for _, c := range []struct{ path, body string }{
		{"/pub?topic=t", "one"},
		{"/pub?topic=t&defer=1", "deferred"},
		{"/mpub?topic=t", "two\n\nthree\n"},
		{"/mpub?topic=t&binary=true", binary},
		{"/mpub?topic=t", ""},
		{"/pub?topic=t", ""},
		{"/pub", "x"},
		{"/pub?topic=", "x"},
		{"/pub?topic=no%20name", "x"},
		{"/pub?topic=t&defer=x", "x"},
		{"/pub?topic=t&defer=-1", "x"},
		{"/pub?topic=t", strings.Repeat("x", 1<<20+1)},
		{"/mpub?topic=t&binary=maybe", "x"},
		{"/mpub?topic=t&binary=true", "short"},
		{"/mpub?topic=t&binary=true", binary[:len(binary)-1]},
		{"/mpub?topic=t", strings.Repeat("x", 1<<20+1)},
		{"/mpub?topic=t", strings.Repeat("x", 5<<20+1)},
	} {
		want, got := post("http://"+broker.HTTP, c.path, c.body), post(g.URL, c.path, c.body)
		if got != want {
			t.Errorf("%s, %.20q:\n%s, want\n%s", c.path, c.body, got, want)
		}
	}
	testkit.WaitFor(t, "every message by each way", func() bool { return len(bodies) >= 12 })
	count := map[string]int{}
	for range len(bodies) {
		count[<-bodies]++
	}
	for _, body := range []string{"one", "deferred", "two", "three", "b1", "b2"} {
		if count[body] != 2 || len(count) != 6 {
			t.Errorf("%q came %d times, of %v", body, count[body], count)
		}
	}
	for _, c := range []struct{ path, id, want string }{
		{"/pub?topic=unknown", "sensor", "404 {\"message\":\"TOPIC_NOT_FOUND\""},
		{"/pub?topic=t", "unknown", "404 {\"message\":\"TOPIC_NOT_FOUND\""},
		{"/pub?topic=t", "", "400 {\"message\":\"MISSING_PUBLISHER_ID\""},
	} {
		req := testkit.Result(http.NewRequestWithContext(t.Context(), http.MethodPost, g.URL+c.path, strings.NewReader("x"))).Must(t)
		req.Header.Set("X-Publisher-Id", c.id)
		res := testkit.Result(newClient(t).Do(req)).Must(t)
		text, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if got := fmt.Sprintf("%d %s", res.StatusCode, text); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %s", c.path, got)
		}
	}
	// The publisher moves, and its HTTP requests follow.
	second := localtest.NSQD(t, "")
	moved := make(localtest.Bodies, 100)
	localtest.Consume(t, "t", "c", moved, nil, second.TCP)
	control.Place("t", second.TCP, "sensor")
	testkit.WaitFor(t, "a message at the new broker", func() bool {
		post(g.URL, "/pub?topic=t", "again")
		return len(moved) > 0
	})
}
