package proxy

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/secure"
)

// Server returns an http.Server that serves the connections of a Listener with p, over HTTP/1.1 and
// HTTP/2. Without TLS, only clients that begin with HTTP/2 use HTTP/2. The server takes its timeouts from
// the present policy and does not follow later policies.
func (p *Proxy) Server(maxHeader int) *http.Server {
	timeouts := p.rules.Load().policy.Timeouts
	return &http.Server{
		Handler: p, Protocols: bothProtocols(), MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(p.faults.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: timeouts.Header, IdleTimeout: timeouts.Idle,
		HTTP2:       &http.HTTP2Config{WriteByteTimeout: timeouts.Response},
		BaseContext: func(net.Listener) context.Context { return p.base },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
}

// Drain returns the time that the present policy gives the queues to empty.
func (p *Proxy) Drain() time.Duration { return p.rules.Load().policy.Timeouts.Drain }

// bothProtocols returns HTTP/1.1 and HTTP/2. To servers without TLS, transports prefer HTTP/1.1.
func bothProtocols() *http.Protocols {
	both := &http.Protocols{}
	both.SetHTTP1(true)
	both.SetHTTP2(true)
	both.SetUnencryptedHTTP2(true)
	return both
}

// Listener limits the number of ln's connections. It adds TLS if guard has TLS; otherwise it checks the
// framing of requests.
func (p *Proxy) Listener(ln net.Listener, guard *secure.Server) net.Listener {
	limited := &bounded.Listener{Listener: ln, Slots: &p.slots, Plain: !guard.HTTPTLS()}
	if !limited.Plain {
		return guard.Listener(limited)
	}
	return framedListener{Listener: limited}
}

// connKey is the context key of a request's net.Conn.
type connKey struct{}

// hangupDetector is a connection that can check whether its client has hung up.
type hangupDetector interface{ HungUp() bool }

// connection returns the connection of an HTTP/1 request, or nil. On HTTP/1 net/http does not notice
// that the client has closed the connection while a body may be left to read, or after the next request
// has begun. On HTTP/2 net/http cancels the request's context.
func connection(r *http.Request) hangupDetector {
	if r.ProtoMajor != 1 {
		return nil
	}
	c := r.Context().Value(connKey{})
	if secured, ok := c.(*tls.Conn); ok {
		c = secured.NetConn()
	}
	client, _ := c.(hangupDetector)
	return client
}
