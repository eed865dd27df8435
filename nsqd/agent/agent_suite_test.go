package agent_test

import (
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestAgent(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	SetDefaultEventuallyPollingInterval(2 * time.Millisecond)
	RunSpecs(t, "Agent")
}
