package console

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	pages "github.com/srtm-io/srtm/console"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// patience is how long a page may take on a busy machine.
const patience = testkit.Hang

func TestMain(m *testing.M) { localtest.Main(m) }

// The accessibility rules for pages, fetched once from the npm registry.
const (
	axeVersion = "4.14.1"
	axeHash    = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)

// axe returns axe-core's script, or "" if it is not available.
func axe(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(testkit.Root(t), "build", "axe-core")
	archive := filepath.Join(dir, "axe-core-"+axeVersion+".tgz")
	if _, err := os.Stat(archive); err != nil {
		testkit.Must(t, os.MkdirAll(dir, 0o755))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if out, err := exec.CommandContext(ctx, "npm", "pack", "--silent", "--pack-destination", dir, "axe-core@"+axeVersion).CombinedOutput(); err != nil {
			t.Logf("without axe-core, pages are not checked for accessibility: %v: %s", err, out)
			return ""
		}
	}
	packed := testkit.Result(os.ReadFile(archive)).Must(t)
	if sum := sha512.Sum512(packed); base64.StdEncoding.EncodeToString(sum[:]) != axeHash {
		t.Fatalf("%s is not what it was", archive)
	}
	zipped, err := gzip.NewReader(bytes.NewReader(packed))
	testkit.Must(t, err)
	for files := tar.NewReader(zipped); ; {
		header := testkit.Result(files.Next()).Must(t)
		if header.Name == "package/axe.min.js" {
			var script bytes.Buffer
			testkit.Result(script.ReadFrom(files)).Must(t)
			return script.String()
		}
	}
}

// browser is a Chromium with one page.
type browser struct {
	t   *testing.T
	ctx context.Context
	axe string

	mu     sync.Mutex
	base   string   // guarded by mu
	before string   // guarded by mu: a base that ending pages may still request
	faults []string // guarded by mu
}

// fault records a fault of a page.
func (b *browser) fault(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = append(b.faults, fmt.Sprintf(format, args...))
}

func open(t *testing.T, base string) *browser {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		t.Skip("there is no Chromium on this machine")
	}
	options := []chromedp.ExecAllocatorOption{chromedp.ExecPath(path), chromedp.UserDataDir(t.TempDir()), chromedp.WindowSize(1280, 900)}
	for _, flag := range []string{"headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync", "disable-dev-shm-usage"} {
		options = append(options, chromedp.Flag(flag, true))
	}
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	t.Cleanup(func() { _ = chromedp.Cancel(ctx) }) // the first cleanup: it waits for the browser's end
	b := &browser{t: t, ctx: ctx, base: base, axe: axe(t)}
	b.do()
	b.width(1280)
	testkit.Must(t, chromedp.Listen(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			b.fault("exception: %v", e.ExceptionDetails)
		case *runtime.EventConsoleAPICalled:
			if e.Type == "error" || e.Type == "warning" {
				said, _ := json.Marshal(e.Args)
				b.fault("console: %s", said)
			}
		case *log.EventEntryAdded: // Content-Security-Policy, too
			if e.Entry.Level == "error" || e.Entry.Level == "warning" {
				b.fault("log: %s %s", e.Entry.Text, e.Entry.URL)
			}
		case *network.EventRequestWillBeSent:
			b.mu.Lock()
			base, before := b.base, b.before
			b.mu.Unlock()
			if !strings.HasPrefix(e.Request.URL, base+"/ui/") && (before == "" || !strings.HasPrefix(e.Request.URL, before+"/ui/live/")) {
				b.fault("request to %s", e.Request.URL)
			}
		}
	}))
	return b
}

// do runs actions. Each action must succeed.
func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if len(actions) == 0 {
		ctx = b.ctx // an empty do starts the browser, which lives as long as the context
	}
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.t.Fatalf("%v\n%s", err, b.faults)
	}
}

// get runs an action and returns its result.
func get[T any](b *browser, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, action)
	if err != nil {
		b.t.Fatalf("%v\n%s", err, b.faults)
	}
	return v
}

// scheme shows the page in a light or dark color scheme.
func (b *browser) scheme(name string) {
	b.t.Helper()
	features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}
	testkit.Result(chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features})).Must(b.t)
}

