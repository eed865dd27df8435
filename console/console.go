package console

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"embed"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
)

//go:embed assets templates
var files embed.FS

// Prefix is the path below which a Console serves.
const Prefix = "/ui/"

// The metadata that says which tenant a call is for, and names who has the console make it.
// Both come from certificates and may have any letters, for which gRPC wants the suffix.
const (
	TenantKey = "srtm-console-tenant-bin"
	CallerKey = "srtm-console-caller-bin"
)

// Config of a Console. Immutable.
type Config struct {
	// API is a loaddistributor's; nil: there is none, and Self is all there is.
	API grpc.ClientConnInterface
	// Shares is that of the tbadaptor's GrantService; nil: histories of shares are not shown.
	Shares grpc.ClientConnInterface
	// Brokers sends requests to the HTTP API of brokers, at the addresses that the API
	// says. It bounds their time.
	Brokers http.RoundTripper
	// Lookup sends requests to the loaddistributor's own HTTP, whatever the address; nil:
	// nodes are not shown.
	Lookup http.RoundTripper
	// Self is the address, as Brokers takes it, of the one broker of a console without API.
	Self string
	// May says why the caller of a request may not do what takes the role, and whether it
	// is known; "" if it may. Nil: every caller may do everything.
	May func(r *http.Request, need secure.Role) (problem string, known bool)
	// Who names the caller of a request in logs; nil: its address.
	Who func(r *http.Request) string
	// Tenant is that of the caller of a request, which API is told as the metadata
	// TenantKey; nil: none is.
	Tenant func(r *http.Request) string
	// Hosts are names beyond localhost by which browsers may ask for pages in clear.
	Hosts []string
	// Streams is how many pages are kept up to date at a time; 0: 100. One caller has at
	// most half of them. More are asked to come back later.
	Streams int
	// Own has the metrics of the broker at Self, for its charts; nil: it has none.
	Own     prometheus.Gatherer
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger
}

// Console serves the pages. Make it with New, and Run it.
type Console struct {
	// Set once.
	cfg       Config
	admin     srtmv1.AdminServiceClient
	grants    srtmv1.GrantServiceClient // nil: none
	mux       *http.ServeMux
	templates *template.Template
	key       []byte        // of CSRF tokens
	done      chan struct{} // closed at the end of Run
	end       func()

	sessions sessions
	watched  watched
	answers  answers
	loops    loops
	own      reading // the last; owned by Run
	ownLoops loops
	streams  streams
	dropped  prometheus.Counter     // readers of streams that were too slow
	refused  *prometheus.CounterVec // streams beyond a bound
}

// New returns a Console that serves nothing but what it is asked for; Run keeps its
// history.
func New(cfg Config) (*Console, error) {
	c := &Console{
		cfg: cfg, mux: http.NewServeMux(), key: make([]byte, 32), done: make(chan struct{}),
		streams: streams{most: cmp.Or(cfg.Streams, 100), of: map[string]int{}},
	}
	_, _ = rand.Read(c.key) // never fails
	auto := promauto.With(cfg.Metrics)
	c.dropped = auto.NewCounter(prometheus.CounterOpts{
		Name: "srtm_console_readers_dropped_total", Help: "Pages that were no longer kept up to date because their browser did not take what it was sent for 5 s.",
	})
	c.refused = auto.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_console_streams_refused_total", Help: "Pages that were not kept up to date because so many are already: all together, or those of one caller.",
	}, []string{"reason"})
	for _, bound := range []string{boundAll, boundCaller} {
		c.refused.WithLabelValues(bound)
	}
	c.end = sync.OnceFunc(func() { close(c.done) })
	c.watched.init()
	if cfg.API != nil {
		c.admin = srtmv1.NewAdminServiceClient(cfg.API)
	}
	if cfg.Shares != nil {
		c.grants = srtmv1.NewGrantServiceClient(cfg.Shares)
	}
	var err error
	if c.templates, err = template.New("").Funcs(functions).ParseFS(files, "templates/*.html"); err != nil {
		return nil, fmt.Errorf("templates of the console: %w", err)
	}
	assets, err := fs.Sub(files, "assets")
	if err != nil {
		return nil, fmt.Errorf("assets of the console: %w", err)
	}
	c.mux.Handle("GET /ui/assets/{file}", http.StripPrefix("/ui/assets/", cached(http.FileServerFS(assets))))
	c.mux.HandleFunc("GET /ui/login", c.loginPage)
	c.mux.HandleFunc("POST /ui/login", c.login)
	c.mux.HandleFunc("POST /ui/logout", c.logout)
	for path, view := range c.views() {
		c.mux.HandleFunc("GET /ui"+path, c.page(view))
		if path != "/peek" && path != "/create" { // they stay as they are
			c.mux.HandleFunc("GET /ui/live"+path, c.stream(view))
		}
	}
	c.mux.HandleFunc("GET /ui/data", c.samples)
	c.mux.HandleFunc("POST /ui/action/{what}", c.act)
	c.mux.HandleFunc("POST /ui/create", c.create)
	c.mux.HandleFunc("/ui/", func(w http.ResponseWriter, r *http.Request) {
		c.fail(w, r, &problem{http.StatusNotFound, "There is no such page."})
	})
	return c, nil
}

