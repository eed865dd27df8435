package console

import (
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A proxy may serve the console below its own path and declare the path. Then each link, redirect and
// cookie is below the path.
func TestConsoleBelowAPrefixOfAProxy(t *testing.T) {
	_, base, _ := serve(t, &fake{names: []string{`t"/ui/x`}}, func(c *Config) {
		c.May = func(r *http.Request, need secure.Role) (string, bool) {
			if need == secure.Unauthenticated || secure.TokenOf(r.Header.Get("Authorization")) == "boss" {
				return "", true
			}
			return "too little", false
		}
	})
	target := testkit.Result(url.Parse(base)).Must(t)
	for _, prefix := range []string{"/team/srtm", "/ui"} {
		proxy := httptest.NewServer(http.StripPrefix(prefix, &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Header.Set("X-Forwarded-Prefix", prefix)
		}}))
		t.Cleanup(proxy.Close)
		jar, _ := cookiejar.New(nil) // has no errors
		browser := &http.Client{Jar: jar, Timeout: testkit.Hang}
		t.Cleanup(browser.CloseIdleConnections)
		_, page := get(t, browser, proxy.URL+prefix+"/ui/")
		csrf := csrfOf.FindStringSubmatch(page)
		if csrf == nil {
			t.Fatalf("%s: no page to log in: %s", prefix, page)
		}
		r, err := browser.PostForm(proxy.URL+prefix+"/ui/login", url.Values{"token": {"boss"}, "csrf": {csrf[1]}})
		testkit.Must(t, err)
		code, page := read(t, r)
		if code != http.StatusOK || !strings.Contains(page, "Brokers") {
			t.Fatalf("%s: after the login %d at %s: %s", prefix, code, r.Request.URL, page)
		}
		links := regexp.MustCompile(`(?:href|src|action|data-live|hx-post|hx-get)="([^"]*)"`).FindAllStringSubmatch(page, -1)
		if len(links) < 8 {
			t.Errorf("%s: %d links", prefix, len(links))
		}
		for _, link := range links {
			if !strings.HasPrefix(link[1], prefix+"/ui/") && link[1] != "#main" {
				t.Errorf("%s: a link to %s", prefix, link[1])
			}
		}
		if strings.Contains(page, prefix+prefix+"/ui") {
			t.Errorf("%s is there twice: %s", prefix, page)
		}
	}
	for _, bad := range []string{"//evil.example", "/a//b", "/..", "/a/../b", "javascript:x", `/a"b`, "a", "/a b", "/" + strings.Repeat("a", 300), "/a/."} {
		if got := prefixOf(&http.Request{Header: http.Header{"X-Forwarded-Prefix": {bad}}}); got != "" {
			t.Errorf("%q is taken for the prefix %q", bad, got)
		}
	}
}