// becomes waits until a script's expression is true on the current page.
func (b *browser) becomes(expression string) {
	b.t.Helper()
	for end := time.Now().Add(patience); ; {
		is, err := chromedp.Run(b.ctx, chromedp.Evaluate[bool]("Boolean("+expression+")"))
		if is {
			return
		}
		if time.Now().After(end) || b.ctx.Err() != nil {
			seen, _ := chromedp.Run(b.ctx, chromedp.Evaluate[string]("location.href + '\\n' + document.body.innerText")) // for the message
			b.t.Fatalf("never: %s (%v)\n%s\n%s", expression, err, seen, b.faults)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-b.ctx.Done():
		}
	}
}

// accessible holds the page to axe-core's rules: all of them, or the rules that are named.
func (b *browser) accessible(what string, rules ...string) {
	b.t.Helper()
	if b.axe == "" {
		return
	}
	if !get(b, chromedp.Evaluate[bool]("Boolean(window.axe)")) { // else this page was examined before
		get(b, chromedp.Evaluate[int](b.axe+";0"))
	}
	only := ""
	if len(rules) > 0 {
		only = `runOnly: ["` + strings.Join(rules, `", "`) + `"], `
	}
	found := get(b, chromedp.Evaluate[string](`axe.run(document, {`+only+`preload: false, resultTypes: ["violations"]}).then((r) => JSON.stringify(r.violations
		.filter((v) => ["moderate", "serious", "critical"].includes(v.impact)).map((v) => [v.id, v.help, v.nodes.slice(0, 3).map((n) => n.html + " " + n.failureSummary)])))`,
		chromedp.EvalAwaitPromise))
	testkit.Equal(b.t, found, "[]", "%s", what)
}

// visit loads a page once, and checks the page at each width in light and in dark. The narrow page in
// light has all elements, also elements that scroll: axe-core examines this page by all rules. A dark
// page differs in colours alone.
func (b *browser) visit(name, path string, charts int) {
	b.t.Helper()
	began := time.Now()
	defer func() { b.t.Logf("%s took %v", name, time.Since(began)) }()
	b.do(chromedp.Navigate(b.base + path))
	if charts > 0 {
		b.becomes(fmt.Sprintf(`document.querySelectorAll(".chart[data-drawn] canvas").length === %d`, charts))
		b.becomes(`[...document.querySelectorAll(".chart canvas")].every((c) => c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((v) => v))`)
	}
	b.becomes(`document.readyState === "complete" && (document.getElementById("live") === null || document.getElementById("connection").textContent === "Live.")`)
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		for _, width := range []int64{1920, 1280, narrow} {
			what := fmt.Sprintf("%s-%s-%d", name, scheme, width)
			b.width(width)
			switch {
			case width == narrow && scheme == "light":
				b.accessible(what)
			case width == 1280 && scheme == "dark":
				b.accessible(what, "color-contrast", "link-in-text-block")
			}
			if width == 1280 || width == narrow && scheme == "light" {
				b.keep(what, get(b, chromedp.FullScreenshot(100)))
			}
			overflow := get(b, chromedp.Evaluate[string](fmt.Sprintf(`[...document.querySelectorAll("body, main, header, footer, main *")].filter((e) => !e.closest(".scroll *, .chart *, nav *, svg *, .skip") && e.getBoundingClientRect().right > %[1]d + 1 || document.documentElement.scrollWidth > %[1]d).slice(0, 3).map((e) => e.outerHTML.slice(0, 200)).join("\n")`, width)))
			testkit.Equal(b.t, overflow, "", "%s is too wide", what)
		}
	}
	b.scheme("light")
	b.width(1280)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.faults {
		b.t.Errorf("%s: %s", name, f)
	}
	b.faults = nil
}

// narrow is the width of a telephone.
const narrow = 360

// width sets the width of the window.
func (b *browser) width(pixels int64) {
	b.t.Helper()
	if pixels == narrow {
		b.do(chromedp.EmulateViewport(pixels, 740, chromedp.EmulateMobile))
		return
	}
	b.do(chromedp.EmulateViewport(pixels, 900))
}

// keep writes a screenshot into build/console.
func (b *browser) keep(name string, shot []byte) {
	b.t.Helper()
	dir := filepath.Join(testkit.Root(b.t), "build", "console")
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), shot, 0o644)
	}
	testkit.NoError(b.t, err)
}

