package proxy

import (
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A server that was slow, and has had no request for more than 10 s, is measured again by a repeatable
// request, and not by whichever request came first.
func TestWhatProbesCanBeRepeated(t *testing.T) {
	named := func(name string) string {
		return backend(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, name) })
	}
	g := serve(t, fmt.Sprintf("[[server]]\nurl = %q\n[[server]]\nurl = %q\n", named("slow"), named("other")), nil)
	g.dispatcher.mu.Lock()
	now, b := clock.Mono(), g.dispatcher.mu.balance
	b.Sent(0, now.Add(-time.Hour))
	b.Ended(0, now.Add(-15*time.Second), balance.Answered)
	b.Sent(1, now)
	b.Ended(1, now, balance.Answered)
	g.dispatcher.mu.Unlock()
	send := func(method string) string {
		c, r := g.dial(t)
		_ = c.SetDeadline(time.Now().Add(testkit.Hang))
		write(t, c, method+" / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
		_, body := answer(t, r)
		return body
	}
	for _, test := range []struct{ method, server string }{{"POST", "other"}, {"PATCH", "other"}, {"GET", "slow"}} {
		if got := send(test.method); got != test.server {
			t.Errorf("%s went to the %s server, not to the %s", test.method, got, test.server)
		}
	}
}
