package archtest

import (
	_ "embed"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The rules of this module. Add a new package to a list here when you create the package. If a rule
// prevents a better structure, change the rule here, with the reason, in the commit that needs the
// change.

var arrows = []Arrow{
	{
		From: []string{"api/..."},
		Only: []string{},
		Why:  "the API is what all others agree on, so it leans on none of them",
	},
	{
		From: []string{"admission/..."},
		Only: []string{"api/...", "admission/...", "internal/...", "tbadaptor/adaptor", "tbadaptor/holder", "tbadaptor/ledger", "tbadaptor/share", "tokenbucket"},
		Why:  "admission serves any program, with brokers or without",
	},
	{
		From:   []string{"..."},
		Except: []string{"admission/...", "bench/figures"},
		Never:  []string{"admission/router", "admission/rule", "admission/server", "admission/store", "admission/table", "admission/wire"},
		Why:    "others ask by admission/client; figures of the pure rule use it",
	},
	{
		From: []string{"console/..."},
		Only: []string{"api/...", "console/...", "docs", "internal/...", "tokenbucket"},
		Why:  "the console sees what the public API says, so that another one could be written",
	},
	{
		From:   []string{"..."},
		Except: []string{"console/...", "loaddistributor", "nsqd"},
		Never:  []string{"console/..."},
		Why:    "pages stand on top: only the programs that serve them know them",
	},
	{
		From: []string{"gateway/..."},
		Only: []string{"admission/client", "api/...", "client/...", "gateway/...", "internal/...", "kernel/stamp", "nsq/...", "tokenbucket"},
		Why:  "a gateway is a client of brokers and of admission like any other",
	},
	{
		From:   []string{"..."},
		Except: []string{"gateway/...", "tools/sim/...", "tools/drlsim", "bench/..."},
		Never:  []string{"gateway/..."},
		Why:    "nothing stands on the gateway but simulations and figures of its pure packages",
	},
	{
		From: []string{"pacing/..."},
		Only: []string{"internal/mono", "kernel/stamp", "pacing/...", "tokenbucket"},
		Why:  "pacing serves anything of known capacity with several senders",
	},
	{
		From: []string{"kernel/..."},
		Only: []string{"kernel/...", "internal/..."},
		Why:  "arrival stamps serve any server, and know nothing of brokers",
	},
	{
		From: []string{"nsq/..."},
		Only: []string{"internal/faults", "internal/mono", "nsq/..."},
		Why:  "the protocol is for brokers and clients alike, and stands on neither",
	},
	{
		From: []string{"mqtt/..."},
		Only: []string{"internal/faults", "internal/mono", "mqtt/...", "nsq/session", "nsq/wire"},
		Why:  "the protocol is for brokers and clients alike, and stands on neither",
	},
	{
		From:   []string{"..."},
		Except: []string{"nsqd/..."},
		Never:  []string{"nsqd/..."},
		Why:    "what brokers and others share stands below both",
	},
	{
		From: []string{"nsqd/..."},
		Only: []string{"admission/client", "client/...", "api/...", "console", "kernel/...", "mqtt/...", "nsq/...", "pacing/...", "tbadaptor/holder", "tokenbucket", "internal/...", "nsqd/..."},
		Why:  "a broker carries messages whether or not there is a control plane, and knows of it only the API and what holding a share means",
	},
	{
		From:   []string{"nsqd/..."},
		Except: []string{"nsqd/forward"},
		Never:  []string{"client"},
		Why:    "a broker publishes at other brokers by nsqd/forward alone; others see what is published and what has become of it",
	},
	{
		From:  []string{"nsqd/broker"},
		Never: []string{"nsqd/agent", "nsqd/conn", "nsqd/httpapi", "nsq/session"},
		Why:   "the broker holds messages, and does not know by which way they come and go",
	},
	{
		From:  []string{"nsqd/conn"},
		Never: []string{"nsqd/agent", "nsqd/httpapi"},
		Why:   "connections work without HTTP and without a control plane",
	},
	{
		From: []string{"nsqd/auth", "nsqd/compress", "nsqd/lookupd", "nsqd/stats"},
		Only: []string{"internal/..."},
		Why:  "they serve the broker and know nothing of it",
	},
	{
		From: []string{"nsqd/commitlog"},
		Only: []string{"internal/faults", "internal/obs", "internal/mono", "kernel/stamp", "nsq/wire"},
		Why:  "a log keeps records, whatever is done with them",
	},
	{
		From: []string{"nsqd/replicated"},
		Only: []string{"internal/clock", "internal/faults", "internal/obs", "internal/mono", "internal/plural", "kernel/stamp", "nsqd/commitlog"},
		Why:  "it is a log like the one in files",
	},
	{
		From: []string{"nsqd/migrate"},
		Only: []string{"internal/obs", "internal/mono", "kernel/stamp", "nsqd/commitlog", "nsqd/durable", "nsqd/metadata", "nsq/wire"},
		Why:  "what another broker has left becomes logs before there is a broker",
	},
	{
		From: []string{"nsqd/metadata"},
		Only: []string{"internal/expiry", "nsqd/durable", "nsq/wire", "tokenbucket"},
		Why:  "it keeps names and contracts, and knows nothing of what they name",
	},
	{
		From: []string{"nsqd/agent"},
		Only: []string{"api/...", "internal/...", "nsqd/durable", "tbadaptor/holder", "tokenbucket"},
		Why:  "the control plane acts on a broker through the agent's own interface, Node",
	},
	{
		From: []string{"loaddistributor/registry"},
		Only: []string{"internal/mono", "nsq/wire"},
		Why:  "who registered is known without a cluster; lookup puts both together",
	},
	{
		From:  []string{"tbadaptor/..."},
		Never: []string{"loaddistributor/..."},
		Why:   "the adaptor runs on its own or inside the loaddistributor, and needs nothing of it",
	},
	{
		From:  []string{"loaddistributor/controller"},
		Never: []string{"loaddistributor/lookup", "loaddistributor/rpc", "tbadaptor/loop"},
		Why:   "the controller decides; how requests reach it and where the adaptor runs is its callers' business",
	},
	{
		From: []string{"client/..."},
		Only: []string{"api/...", "client/...", "internal/...", "nsq/frames", "nsq/nsqhttp", "nsq/origin", "nsq/wire", "pacing/..."},
		Why:  "a library that applications import brings only the API, the protocol and its pace along",
	},
	{
		From:  []string{"tests/conformance"},
		Never: []string{"nsq/...", "nsqd/..."},
		Tests: true,
		Why:   "a mistake of our codec must not hide from the test of it",
	},
	{
		From: []string{"tools/..."},
		Only: []string{
			"api/...", "client/...", "gateway/balance", "gateway/cost", "gateway/limit", "gateway/schedule", "internal/...", "loaddistributor/catalog", "loaddistributor/correlation", "loaddistributor/placement", "loaddistributor/sizing", "loaddistributor/tuner",
			"mqtt/names", "mqtt/packet", "nsq/frames", "nsq/session", "nsq/wire", "pacing/...", "tbadaptor/adaptor", "tbadaptor/holder", "tbadaptor/ledger", "tbadaptor/share", "tokenbucket", "tools/...",
		},
		Why: "tools use a cluster as any other client does: by its API, its protocol, and the pure packages",
	},
	{
		From: []string{"tools/drlsim", "tools/sim/..."},
		Only: []string{"gateway/balance", "gateway/cost", "gateway/limit", "gateway/schedule", "internal/container", "internal/faults", "internal/histogram", "internal/mono", "internal/plural", "internal/program", "loaddistributor/correlation", "loaddistributor/placement", "loaddistributor/tuner", "pacing/...", "tbadaptor/adaptor", "tbadaptor/ledger", "tbadaptor/share", "tokenbucket", "tools/help", "tools/iotpub/schedule", "tools/iotpub/trace", "tools/sim/..."},
		Why:  "the simulator runs the cores that production runs, and nothing of theirs that waits or sends",
	},
	{
		From:   []string{"..."},
		Except: []string{"internal/lifecycle"},
		Never:  []string{"std:os/signal"},
		Why:    "signals are handled in one place, so that every program stops alike",
	},
	{
		From:   []string{"..."},
		Except: []string{"tools/...", "bench/..."},
		Never:  []string{"tools/..."},
		Tests:  true,
		Why:    "tools stand on top, with the measurements that are made with them: what others need of a tool belongs in a package below",
	},
	{
		From:   []string{"..."},
		Except: []string{"bench/..."},
		Never:  []string{"bench/..."},
		Tests:  true,
		Why:    "measurements stand on top: what others need of one belongs in a package below",
	},
	{
		From: []string{"internal/local"},
		Only: []string{"api/...", "internal/faults", "internal/plural"},
		Why:  "what starts a program knows its flags and its API",
	},
	{
		From: []string{"internal/clock", "internal/histogram", "internal/lifecycle", "internal/mono", "internal/obs", "internal/program", "internal/testkit"},
		Only: []string{"api/...", "internal/..."},
		Why:  "what everything uses must not use anything of the system",
	},
	{
		From:  []string{"..."},
		Never: []string{"internal/testkit/...", "nsqd/commitlog/logtest", "std:testing"},
		Why:   "test helpers stay out of binaries",
		Except: []string{
			"internal/testkit/...", "nsqd/commitlog/logtest", // these are test helpers themselves
		},
	},
	{
		From:  []string{"..."},
		Never: []string{"golang.org/x/time/..."},
		Why:   "x/time/rate mints tokens when time goes backwards (golang/go#71360); tokenbucket does not",
	},
	{
		From:   []string{"..."},
		Except: []string{"bench/...", "tests/..."},
		Never:  []string{"github.com/nats-io/nats-server/...", "go.etcd.io/etcd/server/...", "gonum.org/..."},
		Tests:  true,
		Why:    "go.mod lists what the product stands on; servers to test with and plotting are of the modules bench and tests",
	},
	{
		From:  []string{"..."},
		Never: []string{"std:log", "std:math/rand", "std:io/ioutil"},
		Tests: true,
		Why:   "replaced by log/slog, injected; math/rand/v2, seeded; and io, os",
	},
	{
		From:  strings.Fields(purePackages),
		Never: []string{"std:sync", "std:sync/atomic", "std:testing/synctest"},
		Tests: true,
		Why:   "the tests of what is pure run without the race detector, so they have no goroutines either",
	},
}

// purePackages are read by the Makefile, too: the race detector has nothing to find in
// what has no goroutine.
//
//go:embed pure.txt
var purePackages string

var pure = Purity{
	Packages: strings.Fields(purePackages),
	Std: map[string]string{
		"bytes":           "computes",
		"cmp":             "computes",
		"container/heap":  "computes",
		"crypto/hmac":     "computes",
		"crypto/sha256":   "computes",
		"encoding/base64": "computes; its streams need an io.Reader or Writer, which nothing pure has",
		"encoding/binary": "computes; its Read and Write need an io.Reader or Writer, which nothing pure has",
		"encoding/hex":    "computes; the same",
		"encoding/json":   "computes; the same",
		"errors":          "computes",
		"fmt":             "what prints is banned below",
		"hash":            "computes",
		"hash/crc32":      "computes",
		"hash/maphash":    "computes; its seed is chance, as that of maps, and decides only where something lies",
		"iter":            "computes",
		"maps":            "iterators over maps must be sorted at once",
		"math":            "computes",
		"math/big":        "computes",
		"math/bits":       "computes",
		"math/cmplx":      "computes",
		"math/rand/v2":    "generators that are arguments; the global ones are banned below",
		"net/netip":       "computes",
		"net/textproto":   "only how headers are spelled",
		"net/url":         "computes",
		"path":            "computes",
		"slices":          "computes",
		"sort":            "computes",
		"strconv":         "computes",
		"strings":         "computes",
		"time":            "durations; clocks and timers are banned below",
		"unicode":         "computes",
		"unicode/utf8":    "computes",

		"github.com/BurntSushi/toml": "decodes what it is given",
	},
	Banned: map[string]string{
		"time.After":        whyClock,
		"time.AfterFunc":    whyClock,
		"time.LoadLocation": whyClock,
		"time.Local":        whyClock,
		"time.NewTicker":    whyClock,
		"time.NewTimer":     whyClock,
		"time.Now":          whyClock,
		"time.Since":        whyClock,
		"time.Sleep":        whyClock,
		"time.Tick":         whyClock,
		"time.Until":        whyClock,
	},
	Allowed: map[string][]string{
		"fmt":          {"Append", "Appendf", "Appendln", "Errorf", "Fprint", "Fprintf", "Fprintln", "Sprint", "Sprintf", "Sprintln", "Sscan", "Sscanf"},
		"math/rand/v2": {"New", "NewChaCha8", "NewPCG", "NewZipf"},

		"github.com/BurntSushi/toml": {"Decode"},
		"net/textproto":              {"CanonicalMIMEHeaderKey"},
	},
	Why: "a core without clock, goroutine, I/O or chance runs the same in a broker, a test and the simulator",
}

const whyClock = "time is an argument (mono.Time), read once at the edge from internal/clock"

var shuns = []Shun{
	{
		Path: "net/http", Name: "DefaultServeMux", From: []string{"..."},
		Why: "profiles are registered there by an import; serve a mux of your own",
	},
	{Path: "net/http", Name: "Handle", From: []string{"..."}, Why: "it registers on DefaultServeMux"},
	{Path: "net/http", Name: "HandleFunc", From: []string{"..."}, Why: "it registers on DefaultServeMux"},
	{Path: "net/http", Name: "ListenAndServe", From: []string{"..."}, Why: "it cannot be stopped; lifecycle.Serve can"},
	{
		Path: "net/http", Name: "DefaultClient", From: []string{"..."},
		Why: "it never times out",
	},
	{Path: "net/http", Name: "Get", From: []string{"..."}, Why: "it never times out"},
	{
		Path: "time", Name: "Sleep", From: []string{"..."}, TestsOnly: true,
		Why: "wait for an event, a counter or virtual time: a sleep is too short on one machine and too long on the next",
	},
	{
		Path: "testing/synctest", Name: "Test", From: []string{"..."}, TestsOnly: true,
		Why: "testkit.Bubble holds the process to one processor; on two the race detector can end it",
	},
	{
		Path: "google.golang.org/grpc/status", Name: "Error", From: []string{"loaddistributor/..."}, Except: []string{"loaddistributor/rpc"},
		Why: whyStatus,
	},
	{
		Path: "google.golang.org/grpc/status", Name: "Errorf", From: []string{"loaddistributor/..."}, Except: []string{"loaddistributor/rpc"},
		Why: whyStatus,
	},
	{
		Path: "google.golang.org/grpc/status", Name: "New", From: []string{"loaddistributor/..."}, Except: []string{"loaddistributor/rpc"},
		Why: whyStatus,
	},
	{Path: "log/slog", Name: "Default", From: []string{"..."}, Why: "loggers are injected"},
	{
		Path: "log/slog", Name: "SetDefault", From: []string{"..."}, Except: []string{"gateway"},
		Why: "loggers are injected; only the gateway's main takes what net/http writes by package log",
	},
}

const whyStatus = "codes are chosen in loaddistributor/rpc, from one table"

// loaded reads this module once for all tests.
var loaded = sync.OnceValues(func() (*Module, error) {
	return Load(filepath.Join("..", ".."), "bench", "tests")
})

func module(t *testing.T) *Module {
	t.Helper()
	return testkit.Result(loaded()).Must(t)
}

func report(t *testing.T, found []Finding, err error) {
	t.Helper()
	testkit.Must(t, err)
	for _, f := range found {
		t.Errorf("%s", f)
	}
}

func TestArrowsOfThisModule(t *testing.T) { report(t, module(t).CheckArrows(arrows), nil) }

func TestPurityOfThisModule(t *testing.T) {
	found, err := module(t).CheckPurity(pure)
	report(t, found, err)
}

func TestCommentsOfThisModule(t *testing.T) {
	found, err := module(t).CheckComments("a reader starts at the one package comment: what the package is, what it must not know, where to read next")
	report(t, found, err)
}

// structure has the bounds and the remaining violations. A figure may only fall.
var structure = Structure{
	Methods:   45,
	Interface: 7,
	Exceptions: map[string]int{
		// Node has one method for each order and each report of the broker API. A caller of half the
		// API does not exist: the agent carries out every order.
		"nsqd/agent.Node: interface": 19,
		// owner is the state of the agent's main goroutine. It embeds core, the state for the agent's
		// other goroutines. Captures and grants are the next parts to cut.
		"nsqd/agent.owner: embeds":  1,
		"nsqd/agent.owner: methods": 56,
	},
	Why: "a reader must see what a part uses: give it the two or three values that it needs, as named fields",
}

func TestStructureOfThisModule(t *testing.T) {
	found, err := module(t).CheckStructure(structure)
	report(t, found, err)
}

// instruments lists the packages that measure the product.
var instruments = []string{"bench/...", "tools/drlsim", "tools/iotpub/...", "tools/load", "tools/sim/..."}

// maxInstruments is the present number of lines, rounded up. It rises only for a measurement that an issue asks for. The target is 14,000.
const maxInstruments = 21450

func TestInstrumentsStaySmall(t *testing.T) {
	m := module(t)
	if found := m.missing(instruments, "instruments"); len(found) > 0 {
		t.Fatal(found)
	}
	lines := testkit.Result(m.CountLines(instruments...)).Must(t)
	t.Logf("instruments have %d lines (at most %d; the target is 14000)", lines, maxInstruments)
	if lines > maxInstruments {
		t.Errorf("instruments have %d lines, at most %d are allowed", lines, maxInstruments)
	}
}

func TestShunsOfThisModule(t *testing.T) {
	found, err := module(t).CheckShuns(shuns)
	report(t, found, err)
}

// Every rule states its reason, because the author of a violation reads the reason.
func TestRulesHaveReasons(t *testing.T) {
	for _, a := range arrows {
		if a.Why == "" {
			t.Errorf("arrow from %q has no reason", a.From)
		}
	}
	for _, s := range shuns {
		if s.Why == "" {
			t.Errorf("%s.%s is shunned without a reason", s.Path, s.Name)
		}
	}
	for _, reasons := range []map[string]string{pure.Std, pure.Banned} {
		for name, why := range reasons {
			if why == "" {
				t.Errorf("%s has no reason", name)
			}
		}
	}
}

const whyProse = "a reader must understand each sentence the first time: repeat the noun (CONTRIBUTING.md, How we write)"

// The comments of raft, nats-server, nsq and pebble have 3.8 to 4.3 % pronouns and at most 3
// hanging references per 10,000 words, by the same measure.
func TestProseOfThisModule(t *testing.T) {
	m := module(t)
	for _, tests := range []bool{false, true} {
		found, err := m.CheckProse(tests, ProseLimit{Pronouns: 6, Hanging: 10}, ProseLimit{Pronouns: 5, Hanging: 5}, whyProse)
		report(t, found, err)
	}
}

// pagesOf returns the paths of the Markdown pages, except what the commands of bench write to
// docs/performance.
func pagesOf(t *testing.T, root string) (pages []string) {
	t.Helper()
	testkit.Must(t, fs.WalkDir(os.DirFS(root), "docs", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") && filepath.Dir(path) != filepath.Join("docs", "performance") {
			pages = append(pages, path)
		}
		return err
	}))
	return append(pages, "README.md", "CONTRIBUTING.md")
}

func TestProseOfPages(t *testing.T) {
	root := testkit.Root(t)
	found, err := CheckPages(root, pagesOf(t, root), ProseLimit{Pronouns: 6, Hanging: 10}, ProseLimit{Pronouns: 5, Hanging: 5}, whyProse)
	report(t, found, err)
}

func TestLinksOfPages(t *testing.T) {
	root := testkit.Root(t)
	found, err := CheckLinks(root, append(pagesOf(t, root), "CHANGELOG.md"), "a reader of the page cannot follow the link")
	report(t, found, err)
}
