package broker_test

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestBroker(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "nsqd/broker")
}
