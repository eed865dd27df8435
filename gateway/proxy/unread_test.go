package proxy

import (
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Servers with CGI or WSGI cannot distinguish some client headers from the gateway's headers. The gateway
// drops such client headers.
func TestHeadersByAnotherName(t *testing.T) {
	var got http.Header
	url := backend(t, func(_ http.ResponseWriter, r *http.Request) { got = r.Header })
	forged := []string{"X_Forwarded_For: forged", "X-Forwarded_Host: forged", "x_real_ip: forged", "Srtm_Class: forged", "SRTM_class: forged", "X_Kept: kept",
		"X.Forwarded~For: forged", "x!real.ip: forged", "Srtm.Class: forged", "SRTM~class: forged"}
	for trusted, want := range map[string]int{"": 0, `trusted_peers = ["127.0.0.0/8"]`: 5} {
		serve(t, one(url, trusted), nil).get(t, "/", forged...)
		n := 0
		for name, values := range got {
			if strings.Contains(strings.Join(values, ","), "forged") {
				n++
				if n > want || strings.EqualFold(strings.NewReplacer("_", "-", ".", "-", "~", "-").Replace(name), classHeader) {
					t.Errorf("%q: the server receives %s: %v", trusted, name, values)
				}
			}
		}
		if got["X_kept"] == nil {
			t.Errorf("%v", got)
		}
	}
}

// Early hints of a server keep their headers, without the headers that are meant for the gateway.
func TestEarlyHints(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		for name, value := range map[string]string{"Link": "</a.css>", "Endpoint-Load-Metrics": "TEXT cpu_utilization=1", "Srtm-Class": "forged"} {
			w.Header().Set(name, value)
		}
		w.WriteHeader(http.StatusEarlyHints)
	})
	c, r := serve(t, one(url), nil).dial(t)
	write(t, c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	head := textproto.NewReader(r)
	line := testkit.Result(head.ReadLine()).Must(t)
	early := testkit.Result(head.ReadMIMEHeader()).Must(t)
	if !strings.Contains(line, "103") || len(early) != 1 || early.Get("Link") != "</a.css>" {
		t.Errorf("%s %v", line, early)
	}
}

type publisher struct{}

func (publisher) Serve(w http.ResponseWriter, _ *http.Request, _ string, _ func(int) client.Decision) {
	fmt.Fprint(w, "OK")
}

// A client that does not read its answer loses its connection.
func TestClientsThatDoNotRead(t *testing.T) {
	for name, says := range map[string]string{
		"refused":    "GET /a//../b HTTP/1.1\r\nHost: a\r\n\r\n",
		"a head":     "GET /empty HTTP/1.1\r\nHost: a\r\n\r\n",
		"a body":     "GET /body HTTP/1.1\r\nHost: a\r\n\r\n",
		"hints":      "GET /hints HTTP/1.1\r\nHost: a\r\n\r\n",
		"published":  "POST /pub HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
		"in HTTP/2":  "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
		"of nothing": "",
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				g, dial := inMemory(t, func(w http.ResponseWriter, r *http.Request) {
					switch r.URL.Path {
					case "/empty":
						w.WriteHeader(http.StatusNoContent)
					case "/hints":
						for range 1000 {
							w.WriteHeader(http.StatusEarlyHints)
						}
					default:
						fmt.Fprint(w, r.URL)
					}
				})
				g.cfg.Publish = publisher{}
				c := dial()
				defer c.Close()
				testkit.Result(io.WriteString(c, says)).Must(t)
				<-time.After(10 * time.Minute)
				if n, s := g.slots.Open(), g.Status().Servers[0]; n != 0 || s.InFlight != 0 {
					t.Errorf("%d connections, %+v", n, s)
				}
			})
		})
	}
}
