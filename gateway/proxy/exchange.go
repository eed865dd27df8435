package proxy

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/cost"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
)

// Header names of ours, canonical.
const (
	classHeader  = "Srtm-Class"
	timingHeader = "Server-Timing"
)

// exchange is one request on its way through the gateway, and the ResponseWriter that
// its answer goes through. They are pooled with the ReverseProxy whose hooks they are,
// so that a request allocates nothing that a bare ReverseProxy would not.
type exchange struct {
	http.ResponseWriter // the client's
	p                   *Proxy
	reverse             httputil.ReverseProxy
	attempt             func() (io.ReadCloser, error) // newAttempt
	gotConn             func(httptrace.GotConnInfo)   // counts sends
	answer              answerBody

	ticket
	rules  *rules // as they were when the request came
	body   *requestBody
	queued time.Duration

	whole    bool      // its answer has come to the end
	deadline mono.Time // when that of writing is set anew

	writeErr error  // why the client did not get all
	cause    error  // why the server failed
	grpc     string // the grpc-status of the answer; "": it has none
	tunnel   bool   // settled when it became one
	// websocket is the tunnel of one; nil: it is none.
	websocket *tunnel
	spoiled   bool // something of it may still be in use: not to be pooled
}

func (p *Proxy) newExchange() any {
	x := &exchange{p: p, ticket: ticket{granted: make(chan struct{}, 1)}}
	x.answer = answerBody{x: x, timer: time.AfterFunc(time.Hour, x.answer.stalled)}
	x.answer.timer.Stop()
	x.attempt, x.gotConn = x.newAttempt, func(httptrace.GotConnInfo) { x.sends++ }
	x.reverse = httputil.ReverseProxy{
		Transport: x, Rewrite: x.rewrite, ModifyResponse: x.answered, ErrorHandler: x.unanswered,
		BufferPool: &p.buffers, ErrorLog: slog.NewLogLogger(p.faults.Handler(), slog.LevelDebug),
	}
	return x
}

// release ends the request, and pools what may be pooled.
func (p *Proxy) release(x *exchange) {
	if !x.spoiled && !x.tunnel {
		answer := answerBody{x: x, timer: x.answer.timer}
		*x = exchange{p: p, ticket: ticket{granted: x.granted, tried: x.tried[:0]}, answer: answer, reverse: x.reverse, attempt: x.attempt, gotConn: x.gotConn}
		p.exchanges.Put(x)
	}
}

// serve passes the request to the server that its ticket names, and settles it, however
// it ends: ReverseProxy panics where an answer breaks off.
func (x *exchange) serve() {
	defer func() {
		if x.tunnel {
			x.p.tunnels.remove(x.websocket)
			x.p.tunnels.Done()
		} else {
			x.settle(x.outcome())
		}
	}()
	x.reverse.ServeHTTP(x, x.r)
}

func (x *exchange) settle(how balance.Outcome) {
	if how == balance.Failed {
		if x.reason = reasonOf(x.cause, x.status); x.cause == nil && x.grpc != "" {
			x.reason = "answered with grpc-status " + x.grpc[:min(len(x.grpc), 2)]
		}
		if x.cause != nil {
			x.blame(x.cause)
		}
	}
	x.bytes += x.body.bytes.Load()
	x.p.dispatcher.finish(&x.ticket, how, clock.Mono())
}

// blame logs what a server did wrong with a request.
func (x *exchange) blame(err error) {
	text := err.Error()
	x.faults.Warn("a server failed a request", "url", x.url, obs.KeyReason, reasonOf(err, x.status), obs.KeyError, text[:min(len(text), 300)])
}

