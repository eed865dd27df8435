package conn_test

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestConn(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "nsqd/conn")
}
