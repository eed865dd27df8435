package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/srtm-io/srtm/gateway/policy"
)

// newTransport returns the transport for all servers with the same Reach.
func newTransport(reach policy.Reach, timeouts policy.Timeouts) (*http.Transport, error) {
	t := &http.Transport{
		Proxy:                  mayAttempt,
		DialContext:            dialServer,
		Protocols:              bothProtocols(),
		TLSHandshakeTimeout:    5 * time.Second,
		ResponseHeaderTimeout:  timeouts.Response,
		MaxIdleConns:           4096,
		MaxIdleConnsPerHost:    512,
		IdleConnTimeout:        timeouts.ServerIdle,
		DisableCompression:     true, // compression is between the client and the server
		MaxResponseHeaderBytes: 256 << 10,
	}
	if reach.H2C {
		t.Protocols = &http.Protocols{}
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	if reach.Host == "" && reach.CAFile == "" {
		return t, nil
	}
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: reach.Host}
	if host, _, err := net.SplitHostPort(reach.Host); err == nil {
		t.TLSClientConfig.ServerName = host
	}
	if reach.CAFile != "" {
		pem, err := os.ReadFile(reach.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		t.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file %s: it has no certificate in PEM", reach.CAFile)
		}
	}
	return t, nil
}

func dialServer(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &serverConn{Conn: c, closed: make(chan struct{})}, nil
}

// serverConn is a connection to a server. A server may answer and close before it has read the whole
// request. The transport drops an answer after a failed write. So Write delays its failure until
// the transport has closed the connection. The transport does so after it has read the answer or
// the end of the connection.
type serverConn struct {
	net.Conn
	closing sync.Once
	closed  chan struct{}
}

const (
	// lateAnswer bounds the wait in Write.
	lateAnswer = 10 * time.Second
	// causeFirst gives the transport time to report why it closed the connection, before the failed
	// write becomes the reason.
	causeFirst = 10 * time.Millisecond
)

// Write implements net.Conn.
func (c *serverConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil {
		late := time.NewTimer(lateAnswer)
		defer late.Stop()
		select {
		case <-c.closed:
			late.Reset(causeFirst)
			<-late.C
		case <-late.C:
		}
	}
	return n, err
}

// Close implements net.Conn.
func (c *serverConn) Close() error {
	c.closing.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// CloseWrite closes the sending side of a tunnel.
func (c *serverConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
