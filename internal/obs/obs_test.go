package obs

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestObs(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "obs")
}

var _ = Describe("NewLogger", func() {
	var out bytes.Buffer
	BeforeEach(func() { out.Reset() })

	It("writes text from its level on", func() {
		log, _, err := NewLogger(&out, "warn", "text")
		Expect(err).NotTo(HaveOccurred())
		log.Info("quiet")
		log.Warn("loud", KeyTopic, "t")
		Expect(out.String()).To(SatisfyAll(ContainSubstring("level=WARN msg=loud topic=t"), Not(ContainSubstring("quiet"))))
	})
	It("writes JSON", func() {
		log, _, err := NewLogger(&out, "DEBUG", "JSON")
		Expect(err).NotTo(HaveOccurred())
		log.Debug("m", KeyEpoch, 7)
		var line map[string]any
		Expect(json.Unmarshal(out.Bytes(), &line)).To(Succeed())
		Expect(line).To(HaveKeyWithValue("epoch", BeNumerically("==", 7)))
	})
	DescribeTable("refuses", func(level, format, want string) {
		log, _, err := NewLogger(&out, level, format)
		Expect(err).To(MatchError(ContainSubstring(want)))
		Expect(log).To(BeNil())
	},
		Entry("a level that is none", "loud", "text", `log level "loud": want debug, info, warn, error or fatal`),
		Entry("no level", "", "text", `log level ""`),
		Entry("a format that is none", "info", "xml", `log format "xml": want text or json`),
	)
})

var _ = Describe("Mount", func() {
	var (
		state  func() any
		health func() error
		mux    *http.ServeMux
	)
	BeforeEach(func() { state, health = func() any { return map[string]int{"topics": 3} }, nil })
	JustBeforeEach(func() {
		mux = http.NewServeMux()
		mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "catch-all") })
		Mount(mux, NewRegistry(), state, health)
	})
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w
	}

	It("serves the runtime's metrics and the build", func() {
		w := get("/metrics")
		Expect(w.Code).To(Equal(http.StatusOK))
		Expect(w.Body.String()).To(SatisfyAll(
			ContainSubstring("go_goroutines"), ContainSubstring("process_resident_memory_bytes"),
			MatchRegexp(`srtm_build_info\{commit=".+",go_version="go.+",version="`+regexp.QuoteMeta(program.Release)+`"\} 1`)))
	})
	It("serves profiles", func() {
		Expect(get("/debug/pprof/").Body.String()).To(ContainSubstring("goroutine"))
		Expect(get("/debug/pprof/goroutine?debug=1").Body.String()).To(ContainSubstring("goroutine profile"))
		Expect(get("/debug/pprof/cmdline").Body.String()).To(ContainSubstring(filepath.Base(os.Args[0])))
		Expect(get("/debug/pprof/symbol").Body.String()).To(ContainSubstring("num_symbols"))
	})
	It("serves the state as JSON", func() {
		w := get("/debug/state")
		Expect(w.Header().Get("Content-Type")).To(Equal("application/json"))
		Expect(w.Body.String()).To(MatchJSON(`{"topics":3}`))
	})
	It("is healthy without a check, and leaves other paths alone", func() {
		Expect(get("/healthz").Body.String()).To(Equal("ok\n"))
		Expect(get("/other").Body.String()).To(Equal("catch-all"))
	})
	It("takes GET only", func() {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/metrics", nil))
		Expect(w.Code).To(Equal(http.StatusMethodNotAllowed))
	})

	Context("when the daemon is not well", func() {
		BeforeEach(func() { health = func() error { return errors.New("no leader") } })
		It("answers 503 and says why", func() {
			w := get("/healthz")
			Expect(w.Code).To(Equal(http.StatusServiceUnavailable))
			Expect(w.Body.String()).To(Equal("no leader\n"))
		})
	})
	Context("when the state cannot be encoded", func() {
		BeforeEach(func() { state = func() any { return func() {} } })
		It("answers 500 and no half of it", func() {
			w := get("/debug/state")
			Expect(w.Code).To(Equal(http.StatusInternalServerError))
			Expect(w.Body.String()).To(ContainSubstring("encode state"))
		})
	})
	Context("without a state", func() {
		BeforeEach(func() { state = nil })
		It("has no such route", func() { Expect(get("/debug/state").Body.String()).To(Equal("catch-all")) })
	})
})

func TestJSONOfWhatCannotBeRead(t *testing.T) {
	w := httptest.NewRecorder()
	JSON(func() (any, error) { return 1, errors.New("no counters") }).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusServiceUnavailable || w.Body.String() != "no counters\n" {
		t.Errorf("%d %q", w.Code, w.Body)
	}
}
