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

// Names of the gateway's headers, canonical.
const (
	classHeader  = "Srtm-Class"
	timingHeader = "Server-Timing"
)

// exchange is one request in the gateway, and the ResponseWriter of its answer. Exchanges are pooled
// with their ReverseProxy, so that a request allocates no more than with a bare ReverseProxy.
type exchange struct {
	http.ResponseWriter // the client's
	p                   *Proxy
	reverse             httputil.ReverseProxy
	attempt             func() (io.ReadCloser, error) // newAttempt
	gotConn             func(httptrace.GotConnInfo)   // counts sends
	answer              answerBody

	ticket
	rules  *rules // at the time of arrival
	body   *requestBody
	queued time.Duration

	complete bool      // the answer is complete
	deadline mono.Time // time to renew the write deadline

	writeErr error  // why the client did not get the whole answer
	cause    error  // why the server failed
	grpc     string // grpc-status of the answer; "": none
	tunnel   bool   // the exchange became a tunnel and was settled then
	// websocket is the tunnel of a websocket, or nil.
	websocket *tunnel
	spoiled   bool // a part may still be in use: do not pool
}

func (p *Proxy) newExchange() any {
	x := &exchange{p: p, ticket: ticket{granted: make(chan struct{}, 1)}}
	x.answer = answerBody{x: x, timer: time.AfterFunc(time.Hour, x.answer.stalled)}
	x.answer.timer.Stop()
	x.attempt, x.gotConn = x.newAttempt, func(httptrace.GotConnInfo) { x.sends++ }
	x.reverse = httputil.ReverseProxy{
		Transport: x, Rewrite: x.rewrite, ModifyResponse: x.answered, ErrorHandler: x.serverFailed,
		BufferPool: &p.buffers, ErrorLog: slog.NewLogLogger(p.faults.Handler(), slog.LevelDebug),
	}
	return x
}

// release returns the exchange to the pool, unless a part may still be in use.
func (p *Proxy) release(x *exchange) {
	if !x.spoiled && !x.tunnel {
		answer := answerBody{x: x, timer: x.answer.timer}
		*x = exchange{p: p, ticket: ticket{granted: x.granted, timer: x.timer, tried: x.tried[:0]}, answer: answer, reverse: x.reverse, attempt: x.attempt, gotConn: x.gotConn}
		p.exchanges.Put(x)
	}
}

// serve passes the request to the ticket's server and settles the request, however it ends:
// ReverseProxy panics if an answer breaks off.
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

func (x *exchange) settle(outcome balance.Outcome) {
	if outcome == balance.Failed {
		if x.reason = reasonOf(x.cause, x.status); x.cause == nil && x.grpc != "" {
			x.reason = "answered with grpc-status " + x.grpc[:min(len(x.grpc), 2)]
		}
		if x.cause != nil {
			x.blame(x.cause)
		}
	}
	x.bytes += x.body.bytes.Load()
	x.p.dispatcher.finish(&x.ticket, outcome, clock.Mono())
}

// blame logs a server's fault.
func (x *exchange) blame(err error) {
	text := err.Error()
	x.faults.Warn("a server failed a request", "url", x.url, obs.KeyReason, reasonOf(err, x.status), obs.KeyError, text[:min(len(text), 300)])
}

// outcome classifies the end of a request. If the client breaks off or does not take the answer, the
// server is not to blame. A 5xx status counts as a failure, because another server might have done
// better, except 501 and 505, which mean that no server can.
func (x *exchange) outcome() balance.Outcome {
	switch {
	case x.complete && (x.status >= 500 && x.status != http.StatusNotImplemented && x.status != http.StatusHTTPVersionNotSupported || grpcFails(x.grpc)):
		return balance.Failed
	case x.complete && (x.status >= http.StatusBadRequest || x.grpc != "" && x.grpc != "0"):
		return balance.Refused
	case x.complete:
		return balance.Answered
	case !x.complete && (x.writeErr != nil || x.body.failed() != nil || x.r.Context().Err() != nil):
		return balance.Aborted
	}
	return balance.Failed
}

// RoundTrip implements http.RoundTripper. If no connection to a server can be made, another server gets
// the request.
func (x *exchange) RoundTrip(out *http.Request) (*http.Response, error) {
	if out.Body != nil {
		out.Body = io.NopCloser(out.Body) // a transport closes a body even if it has not read it
	} else {
		out.GetBody = x.attempt
	}
	trace := httptrace.ContextClientTrace(out.Context())
	if trace == nil { // ReverseProxy makes a trace for each request
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
		if !x.p.dispatcher.retry(&x.ticket, clock.Mono()) {
			return res, err
		}
		faults.Warn("cannot connect to a server; trying another server", "url", url, obs.KeyReason, x.reason, obs.KeyError, err)
		x.aim(out)
	}
}

