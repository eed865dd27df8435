package proxy

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/srtm-io/srtm/internal/connlimit"
	"github.com/srtm-io/srtm/internal/framing"
	"github.com/srtm-io/srtm/internal/secure"
)

// Server returns the server of a Listener, for HTTP/1.1 and 2, the latter also in clear
// for clients that know that it is spoken. The timeouts of connections are those of the
// policy that there is now.
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

// Drain is how long the queues have to empty, by the policy that there is now.
func (p *Proxy) Drain() time.Duration { return p.rules.Load().policy.Timeouts.Drain }

// bothProtocols are HTTP/1.1 and 2, the latter to servers with TLS only: in clear HTTP/1.1 comes first.
func bothProtocols() *http.Protocols {
	both := &http.Protocols{}
	both.SetHTTP1(true)
	both.SetHTTP2(true)
	both.SetUnencryptedHTTP2(true)
	return both
}

// Listener returns ln with as many connections as there may be, with TLS where the guard
// has it, and otherwise with an eye on how requests are framed.
func (p *Proxy) Listener(ln net.Listener, guard *secure.Server) net.Listener {
	limited := &connlimit.Listener{Listener: ln, Slots: &p.slots, Plain: !guard.HTTPTLS()}
	if !limited.Plain {
		return guard.Listener(limited)
	}
	return framing.Listener{Listener: limited}
}

// connKey is that of a request's net.Conn, in its context.
type connKey struct{}

// hangs is a connection that knows whether its client has gone.
type hangs interface{ HungUp() bool }

// connection returns that of a request of HTTP/1, on which net/http does not always look
// for the client's end: not while there may be more of a body to read, nor once the next
// request has begun. In HTTP/2 it ends the request's context when the client has gone.
func connection(r *http.Request) hangs {
	if r.ProtoMajor != 1 {
		return nil
	}
	c := r.Context().Value(connKey{})
	if secured, ok := c.(*tls.Conn); ok {
		c = secured.NetConn()
	}
	client, _ := c.(hangs)
	return client
}
