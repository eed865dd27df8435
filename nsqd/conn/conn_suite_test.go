package conn_test

import (
	"log/slog"
	"runtime"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestConn(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "nsqd/conn")
}

// loops is the number of event loops of the nodes in the present spec.
var loops int

// log is the log of the nodes in the present spec; nil: GinkgoWriter.
var log *slog.Logger

// overBoth describes behaviour that both drivers must have.
func overBoth(text string, body func()) bool {
	Describe(text+", on goroutines", func() {
		BeforeEach(func() { loops = 0 })
		body()
	})
	if runtime.GOOS == "linux" {
		Describe(text+", on event loops", func() {
			BeforeEach(func() { loops = 2 })
			body()
		})
	}
	return true
}