// maxSends bounds how often a request is sent. If a server ends a kept connection without an answer, a
// transport repeats a request without a body whose method changes nothing, because the server may have
// closed the connection before the request arrived. Without the bound, a request that crashes the
// server would end every kept connection.
const maxSends = 4

// mayAttempt is the Proxy function of transports. Transports call it before each attempt; no other hook
// can prevent an attempt.
func mayAttempt(out *http.Request) (*url.URL, error) {
	if out.GetBody == nil {
		return nil, nil
	}
	_, err := out.GetBody()
	return nil, err
}

// newAttempt is the GetBody of a request without a body.
func (x *exchange) newAttempt() (io.ReadCloser, error) {
	if x.sends >= maxSends {
		return nil, errHungUp
	}
	return http.NoBody, nil
}

// aim directs a request to the ticket's server. The path is sent byte by byte as received: Go would
// re-encode a path that it considers invalid, so such a path is passed as Opaque.
func (x *exchange) aim(out *http.Request) {
	target := x.target
	out.URL.Path, out.URL.RawPath, out.URL.Opaque = x.r.URL.Path, x.r.URL.RawPath, ""
	out.URL.RawQuery = x.r.URL.RawQuery // ReverseProxy drops parameters that Go cannot parse; nothing here depends on the query
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
			raw = "//" + target.Host + raw // here Opaque must begin with an authority
		}
		out.URL.Opaque = raw
	}
	if out.Host = x.r.Host; x.host != "" {
		out.Host = x.host
	}
}

// rewrite makes the request to the server. It removes what a client may not claim: the sender's address
// (unless the peer is trusted), the class, and the token for the gateway.
func (x *exchange) rewrite(pr *httputil.ProxyRequest) {
	out, in := pr.Out, pr.In
	x.aim(out)
	out.Trailer = in.Trailer // filled while the body is read, unlike the copy
	dropTrailers(out.Trailer)
	if upgrade := out.Header.Get("Upgrade"); upgrade != "" && leadsToHTTP.MatchString(upgrade) {
		out.Header.Del("Upgrade")
		out.Header.Del("Connection")
	}
	trusted := x.rules.trusts(in.RemoteAddr)
	for name := range out.Header {
		if meaning := meaning(name); meaning == classHeader || !trusted && forwards(meaning) {
			delete(out.Header, name)
		}
	}
	if trusted {
		out.Header["X-Forwarded-For"] = in.Header["X-Forwarded-For"]
		pr.SetXForwarded()
		// Keep the values that the client sent to the peer.
		for _, name := range []string{"Forwarded", "X-Forwarded-Host", "X-Forwarded-Proto"} {
			if v := in.Header[name]; v != nil {
				out.Header[name] = v
			}
		}
	} else {
		ip, _, _ := net.SplitHostPort(in.RemoteAddr) // net/http's own value
		values := &[2]string{ip, in.Host}            // same as SetXForwarded with a third of its allocations
		out.Header["X-Forwarded-For"], out.Header["X-Forwarded-Host"] = values[:1:1], values[1:]
		out.Header["X-Forwarded-Proto"] = protocol[in.TLS != nil]
	}
	out.Header[classHeader] = x.class.header
	if in.Header["Authorization"] != nil && x.p.cfg.Tokens != nil {
		if _, identified := x.p.cfg.Tokens.Check(in, secure.ReadOnly); identified {
			delete(out.Header, "Authorization")
		}
	}
}

// dropTrailers keeps only trailers that a server may safely merge into the headers. It drops trailers
// that frame, route or authenticate the request, and trailers that rewrite drops or sets as headers. A
// trusted peer sends such values as headers; its trailers come from its client.
func dropTrailers(all http.Header) {
	for name := range all {
		if meaning := meaning(name); meaning == classHeader || forwards(meaning) || !httpguts.ValidTrailerHeader(meaning) {
			delete(all, name)
		}
	}
}

// forwards reports whether a header with this meaning names the client that a peer forwards for.
func forwards(meaning string) bool {
	return strings.HasPrefix(meaning, "X-Forwarded-") || meaning == "X-Real-Ip" || meaning == "Forwarded"
}

