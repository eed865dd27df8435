// Package console is the web console: pages for operators under /ui/. The loaddistributor
// serves the pages of a cluster, and nsqd the pages of a standalone broker. All data
// comes from the public API, gRPC and a broker's HTTP, so anyone could write another
// console.
//
// console.go has the Console and its configuration. guard.go checks who may see and do
// what. watch.go polls the cluster and keeps the results. overview.go, topic.go and their neighbours
// have a function for each page. live.go streams updates to pages. Package why interprets
// a topic's stats, and package history keeps the last hour. Pages are html/template
// (templates/). Scripts and styles are in assets/; pages load nothing from other hosts.
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
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
)

//go:embed assets templates
var files embed.FS

// Prefix is the path below which a Console serves.
const Prefix = "/ui/"

// Metadata of calls: the tenant of a call, and the name of the console's caller. Both
// come from certificates and may contain any characters, so gRPC requires the suffix.
const (
	TenantKey = "srtm-console-tenant-bin"
	CallerKey = "srtm-console-caller-bin"
)

// Config configures a Console. Immutable.
type Config struct {
	// API is a connection to a loaddistributor; nil: the console serves only the broker at
	// Self.
	API grpc.ClientConnInterface
	// Shares is a connection to the tbadaptor's GrantService; nil: pages show no histories
	// of shares.
	Shares grpc.ClientConnInterface
	// Brokers sends requests to the HTTP API of brokers, at the addresses from API. It
	// bounds the time of requests.
	Brokers http.RoundTripper
	// Lookup sends requests to the loaddistributor's own HTTP, for any address; nil: pages
	// show no nodes.
	Lookup http.RoundTripper
	// Admission are connections to the gRPC API of admission's servers, by address. Without
	// one, the page of admission says how to configure it.
	Admission map[string]grpc.ClientConnInterface
	// Gateways are the operators' addresses of gateways; Gateway sends requests there. Without
	// an address, the page of gateways says how to configure it.
	Gateways []string
	Gateway  http.RoundTripper
	// Self is the address, for Brokers, of the broker of a console without API.
	Self string
	// May returns the reason why the caller of a request lacks the role, or "" if the
	// caller has the role. found reports whether the caller is known. Nil: every caller
	// may do everything.
	May func(r *http.Request, need secure.Role) (problem string, found bool)
	// CallerName returns the name of a request's caller for logs; nil: the caller's address.
	CallerName func(r *http.Request) string
	// Tenant returns the tenant of a request's caller, for the metadata TenantKey of API
	// calls; nil: no tenant.
	Tenant func(r *http.Request) string
	// Hosts are the names, besides localhost, at which browsers may request pages without
	// TLS.
	Hosts []string
	// Streams is the maximum number of pages with live updates; 0: 100. One caller may
	// have at most half of them. Further pages must retry later.
	Streams int
	// Own gathers the metrics of the broker at Self, for its charts; nil: no charts.
	Own     prometheus.Gatherer
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger
}

// Console serves the pages. Make it with New, and Run it.
type Console struct {
	// Set by New.
	cfg       Config
	admin     srtmv1.AdminServiceClient
	grants    srtmv1.GrantServiceClient // nil: none
	mux       *http.ServeMux
	templates *template.Template
	key       []byte        // of CSRF tokens
	done      chan struct{} // closed at the end of Run
	end       func()

	sessions  sessions
	watched   watched
	requester requester
	loops     loops
	streams   streams
	dropped   prometheus.Counter     // stream readers that were too slow
	refused   *prometheus.CounterVec // streams beyond a bound
}

