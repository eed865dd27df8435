package conformance

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

const (
	envBinary = "SRTM_CONFORMANCE_NSQD"
	envTCP    = "SRTM_CONFORMANCE_TCP"
	envHTTP   = "SRTM_CONFORMANCE_HTTP"
)

// subject is what the tests are about. Set once, by TestMain.
type subject struct {
	binary    string // to start; "" when addresses are given
	tcp, http string // of one that runs already
	srtm      bool   // it is SRTM's nsqd, not NSQ's
}

var under subject

// suite is the package's tests with what comes before and after them.
type suite struct{ m *testing.M }

func TestMain(m *testing.M) {
	flag.Parse()
	testkit.Main(&suite{m})
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
	dir, err := os.MkdirTemp("", "conformance")
	if err != nil {
		return complain(err)
	}
	defer os.RemoveAll(dir)
	if under, err = choose(dir); err != nil {
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

// filtered reports whether only a part of the tests was asked for.
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

func choose(dir string) (subject, error) {
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
	s.binary, s.srtm = filepath.Join(dir, "nsqd"), true
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	return s, local.Build(ctx, "github.com/srtm-io/srtm/nsqd", s.binary, raceDetector)
}

// product is in the version of SRTM's nsqd.
const product = "SRTM"
