package conformance

import (
	"bufio"
	"compress/flate"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/golang/snappy"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// secured starts an nsqd with TLS, and with more flags.
func secured(t *testing.T, flags ...string) (*node, *testkit.Authority) {
	t.Helper()
	a := testkit.NewAuthority(t)
	c := a.Certificate("nsqd")
	return start(t, append([]string{"--tls-cert=" + c.CertFile, "--tls-key=" + c.KeyFile, "--https-address="}, flags...)...), a
}

// trusting is the configuration of a client that trusts the server's authority.
func trusting(a *testkit.Authority) *tls.Config {
	return &tls.Config{RootCAs: a.Pool, ServerName: "127.0.0.1"}
}

// encrypt requests TLS, with other fields, and continues over TLS.
func (p *peer) encrypt(config *tls.Config, fields ...string) {
	p.t.Helper()
	all := map[string]any{"tls_v1": true}
	for _, f := range fields {
		all[f] = true
	}
	answer := p.identify(all)
	for f := range all {
		testkit.MustEqual(p.t, answer[f], true, "%s", f)
	}
	testkit.Must(p.t, p.handshake(config))
	p.ok()
}

// viaHTTPS makes an HTTPS request to an nsqd.
func viaHTTPS(t *testing.T, a *testkit.Authority, method, url string) reply {
	t.Helper()
	by := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: a.Pool}}
	return testkit.Result(fetchBy(by, method, "https://"+url, []byte("x"))).Must(t)
}

// behind is a connection whose reader has read ahead.
type behind struct {
	net.Conn
	r io.Reader
}

func (b behind) Read(p []byte) (int, error) { return b.r.Read(p) }

// handshake continues with TLS.
func (p *peer) handshake(config *tls.Config) error {
	c := tls.Client(behind{p.nc, p.r}, config)
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if err := c.Handshake(); err != nil {
		return err
	}
	p.nc, p.r, p.w = c, bufio.NewReader(c), c
	return nil
}

// squeeze continues with compression.
func (p *peer) squeeze(algorithm string, level int) {
	p.t.Helper()
	if algorithm == "snappy" {
		p.r, p.w = bufio.NewReader(snappy.NewReader(p.r)), flusher{snappy.NewBufferedWriter(p.w)}
		return
	}
	w := testkit.Result(flate.NewWriter(p.w, level)).Must(p.t)
	p.r, p.w = bufio.NewReader(flate.NewReader(p.r)), flusher{w}
}

// flusher flushes after each write.
type flusher struct {
	w interface {
		io.Writer
		Flush() error
	}
}

func (f flusher) Write(b []byte) (int, error) {
	n, err := f.w.Write(b)
	if err == nil {
		err = f.w.Flush()
	}
	return n, err
}

// round publishes and consumes over the connection in its current state.
func (p *peer) round(n *node) {
	p.t.Helper()
	topic := n.topic()
	bodies := []string{"small", strings.Repeat("large and easy to compress ", 10_000)}
	p.pub(topic, bodies...)
	p.mpub(topic, "a", "b")
	p.sub(topic, "ch").rdy(10)
	want := append([]string{"a", "b"}, bodies...)
	slices.Sort(want)
	testkit.EqualSlices(p.t, p.bodies(4), want)
	p.fin(noID)
	p.fault("E_FIN_FAILED")
}