// outcome says whose doing the end was. What a client breaks off or does not take says
// nothing of the server; a 5xx means that another might have done better, but for those
// that say that no server can.
func (x *exchange) outcome() balance.Outcome {
	switch {
	case x.whole && (x.status >= 500 && x.status != http.StatusNotImplemented && x.status != http.StatusHTTPVersionNotSupported || grpcFails(x.grpc)):
		return balance.Failed
	case x.whole && (x.status >= http.StatusBadRequest || x.grpc != "" && x.grpc != "0"):
		return balance.Refused
	case x.whole:
		return balance.Answered
	case !x.whole && (x.writeErr != nil || x.body.failed() != nil || x.r.Context().Err() != nil):
		return balance.Aborted
	}
	return balance.Failed
}

// RoundTrip implements http.RoundTripper. A server to which nothing could be sent, since
// there was no connection to be had, leaves its place to another.
func (x *exchange) RoundTrip(out *http.Request) (*http.Response, error) {
	if out.Body != nil {
		out.Body = io.NopCloser(out.Body) // a transport closes it also where it has not read it
	} else {
		out.GetBody = x.attempt
	}
	trace := httptrace.ContextClientTrace(out.Context())
	if trace == nil { // ReverseProxy has one for each request
		trace = &httptrace.ClientTrace{}
		out = out.WithContext(httptrace.WithClientTrace(out.Context(), trace))
	}
	trace.GotConn = x.gotConn
	for {
		res, err := x.transport.RoundTrip(out)
		at, _ := errors.AsType[*net.OpError](err)
		if at == nil || at.Op != "dial" || x.sends > 0 || out.Context().Err() != nil || x.body.read.Load() {
			return res, err
		}
		faults, url := x.faults, x.url
		x.reason = reasonOf(err, 0)
		if !x.p.dispatcher.again(&x.ticket, clock.Mono()) {
			return res, err
		}
		faults.Warn("cannot connect to a server; another one gets the request", "url", url, obs.KeyReason, x.reason, obs.KeyError, err)
		x.aim(out)
	}
}

// maxSends is how often a request is sent, at most. A transport sends one without a body,
// of a method that changes nothing, again where the server ends a kept connection without
// an answer, since it may have done so before the request came; without this bound it would
// do so on every connection that is kept, and end them all where it is the request that the
// server does not survive.
const maxSends = 4

// mayAttempt is the Proxy of transports, which they ask before each attempt: nothing else
// keeps them from the next.
func mayAttempt(out *http.Request) (*url.URL, error) {
	if out.GetBody == nil {
		return nil, nil
	}
	_, err := out.GetBody()
	return nil, err
}

// newAttempt is the GetBody of a request that has no body.
func (x *exchange) newAttempt() (io.ReadCloser, error) {
	if x.sends >= maxSends {
		return nil, errHungUp
	}
	return http.NoBody, nil
}

// aim has a request go to the server that the ticket names. Its path goes as it came, byte
// by byte: Go encodes anew what it does not take for a valid path, so that is passed as
// Opaque.
func (x *exchange) aim(out *http.Request) {
	target := x.target
	out.URL.Path, out.URL.RawPath, out.URL.Opaque = x.r.URL.Path, x.r.URL.RawPath, ""
	out.URL.RawQuery = x.r.URL.RawQuery // ReverseProxy drops what Go does not parse; nothing here depends on it
	if target.Path == "" {
		out.URL.Scheme, out.URL.Host = target.Scheme, target.Host
	} else {
		(&httputil.ProxyRequest{In: x.r, Out: out}).SetURL(target)
	}
	if raw := x.r.URL.RawPath; raw != "" {
		if target.Path != "" {
			raw = target.EscapedPath() + raw
		}
		if strings.HasPrefix(raw, "//") {
			raw = "//" + target.Host + raw // Opaque begins with an authority then
		}
		out.URL.Opaque = raw
	}
	if out.Host = x.r.Host; x.host != "" {
		out.Host = x.host
	}
}

