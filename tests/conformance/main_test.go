package conformance

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

const (
	envBinary = "SRTM_CONFORMANCE_NSQD"
	envTCP    = "SRTM_CONFORMANCE_TCP"
	envHTTP   = "SRTM_CONFORMANCE_HTTP"
)

// subject is the program under test. Set once, by TestMain.
type subject struct {
	binary    string // to start; "" when it is ours, or addresses are given
	ours      bool   // this repository's nsqd, built at first use
	tcp, http string // addresses of a running nsqd
	srtm      bool   // SRTM's nsqd, not NSQ's
}

var under subject

// suite is the package's tests with their setup and cleanup.
type suite struct{ m *testing.M }

func TestMain(m *testing.M) {
	flag.Parse()
	localtest.Main(&suite{m})
}

// Run runs the tests and returns the exit code.
func (s *suite) Run() int {
	// Most cases wait for a timeout of the broker, not for the processor.
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", "32"); err != nil {
			return complain(err)
		}
	}
	var err error
	if under, err = choose(); err != nil {
		return complain(err)
	}
	code := s.m.Run()
	if err := commons.close(); err != nil {
		code = max(code, complain(err))
	}
	if !filtered() {
		if err := staleEntries(); err != nil {
			code = max(code, complain(err))
		}
	}
	return code
}

// filtered reports whether only a part of the tests was requested.
func filtered() bool {
	part := false
	flag.Visit(func(f *flag.Flag) {
		part = part || f.Name == "test.run" || f.Name == "test.skip" || f.Name == "test.list" || f.Name == "test.short"
	})
	return part
}

func complain(err error) int {
	fmt.Fprintln(os.Stderr, "conformance:", err)
	return 1
}

func choose() (subject, error) {
	s := subject{
		binary: os.Getenv(envBinary),
		tcp:    os.Getenv(envTCP),
		http:   os.Getenv(envHTTP),
	}
	switch {
	case (s.tcp == "") != (s.http == ""):
		return s, fmt.Errorf("%s and %s go together", envTCP, envHTTP)
	case s.tcp != "" && s.binary != "":
		return s, fmt.Errorf("%s excludes %s", envTCP, envBinary)
	case s.tcp != "":
		r, err := fetch(http.MethodGet, "http://"+s.http+"/info", nil)
		s.srtm = strings.Contains(strings.ToUpper(r.body), product)
		return s, err
	case s.binary != "":
		var err error
		if s.binary, err = filepath.Abs(s.binary); err != nil {
			return s, err
		}
		version, err := exec.Command(s.binary, "--version").Output()
		s.srtm = strings.Contains(string(version), product)
		return s, err
	}
	s.ours, s.srtm = true, true
	return s, nil
}

// program returns the nsqd to start. It skips t if an nsqd runs already and the test needs other
// flags.
func program(t *testing.T, flags ...string) string {
	t.Helper()
	switch {
	case under.tcp != "":
		t.Skipf("needs an nsqd with the flags %q; the one under test runs already", flags)
	case under.ours:
		return localtest.Racing(t, "nsqd")
	}
	return under.binary
}

// product is part of the version of SRTM's nsqd.
const product = "SRTM"
