// Package proxy is the gateway's data path. It classifies a request, requests admission, queues the
// request, passes it to the server that will answer soonest, and settles its cost. gateway/schedule
// decides the order of requests, gateway/balance the servers; the mutex in dispatch.go guards both. The
// rest is net/http and httputil.ReverseProxy. The package knows nothing of files and listeners. Read
// proxy.go next, then exchange.go.
package proxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
)

// Config configures a Proxy. Immutable.
type Config struct {
	Policy  *policy.Policy
	Balance balance.Kind
	// Scheduler is mqos, none, or single:RESOURCE.
	Scheduler string
	// Gateways is the number of gateways that share the servers, including this gateway. Each gateway
	// uses an equal part of every capacity.
	Gateways int
	// MaxBody bounds a request's body in bytes; 0: unbounded.
	MaxBody int64
	// MaxConnections bounds the clients' connections on Listeners; 0: unbounded.
	MaxConnections int
	// Tokens map tokens to tenants; nil: only client certificates name tenants.
	Tokens *secure.Tokens
	// Admission decides before a request waits, if the request's class has a key; nil: never.
	Admission interface {
		Ask(ctx context.Context, key string, cost uint32) client.Decision
	}
	// Publish handles posts to /pub and /mpub; nil: they go to a server, too.
	Publish Publisher
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Publisher is an http.Handler that gets the tenant, and a function charge that it must call before it
// publishes messages.
type Publisher interface {
	Serve(w http.ResponseWriter, r *http.Request, tenant string, charge func(messages int) client.Decision)
}

// Proxy is the handler of all client requests. Make a Proxy with New.
type Proxy struct {
	// Set once.
	cfg        Config
	slots      bounded.Slots // of clients' connections
	dispatcher *dispatcher
	exchanges  sync.Pool
	buffers    bufferPool
	faults     *slog.Logger    // logs faults that clients and servers can cause
	base       context.Context // ends after the last request; tunnels end with it
	end        context.CancelFunc
	tunnels    tunnels

	// Written by SetPolicy; a request reads rules once.
	rules atomic.Pointer[rules]
}

// rules is a policy in the form that requests use. Immutable.
type rules struct {
	policy     *policy.Policy
	classes    []class
	transports map[policy.Reach]*http.Transport
}

type class struct {
	*policy.Class
	header []string // value of classHeader
}

// noBody is the body of requests without a body.
var noBody requestBody

// New returns a handler. Run must run while the handler serves.
func New(cfg Config) (*Proxy, error) {
	p := &Proxy{cfg: cfg, dispatcher: newDispatcher(cfg)}
	p.slots.Most = cfg.MaxConnections
	p.base, p.end = context.WithCancel(context.Background())
	p.faults, _ = obs.Sparse(cfg.Log)
	p.exchanges.New = p.newExchange
	p.buffers.New = func() any { return new([32 << 10]byte) }
	if err := p.SetPolicy(cfg.Policy); err != nil {
		return nil, err
	}
	cfg.Metrics.MustRegister(p)
	return p, nil
}

// SetPolicy applies another policy to all later requests and to the waiting requests. On an error
// nothing changes.
func (p *Proxy) SetPolicy(changed *policy.Policy) error {
	next := &rules{policy: changed, transports: map[policy.Reach]*http.Transport{}}
	for i := range changed.Classes {
		next.classes = append(next.classes, class{&changed.Classes[i], []string{changed.Classes[i].Name}})
	}
	old := p.rules.Load()
	for _, s := range changed.Servers {
		if next.transports[s.Reach] != nil {
			continue
		}
		if old != nil && old.policy.Timeouts == changed.Timeouts && s.Reach.CAFile == "" && old.transports[s.Reach] != nil {
			next.transports[s.Reach] = old.transports[s.Reach]
			continue
		}
		transport, err := newTransport(s.Reach, changed.Timeouts)
		if err != nil {
			return fmt.Errorf("server %s: %w", s.URL, err)
		}
		next.transports[s.Reach] = transport
	}
	if err := p.dispatcher.configure(changed, next.transports, clock.Mono()); err != nil {
		return err
	}
	p.rules.Store(next)
	if old != nil {
		old.closeIdle(next)
	}
	return nil
}

// closeIdle closes the idle connections of the transports that next does not use; nil: of all
// transports.
func (s *rules) closeIdle(next *rules) {
	for reach, transport := range s.transports {
		if next == nil || next.transports[reach] != transport {
			transport.CloseIdleConnections()
		}
	}
}

// Run does the periodic work until ctx ends. Then Run ends the tunnels.
func (p *Proxy) Run(ctx context.Context) error {
	for clock.Sleep(ctx, tick) {
		for _, s := range p.dispatcher.tick(clock.Mono()) {
			if s.ejected {
				p.cfg.Log.Warn("server ejected after several failed requests in a row; it gets no requests until a trial succeeds", "url", s.URL, obs.KeyReason, s.reason)
			} else {
				p.cfg.Log.Warn("server answers again", "url", s.URL)
			}
		}
	}
	p.tunnels.leave()
	p.end()
	p.tunnels.Wait()
	p.rules.Load().closeIdle(nil)
	return nil
}

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rules := p.rules.Load()
	tenant := p.cfg.Tokens.Tenant(r)
	index, _ := rules.policy.Classify(policy.Request{
		Tenant: tenant, Method: r.Method, Host: r.Host, Path: r.URL.Path, RawQuery: r.URL.RawQuery, Header: r.Header,
	})
	c := rules.classes[index]
	body := &noBody
	if r.Body != nil && r.Body != http.NoBody {
		// net/http needs its own body to know how much is left to read.
		defer func(original io.ReadCloser) {
			body.leave()
			r.Body = original
		}(r.Body)
		if p.cfg.MaxBody > 0 {
			r.Body = http.MaxBytesReader(w, r.Body, p.cfg.MaxBody)
		}
		body = newBody(w, r, rules.policy.Timeouts.Body, c.MinBodyRate)
		r.Body = body
	}
	conn, _ := r.Context().Value(connKey{}).(net.Conn)
	code, text := 0, ""
	switch {
	case framedTwice(conn, r):
		// The framing of the following bytes is unknown: do not read them.
		w.Header().Set("Connection", "close")
		body.late.Store(true)
		_ = http.NewResponseController(w).SetReadDeadline(time.Now())
		code, text = http.StatusBadRequest, "Content-Length and Transfer-Encoding exclude each other"
	case r.Method == http.MethodConnect:
		code, text = http.StatusMethodNotAllowed, "CONNECT is for forward proxies"
	case r.URL.Opaque != "": // a server could derive a path of another class
		code, text = http.StatusBadRequest, "the request's target is neither a path nor a URL with a host"
	case policy.Ambiguous(r.URL):
		code, text = http.StatusBadRequest, "servers differ in what this path means: resolve its . and .. first"
	case p.cfg.MaxBody > 0 && r.ContentLength > p.cfg.MaxBody:
		code, text = http.StatusRequestEntityTooLarge, "the body has more than "+strconv.FormatInt(p.cfg.MaxBody, 10)+" bytes"
	case p.cfg.Publish != nil && r.Method == http.MethodPost && (r.URL.Path == "/pub" || r.URL.Path == "/mpub"):
		p.cfg.Publish.Serve(earlyWriter{w, body}, r, tenant, func(messages int) client.Decision { return p.admit(r, c, tenant, messages) })
		limitWrite(w, rules.policy.Timeouts.Response) // net/http has yet to send the answer
		return
	default:
		if d := p.admit(r, c, tenant, 1); !d.Admit {
			client.RetryAfter(w.Header(), d)
			code, text = http.StatusTooManyRequests, "too many requests"
		}
	}
	if code != 0 {
		w.Header()[classHeader] = c.header
		limitWrite(w, rules.policy.Timeouts.Response)
		if !body.late.Load() {
			body.drain()
		}
		http.Error(earlyWriter{w, body}, text, code)
		return
	}
	x := p.exchanges.Get().(*exchange)
	x.ResponseWriter, x.rules, x.body = w, rules, body
	x.r, x.class, x.request.Bytes = r, c, waitingBytes(r)
	p.pass(x)
}