// startAdmission runs a server of admission with four rules. A key has used all its credits. The function
// returns the gRPC address.
func startAdmission(t *testing.T) (rpc string) {
	t.Helper()
	at := localtest.Ports(t, 3)
	localtest.Run(t, localtest.Program(t, "admission"), at[0]+"/healthz", "--data-path="+t.TempDir(), "--http-address="+at[0], "--grpc-address="+at[1], "--udp-address="+at[2])
	_, err := srtmv1.NewAdmissionAdminClient(localtest.Dial(t, at[1])).SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{
		{Key: "ip/*", RefillMilli: 1000, RefillPeriodS: 3600, Capacity: 20, Shadow: true}, {Key: "tenant/acme/http", RefillMilli: 5_000_000, Capacity: 10_000, FailOpen: true},
		{Key: "user/17", RefillMilli: 1000, RefillPeriodS: 86400, Capacity: 3, Strict: true}, {Key: "user/banned"},
	}}, grpc.WaitForReady(true))
	testkit.Must(t, err)
	for _, key := range []string{"ip/10.0.0.7", "user/17", "user/17", "user/17", "user/17"} {
		localtest.MustAsk(t, http.MethodGet, "http://"+at[0]+"/qos?key="+key, "")
	}
	return at[1]
}

// startGateway runs a gateway with two classes and a server, which has answered requests, and returns its
// operators' address.
func startGateway(t *testing.T) (admin string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(server.Close)
	at := localtest.Ports(t, 2)
	file := filepath.Join(t.TempDir(), "policy.toml")
	testkit.Must(t, os.WriteFile(file, fmt.Appendf(nil, "[[class]]\nname = \"paid\"\nweight = 6\nmatch = [{path = \"/paid\"}]\n[[class]]\nname = \"free\"\nweight = 1\n[[server]]\nurl = %q\ncpu = 100\n", server.URL), 0o600))
	localtest.Run(t, localtest.Program(t, "gateway"), at[1]+"/healthz", "--policy="+file, "--http-address="+at[0], "--admin-address="+at[1])
	for _, path := range []string{"/paid/1", "/paid/2", "/paid/3", "/free"} {
		localtest.MustAsk(t, http.MethodGet, "http://"+at[0]+path, "")
	}
	return at[1]
}

// publish sends messages to an nsqd until the test ends, in bursts.
func publish(t *testing.T, p *local.Process, topic string) {
	producer := localtest.Producer(t, p.TCP, "p1")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for ctx.Err() == nil {
			if err := producer.MultiPublish(topic, [][]byte{[]byte("<script>alert(1)</script>"), []byte("ä\xff\x00")}); err != nil {
				return // the broker has ended, or drains
			}
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
	}()
}

func paused(t *testing.T, p *local.Process) bool {
	t.Helper()
	text, _, err := localtest.Ask(http.MethodGet, "http://"+p.HTTP+"/stats?format=json&topic=sensors&channel=main", "")
	testkit.Must(t, err)
	_, channel, _ := strings.Cut(text, `"channel_name":"main"`)
	return strings.Contains(channel, `"paused":true`)
}

// whys is a control plane with one topic, which has a long history of fits and moves.
type whys struct {
	srtmv1.UnimplementedAdminServiceServer
}

func (whys) ListBrokers(context.Context, *srtmv1.ListBrokersRequest) (*srtmv1.ListBrokersResponse, error) {
	return &srtmv1.ListBrokersResponse{}, nil
}

func (whys) ListTopics(context.Context, *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	return &srtmv1.ListTopicsResponse{}, nil
}

func (whys) GetTopic(context.Context, *srtmv1.GetTopicRequest) (*srtmv1.GetTopicResponse, error) {
	status := &srtmv1.TopicStatus{Fit: &srtmv1.Fit{Ended: true, Fitted: true, Took: durationpb.New(time.Minute)}}
	for i := range 8 {
		quotas := make([]*srtmv1.BrokerQuota, i+1)
		for k := range quotas {
			quotas[k] = &srtmv1.BrokerQuota{BrokerId: fmt.Sprintf("broker-%d.example", k), Share: &srtmv1.Share{RateMilli: 1_000_000, Burst: 40}}
		}
		late := 0.25
		status.Fit.Trials = append(status.Fit.Trials, &srtmv1.FitTrial{Began: timestamppb.Now(), Quotas: quotas, Delivered: 3000, Exceeded: 50, Forecast: &late, Confidence: 0.9, Verdict: "missed"})
		status.Moves = append(status.Moves, &srtmv1.PublisherMove{
			Time: timestamppb.Now(), PublisherId: fmt.Sprintf("sensors/north/%d", i), From: "broker-1.example", To: "broker-2.example", Epoch: 7,
			Reason: srtmv1.MoveReason(i + 1), Why: "a reason in some words", By: "certificate operations at 192.0.2.1:777",
		})
	}
	return &srtmv1.GetTopicResponse{Topic: &srtmv1.Topic{Spec: &srtmv1.TopicSpec{Name: "t", Contract: &srtmv1.Contract{}}, State: srtmv1.TopicState_TOPIC_STATE_ACTIVE, Status: status}}, nil
}

