// Package auth queries an HTTP auth server what a client may do, and checks permissions against the
// answer. It knows the auth server's protocol and no connections: nsqd/conn remembers a
// connection's answer and queries again when the answer expires. For requests without a connection,
// Cache does the same.
//
// Source: the section AUTH of nsq.io/components/nsqd.html. Where the section leaves a choice, the
// package behaves as NSQ's nsqd does, so an auth server means the same after a change of brokers.
package auth

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
)

// Query describes a client to an auth server.
type Query struct {
	RemoteIP   string // empty for a Unix socket
	TLS        bool
	CommonName string // of the client's certificate; empty without one
	Secret     string
}

// NewQuery returns the query for a client at a remote address. The client uses TLS unless state is
// nil.
func NewQuery(remote, secret string, state *tls.ConnectionState) Query {
	host, _, _ := net.SplitHostPort(remote) // empty for an address without a port
	q := Query{RemoteIP: host, TLS: state != nil, Secret: secret}
	if state != nil && len(state.PeerCertificates) > 0 {
		q.CommonName = state.PeerCertificates[0].Subject.CommonName
	}
	return q
}

func (q Query) values() url.Values {
	return url.Values{
		"remote_ip":   {q.RemoteIP},
		"tls":         {strconv.FormatBool(q.TLS)},
		"common_name": {q.CommonName},
		"secret":      {q.Secret},
	}
}

// Config names the auth servers. Immutable.
type Config struct {
	// Addresses are host:port, for http://host:port/auth, or whole URLs. The servers take turns.
	// If a server does not answer, the next server gets the question.
	Addresses []string
	// Method is GET, with the question in the URL's query, or POST, with the question as a form. Case
	// is ignored.
	Method string
	// ConnectTimeout and RequestTimeout bound each request to one server.
	ConnectTimeout, RequestTimeout time.Duration
	// TLS is for servers with https; nil means the defaults.
	TLS *tls.Config
}

// Flags defines the flags of auth servers. nsqd/lookupd uses the same timeouts.
func (c *Config) Flags(fs *flag.FlagSet) {
	const addresses = "auth-http-address"
	fs.Var((*daemon.List)(&c.Addresses), addresses, "`host:port`, or URL, of an auth server whose permission clients need, over HTTP too (Authorization: Bearer SECRET); may be repeated, then one permission suffices")
	daemon.Alias(fs, addresses, "auth-http-addresses", daemon.NSQName)
	fs.StringVar(&c.Method, "auth-http-request-method", "get", "`method` of requests to auth servers: get or post")
	fs.DurationVar(&c.ConnectTimeout, "http-client-connect-timeout", 2*time.Second, "how long to wait for a connection to an auth server or an nsqlookupd")
	fs.DurationVar(&c.RequestTimeout, "http-client-request-timeout", 5*time.Second, "how long to wait for its answer")
}

// Validate reports all problems at once. A Config may have no server.
func (c Config) Validate() error {
	var errs faults.List
	for _, a := range c.Addresses {
		_, err := serverURL(a)
		errs.If(err != nil, "--auth-http-address %q: %w", a, err)
	}
	method := c.method()
	errs.If(len(c.Addresses) > 0 && method != http.MethodGet && method != http.MethodPost, "--auth-http-request-method %q is neither GET nor POST", method)
	errs.If(c.ConnectTimeout <= 0, "--http-client-connect-timeout %v is not positive", c.ConnectTimeout)
	errs.If(c.RequestTimeout <= 0, "--http-client-request-timeout %v is not positive", c.RequestTimeout)
	return errs.Err()
}

func (c Config) method() string { return strings.ToUpper(c.Method) }

func serverURL(address string) (*url.URL, error) {
	if strings.Contains(address, "://") {
		u, err := url.Parse(address)
		switch {
		case err != nil:
			return nil, err
		case u.Scheme != "http" && u.Scheme != "https":
			return nil, fmt.Errorf("scheme %q is neither http nor https", u.Scheme)
		case u.Host == "":
			return nil, errors.New("URL without a host")
		case u.Path == "":
			u.Path = "/auth"
		}
		return u, nil
	}
	if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
		return nil, errors.New("want host:port or a URL")
	}
	return &url.URL{Scheme: "http", Host: address, Path: "/auth"}, nil
}

const (
	maxAnswer    = 1 << 20 // bytes
	maxRedirects = 10      // of a question
)

// Servers sends queries to auth servers. Make it with New. Safe for concurrent use.
type Servers struct {
	// Set once.
	urls   []*url.URL
	method string
	http   *http.Client

	// Atomic: every caller of Ask adds.
	nextServer atomic.Uint32
	counts     [len(outcomes)]atomic.Uint64
}

