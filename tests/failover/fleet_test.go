package failover

import (
	"fmt"
	"strings"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// fleet is a cluster of two brokers. The processes restart in the same folders and at the same
// addresses.
type fleet struct {
	*cluster
	brokerDirs []string
}

// newFleet starts the loaddistributors and the brokers.
func newFleet(t *testing.T, controls int, flags ...string) *fleet {
	t.Helper()
	f := &fleet{cluster: &cluster{t: t, release: current(t)}, brokerDirs: []string{t.TempDir(), t.TempDir()}}
	for i := range controls {
		f.add(flags...)
		f.start(i)
	}
	f.brokers = make([]*local.Process, len(f.brokerDirs))
	for i := range f.brokers {
		f.startBroker(i)
	}
	f.connect(len(f.brokers))
	return f
}

func (f *fleet) startBroker(i int) {
	f.t.Helper()
	flags := []string{
		"--loaddistributor-address=" + strings.Join(f.grpc, ","), fmt.Sprintf("--broker-id=b%d", i+1), "--mcap=1000000", "--data-path=" + f.brokerDirs[i],
	}
	start := func() (*local.Process, error) { return local.NSQD(f.release.nsqd, f.brokerDirs[i], flags...) }
	if old := f.brokers[i]; old != nil {
		start = func() (*local.Process, error) {
			return local.NSQDAt(f.release.nsqd, f.brokerDirs[i], old.TCP, old.HTTP, flags...)
		}
	}
	d, err := start()
	f.brokers[i] = localtest.Watch(f.t, d, err)
}

// wide is a topic on both brokers.
func wide() *srtmv1.TopicSpec {
	spec := contract("t", 1000, 100, 10)
	spec.PlacementPolicy, spec.ShareRule = "loadbalance", "sqrt"
	spec.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY
	spec.Publishers = []*srtmv1.Publisher{{Id: "alone", Rate: 3}}
	return spec
}
