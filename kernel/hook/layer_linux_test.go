package hook

import (
	"bytes"
	"compress/flate"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// certificate returns a self-signed certificate.
func certificate(t testing.TB) tls.Certificate {
	t.Helper()
	key := testkit.Result(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)).Must(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der := testkit.Result(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)).Must(t)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// secure is a TLS client over a sender.
type secure struct {
	*sender
	tls *tls.Conn
}

func (s secure) send(p []byte) span {
	s.t.Helper()
	from := clock.Mono()
	testkit.Result(s.tls.Write(p)).Must(s.t)
	return span{from, s.acked()}
}

// handshake returns both ends of a TLS connection.
func handshake(t *testing.T, s *Stamper, version uint16) (secure, *Conn, *Records, *tls.Conn) {
	t.Helper()
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	x := c.Records()
	server := tls.Server(x, &tls.Config{Certificates: []tls.Certificate{certificate(t)}, MaxVersion: version})
	out := tls.Client(client, &tls.Config{InsecureSkipVerify: true, MaxVersion: version})
	done := make(chan error, 1)
	go func() { done <- out.Handshake() }()
	testkit.Must(t, server.Handshake())
	testkit.Must(t, <-done)
	if got := server.ConnectionState().Version; got != version {
		t.Fatalf("TLS version %#x, want %#x", got, version)
	}
	return secure{client, out}, c, x, server
}

// The stamp of a TLS message is the stamp of the segment that carried the end of the message's last record.
func TestTLSIsStampedByRecord(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		client, c, x, server := handshake(t, s, version)
		l := x.Layer(server)

		// All records have come before the first is read.
		var sent []span
		for i := range 2 { // few, because only a few early segments are kept, and TCP may repeat segments
			sent = append(sent, client.send(message(20+i)))
		}
		for i, in := range sent {
			within(t, fmt.Sprintf("%#x message %d", version, i), take(t, l, 20+i), stamp.Exact, in)
		}
		// Several messages in a record, and a message over two records.
		sent = []span{client.send(message(35)), client.send(message(15))}
		for i, in := range []span{sent[0], sent[0], sent[0], sent[1], sent[1]} {
			within(t, fmt.Sprintf("%#x message %d of 10 bytes", version, i), take(t, l, 10), stamp.Exact, in)
		}
		// A record over several reads of the layer, whose stamp is requested late.
		in := client.send(message(1000))
		start := l.Offset()
		testkit.Result(io.ReadFull(l, make([]byte, 500))).Must(t)
		testkit.Result(io.ReadFull(l, make([]byte, 500))).Must(t)
		within(t, fmt.Sprintf("%#x first half", version), l.Arrival(start, start+500), stamp.Exact, in)
		within(t, fmt.Sprintf("%#x second half", version), l.Arrival(start+500, start+1000), stamp.Exact, in)
		if c.Offset() != x.Offset() {
			t.Errorf("%#x: read %d bytes, handed out %d", version, c.Offset(), x.Offset())
		}
		l.Release()
	}
	if c := s.Info().Counters; c.Arrivals[stamp.Exact] != 2*9 || c.Rings != 0 {
		t.Errorf("counters %+v", c)
	}
}

// A decompressor reads more than it returns, so the stamps of a compressed stream are bounds.
func TestCompressedStreamsGetBounds(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	deflate := func(to io.Writer) *flate.Writer {
		return testkit.Result(flate.NewWriter(to, flate.BestSpeed)).Must(t)
	}
	check := func(what string, l *Layer, acked func() mono.Time, w *flate.Writer) {
		t.Helper()
		for i := range 5 {
			from := clock.Mono()
			testkit.Result(w.Write(bytes.Repeat([]byte{byte(i)}, 50))).Must(t)
			testkit.Must(t, w.Flush())
			in := span{from, acked()}
			within(t, fmt.Sprintf("%s message %d", what, i), take(t, l, 50), stamp.UpperBound, in)
		}
		l.Ignore()
		l.Release()
	}

	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	check("deflate", c.Layer(flate.NewReader(c)), client.acked, deflate(client))

	over, _, x, server := handshake(t, s, tls.VersionTLS13)
	plain := x.Layer(server)
	check("deflate over TLS", plain.Layer(flate.NewReader(plain)), over.acked, deflate(over.tls))
}
