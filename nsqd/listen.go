package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// listeners has nsqd's listening sockets; nil: not configured.
type listeners struct {
	tcp, http, https, admin net.Listener

	web, operators bounded.Slots // web: slots of http and https; operators: slots of admin
}

// open opens the sockets that opts names. After an error some sockets are open.
func (ls *listeners) open(ctx context.Context, opts *options, conns *conn.Server) error {
	ls.web.Most, ls.operators.Most = opts.maxHTTPConnections, opts.maxHTTPConnections
	var err error
	if ls.tcp, err = conns.Listen(ctx, opts.tcpAddress); err != nil {
		ls.tcp = nil // avoids a typed nil
		return fmt.Errorf("--tcp-address: %w", err)
	}
	if opts.httpAddress != "" {
		if ls.http, err = conn.ListenAt(ctx, net.ListenConfig{}, opts.httpAddress); err != nil {
			ls.http = nil
			return fmt.Errorf("--http-address: %w", err)
		}
		ls.http = &bounded.Listener{Listener: ls.http, Slots: &ls.web, Plain: true}
	}
	if opts.httpsAddress != "" && opts.conn.TLS != nil {
		ln, err := conn.ListenAt(ctx, net.ListenConfig{}, opts.httpsAddress)
		if err != nil {
			return fmt.Errorf("--https-address: %w", err)
		}
		ls.https = tls.NewListener(&bounded.Listener{Listener: ln, Slots: &ls.web}, opts.conn.TLS)
	}
	if opts.adminAddress != "" {
		ln, err := conn.ListenAt(ctx, net.ListenConfig{}, opts.adminAddress)
		if err != nil {
			return fmt.Errorf("--admin-http-address: %w", err)
		}
		encrypted := opts.encrypted()
		ls.admin = &bounded.Listener{Listener: ln, Slots: &ls.operators, Plain: !encrypted}
		if encrypted {
			ls.admin = mixedListener{ls.admin, opts.conn.TLS}
		}
	}
	return nil
}

// connections counts the HTTP connections: open now, and refused since the start.
func (ls *listeners) connections() (open int64, refused uint64) {
	return ls.web.Open() + ls.operators.Open(), ls.web.Refused() + ls.operators.Refused()
}

// log logs the addresses in the format of NSQ's nsqd. A program that starts nsqd on port 0 reads the
// port from these lines.
func (ls *listeners) log(log *slog.Logger) {
	for _, l := range []struct {
		protocol string
		net.Listener
	}{{"HTTP", ls.http}, {"HTTPS", ls.https}, {"ADMIN", ls.admin}, {"TCP", ls.tcp}} {
		if l.Listener != nil {
			log.Info(l.protocol + ": listening on " + name(l))
		}
	}
}

// close closes the sockets. A socket may be closed already.
func (ls *listeners) close() {
	for _, ln := range []net.Listener{ls.tcp, ls.http, ls.https, ls.admin} {
		if ln != nil {
			_ = ln.Close()
		}
	}
}

// address returns the address of ln; nil if ln is nil.
func address(ln net.Listener) net.Addr {
	if ln == nil {
		return nil
	}
	return ln.Addr()
}

// port returns the port of ln; -1: none.
func port(ln net.Listener) int { return conn.Port(address(ln)) }

// name returns the address of ln for display.
func name(ln net.Listener) string {
	if ln == nil {
		return "none"
	}
	return ln.Addr().String()
}