// rewrite makes the request to the server of the client's. What a client may not say of
// itself is gone: who sent it (unless it is a trusted peer), its class, and the token
// that was for the gateway.
func (x *exchange) rewrite(pr *httputil.ProxyRequest) {
	out, in := pr.Out, pr.In
	x.aim(out)
	out.Trailer = in.Trailer // which is filled as the body is read; the copy is not
	dropTrailers(out.Trailer)
	if upgrade := out.Header.Get("Upgrade"); upgrade != "" && leadsToHTTP.MatchString(upgrade) {
		out.Header.Del("Upgrade")
		out.Header.Del("Connection")
	}
	trusted := x.rules.trusts(in.RemoteAddr)
	for name := range out.Header {
		if means := meaning(name); means == classHeader || !trusted && forwards(means) {
			delete(out.Header, name)
		}
	}
	if trusted {
		out.Header["X-Forwarded-For"] = in.Header["X-Forwarded-For"]
		pr.SetXForwarded()
		// What the client asked the peer for, not what the peer asked us for.
		for _, name := range []string{"Forwarded", "X-Forwarded-Host", "X-Forwarded-Proto"} {
			if v := in.Header[name]; v != nil {
				out.Header[name] = v
			}
		}
	} else {
		ip, _, _ := net.SplitHostPort(in.RemoteAddr) // it is net/http's
		values := &[2]string{ip, in.Host}            // as SetXForwarded, at a third of its allocations
		out.Header["X-Forwarded-For"], out.Header["X-Forwarded-Host"] = values[:1:1], values[1:]
		out.Header["X-Forwarded-Proto"] = protocol[in.TLS != nil]
	}
	out.Header[classHeader] = x.class.header
	if in.Header["Authorization"] != nil && x.p.cfg.Tokens != nil {
		if _, ours := x.p.cfg.Tokens.Check(in, secure.ReadOnly); ours {
			delete(out.Header, "Authorization")
		}
	}
}

// dropTrailers leaves of a client's trailers what a server that adds them to the headers may
// have there: nothing that frames, routes or authenticates the request, nor what rewrite
// drops or sets. A trusted peer has it in its headers; its trailers are its client's.
func dropTrailers(all http.Header) {
	for name := range all {
		if means := meaning(name); means == classHeader || forwards(means) || !httpguts.ValidTrailerHeader(means) {
			delete(all, name)
		}
	}
}

// forwards reports whether a header of that meaning says for whom a peer speaks.
func forwards(means string) bool {
	return strings.HasPrefix(means, "X-Forwarded-") || means == "X-Real-Ip" || means == "Forwarded"
}

// meaning is the canonical name of the header as which servers may read this one.
func meaning(name string) string { return http.CanonicalHeaderKey(strings.Map(hyphen, name)) }

// hyphen is for what CGI makes of a header's name, for which, by some servers, all that is
// neither letter nor digit is an underscore.
func hyphen(c rune) rune {
	if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' {
		return c
	}
	return '-'
}

// leadsToHTTP matches an Upgrade header of which one of the protocols is another form of
// HTTP: requests would come through the tunnel that no class knows of, and that say of
// themselves what they like. A server may ignore the header.
var leadsToHTTP = regexp.MustCompile(`(?i)(^|,)\s*(h2c?|http|tls)\s*(/|,|$)`)

// Values of headers. They are shared, and not written to.
var (
	protocol = map[bool][]string{false: {"http"}, true: {"https"}}
	unqueued = []string{"queue;dur=0.0"}
)

