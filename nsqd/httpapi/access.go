package httpapi

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/auth"
)

// administrative reports whether a request requires an administrator, if the broker has
// administrators. Such requests change something other than by publishing, show messages, or are
// below /debug/.
func administrative(r *http.Request) bool {
	return r.URL.Path == "/channel/peek" || r.URL.Path != "/pub" && r.URL.Path != "/mpub" && secure.Administrative(r)
}

// Public returns the API without administrative requests, for listeners beside an administrative
// listener.
func (a *API) Public() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.serve(w, r, true) })
}

// forbidden returns a fault if the caller may not make the administrative request r, and nil
// otherwise. Without tokens, only callers on this host may change a contract. As in NSQ, all other
// requests are open to everyone.
func (a *API) forbidden(r *http.Request, public bool) *fault {
	if public {
		return &fault{Status: http.StatusForbidden, Message: "ADMIN_ADDRESS", Detail: fmt.Sprintf("%s %.100q is served at --admin-http-address", r.Method, r.URL.Path)}
	}
	if a.cfg.Tokens != nil {
		problem, identity := a.cfg.Tokens.Check(r, secure.Admin)
		switch {
		case problem == "":
			return nil
		case !identity:
			return &fault{Status: http.StatusUnauthorized, Message: "UNAUTHENTICATED", Detail: problem}
		}
		return &fault{Status: http.StatusForbidden, Message: "PERMISSION_DENIED", Detail: problem}
	}
	if r.URL.Path != "/topic/limit" {
		return nil
	}
	if reason := foreign(r); reason != "" {
		return &fault{Status: http.StatusForbidden, Message: "NOT_LOCAL", Detail: "a contract is changed from the broker's host, through a loopback address or a Unix socket, or with a token of --http-token-file; " + reason}
	}
	return nil
}

// foreign returns why a request may come from outside this host, or "" if it comes from a program
// on this host. Headers only count against the caller: a proxy on this host forwards requests of
// other hosts, and a browser sends requests of web pages. A web page may have its own name for a
// loopback address, so the request's host must be a local name.
func foreign(r *http.Request) string {
	for name := range r.Header {
		switch {
		case name == "Forwarded", name == "Via", name == "X-Real-Ip", strings.HasPrefix(name, "X-Forwarded-"):
			return "this came through a proxy, which has added " + name
		case name == "Origin", name == "Referer", strings.HasPrefix(name, "Sec-Fetch-"):
			return "this came from a browser, which has added " + name
		}
	}
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok && local.Network() == "unix" {
		return "" // the socket's permissions decide who may connect
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !peer.Addr().Unmap().IsLoopback() {
		return "the caller is " + r.RemoteAddr
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	if !strings.EqualFold(host, "localhost") && (err != nil || !ip.Unmap().IsLoopback()) {
		return fmt.Sprintf("the host asked for is %.100q and not localhost", r.Host)
	}
	return ""
}

// maxSecret limits a publisher's secret, in bytes, because the secret is kept with its grant.
const maxSecret = 4 << 10

// permitted returns h for publishers that the auth servers permit to publish to the topic. It
// refuses other publishers before it reads the body.
func (a *API) permitted(h handler) handler {
	if a.cfg.Authorise == nil {
		return h
	}
	return func(r *http.Request) (string, error) {
		if err := a.permit(r); err != nil {
			return "", err
		}
		return h(r)
	}
}

// charge requests admission for the messages of an otherwise valid request.
func (a *API) charge(r *http.Request, messages int) error {
	if a.cfg.Admission == nil {
		return nil
	}
	tenant := a.cfg.Tokens.Tenant(r)
	d := a.cfg.Admission.Ask(r.Context(), "tenant/"+tenant+"/http", uint32(messages))
	if d.Admit {
		return nil
	}
	return nsqhttp.QuotaExceeded(tenant, messages, d.RetryAfter)
}

func (a *API) permit(r *http.Request) error {
	secret := secure.TokenOf(r.Header.Get("Authorization"))
	if secret == "" || len(secret) > maxSecret {
		return nsqhttp.Refuse(http.StatusUnauthorized, "AUTH_FIRST", "publishing takes a secret of 1 to %d bytes, as Authorization: Bearer SECRET", maxSecret)
	}
	grant, err := a.cfg.Authorise(r.Context(), auth.NewQuery(r.RemoteAddr, secret, r.TLS))
	switch {
	case errors.Is(err, auth.ErrBusy):
		return nsqhttp.Refuse(http.StatusServiceUnavailable, "AUTH_BUSY", "%v", err)
	case err != nil:
		a.faults.Warn("cannot authorise the publisher", obs.KeyRemote, r.RemoteAddr, obs.KeyError, err)
		if errors.Is(err, auth.ErrRefused) {
			return nsqhttp.Refuse(http.StatusUnauthorized, "AUTH_FAILED", "the auth server refuses the secret")
		}
		return nsqhttp.Refuse(http.StatusServiceUnavailable, "AUTH_FAILED", "no auth server gave a valid answer")
	}
	if topic := r.URL.Query().Get("topic"); !grant.Allows(auth.Publish, topic, "") {
		return nsqhttp.Refuse(http.StatusForbidden, "UNAUTHORIZED", "not permitted to publish to topic %.100q", topic)
	}
	if b, ok := r.Body.(*body); ok {
		b.identity = grant.Identity
	}
	return nil
}
