package decide

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == BareCommand {
		fmt.Fprintln(os.Stderr, Serve(os.Args[2:]))
		os.Exit(1)
	}
	localtest.Main(m)
}

// Each server answers and is measured. A server that is not installed reports this.
func TestEachIsMeasured(t *testing.T) {
	const rate, length = 200, 200 * time.Millisecond
	pool, pipelined := Load{rate, length, 4}, Load{rate, length, 1}
	udp, web, err := Admission(t.Context(), localtest.Folder(t, "admission"), t.TempDir(), Generous(), "--attempts=10000", "--wait=5s", "--lookup-wait=5s")
	testkit.Must(t, err)
	t.Cleanup(func() { udp.Stop() })
	started := func(s *Server, err error) *Server {
		switch {
		case errors.Is(err, host.ErrAbsent):
			t.Log(err)
			return nil
		case err != nil:
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Stop() })
		return s
	}
	for name, c := range map[string]struct {
		s   *Server
		ask func(*Server) (Result, error)
	}{
		"echo":            {started(Bare("udp")), func(s *Server) (Result, error) { return UDP(s, pool, true) }},
		"admission":       {udp, func(s *Server) (Result, error) { return UDP(s, pool, false) }},
		"pipelined":       {udp, func(s *Server) (Result, error) { return UDP(s, pipelined, false) }},
		"handler":         {started(Bare("http")), func(s *Server) (Result, error) { return HTTP(s, Load{rate, length, 16}, "/qos?key=%s") }},
		"router":          {web, func(s *Server) (Result, error) { return HTTP(s, Load{rate, length, 16}, "/qos?key=%s") }},
		"redis":           {started(Redis(t.TempDir())), func(s *Server) (Result, error) { return EVALSHA(s, pool) }},
		"pipelined redis": {started(Redis(t.TempDir())), func(s *Server) (Result, error) { return EVALSHA(s, pipelined) }},
		"nginx":           {started(Nginx(t.TempDir(), NginxLimit)), func(s *Server) (Result, error) { return HTTP(s, Load{rate, length, 16}, "/?key=%s") }},
		"haproxy":         {started(HAProxy(t.TempDir(), HAProxyLimit)), func(s *Server) (Result, error) { return HTTP(s, Load{rate, length, 16}, "/?key=%s") }},
		"gateway":         {started(HAProxy(t.TempDir(), HAProxyBefore(web.At))), func(s *Server) (Result, error) { return HTTP(s, Load{rate, length, 16}, "/qos?key=%s") }},
	} {
		if c.s == nil {
			continue
		}
		r, err := c.ask(c.s)
		if err != nil || r.Answered == 0 || r.Answered > r.Sent || r.Latency.Count() != r.Answered || r.CPU <= 0 || (r.RSS <= 0) != c.s.Bare {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}