func TestTLS(t *testing.T) {
	group(t)
	check(t, "negotiated", func(t *testing.T) {
		n, a := secured(t)
		p := n.open(t)
		p.encrypt(trusting(a))
		p.round(n)
	})
	check(t, "not requested", func(t *testing.T) {
		n, _ := secured(t)
		p := n.open(t)
		testkit.MustEqual(t, p.identify(nil)["tls_v1"], false, "tls_v1")
		p.round(n)
		n.open(t).round(n)
	})
	check(t, "requested without feature negotiation", func(t *testing.T) {
		n, _ := secured(t)
		p := n.open(t)
		p.raw(identity(t, map[string]any{"tls_v1": true}))
		p.ok()
		p.round(n)
	})
	check(t, "in stats", func(t *testing.T) {
		n, a := secured(t)
		p := n.open(t)
		p.encrypt(trusting(a))
		topic := n.topic()
		p.sub(topic, "ch")
		n.settle(t, topic, "ch", func(s channelStats) bool { return len(s.Clients) == 1 && s.Clients[0].TLS })
	})
	check(t, "a handshake that is none", func(t *testing.T) {
		n, _ := secured(t)
		p := n.open(t)
		p.identify(map[string]any{"tls_v1": true})
		p.raw(sized("PUB "+n.topic(), "in the clear"))
		p.hungUp()
		n.open(t).alive(n)
	})
	check(t, "required", func(t *testing.T) {
		n, a := secured(t, "--tls-required=tcp-https")
		for _, command := range []string{"SUB t ch\n", string(sized("PUB t", "x")), string(sized("MPUB t", batch("x"))), string(sized("DPUB t 0", "x"))} {
			p := n.open(t)
			p.send("%s", command)
			p.fatal("E_INVALID")
		}
		p := n.open(t)
		p.encrypt(trusting(a))
		p.round(n)
	})
	check(t, "required of HTTP", func(t *testing.T) {
		https := localtest.Ports(t, 1)
		n, a := secured(t, "--tls-required=true", "--https-address="+https[0])
		n.get(t, "/ping").refused(t, 403, "TLS_REQUIRED")
		n.post(t, "/pub?topic=t", "x").refused(t, 403, "TLS_REQUIRED")
		if r := viaHTTPS(t, a, http.MethodPost, https[0]+"/pub?topic=t"); r.status != http.StatusOK || r.body != "OK" {
			t.Errorf("over HTTPS: got %+v", r)
		}
	})
	check(t, "minimum version", func(t *testing.T) {
		n, a := secured(t, "--tls-min-version=tls1.3")
		p := n.open(t)
		p.identify(map[string]any{"tls_v1": true})
		if err := p.handshake(&tls.Config{RootCAs: a.Pool, ServerName: "127.0.0.1", MaxVersion: tls.VersionTLS12}); err == nil {
			t.Error("TLS 1.2 was accepted")
		}
		p = n.open(t)
		p.encrypt(trusting(a))
	})
	for policy, foreign := range map[string]bool{"require": true, "require-verify": false} {
		check(t, "client certificate, "+policy, func(t *testing.T) {
			known := testkit.NewAuthority(t)
			n, a := secured(t, "--tls-client-auth-policy="+policy, "--tls-root-ca-file="+known.File)
			good, bad := known.Certificate("good").TLS, testkit.NewAuthority(t).Certificate("bad").TLS
			// accepted reports whether the server continues after the handshake.
			accepted := func(certs ...tls.Certificate) bool {
				p := n.open(t)
				p.identify(map[string]any{"tls_v1": true})
				config := trusting(a)
				if len(certs) > 0 {
					// The client offers its certificate whether or not the server names its authority.
					config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &certs[0], nil }
				}
				if p.handshake(config) != nil {
					return false
				}
				f, err := p.read(patience)
				return err == nil && string(f.data) == "OK"
			}
			if accepted() {
				t.Error("accepted without a certificate")
			}
			if !accepted(good) {
				t.Error("refused with a certificate of the authority")
			}
			testkit.Equal(t, accepted(bad), foreign, "certificate of another authority: accepted")
		})
	}
}

func TestHTTPS(t *testing.T) {
	group(t)
	check(t, "serves what HTTP serves", func(t *testing.T) {
		https := localtest.Ports(t, 1)
		n, a := secured(t, "--https-address="+https[0])
		for path, want := range map[string]string{"/ping": "OK", "/info": "broadcast_address", "/stats?format=json": "topics"} {
			if r := viaHTTPS(t, a, http.MethodGet, https[0]+path); r.status != http.StatusOK || !strings.Contains(r.body, want) {
				t.Errorf("%s: got %+v", path, r)
			}
		}
		topic := n.topic()
		if r := viaHTTPS(t, a, http.MethodPost, https[0]+"/pub?topic="+topic); r.body != "OK" {
			t.Errorf("pub: got %+v", r)
		}
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
}

func TestCompression(t *testing.T) {
	group(t)
	for _, algorithm := range []string{"snappy", "deflate"} {
		check(t, algorithm+" bytes that are none", func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			p.identify(map[string]any{algorithm: true})
			w := p.w
			p.squeeze(algorithm, 6)
			p.ok()
			p.w = w
			p.send("%s", strings.Repeat("\xff\xfe not compressed", 100))
			p.hungUp()
			n.open(t).alive(n)
		})
		check(t, algorithm+" under TLS", func(t *testing.T) {
			n, a := secured(t)
			p := n.open(t)
			p.encrypt(trusting(a), algorithm)
			p.squeeze(algorithm, 6)
			p.ok()
			p.round(n)
		})
	}
}
