package security

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// consumers are a client's connections to each of nsqd's ports.
type consumers map[string]net.Conn

// consume connects to each port, and subscribes over NSQ's protocol, with Snappy and without. The
// error is of the handshake.
func consume(t *testing.T, p *local.Process, https, admin string, config *tls.Config) (consumers, error) {
	t.Helper()
	all := consumers{}
	for name, identify := range map[string]string{"NSQ": `{"feature_negotiation":true,"tls_v1":true}`, "NSQ with Snappy": `{"feature_negotiation":true,"tls_v1":true,"snappy":true}`} {
		nc := testkit.Result(net.Dial("tcp", p.TCP)).Must(t)
		t.Cleanup(func() { nc.Close() })
		_, err := nc.Write(append(wire.AppendMagic(nil), wire.AppendIdentify(nil, []byte(identify))...))
		testkit.Must(t, err)
		if _, _, err := frames.Read(nc, 1<<20); err != nil {
			return nil, err
		}
		secured := tls.Client(nc, config)
		if _, _, err := frames.Read(secured, 1<<20); err != nil { // TLS 1.3 reports a refused certificate to the first read
			return nil, err
		}
		if name == "NSQ" {
			testkit.Result(secured.Write(wire.AppendSub(nil, "t", "c#ephemeral"))).Must(t)
			if _, _, err := frames.Read(secured, 1<<20); err != nil {
				return nil, err
			}
		}
		all[name] = secured
	}
	for name, address := range map[string]string{"HTTPS": https, "admin": admin} {
		secured, err := tls.Dial("tcp", address, config)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { secured.Close() })
		testkit.Result(io.WriteString(secured, "GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")).Must(t)
		r, err := http.ReadResponse(bufio.NewReader(secured), nil)
		if err != nil {
			return nil, err
		}
		testkit.Result(io.Copy(io.Discard, r.Body)).Must(t)
		all[name] = secured
	}
	return all, nil
}

// end waits until the server has ended all connections.
func (c consumers) end(t *testing.T) {
	t.Helper()
	for name, nc := range c {
		testkit.Must(t, nc.SetReadDeadline(time.Now().Add(local.Patience)))
		if _, err := io.Copy(io.Discard, nc); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection has outlived the certificate", name)
		}
	}
}

// Each port of nsqd ends the connections of a client whose certificate expires, or is revoked at
// SIGHUP. Other clients keep their connections.
func TestConnectionsEndWithTheirCertificates(t *testing.T) {
	a := testkit.NewAuthority(t)
	server, revoked, other := a.Certificate("server"), a.Certificate("revoked"), a.Certificate("other")
	list := filepath.Join(t.TempDir(), "crl.pem")
	testkit.Must(t, os.WriteFile(list, a.Revoke(), 0o600))
	free := localtest.Ports(t, 2)
	p := localtest.NSQD(t, "", "--tls-cert="+server.CertFile, "--tls-key="+server.KeyFile, "--tls-root-ca-file="+a.File,
		"--tls-client-auth-policy=require-verify", "--tls-crl="+list,
		"--https-address="+free[0], "--admin-http-address="+free[1])
	connect := func(c testkit.Certificate) (consumers, error) {
		return consume(t, p, free[0], free[1], &tls.Config{RootCAs: a.Pool, ServerName: "localhost", Certificates: []tls.Certificate{c.TLS}})
	}
	kept, out := testkit.Result(connect(other)).Must(t), testkit.Result(connect(revoked)).Must(t)
	brief, err := consumers(nil), errors.New("not tried")
	for lasts := 2 * time.Second; err != nil; lasts *= 2 { // a busy machine may take longer than that to connect
		if lasts > local.Patience {
			t.Fatal(err)
		}
		brief, err = connect(a.Until("brief", time.Now().Add(lasts)))
	}
	brief.end(t)
	testkit.Must(t, os.WriteFile(list, a.Revoke(revoked), 0o600))
	testkit.Must(t, p.Signal(syscall.SIGHUP))
	out.end(t)
	if _, err := connect(revoked); err == nil {
		t.Error("a revoked certificate is accepted")
	}
	for _, name := range []string{"HTTPS", "admin"} {
		testkit.Result(io.WriteString(kept[name], "GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")).Must(t)
		testkit.Equal(t, testkit.Result(http.ReadResponse(bufio.NewReader(kept[name]), nil)).Must(t).StatusCode, http.StatusOK, "%s", name)
	}
	testkit.Result(kept["NSQ"].Write(wire.AppendPub(nil, "t", []byte("x")))).Must(t)
	if kind, data, err := frames.Read(kept["NSQ"], 1<<20); err != nil || kind != wire.FrameResponse || string(data) != wire.OK {
		t.Errorf("PUB: %v %q, %v", kind, data, err)
	}
	for _, reason := range []string{"reason=expired", "reason=revoked"} {
		if n := strings.Count(p.AllOutput(), reason); n < 4 {
			t.Errorf("%d log lines with %s, want one for each of 4 connections", n, reason)
		}
	}
}