// views are the pages, by path.
func (c *Console) views() map[string]viewer {
	if c.cfg.API == nil {
		return map[string]viewer{"/{$}": c.broker, "/channel": c.channel, "/peek": c.peek}
	}
	return map[string]viewer{
		"/{$}": c.overview, "/topic": c.topic, "/compare": c.compare, "/broker": c.broker, "/channel": c.channel, "/peek": c.peek,
		"/nodes": c.nodes, "/create": c.createPage,
	}
}

// viewer gathers what a page shows. Its error is shown instead.
type viewer func(ctx context.Context, q url.Values, u user) (view, error)

// view is a page: its template, and "-live" after it the part that is kept up to date.
type view struct {
	Template, Title string
	Topics          []string // whose samples its charts show
	Data            any
}

// frame is what templates get.
type frame struct {
	view
	User    user
	Path    string        // of the page, with its query
	Live    template.HTML // of what is kept up to date
	Main    template.HTML
	Cluster bool
	Version string
}

// problem is an answer that is none of the pages.
type problem struct {
	status int
	text   string
}

func (p *problem) Error() string { return p.text }

// page serves a view as a whole.
func (c *Console) page(of viewer) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		u := userOf(r.Context())
		v, err := of(r.Context(), r.URL.Query(), u)
		if err != nil {
			c.fail(w, r, err)
			return
		}
		c.show(w, r, http.StatusOK, v)
	}
}

// show writes a page.
func (c *Console) show(w http.ResponseWriter, r *http.Request, status int, v view) {
	f := frame{view: v, User: userOf(r.Context()), Path: strings.TrimPrefix(r.URL.RequestURI(), "/ui"), Cluster: c.cfg.API != nil, Version: obs.Version()}
	var err error
	if c.templates.Lookup(v.Template+"-live") != nil {
		f.Live, err = c.render(v.Template+"-live", f)
	}
	if err == nil {
		f.Main, err = c.render(v.Template, f)
	}
	var all template.HTML
	if err == nil {
		all, err = c.render("layout", f)
	}
	if err != nil { // a mistake of ours
		c.cfg.Log.Error("console page not rendered", "page", v.Template, obs.KeyError, err)
		http.Error(w, "the page could not be made", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(below(prefixOf(r), all))) // the reader is gone
}

// render executes a template, whose output is safe HTML.
func (c *Console) render(name string, f frame) (template.HTML, error) {
	var b bytes.Buffer
	err := c.templates.ExecuteTemplate(&b, name, f)
	return template.HTML(b.String()), err
}

// below puts the prefix of a proxy before all links to pages: they begin with Prefix behind
// a quote, which no other text can have.
func below(prefix string, text template.HTML) template.HTML {
	if prefix == "" {
		return text
	}
	return template.HTML(strings.ReplaceAll(string(text), `"`+Prefix, `"`+prefix+Prefix))
}

// fail shows an error.
func (c *Console) fail(w http.ResponseWriter, r *http.Request, err error) {
	p := problemOf(err)
	c.show(w, r, p.status, view{Template: "problem", Title: http.StatusText(p.status), Data: p.text})
}

// cached lets browsers keep what does not change while this program runs.
func cached(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "max-age=300")
		next.ServeHTTP(w, r)
	})
}