// pass queues a request, then serves or refuses it.
func (p *Proxy) pass(x *exchange) {
	defer p.release(x)
	start := clock.Mono()
	err := p.dispatcher.enter(&x.ticket, start)
	x.queued = clock.Mono().Sub(start)
	switch {
	case err == nil:
		x.serve()
	case err == errGone || x.r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // a client that closed only its sending side would otherwise read a 200
	default:
		x.body.drain()
		x.Header().Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(x.drain)))))
		x.refuse(http.StatusServiceUnavailable, err.Error())
	}
}

// Estimated bytes that net/http and the gateway keep for a waiting request, and for each header beyond
// its text: a map entry and a slice. So many empty headers take 25 times the memory of their text.
// Connection buffers are not included.
const (
	bytesPerRequest = 1 << 10
	bytesPerName    = 112
	bytesPerValue   = 16
)

// waitingBytes estimates the memory of a waiting request in bytes: its header, plus the declared
// size of its body.
func waitingBytes(r *http.Request) int {
	bytes := bytesPerRequest + len(r.RequestURI)
	for name, values := range r.Header {
		bytes += bytesPerName + len(name) + len(values)*bytesPerValue
		for _, v := range values {
			bytes += len(v)
		}
	}
	return bytes + int(min(max(r.ContentLength, 0), math.MaxInt64/2))
}

// admit requests admission of cost requests of a class.
func (p *Proxy) admit(r *http.Request, c class, tenant string, cost int) client.Decision {
	key := c.AdmissionKey(tenant)
	if p.cfg.Admission == nil || key == "" {
		return client.Decision{Admit: true, Left: -1}
	}
	d := p.cfg.Admission.Ask(r.Context(), key, uint32(cost))
	if d.Unanswered {
		d.Admit = c.FailOpen
	}
	if !d.Admit {
		p.dispatcher.denied(c.Name)
	}
	return d
}

type bufferPool struct{ sync.Pool }

func (b *bufferPool) Get() []byte  { return b.Pool.Get().(*[32 << 10]byte)[:] }
func (b *bufferPool) Put(p []byte) { b.Pool.Put((*[32 << 10]byte)(p)) }