// New returns a Console that answers requests. Run also keeps its history.
func New(cfg Config) (*Console, error) {
	c := &Console{
		cfg: cfg, mux: http.NewServeMux(), key: make([]byte, 32), done: make(chan struct{}),
		streams: streams{maxStreams: cmp.Or(cfg.Streams, 100), byCaller: map[string]int{}},
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
	c.requester.transport, c.requester.self, c.requester.admin, c.requester.watched = cfg.Brokers, cfg.Self, c.admin, &c.watched
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
		if path != "/peek" && path != "/create" && path != "/glossary" { // these pages have no live updates
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

// clustered reports whether the console shows a cluster.
func (c *Console) clustered() bool { return c.cfg.API != nil }

// views returns the pages by path.
func (c *Console) views() map[string]viewer {
	all := map[string]viewer{"/channel": c.channel, "/peek": c.peek, "/glossary": glossary}
	if !c.clustered() {
		all["/{$}"] = c.broker
		return all
	}
	maps.Copy(all, map[string]viewer{
		"/{$}": c.watched.overview, "/topics": c.watched.topicList, "/topic": c.topic, "/compare": c.compare,
		"/brokers": c.watched.brokerList, "/broker": c.broker, "/nodes": c.nodes, "/create": c.createPage,
		"/admission": c.admissionPage, "/gateways": c.gatewayPage,
	})
	return all
}

// viewer gathers the data of a page. A page shows its error instead.
type viewer func(ctx context.Context, q url.Values, u user) (view, error)

// view is a page: its template, and the template of its live part with the suffix
// "-live".
type view struct {
	Template, Title string
	Topics          []string // topics whose samples the charts show
	Crumbs          []link   // pages above this page
	Data            any
}

// link is a link with its text.
type link struct{ Text, Link string }

// sections are the sections of the navigation, with their pages' templates.
var sections = []struct {
	link
	templates []string
}{
	{link{"Overview", "/ui/"}, []string{"overview"}},
	{link{"Topics", "/ui/topics"}, []string{"topics", "topic", "compare", "channel", "peek", "create"}},
	{link{"Brokers", "/ui/brokers"}, []string{"brokers", "broker", "nodes"}},
	{link{"Admission", "/ui/admission"}, []string{"admission"}},
	{link{"Gateways", "/ui/gateways"}, []string{"gateways"}},
}

// Sections returns the links of the navigation.
func (f frame) Sections() (all []link) {
	switch {
	case f.Template == "login":
		return nil
	case !f.Cluster:
		return []link{{"Broker", "/ui/"}}
	}
	for _, s := range sections {
		all = append(all, s.link)
	}
	return all
}

// Section returns the section of the page; "": none.
func (f frame) Section() string {
	if !f.Cluster {
		return "Broker"
	}
	for _, s := range sections {
		if slices.Contains(s.templates, f.Template) {
			return s.Text
		}
	}
	return ""
}

// frame is the input of templates.
type frame struct {
	view
	User    user
	Path    string        // of the page, with its query
	Live    template.HTML // the live part
	Main    template.HTML
	Tools   template.HTML // beside the title
	Cluster bool
	Version string
}

// problem is an error page.
type problem struct {
	status int
	text   string
}

func (p *problem) Error() string { return p.text }

// page serves a view as a whole page.
func (c *Console) page(show viewer) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		u := userOf(r.Context())
		v, err := show(r.Context(), r.URL.Query(), u)
		if err != nil {
			c.fail(w, r, err)
			return
		}
		c.show(w, r, http.StatusOK, v)
	}
}

// show writes a page.
func (c *Console) show(w http.ResponseWriter, r *http.Request, status int, v view) {
	f := frame{view: v, User: userOf(r.Context()), Path: strings.TrimPrefix(r.URL.RequestURI(), "/ui"), Cluster: c.cfg.API != nil, Version: program.Version()}
	var err error
	if c.templates.Lookup(v.Template+"-live") != nil {
		f.Live, err = c.render(v.Template+"-live", f)
	}
	if err == nil && c.templates.Lookup(v.Template+"-tools") != nil {
		f.Tools, err = c.render(v.Template+"-tools", f)
	}
	if err == nil {
		f.Main, err = c.render(v.Template, f)
	}
	var all template.HTML
	if err == nil {
		all, err = c.render("layout", f)
	}
	if err != nil { // a programming error
		c.cfg.Log.Error("console page not rendered", "page", v.Template, obs.KeyError, err)
		http.Error(w, "the page could not be made", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(below(prefixOf(r), all))) // the reader has left
}

// render executes a template. The output is safe HTML.
func (c *Console) render(name string, f frame) (template.HTML, error) {
	var b bytes.Buffer
	err := c.templates.ExecuteTemplate(&b, name, f)
	return template.HTML(b.String()), err
}

// below inserts a proxy's prefix before all links to pages. These links begin with Prefix
// after a quote, and no other text can contain both.
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

// cached lets browsers cache files that do not change while this program runs.
func cached(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "max-age=300")
		next.ServeHTTP(w, r)
	})
}