// serveWhys serves a console on a whys until the test ends, and returns its address.
func serveWhys(t *testing.T) string {
	t.Helper()
	ln := testkit.Listen(t)
	server := grpc.NewServer()
	srtmv1.RegisterAdminServiceServer(server, whys{})
	conn := testkit.Result(grpc.NewClient(ln.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	shown := testkit.Result(pages.New(pages.Config{API: conn, Log: slog.New(slog.DiscardHandler)})).Must(t)
	web := httptest.NewServer(shown)
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() { _ = server.Serve(ln) }) // until Stop
	parts.Go(func() { _ = shown.Run(ctx) })   // has no errors
	t.Cleanup(func() {
		cancel()
		web.CloseClientConnections()
		web.Close()
		_ = conn.Close()
		server.Stop()
		parts.Wait()
	})
	return web.URL
}

// Visits every page of a cluster's console, and uses its controls.
func TestPagesOfACluster(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes a browser")
	}
	if _, err := exec.LookPath("chromium"); err != nil && errors.Is(err, exec.ErrNotFound) {
		t.Skip("there is no Chromium on this machine")
	}
	admission, gateway := startAdmission(t), startGateway(t)
	c := localtest.Start(t, 2, []string{"--fitting=off", "--console-admission-address=" + admission, "--console-gateway-address=" + gateway}, "--mcap=1000")
	localtest.Srtm(t, c.RPC, "topic", "create", "sensors", "--rate=1100", "--burst=20", "--slo-latency=100ms", "--channel=main")
	localtest.Srtm(t, c.RPC, "topic", "create", "other", "--rate=50", "--burst=20", "--slo-latency=1s", "--channel=main")
	publish(t, c.Brokers[0], "sensors")
	localtest.Consume(t, "sensors", "main", nsq.HandlerFunc(func(*nsq.Message) error { return nil }), nil, c.Brokers[0].TCP)
	b := open(t, "http://"+c.Web)

	b.visit("topic", "/ui/topic?name=sensors", 4)
	// The legends have values without a mouse, on both scales. The brokers sort by a click.
	b.do(chromedp.Click(`[data-log="on"]`))
	b.becomes(`document.querySelector('[data-log="on"]').ariaPressed === "true" && [...document.querySelectorAll(".u-legend .u-value")].every((v) => /^[0-9–]/.test(v.textContent))`)
	// Without a mouse the legends follow the samples.
	const newest = `[...document.querySelectorAll(".u-legend .u-value:first-child, .u-legend tr:first-child .u-value")].map((v) => v.textContent)`
	before := get(b, chromedp.Evaluate[string](`JSON.stringify(`+newest+`)`))
	b.becomes(newest + `.every((v, i) => v && v !== ` + before + `[i])`)
	b.do(chromedp.Click(`[aria-label="Brokers of sensors"] thead th button`))
	b.becomes(`document.querySelector('[aria-label="Brokers of sensors"] thead th').ariaSort === "ascending"`)
	b.becomes(`[...document.querySelectorAll('[aria-label="Channels"] tbody th')].some((th) => th.textContent === "main")`)
	b.visit("overview", "/ui/", 0)
	b.visit("topics", "/ui/topics?sort=offered&desc=1", 0)
	b.visit("brokers", "/ui/brokers", 0)
	b.visit("admission", "/ui/admission", 0)
	b.becomes(`[...document.querySelectorAll('[aria-label="Keys near their limit"] tbody tr')].some((r) => r.cells[0].textContent === "user/17" && r.cells[1].textContent === "no credit")`)
	b.becomes(`document.querySelector('[aria-label="Servers"] tbody').textContent.includes("healthy") && document.querySelector('[aria-label="Rules"] tbody').rows.length === 4`)
	b.visit("gateways", "/ui/gateways", 0)
	b.becomes(`[...document.querySelectorAll('[aria-label="Classes and queues"] tbody tr')].some((r) => r.cells[0].textContent === "paid" && r.cells[5].textContent === "3")`)
	b.visit("glossary", "/ui/glossary", 0)
	b.visit("compare", "/ui/compare?a=sensors&b=other", 4)
	b.visit("broker", "/ui/broker?id=b1", 5)
	b.visit("nodes", "/ui/nodes", 0)

	// By keyboard: the first tab stop leads to the content.
	b.do(chromedp.KeyEvent("\t"), chromedp.KeyEvent("\r"))
	b.becomes(`document.activeElement.id === "main"`)

	// After an action the page updates without a reload, and the focus stays.
	b.visit("channel", "/ui/channel?topic=sensors&channel=main", 0)
	b.becomes(`document.querySelector('form[action="/ui/action/pause"] button') !== null`)
	b.becomes(`(document.querySelector('form[action="/ui/action/pause"] button').focus(), window.same = true)`)
	b.do(chromedp.KeyEvent("\r"))
	b.becomes(`document.getElementById("answer").textContent.includes("Paused on 2 brokers.")`)
	b.becomes(`window.same && document.querySelector('form[action="/ui/action/unpause"] button')?.textContent === "Resume" && document.activeElement.tagName === "BUTTON"`)
	if !paused(t, c.Brokers[0]) {
		t.Error("the page says that the channel is paused, and it is not")
	}
	if out := c.Control.Output(); !strings.Contains(out, "action=pause by=127.0.0.1:") {
		t.Errorf("the log does not say who has paused it:\n%s", out)
	}
	testkit.WaitFor(t, "messages to wait", func() bool {
		n, err := localtest.Metric(c.Brokers[0], "srtm_nsqd_channel_ready_messages")
		return err == nil && n > 4
	})
	b.visit("peek", "/ui/peek?topic=sensors&channel=main", 0)
	// The pause decided which of the two alternating messages comes first.
	b.becomes(`[...document.querySelectorAll("pre")].some(p => p.textContent === "<script>alert(1)</script>") && document.querySelectorAll("main script").length === 0`)

	// A whole topic is paused on its brokers after a confirmation, then emptied and resumed.
	b.visit("topic-tools", "/ui/topic?name=sensors", 4)
	press := func(action, answer string) {
		b.becomes(fmt.Sprintf(`document.querySelector('#live form[action="/ui/action/%s"] button') !== null`, action))
		b.do(chromedp.Click(fmt.Sprintf(`#live form[action="/ui/action/%s"] button`, action)))
		if action != "unpause-topic" {
			b.becomes(`document.querySelector("#answer #sure") !== null`)
			b.do(chromedp.Click("#sure"))
		}
		b.becomes(`document.getElementById("answer").textContent.includes("` + answer + `")`)
	}
	press("pause-topic", "Paused on 2 brokers.")
	b.accessible("topic, paused")
	for _, broker := range c.Brokers {
		if stats := localtest.MustAsk(t, http.MethodGet, "http://"+broker.HTTP+"/stats?format=json&topic=sensors&channel=none", ""); !strings.Contains(stats, `"paused":true`) {
			t.Errorf("the topic is not paused on a broker: %s", stats)
		}
	}
	press("empty-topic", "Emptied on 2 brokers.")
	press("unpause-topic", "Resumed on 2 brokers.")

	// Creating a topic: a topic that does not fit, with the reason, then the plan, and the topic.
	b.visit("create", "/ui/create", 0)
	fill := func(rate string) {
		b.do(chromedp.SetValue("#name", "new"), chromedp.SetValue("#rate", rate), chromedp.SetValue("#groups", "g:10:20"))
	}
	fill("100000")
	b.do(chromedp.Click(`button[value="plan"]`))
	b.becomes(`document.body.innerText.includes("Nothing fits") && document.body.innerText.includes("r of ")`)
	b.accessible("create, infeasible")
	fill("300")
	b.mu.Lock()
	b.faults = nil // the log contains the 409 answer
	b.mu.Unlock()
	b.do(chromedp.Click(`button[value="plan"]`))
	b.becomes(`document.body.innerText.includes("How it would be placed")`)
	b.accessible("create, planned")
	b.do(chromedp.Click(`button[value="create"]`))
	b.becomes(`location.pathname === "/ui/topic" && document.querySelector("h1").textContent === "Topic new"`)
	if _, code, err := localtest.Ask(http.MethodGet, "http://"+c.Web+"/lookup?topic=new", ""); err != nil || code != http.StatusOK {
		t.Errorf("the topic was not created: %d, %v", code, err)
	}

	// Expiry settings: the form lists all faults of the input, the form changes the topic, and the
	// page shows the settings in force and the counts.
	b.mu.Lock()
	b.faults = nil
	b.mu.Unlock()
	b.visit("expiry", "/ui/topic?name=other", 4)
	b.do(chromedp.Click("#expiring summary"))
	b.do(chromedp.SetValue("#ttl", "soon"), chromedp.SetValue("#attempts", "0"), chromedp.SetValue("#expire", "slow:ttl=never"), chromedp.Click(`form[action="/ui/action/expiry"] button`))
	b.becomes(`["such as 1h", "such as 5", "CHANNEL:ttl=10m"].every((text) => document.getElementById("answer").textContent.includes(text))`)
	b.do(chromedp.SetValue("#ttl", "2h"), chromedp.SetValue("#attempts", "1"), chromedp.SetValue("#dead", "sensors"), chromedp.SetValue("#expire", "slow:ttl=1ms"), chromedp.Click(`form[action="/ui/action/expiry"] button`))
	b.becomes(`document.getElementById("answer").textContent.includes("discarded after 2h0m0s, given up after 1 delivery, then sent to sensors")`)
	b.becomes(`document.getElementById("live").innerText.includes("Channel slow: discarded after 1ms")`)
	stop := localtest.Consume(t, "other", "failing", nsq.HandlerFunc(func(m *nsq.Message) error {
		m.DisableAutoResponse()
		m.RequeueWithoutBackoff(0)
		return nil
	}), nil, "http://"+c.Web)
	localtest.Srtm(t, c.RPC, "channel", "create", "other", "slow")
	localtest.MustAsk(t, http.MethodPost, "http://"+c.Brokers[0].HTTP+"/pub?topic=other", "poison")
	given := func(channel string, column, count int) string {
		return fmt.Sprintf(`[...document.querySelectorAll('[aria-label="Messages given up"] tbody tr')].some((r) => r.children[0].textContent === %q && r.children[%d].textContent === "%d")`, channel, column, count)
	}
	b.becomes(given("failing", 3, 1))
	b.becomes(given("slow", 1, 1))
	stop()
	b.visit("expiry-channel", "/ui/channel?topic=other&channel=slow", 0)
	b.becomes(`document.getElementById("live").innerText.includes("discarded after 1ms")`)

	// A standalone broker has a console with its own pages; a broker of a cluster has none.
	alone := localtest.NSQD(t, "")
	for _, path := range []string{"/topic/create?topic=sensors", "/channel/create?topic=sensors&channel=main"} {
		localtest.MustAsk(t, http.MethodPost, "http://"+alone.HTTP+path, "")
	}
	publish(t, alone, "sensors")
	if _, code, err := localtest.Ask(http.MethodGet, "http://"+c.Brokers[0].HTTP+"/ui/", ""); err != nil || code != http.StatusNotFound {
		t.Errorf("the console of a cluster's broker: %d, %v", code, err)
	}
	b.mu.Lock()
	b.before, b.base = b.base, "http://"+alone.HTTP
	b.mu.Unlock()
	b.visit("alone", "/ui/", 5)
	press("pause-topic", "Paused on 1 broker.")
	press("unpause-topic", "Resumed on 1 broker.")
	b.visit("alone-channel", "/ui/channel?topic=sensors&channel=main", 0)
	b.do(chromedp.Click(`form[action="/ui/action/pause"] button`))
	b.becomes(`document.getElementById("answer").textContent.includes("Paused on 1 broker.")`)
	if !paused(t, alone) {
		t.Error("the page says that the broker's channel is paused, and it is not")
	}

	// A topic's page with a long fit and many moves.
	b.mu.Lock()
	b.base = serveWhys(t)
	b.mu.Unlock()
	b.visit("whys", "/ui/topic?name=t", 4)
	b.becomes(`["Steps of the fit", "Moves of publishers"].every((name) => document.querySelectorAll('[aria-label="' + name + '"] tbody tr').length === 8)`)

	// Another site's page cannot press a button, whatever the page knows.
	if text, code, err := localtest.Ask(http.MethodPost, "http://"+c.Web+"/ui/action/empty?topic=sensors&channel=main", ""); err != nil || code != http.StatusForbidden {
		t.Errorf("a request without a token of the page: %d %s, %v", code, text, err)
	}
}
