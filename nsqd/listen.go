package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"

	"github.com/srtm-io/srtm/internal/connlimit"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// listeners are the sockets that nsqd listens at; those it does not are nil.
type listeners struct {
	tcp, http, https, admin net.Listener

	web, operators connlimit.Slots // of http and https, of admin
}

// open opens what opts names. After an error some are open.
func (at *listeners) open(ctx context.Context, opts *options, conns *conn.Server) error {
	at.web.Most, at.operators.Most = opts.maxHTTPConnections, opts.maxHTTPConnections
	var err error
	if at.tcp, err = conns.Listen(ctx, opts.tcpAddress); err != nil {
		at.tcp = nil // no typed nil
		return fmt.Errorf("--tcp-address: %w", err)
	}
	if opts.httpAddress != "" {
		if at.http, err = conn.ListenAt(ctx, net.ListenConfig{}, opts.httpAddress); err != nil {
			at.http = nil
			return fmt.Errorf("--http-address: %w", err)
		}
		at.http = &connlimit.Listener{Listener: at.http, Slots: &at.web, Plain: true}
	}
	if opts.httpsAddress != "" && opts.conn.TLS != nil {
		ln, err := conn.ListenAt(ctx, net.ListenConfig{}, opts.httpsAddress)
		if err != nil {
			return fmt.Errorf("--https-address: %w", err)
		}
		at.https = tls.NewListener(&connlimit.Listener{Listener: ln, Slots: &at.web}, opts.conn.TLS)
	}
	if opts.adminAddress != "" {
		ln, err := conn.ListenAt(ctx, net.ListenConfig{}, opts.adminAddress)
		if err != nil {
			return fmt.Errorf("--admin-http-address: %w", err)
		}
		encrypted := opts.encrypted()
		at.admin = &connlimit.Listener{Listener: ln, Slots: &at.operators, Plain: !encrypted}
		if encrypted {
			at.admin = either{at.admin, opts.conn.TLS}
		}
	}
	return nil
}

// connections are those for HTTP.
func (at *listeners) connections() (open int64, refused uint64) {
	return at.web.Open() + at.operators.Open(), at.web.Refused() + at.operators.Refused()
}

// log says where it listens, in the form of NSQ's nsqd: what starts one on port 0
// reads the port there.
func (at *listeners) log(log *slog.Logger) {
	for _, l := range []struct {
		protocol string
		net.Listener
	}{{"HTTP", at.http}, {"HTTPS", at.https}, {"ADMIN", at.admin}, {"TCP", at.tcp}} {
		if l.Listener != nil {
			log.Info(l.protocol + ": listening on " + name(l))
		}
	}
}

// close closes what is open; that some were closed before is no error.
func (at *listeners) close() {
	for _, ln := range []net.Listener{at.tcp, at.http, at.https, at.admin} {
		if ln != nil {
			_ = ln.Close()
		}
	}
}

// address returns where ln listens; nil if ln is.
func address(ln net.Listener) net.Addr {
	if ln == nil {
		return nil
	}
	return ln.Addr()
}

// port is -1 for a listener without.
func port(ln net.Listener) int { return conn.Port(address(ln)) }

// name is the address for people.
func name(ln net.Listener) string {
	if ln == nil {
		return "none"
	}
	return ln.Addr().String()
}
