package console

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
)

// policy is the Content-Security-Policy of all pages: only own files, no inline scripts
// or styles, no framing.
const policy = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"

// Bounds of the data held for callers.
const (
	cookieName  = "srtm-console"
	maxSessions = 1000
	maxIdle     = 12 * time.Hour
	maxBody     = 256 << 10
	maxToken    = 4 << 10
)

// user is the caller of a page.
type user struct {
	Name          string
	Admin         bool
	Login         bool   // logged in with a token
	CSRF          string // token that the user's requests must contain
	cookie        string
	authorization string // its Authorization header
}

// caller identifies the user across connections: by certificate or token, otherwise by
// host.
func (u user) caller() string {
	if i := strings.LastIndex(u.Name, " at "); i > 0 {
		return u.Name[:i]
	}
	if host, _, err := net.SplitHostPort(u.Name); err == nil {
		return host
	}
	return u.Name
}

type userKey struct{}

func userOf(ctx context.Context) user {
	u, _ := ctx.Value(userKey{}).(user)
	return u
}

// sessions are the logins with a token.
type sessions struct {
	mu       sync.Mutex
	byCookie map[string]session // guarded by mu; by cookie
}

type session struct {
	token string
	used  time.Time
}

// token returns the token of a cookie's session; "" without a session.
func (s *sessions) token(cookie string, now time.Time) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	login, found := s.byCookie[cookie]
	if !found {
		return ""
	}
	if now.Sub(login.used) > maxIdle {
		delete(s.byCookie, cookie)
		return ""
	}
	login.used = now
	s.byCookie[cookie] = login
	return login.token
}

// open stores a token. When the table is full, the token with the most sessions loses its
// least recently used session.
func (s *sessions) open(cookie, token string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byCookie == nil {
		s.byCookie = map[string]session{}
	}
	if len(s.byCookie) >= maxSessions {
		count := map[string]int{}
		for _, s := range s.byCookie {
			count[s.token]++
		}
		oldest := ""
		for c, login := range s.byCookie {
			last := s.byCookie[oldest]
			if difference := count[login.token] - count[last.token]; oldest == "" || difference > 0 || difference == 0 && login.used.Before(last.used) {
				oldest = c
			}
		}
		delete(s.byCookie, oldest)
	}
	s.byCookie[cookie] = session{token, now}
}

func (s *sessions) close(cookie string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byCookie, cookie)
}

var crossOrigin = http.NewCrossOriginProtection()

// ServeHTTP checks the caller and sets the security headers.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Frame-Options", "DENY")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	if !c.expected(r) {
		http.Error(w, "this console is not served by that name: ask for localhost or the address, or name it with --console-host", http.StatusMisdirectedRequest)
		return
	}
	if strings.HasPrefix(r.URL.Path, "/ui/assets/") {
		c.mux.ServeHTTP(w, r)
		return
	}
	h.Set("Cache-Control", "no-store")
	u := user{cookie: c.cookie(w, r)}
	u.CSRF = c.csrf(u.cookie)
	if token := c.sessions.token(u.cookie, time.Now()); token != "" && r.Header.Get("Authorization") == "" {
		u.Login = true
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+token)
	}
	u.Name = r.RemoteAddr
	if c.cfg.CallerName != nil {
		u.Name = c.cfg.CallerName(r)
	}
	need := secure.ReadOnly
	changes := r.Method != http.MethodGet && r.Method != http.MethodHead
	if strings.HasPrefix(r.URL.Path, "/ui/log") { // login and logout
		need = secure.Unauthenticated
	} else if changes || strings.Contains(r.URL.Path, "/peek") {
		need = secure.Admin
	}
	u.authorization = r.Header.Get("Authorization")
	u.Admin = c.checkRole(r, secure.Admin) == nil
	ctx := metadata.AppendToOutgoingContext(context.WithValue(r.Context(), userKey{}, u), CallerKey, u.Name)
	if c.cfg.Tenant != nil {
		ctx = metadata.AppendToOutgoingContext(ctx, TenantKey, c.cfg.Tenant(r))
	}
	r = r.WithContext(ctx)
	if changes {
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		if err := crossOrigin.Check(r); err != nil || !c.hasToken(r, u) {
			c.cfg.Log.Warn("console request refused: it did not come from a page of the console", "path", r.URL.Path, obs.KeyRemote, r.RemoteAddr)
			c.fail(w, r, &problem{http.StatusForbidden, "This request did not come from a page of this console, or the page is too old: load it again."})
			return
		}
	}
	if p := c.checkRole(r, need); p != nil {
		if p.status == http.StatusUnauthorized && !changes && !strings.HasPrefix(r.URL.Path, "/ui/live") && r.Header.Get("Authorization") == "" {
			http.Redirect(w, r, prefixOf(r)+"/ui/login", http.StatusSeeOther)
			return
		}
		c.fail(w, r, p)
		return
	}
	c.mux.ServeHTTP(w, r)
}