// answered is told of the head of an answer that is not 1xx, or 101.
func (x *exchange) answered(res *http.Response) error {
	if res.StatusCode < http.StatusContinue {
		return errNoStatus
	}
	x.status = res.StatusCode
	if x.body.continued != nil {
		x.body.answered.Store(true)
	}
	x.head.Store(int64(clock.Mono()))
	x.load(res.Header)
	delete(res.Trailer, cost.Header)
	x.grpcStatus(res.Header, res.Header)
	if len(res.Trailer) > 0 && x.r.ProtoMajor == 1 && x.r.Method != http.MethodHead {
		delete(res.Header, "Content-Length") // HTTP/1.1 has trailers behind chunks alone
	}
	delete(res.Header, classHeader)
	x.mark()
	if res.StatusCode == http.StatusSwitchingProtocols {
		// From here on it is two peers talking, for hours perhaps: what it took of the
		// server's capacity is over. No request comes after it on this connection.
		x.Header().Del("Connection")
		x.tunnel = true
		x.p.tunnels.Add(1)
		x.settle(balance.Answered)
		server, ours := res.Body.(io.ReadWriteCloser)
		if client, known := x.r.Context().Value(connKey{}).(net.Conn); ours && known {
			t := &tunnel{ReadWriteCloser: server, client: client, limit: x.rules.policy.Timeouts.Response, websocket: strings.EqualFold(res.Header.Get("Upgrade"), "websocket")}
			if t.websocket {
				x.websocket = t
				x.p.tunnels.add(t)
			}
			res.Body = t
		}
		return nil
	}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
		x.p.dispatcher.stream(&x.ticket)
	}
	x.answer.ReadCloser, x.answer.res, x.answer.limit = res.Body, res, x.rules.policy.Timeouts.Response
	res.Body = &x.answer
	return nil
}

// load takes what the server reports of itself, which is not the client's to see.
func (x *exchange) load(h http.Header) {
	if reports := h[cost.Header]; len(reports) > 0 {
		x.report = reports[0]
		delete(h, cost.Header)
	}
}

// grpcStatus takes the status of gRPC from a header or a trailer.
func (x *exchange) grpcStatus(header, of http.Header) {
	if status := of["Grpc-Status"]; len(status) > 0 && strings.HasPrefix(header.Get("Content-Type"), "application/grpc") {
		x.grpc = status[0]
	}
}

// grpcFails reports whether a status of gRPC is one for which HTTP has 500, 503 and their
// like: unknown, internal, unavailable, and data loss. A deadline is the client's.
func grpcFails(status string) bool {
	return status == "2" || status == "13" || status == "14" || status == "15"
}

// mark says in the header of the answer to the client what the gateway did.
func (x *exchange) mark() {
	h := x.Header()
	h[classHeader] = x.class.header
	if r := x.r; r.TLS != nil && r.ProtoMajor == 1 && (len(r.TransferEncoding) > 0 || r.ProtoMinor == 0) {
		h.Set("Connection", "close") // its framing could not be looked at, see framing.Conn
	}
	if h[timingHeader] = unqueued; x.queued >= 50*time.Microsecond { // which is rounded up
		h[timingHeader] = []string{"queue;dur=" + strconv.FormatFloat(x.queued.Seconds()*1e3, 'f', 1, 64)}
	}
}

// unanswered answers for a server that has not.
func (x *exchange) unanswered(w http.ResponseWriter, _ *http.Request, err error) {
	clients := x.body.failed()
	tooLong, _ := errors.AsType[*http.MaxBytesError](clients)
	timeout, _ := errors.AsType[net.Error](err)
	code, text := http.StatusBadGateway, "the server could not be reached, or ended the connection"
	switch {
	case clients == nil && x.r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // there is no client to answer
	case tooLong != nil:
		code, text = http.StatusRequestEntityTooLarge, "the body has more than "+strconv.FormatInt(tooLong.Limit, 10)+" bytes"
	case errors.Is(clients, os.ErrDeadlineExceeded):
		code, text = http.StatusRequestTimeout, "the body did not come in time"
	case clients != nil:
		code, text = http.StatusBadRequest, "the body could not be read"
	default:
		x.cause = err
		if timeout != nil && timeout.Timeout() {
			code, text = http.StatusGatewayTimeout, "the server did not answer in time"
		}
	}
	x.refuse(code, text)
}

// refuse answers in the gateway's own name.
func (x *exchange) refuse(code int, text string) {
	x.mark()
	http.Error(x, text, code)
}

