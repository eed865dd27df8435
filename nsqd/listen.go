package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// addresses are the addresses to listen on and to advertise.
type addresses struct {
	tcp, http, https, admin             string // empty: none
	mqtt, mqtts                         string // empty: none
	broadcast                           string // host; empty: the hostname
	broadcastTCPPort, broadcastHTTPPort int    // 0: the ports of tcp and http
	broadcastMQTTPort                   int    // 0: the port of mqtt
	broadcastMQTTSPort                  int    // 0: the port of mqtts
	console                             bool   // serve the web console
	maxHTTP                             int    // connections; 0: set by fit, like conn.MaxConnections
}

// Flags defines the flags of addresses.
func (a *addresses) Flags(fs *flag.FlagSet) {
	fs.StringVar(&a.tcp, "tcp-address", "0.0.0.0:4150", "`host:port`, or path of a Unix socket, for NSQ clients")
	fs.StringVar(&a.http, "http-address", "0.0.0.0:4151", "`host:port`, or path of a Unix socket, for HTTP; empty: none")
	fs.StringVar(&a.https, "https-address", "0.0.0.0:4152", "`host:port` for HTTPS, served if there is a --tls-cert; empty: none")
	fs.StringVar(&a.admin, "admin-http-address", "", "`host:port`, or path of a Unix socket, for all HTTP routes; the other HTTP addresses then refuse /debug/ and the routes that change anything except publishing (default none: every address serves all routes)")
	fs.StringVar(&a.mqtt, "mqtt-address", "", "`host:port`, or path of a Unix socket, for MQTT 3.1.1 and 5.0 clients (default none)")
	fs.StringVar(&a.mqtts, "mqtts-address", "", "`host:port` for MQTT clients over TLS; needs --tls-cert (default none)")
	fs.StringVar(&a.broadcast, "broadcast-address", "", "`host` that clients dial (default the hostname)")
	fs.IntVar(&a.broadcastTCPPort, "broadcast-tcp-port", 0, "TCP `port` that clients dial (default the port of --tcp-address)")
	fs.IntVar(&a.broadcastHTTPPort, "broadcast-http-port", 0, "HTTP `port` that clients dial (default the port of --http-address)")
	fs.IntVar(&a.broadcastMQTTPort, "broadcast-mqtt-port", 0, "MQTT `port` that clients dial (default the port of --mqtt-address)")
	fs.IntVar(&a.broadcastMQTTSPort, "broadcast-mqtts-port", 0, "`port` that MQTT clients with TLS dial (default the port of --mqtts-address)")
	fs.BoolVar(&a.console, "console", true, "serve the web console of a standalone broker at /ui/ of --admin-http-address, or else of every HTTP address")
}

// LimitFlags defines the flag of HTTP connections.
func (a *addresses) LimitFlags(fs *flag.FlagSet) {
	fs.IntVar(&a.maxHTTP, "max-http-connections", 0, "maximum number of `connections` for HTTP and HTTPS together, and as many again at --admin-http-address; one more is answered 503 and closed (default an eighth of the descriptor limit, at most 5000)")
}

// CheckFlags returns all problems of the flags' values. A managed broker must have ports to advertise.
func (a *addresses) CheckFlags(managed bool) error {
	var errs faults.List
	errs.If(a.tcp == "", "--tcp-address is empty")
	errs.If(conn.IsPath(a.https), "--https-address %q is not a host:port", a.https)
	errs.If(a.maxHTTP < 0, "--max-http-connections %d is negative", a.maxHTTP)
	errs.Add(faults.Within("broadcast-tcp-port", a.broadcastTCPPort, 0, math.MaxUint16))
	errs.Add(faults.Within("broadcast-http-port", a.broadcastHTTPPort, 0, math.MaxUint16))
	errs.Add(faults.Within("broadcast-mqtt-port", a.broadcastMQTTPort, 0, math.MaxUint16))
	errs.Add(faults.Within("broadcast-mqtts-port", a.broadcastMQTTSPort, 0, math.MaxUint16))
	if managed {
		errs.If(conn.IsPath(a.tcp) && a.broadcastTCPPort == 0, "--loaddistributor-address needs a TCP port to advertise, and --tcp-address has none")
		errs.If((a.http == "" || conn.IsPath(a.http)) && a.broadcastHTTPPort == 0, "--loaddistributor-address needs an HTTP port to advertise, and --http-address has none")
	}
	return errs.Err()
}

// listeners has nsqd's listening sockets; nil: not configured.
type listeners struct {
	tcp, http, https, admin, mqtt, mqtts net.Listener

	web, operators bounded.Slots // web: slots of http and https; operators: slots of admin
}

// open opens the sockets that opts names. After an error some sockets are open.
func (ls *listeners) open(ctx context.Context, opts *options, conns *conn.Server) error {
	ls.web.Most, ls.operators.Most = opts.addresses.maxHTTP, opts.addresses.maxHTTP
	var err error
	if ls.tcp, err = conns.Listen(ctx, opts.addresses.tcp); err != nil {
		ls.tcp = nil // avoids a typed nil
		return fmt.Errorf("--tcp-address: %w", err)
	}
	for _, l := range []struct {
		flag, address string
		listener      *net.Listener
	}{{"--mqtt-address", opts.addresses.mqtt, &ls.mqtt}, {"--mqtts-address", opts.addresses.mqtts, &ls.mqtts}} {
		if l.address != "" {
			ln, err := conns.Listen(ctx, l.address)
			if err != nil {
				return fmt.Errorf("%s: %w", l.flag, err)
			}
			*l.listener = ln
		}
	}
	if opts.addresses.http != "" {
		if ls.http, err = conn.ListenAt(ctx, net.ListenConfig{}, opts.addresses.http); err != nil {
			ls.http = nil
			return fmt.Errorf("--http-address: %w", err)
		}
		ls.http = &bounded.Listener{Listener: ls.http, Slots: &ls.web, Plain: true}
	}
	if opts.addresses.https != "" && opts.conn.TLS != nil {
		ln, err := conn.ListenAt(ctx, net.ListenConfig{}, opts.addresses.https)
		if err != nil {
			return fmt.Errorf("--https-address: %w", err)
		}
		ls.https = tls.NewListener(&bounded.Listener{Listener: ln, Slots: &ls.web}, opts.conn.TLS)
	}
	if opts.addresses.admin != "" {
		ln, err := conn.ListenAt(ctx, net.ListenConfig{}, opts.addresses.admin)
		if err != nil {
			return fmt.Errorf("--admin-http-address: %w", err)
		}
		encrypted := opts.tls.forced()
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
	}{{"HTTP", ls.http}, {"HTTPS", ls.https}, {"ADMIN", ls.admin}, {"MQTT", ls.mqtt}, {"MQTTS", ls.mqtts}, {"TCP", ls.tcp}} {
		if l.Listener != nil {
			log.Info(l.protocol + ": listening on " + name(l))
		}
	}
}

// close closes the sockets. A socket may be closed already.
func (ls *listeners) close() {
	for _, ln := range []net.Listener{ls.tcp, ls.http, ls.https, ls.admin, ls.mqtt, ls.mqtts} {
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

// advertised returns the address that clients of ln dial, or "" without a port. broadcast is the
// port of a flag; 0: the port of ln.
func advertised(host string, ln net.Listener, broadcast int) string {
	p := cmp.Or(broadcast, port(ln))
	if ln == nil || p < 0 {
		return ""
	}
	return net.JoinHostPort(host, strconv.Itoa(p))
}

// name returns the address of ln for display.
func name(ln net.Listener) string {
	if ln == nil {
		return "none"
	}
	return ln.Addr().String()
}