// checkRole returns the reason why the caller lacks the role, or nil.
func (c *Console) checkRole(r *http.Request, need secure.Role) *problem {
	if c.cfg.May == nil {
		return nil
	}
	switch text, found := c.cfg.May(r, need); {
	case text == "":
		return nil
	case found:
		return &problem{http.StatusForbidden, "Not permitted: " + text + "."}
	default:
		return &problem{http.StatusUnauthorized, "Log in first: " + text + "."}
	}
}

// expected reports whether the request's Host is ours. Without TLS, a page of another
// site may point its own name at our address (DNS rebinding) and then send requests as
// the same origin. A numeric address cannot be rebound, and TLS shows a certificate that
// does not match.
func (c *Console) expected(r *http.Request) bool {
	if r.TLS != nil {
		return true
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	return host == "localhost" || slices.ContainsFunc(c.cfg.Hosts, func(name string) bool { return strings.EqualFold(name, host) })
}

// cookie returns the caller's cookie and sets a missing cookie.
func (c *Console) cookie(w http.ResponseWriter, r *http.Request) string {
	if sent, err := r.Cookie(cookieName); err == nil && len(sent.Value) == 64 {
		return sent.Value
	}
	return setCookie(w, r)
}

// proxyPrefix matches a proxy's path: no element is empty or consists only of dots.
var proxyPrefix = regexp.MustCompile(`^(/\.*[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)

// prefixOf returns the path below which a proxy serves the console, or "". A client that
// invents a prefix gets broken links, but no links to another host.
func prefixOf(r *http.Request) string {
	prefix := strings.TrimSuffix(r.Header.Get("X-Forwarded-Prefix"), "/")
	if len(prefix) > 200 || !proxyPrefix.MatchString(prefix) {
		return ""
	}
	return prefix
}

func setCookie(w http.ResponseWriter, r *http.Request) string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	value := hex.EncodeToString(b)
	http.SetCookie(w, &http.Cookie{
		Name: cookieName, Value: value, Path: prefixOf(r) + Prefix, HttpOnly: true,
		Secure:   r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https", // a client that lies loses the cookie
		SameSite: http.SameSiteStrictMode,
	})
	return value
}

// csrf returns the CSRF token of a cookie. Only pages made for the cookie's holder
// contain the token.
func (c *Console) csrf(cookie string) string {
	mac := hmac.New(sha256.New, c.key)
	mac.Write([]byte(cookie))
	return hex.EncodeToString(mac.Sum(nil))
}

// hasToken reports whether a request contains its caller's CSRF token.
func (c *Console) hasToken(r *http.Request, u user) bool {
	return hmac.Equal([]byte(r.PostFormValue("csrf")), []byte(u.CSRF))
}

func (c *Console) loginPage(w http.ResponseWriter, r *http.Request) {
	c.show(w, r, http.StatusOK, view{Template: "login", Title: "Log in"})
}

// login stores a valid token in a new session.
func (c *Console) login(w http.ResponseWriter, r *http.Request) {
	token := strings.TrimSpace(r.PostFormValue("token"))
	forwarded := r.Clone(r.Context())
	forwarded.Header.Set("Authorization", "Bearer "+token)
	if p := c.checkRole(forwarded, secure.ReadOnly); token == "" || len(token) > maxToken || p != nil {
		c.cfg.Log.Warn("console login refused", obs.KeyRemote, r.RemoteAddr)
		c.show(w, r, http.StatusUnauthorized, view{Template: "login", Title: "Log in", Data: "The token is not known, or may not even read."})
		return
	}
	c.sessions.close(userOf(r.Context()).cookie)
	c.sessions.open(setCookie(w, r), token, time.Now()) // a new cookie, because others may know the old cookie
	http.Redirect(w, r, prefixOf(r)+Prefix, http.StatusSeeOther)
}

func (c *Console) logout(w http.ResponseWriter, r *http.Request) {
	c.sessions.close(userOf(r.Context()).cookie)
	setCookie(w, r)
	http.Redirect(w, r, prefixOf(r)+Prefix, http.StatusSeeOther)
}