// Unwrap is for http.ResponseController.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// bound ends a client that takes nothing of its answer for as long as limit.
func bound(w http.ResponseWriter, limit time.Duration) {
	// What has no deadlines (a recorder, in tests) needs none.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
}

// bound is that of an exchange, which holds a place at the server: as long as a server may
// take to answer, and renewed seldom.
func (x *exchange) bound() {
	if now := clock.Mono(); x.deadline == 0 || now >= x.deadline {
		limit := x.rules.policy.Timeouts.Response
		x.deadline = now.Add(limit / 4)
		bound(x.ResponseWriter, limit+limit/4)
	}
}

// WriteHeader also writes what a server says before its answer (1xx), which has passed
// nothing of ours. Its time is over before the server's, which waits for it.
func (x *exchange) WriteHeader(code int) {
	if code < http.StatusOK {
		delete(x.Header(), cost.Header)
		delete(x.Header(), classHeader)
		bound(x.ResponseWriter, x.rules.policy.Timeouts.Response/2)
		x.deadline = 0
		x.ResponseWriter.WriteHeader(code)
		if code == http.StatusContinue {
			x.body.proceed()
		}
		return
	}
	x.bound()
	h := x.Header()
	if _, given := h["Content-Type"]; !given {
		h["Content-Type"] = nil // or net/http guesses one
	}
	early := x.body.pending()
	if early {
		h.Set("Connection", "close")
	}
	x.ResponseWriter.WriteHeader(code)
	if early {
		_ = http.NewResponseController(x.ResponseWriter).Flush() // its client waits for this, perhaps; Write says what is wrong
	}
}

// Write implements http.ResponseWriter.
func (x *exchange) Write(p []byte) (int, error) {
	x.bound()
	n, err := x.ResponseWriter.Write(p)
	x.bytes += int64(n)
	if err != nil {
		x.writeErr = err
	}
	return n, err
}

// answerBody is what a server sends: between two bytes at most limit.
type answerBody struct {
	io.ReadCloser
	x     *exchange
	res   *http.Response
	timer *time.Timer
	limit time.Duration
	got   int64
	pause bool // the last Read got less than it had room for
}

// stalled ends a Read that takes too long. A body may be closed while it is read.
func (b *answerBody) stalled() { _ = b.ReadCloser.Close() }

// Close implements io.Closer. The transport of HTTP/2 waits in it for the request's body, which may
// never come to its end.
func (b *answerBody) Close() error {
	b.x.body.leave()
	return b.ReadCloser.Close()
}

func (b *answerBody) Read(p []byte) (int, error) {
	if b.pause && b.got < b.res.ContentLength {
		// The server takes its time: what there is does not wait for the rest. ReverseProxy
		// does so alone for answers of unknown length.
		b.x.bound()
		if err := http.NewResponseController(b.x.ResponseWriter).Flush(); err != nil {
			b.x.writeErr = err
			return 0, err
		}
	}
	b.timer.Reset(b.limit)
	n, err := b.ReadCloser.Read(p)
	b.got, b.pause = b.got+int64(n), n < len(p)
	if !b.timer.Stop() {
		b.x.spoiled = true // stalled runs or has run
		err = errStalled
	}
	if err != nil && err != io.EOF {
		b.x.cause = err
	}
	if err == io.EOF {
		b.x.whole = true
		b.x.load(b.res.Trailer)
		b.x.grpcStatus(b.res.Header, b.res.Trailer)
		delete(b.res.Trailer, classHeader)
	}
	return n, err
}

// trusts reports whether a peer may say whom it speaks for.
func (s *rules) trusts(address string) bool {
	peer, err := netip.ParseAddrPort(address)
	ip := peer.Addr().Unmap()
	return err == nil && slices.ContainsFunc(s.policy.TrustedPeers, func(p netip.Prefix) bool { return p.Contains(ip) })
}
