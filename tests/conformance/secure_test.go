package conformance

import (
	"bufio"
	"compress/flate"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/srtm-io/srtm/internal/local"
)

// authority signs certificates for one test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string // the certificate, PEM
	pool *x509.CertPool
}

func newAuthority(t *testing.T, dir, name string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{cert: cert, key: key, file: filepath.Join(dir, name+".pem"), pool: x509.NewCertPool()}
	a.pool.AddCert(cert)
	writePEM(t, a.file, "CERTIFICATE", der)
	return a
}

// issue writes a certificate and its key, and returns them.
func (a *authority) issue(t *testing.T, dir, name string) (certFile, keyFile string, pair tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, name+"-cert.pem"), filepath.Join(dir, name+"-key.pem")
	writePEM(t, certFile, "CERTIFICATE", der)
	writePEM(t, keyFile, "EC PRIVATE KEY", keyDER)
	if pair, err = tls.LoadX509KeyPair(certFile, keyFile); err != nil {
		t.Fatal(err)
	}
	return certFile, keyFile, pair
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// secured starts an nsqd that offers TLS, with more flags.
func secured(t *testing.T, flags ...string) (*node, *authority) {
	t.Helper()
	dir := t.TempDir()
	a := newAuthority(t, dir, "server-ca")
	cert, key, _ := a.issue(t, dir, "nsqd")
	return start(t, append([]string{"--tls-cert=" + cert, "--tls-key=" + key, "--https-address="}, flags...)...), a
}

// behind is a connection of which a reader has read ahead.
type behind struct {
	net.Conn
	r io.Reader
}

func (b behind) Read(p []byte) (int, error) { return b.r.Read(p) }

// handshake goes on with TLS.
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