// outcomes are the names of the outcomes of a question, for display.
var outcomes = [...]string{granted: "granted", denied: "nothing", failed: "failed"}

const (
	granted = iota
	denied  // a valid answer that grants nothing, or a refused secret
	failed  // no server gave a valid answer
)

// Counts returns the number of questions by outcome.
func (s *Servers) Counts() map[string]uint64 {
	counts := make(map[string]uint64, len(outcomes))
	for i, name := range outcomes {
		counts[name] = s.counts[i].Load()
	}
	return counts
}

// New returns the auth servers of cfg.
func New(cfg Config) (*Servers, error) {
	if len(cfg.Addresses) == 0 {
		return nil, errors.New("there is no auth server")
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Servers{method: cfg.method()}
	for _, a := range cfg.Addresses {
		u, _ := serverURL(a) // Validate has checked the URL
		s.urls = append(s.urls, u)
	}
	dialer := &net.Dialer{Timeout: cfg.ConnectTimeout}
	s.http = &http.Client{
		Timeout:       cfg.RequestTimeout,
		CheckRedirect: keepSecret,
		Transport: &http.Transport{
			DialContext:           dialer.DialContext,
			TLSClientConfig:       cfg.TLS,
			TLSHandshakeTimeout:   cfg.ConnectTimeout,
			ResponseHeaderTimeout: cfg.RequestTimeout,
			MaxIdleConnsPerHost:   4,
			IdleConnTimeout:       time.Minute,
		},
	}
	return s, nil
}

// Close closes idle connections to the servers.
func (s *Servers) Close() { s.http.CloseIdleConnections() }

// ErrRefused reports that an auth server answers 401 or 403: it knows no client with the secret.
var ErrRefused = errors.New("refuses the secret")

// Ask returns one server's answer about q. Its errors do not contain the secret. The error is
// ErrRefused if one server refuses the secret and no server grants anything.
func (s *Servers) Ask(ctx context.Context, q Query) (*Grant, error) {
	var errs []error
	first := int(s.nextServer.Add(1) % uint32(len(s.urls)))
	for i := range s.urls {
		u := s.urls[(first+i)%len(s.urls)]
		g, err := s.ask(ctx, *u, q)
		if err == nil {
			outcome := granted
			if g.Rules() == 0 {
				outcome = denied
			}
			s.counts[outcome].Add(1)
			return g, nil
		}
		errs = append(errs, fmt.Errorf("auth server %s: %w", u.Host, err))
		if ctx.Err() != nil {
			break
		}
	}
	err, outcome := errors.Join(errs...), failed
	if errors.Is(err, ErrRefused) {
		outcome = denied
	}
	s.counts[outcome].Add(1)
	return nil, err
}

func (s *Servers) ask(ctx context.Context, u url.URL, q Query) (*Grant, error) {
	values := q.values()
	var body io.Reader
	if s.method == http.MethodPost {
		body = strings.NewReader(values.Encode())
	} else {
		for name, defaults := range u.Query() {
			if values[name] == nil {
				values[name] = defaults
			}
		}
		u.RawQuery = values.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, s.method, u.String(), body)
	if err != nil {
		return nil, withoutURL(err)
	}
	r.Header.Set("Accept", "application/vnd.nsq; version=1.0")
	if body != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	response, err := s.http.Do(r)
	if err != nil {
		return nil, withoutURL(err)
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		return nil, fmt.Errorf("%w: answers %s", ErrRefused, response.Status)
	default:
		return nil, fmt.Errorf("answers %s", response.Status)
	}
	text, err := bounded.Read(response.Body, maxAnswer)
	if err != nil {
		return nil, err
	}
	return ParseAnswer(text)
}

// keepSecret follows redirects only within a server, because a redirect sends the secret along,
// in the form and in the Referer header.
func keepSecret(next *http.Request, via []*http.Request) error {
	first := via[0].URL
	switch {
	case next.URL.Host != first.Host, first.Scheme == "https" && next.URL.Scheme != "https":
		return fmt.Errorf("redirects to %s://%s", next.URL.Scheme, next.URL.Host)
	case len(via) > maxRedirects:
		return fmt.Errorf("redirects more than %d times", maxRedirects)
	}
	return nil
}

// withoutURL strips the URL, which contains the secret, from an error of net/http.
func withoutURL(err error) error {
	var e *url.Error
	if errors.As(err, &e) {
		return e.Err
	}
	return err
}