// meaning returns the canonical name of the header that servers may understand by name.
func meaning(name string) string { return http.CanonicalHeaderKey(strings.Map(hyphen, name)) }

// hyphen maps a character of a header's name as CGI does: for some servers each character except
// letters and digits is an underscore.
func hyphen(c rune) rune {
	if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' {
		return c
	}
	return '-'
}

// leadsToHTTP matches an Upgrade header that offers another form of HTTP. Requests in such a tunnel
// would bypass the classes and could carry any header. A server may ignore Upgrade.
var leadsToHTTP = regexp.MustCompile(`(?i)(^|,)\s*(h2c?|http|tls)\s*(/|,|$)`)

// Shared header values; never modified.
var (
	protocol = map[bool][]string{false: {"http"}, true: {"https"}}
	unqueued = []string{"queue;dur=0.0"}
)

// answered handles the header of the server's answer. WriteHeader handles 1xx answers other
// than 101.
func (x *exchange) answered(res *http.Response) error {
	if res.StatusCode < http.StatusContinue {
		return errNoStatus
	}
	x.status = res.StatusCode
	if x.body.continued != nil {
		x.body.answered.Store(true)
	}
	x.head.Store(int64(clock.Mono()))
	x.takeReport(res.Header)
	delete(res.Trailer, cost.Header)
	x.grpcStatus(res.Header, res.Header)
	if len(res.Trailer) > 0 && x.r.ProtoMajor == 1 && x.r.Method != http.MethodHead {
		delete(res.Header, "Content-Length") // HTTP/1.1 sends trailers only after chunks
	}
	delete(res.Header, classHeader)
	x.mark()
	if res.StatusCode == http.StatusSwitchingProtocols {
		// From here on two peers talk, perhaps for hours. The request no longer uses the server's
		// capacity. The connection carries no further request.
		x.Header().Del("Connection")
		x.tunnel = true
		x.p.tunnels.Add(1)
		x.settle(balance.Answered)
		server, identified := res.Body.(io.ReadWriteCloser)
		if client, known := x.r.Context().Value(connKey{}).(net.Conn); identified && known {
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

// takeReport moves the server's load report from h to x.
func (x *exchange) takeReport(h http.Header) {
	if reports := h[cost.Header]; len(reports) > 0 {
		x.report = reports[0]
		delete(h, cost.Header)
	}
}

// grpcStatus keeps the gRPC status of a header or trailer.
func (x *exchange) grpcStatus(header, source http.Header) {
	if status := source["Grpc-Status"]; len(status) > 0 && strings.HasPrefix(header.Get("Content-Type"), "application/grpc") {
		x.grpc = status[0]
	}
}

// grpcFails reports whether a gRPC status corresponds to HTTP 500, 503 and the like: unknown, internal,
// unavailable, and data loss. An exceeded deadline is no failure, because the client sets the deadline.
func grpcFails(status string) bool {
	return status == "2" || status == "13" || status == "14" || status == "15"
}

// mark adds the gateway's headers to the answer.
func (x *exchange) mark() {
	h := x.Header()
	h[classHeader] = x.class.header
	if r := x.r; r.TLS != nil && r.ProtoMajor == 1 && (len(r.TransferEncoding) > 0 || r.ProtoMinor == 0) {
		h.Set("Connection", "close") // the framing could not be checked, see framedConn
	}
	if h[timingHeader] = unqueued; x.queued >= 50*time.Microsecond { // rounded up
		h[timingHeader] = []string{"queue;dur=" + strconv.FormatFloat(x.queued.Seconds()*1e3, 'f', 1, 64)}
	}
}

// serverFailed answers the client instead of the server.
func (x *exchange) serverFailed(w http.ResponseWriter, _ *http.Request, err error) {
	bodyErr := x.body.failed()
	tooLong, _ := errors.AsType[*http.MaxBytesError](bodyErr)
	timeout, _ := errors.AsType[net.Error](err)
	code, text := http.StatusBadGateway, "the server could not be reached, or ended the connection"
	switch {
	case bodyErr == nil && x.r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // no client to answer
	case tooLong != nil:
		code, text = http.StatusRequestEntityTooLarge, "the body has more than "+strconv.FormatInt(tooLong.Limit, 10)+" bytes"
	case errors.Is(bodyErr, os.ErrDeadlineExceeded):
		code, text = http.StatusRequestTimeout, "the body did not come in time"
	case bodyErr != nil:
		code, text = http.StatusBadRequest, "the body could not be read"
	default:
		x.cause = err
		if timeout != nil && timeout.Timeout() {
			code, text = http.StatusGatewayTimeout, "the server did not answer in time"
		}
	}
	x.refuse(code, text)
}

// refuse answers for the gateway itself.
func (x *exchange) refuse(code int, text string) {
	x.mark()
	http.Error(x, text, code)
}

// Unwrap is for http.ResponseController.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// limitWrite fails writes to a client that reads nothing of its answer for limit.
func limitWrite(w http.ResponseWriter, limit time.Duration) {
	// A recorder in tests has no deadlines, and needs none.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
}

// limitWrites limits the time of the exchange's writes, because the exchange occupies a place at the
// server. The limit is the server's time to answer. limitWrites renews the deadline seldom.
func (x *exchange) limitWrites() {
	if now := clock.Mono(); x.deadline == 0 || now >= x.deadline {
		limit := x.rules.policy.Timeouts.Response
		x.deadline = now.Add(limit / 4)
		limitWrite(x.ResponseWriter, limit+limit/4)
	}
}

// WriteHeader also relays 1xx answers, which do not pass the method answered. The write limit of a 1xx
// answer is half of the server's limit, because the server waits while the client reads.
func (x *exchange) WriteHeader(code int) {
	if code < http.StatusOK {
		delete(x.Header(), cost.Header)
		delete(x.Header(), classHeader)
		limitWrite(x.ResponseWriter, x.rules.policy.Timeouts.Response/2)
		x.deadline = 0
		x.ResponseWriter.WriteHeader(code)
		if code == http.StatusContinue {
			x.body.proceed()
		}
		return
	}
	x.limitWrites()
	h := x.Header()
	if _, given := h["Content-Type"]; !given {
		h["Content-Type"] = nil // stops net/http from guessing a type
	}
	early := x.body.pending()
	if early {
		h.Set("Connection", "close")
	}
	x.ResponseWriter.WriteHeader(code)
	if early {
		_ = http.NewResponseController(x.ResponseWriter).Flush() // the client may wait for the header; Write reports errors
	}
}

// Write implements http.ResponseWriter.
func (x *exchange) Write(p []byte) (int, error) {
	x.limitWrites()
	n, err := x.ResponseWriter.Write(p)
	x.bytes += int64(n)
	if err != nil {
		x.writeErr = err
	}
	return n, err
}

// answerBody is the body of a server's answer. A read takes at most limit.
type answerBody struct {
	io.ReadCloser
	x        *exchange
	res      *http.Response
	timer    *time.Timer
	limit    time.Duration
	received int64
	paused   bool // the last Read did not fill its buffer
}

// stalled ends a Read that takes too long. Closing a body during a Read is allowed.
func (b *answerBody) stalled() { _ = b.ReadCloser.Close() }

// Close implements io.Closer. HTTP/2's transport waits in Close for the request's body, which may never
// end.
func (b *answerBody) Close() error {
	b.x.body.leave()
	return b.ReadCloser.Close()
}

func (b *answerBody) Read(p []byte) (int, error) {
	if b.paused && b.received < b.res.ContentLength {
		// The server pauses: flush the data so far. ReverseProxy does this only for answers of unknown
		// length.
		b.x.limitWrites()
		if err := http.NewResponseController(b.x.ResponseWriter).Flush(); err != nil {
			b.x.writeErr = err
			return 0, err
		}
	}
	b.timer.Reset(b.limit)
	n, err := b.ReadCloser.Read(p)
	b.received, b.paused = b.received+int64(n), n < len(p)
	if !b.timer.Stop() {
		b.x.spoiled = true // stalled is running or has run
		err = errStalled
	}
	if err != nil && err != io.EOF {
		b.x.cause = err
	}
	if err == io.EOF {
		b.x.complete = true
		b.x.takeReport(b.res.Trailer)
		b.x.grpcStatus(b.res.Header, b.res.Trailer)
		delete(b.res.Trailer, classHeader)
	}
	return n, err
}

// trusts reports whether the peer at address may name the client that it forwards for.
func (s *rules) trusts(address string) bool {
	peer, err := netip.ParseAddrPort(address)
	ip := peer.Addr().Unmap()
	return err == nil && slices.ContainsFunc(s.policy.TrustedPeers, func(p netip.Prefix) bool { return p.Contains(ip) })
}