// squeeze goes on compressed.
func (p *peer) squeeze(algorithm string, level int) {
	p.t.Helper()
	if algorithm == "snappy" {
		p.r, p.w = bufio.NewReader(snappy.NewReader(p.r)), flusher{snappy.NewBufferedWriter(p.w)}
		return
	}
	w, err := flate.NewWriter(p.w, level)
	if err != nil {
		p.t.Fatal(err)
	}
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

// round publishes and consumes over the connection as it is now.
func (p *peer) round(n *node) {
	p.t.Helper()
	topic := n.topic()
	bodies := []string{"small", strings.Repeat("large and easy to compress ", 10_000)}
	p.pub(topic, bodies...)
	p.mpub(topic, "a", "b")
	p.sub(topic, "ch").rdy(10)
	want := append([]string{"a", "b"}, bodies...)
	slices.Sort(want)
	if got := p.bodies(4); !slices.Equal(got, want) {
		p.t.Errorf("got %.200q", got)
	}
	p.fin(noID)
	p.fault("E_FIN_FAILED")
}

func TestTLS(t *testing.T) {
	group(t)
	check(t, "negotiated", func(t *testing.T) {
		n, a := secured(t)
		p := n.open(t)
		if answer := p.identify(map[string]any{"tls_v1": true}); answer["tls_v1"] != true {
			t.Fatalf("tls_v1: got %v", answer["tls_v1"])
		}
		if err := p.handshake(&tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
		p.ok()
		p.round(n)
	})
	check(t, "not asked for", func(t *testing.T) {
		n, _ := secured(t)
		p := n.open(t)
		if answer := p.identify(nil); answer["tls_v1"] != false {
			t.Fatalf("tls_v1: got %v", answer["tls_v1"])
		}
		p.round(n)
		n.open(t).round(n)
	})
	check(t, "asked for without feature negotiation", func(t *testing.T) {
		n, _ := secured(t)
		p := n.open(t)
		p.raw(identity(t, map[string]any{"tls_v1": true}))
		p.ok()
		p.round(n)
	})
	check(t, "in stats", func(t *testing.T) {
		n, a := secured(t)
		p := n.open(t)
		p.identify(map[string]any{"tls_v1": true})
		if err := p.handshake(&tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
		p.ok()
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
		if answer := p.identify(map[string]any{"tls_v1": true}); answer["tls_v1"] != true {
			t.Fatalf("tls_v1: got %v", answer["tls_v1"])
		}
		if err := p.handshake(&tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
		p.ok()
		p.round(n)
	})
	check(t, "required of HTTP", func(t *testing.T) {
		https, err := local.Ports(1)
		if err != nil {
			t.Fatal(err)
		}
		n, a := secured(t, "--tls-required=true", "--https-address="+https[0])
		n.get(t, "/ping").refused(t, 403, "TLS_REQUIRED")
		n.post(t, "/pub?topic=t", "x").refused(t, 403, "TLS_REQUIRED")
		by := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: a.pool}}
		r, err := fetchBy(by, http.MethodPost, "https://"+https[0]+"/pub?topic=t", []byte("x"))
		if err != nil || r.status != http.StatusOK || r.body != "OK" {
			t.Errorf("over HTTPS: got %+v, %v", r, err)
		}
	})
	check(t, "least version", func(t *testing.T) {
		n, a := secured(t, "--tls-min-version=tls1.3")
		p := n.open(t)
		p.identify(map[string]any{"tls_v1": true})
		if err := p.handshake(&tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1", MaxVersion: tls.VersionTLS12}); err == nil {
			t.Error("TLS 1.2 was accepted")
		}
		p = n.open(t)
		p.identify(map[string]any{"tls_v1": true})
		if err := p.handshake(&tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1"}); err != nil {
			t.Error(err)
		}
		p.ok()
	})
	for policy, foreign := range map[string]bool{"require": true, "require-verify": false} {
		check(t, "client certificate, "+policy, func(t *testing.T) {
			dir := t.TempDir()
			known, unknown := newAuthority(t, dir, "known"), newAuthority(t, dir, "unknown")
			n, a := secured(t, "--tls-client-auth-policy="+policy, "--tls-root-ca-file="+known.file)
			_, _, good := known.issue(t, dir, "good")
			_, _, bad := unknown.issue(t, dir, "bad")
			// accepted reports whether the server goes on after the handshake.
			accepted := func(certs ...tls.Certificate) bool {
				p := n.open(t)
				p.identify(map[string]any{"tls_v1": true})
				config := &tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1"}
				if len(certs) > 0 {
					// Offered whether or not the server names its authority.
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
			if got := accepted(bad); got != foreign {
				t.Errorf("certificate of another authority: accepted %t, want %t", got, foreign)
			}
		})
	}
}

func TestHTTPS(t *testing.T) {
	group(t)
	check(t, "serves what HTTP serves", func(t *testing.T) {
		https, err := local.Ports(1)
		if err != nil {
			t.Fatal(err)
		}
		n, a := secured(t, "--https-address="+https[0])
		by := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: a.pool}}
		for path, want := range map[string]string{"/ping": "OK", "/info": "broadcast_address", "/stats?format=json": "topics"} {
			r, err := fetchBy(by, http.MethodGet, "https://"+https[0]+path, nil)
			if err != nil || r.status != http.StatusOK || !strings.Contains(r.body, want) {
				t.Errorf("%s: got %+v, %v", path, r, err)
			}
		}
		topic := n.topic()
		if r, err := fetchBy(by, http.MethodPost, "https://"+https[0]+"/pub?topic="+topic, []byte("x")); err != nil || r.body != "OK" {
			t.Errorf("pub: got %+v, %v", r, err)
		}
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
}

func TestCompression(t *testing.T) {
	group(t)
	for _, algorithm := range []string{"snappy", "deflate"} {
		check(t, algorithm+" negotiated", func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			answer := p.identify(map[string]any{algorithm: true})
			if answer[algorithm] != true {
				t.Fatalf("%s: got %v", algorithm, answer[algorithm])
			}
			p.squeeze(algorithm, 6)
			p.ok()
			p.round(n)
		})
		check(t, algorithm+" in stats", func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			p.identify(map[string]any{algorithm: true})
			p.squeeze(algorithm, 6)
			p.ok()
			topic := n.topic()
			p.sub(topic, "ch")
			n.settle(t, topic, "ch", func(s channelStats) bool {
				return len(s.Clients) == 1 && s.Clients[0].Snappy == (algorithm == "snappy") && s.Clients[0].Deflate == (algorithm == "deflate")
			})
		})
		check(t, algorithm+" with heartbeats", func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			p.beats = true
			p.identify(map[string]any{algorithm: true, "heartbeat_interval": 1000})
			p.squeeze(algorithm, 6)
			p.ok()
			p.response(heartbeat)
			p.send("NOP\n")
			p.response(heartbeat)
		})
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
		check(t, algorithm+" switched off by flag", func(t *testing.T) {
			n := start(t, "--"+algorithm+"=false")
			p := n.open(t)
			if answer := p.identify(map[string]any{algorithm: true}); answer[algorithm] != false {
				t.Errorf("%s: got %v", algorithm, answer[algorithm])
			}
			p.round(n)
		})
		check(t, algorithm+" under TLS", func(t *testing.T) {
			n, a := secured(t)
			p := n.open(t)
			answer := p.identify(map[string]any{algorithm: true, "tls_v1": true})
			if answer[algorithm] != true || answer["tls_v1"] != true {
				t.Fatalf("got %v", answer)
			}
			if err := p.handshake(&tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1"}); err != nil {
				t.Fatal(err)
			}
			p.ok()
			p.squeeze(algorithm, 6)
			p.ok()
			p.round(n)
		})
	}
	check(t, "both", func(t *testing.T) {
		p := common(t).open(t)
		p.raw(identity(t, map[string]any{"snappy": true, "deflate": true, "feature_negotiation": true}))
		p.fatal("E_IDENTIFY_FAILED")
	})
	for ask, want := range map[int]float64{0: 6, 1: 1, 3: 3, 6: 6, 9: 6} {
		check(t, "deflate_level "+string(rune('0'+ask)), func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			answer := p.identify(map[string]any{"deflate": true, "deflate_level": ask})
			if answer["deflate_level"] != want || answer["max_deflate_level"] != 6.0 {
				t.Errorf("got level %v of at most %v, want %v", answer["deflate_level"], answer["max_deflate_level"], want)
			}
			p.squeeze("deflate", max(1, ask))
			p.ok()
			p.alive(n)
		})
	}
	check(t, "max-deflate-level", func(t *testing.T) {
		n := start(t, "--max-deflate-level=2")
		p := n.open(t)
		answer := p.identify(map[string]any{"deflate": true, "deflate_level": 5})
		if answer["deflate_level"] != 2.0 || answer["max_deflate_level"] != 2.0 {
			t.Errorf("got %v", answer)
		}
	})
}

// insecure takes any certificate.
func insecure() *tls.Config { return &tls.Config{InsecureSkipVerify: true} }
