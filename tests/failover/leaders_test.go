package failover

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// Two leaders on purpose: the first leader hangs. One of its two brokers connects to the next leader
// while the other waits for the first. All of a share is on a lease. If the first leader simply
// continued, it would count the leaving broker's share as free, and give the share to the remaining
// broker.
func TestTwoLeadersAtOnce(t *testing.T) {
	twoLeaders(t, true, "--flex-lease=1s", "--clock-bound=100ms", "--share-period=100ms")
}

// The same with a first leader that has lost its store and continues until it notices the loss. Leases
// are so short that before this the leader counts the leaving broker's share as free. The contract of
// 200 msg/s, burst 20, was exceeded by 12 messages before leaders acted only in their own term.
func TestALeaderThatHasLostItsStore(t *testing.T) {
	twoLeaders(t, false, "--flex-lease=250ms", "--session-lease=20s", "--clock-bound=20ms", "--share-period=20ms")
}

func twoLeaders(t *testing.T, hangs bool, leases ...string) {
	e := etcdtest.Start(t, etcdtest.Config{})
	store := testkit.Result(local.NewProxy(strings.TrimPrefix(e.URL, "http://"))).Must(t)
	t.Cleanup(store.Close)
	c := &cluster{t: t, release: current(t)}
	for _, endpoint := range []string{"http://" + store.Address(), e.URL} {
		c.add(append(slices.Clone(leases), "--store=etcd", "--etcd-endpoint="+endpoint, "--etcd-lease=2s", "--flex-percent=100", "--window=1s")...)
	}
	c.start(0)
	// The first leads before there is a second.
	way, err := local.NewProxy(c.grpc[0])
	testkit.Must(t, err)
	t.Cleanup(way.Close)
	c.join(way.Address(), c.grpc[1])
	c.join(c.grpc[0], c.grpc[1])
	c.connect(2)
	c.start(1)

	spec := contract("load", loadRate, loadBurst, loadPublishers)
	spec.PlacementPolicy = "loadbalance"
	c.create(spec)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c.consume("load")
	l := &load{topic: "load", publishers: loadPublishers}
	wait := l.run(ctx, t, c, loadEvery)
	grants := func(broker int) (address string, connected bool) {
		text, _, err := localtest.Ask(http.MethodGet, "http://"+c.brokers[broker].HTTP+"/debug/state", "")
		if err != nil {
			return "", false
		}
		var state struct {
			Agent struct {
				Grants struct {
					Address   string
					Connected bool
				}
			}
		}
		_ = json.Unmarshal([]byte(text), &state)
		return state.Agent.Grants.Address, state.Agent.Grants.Connected
	}
	store.Cut(true)
	signal := func(s syscall.Signal) {
		if !hangs {
			return
		}
		testkit.Must(t, c.control[0].Signal(s))
	}
	signal(syscall.SIGSTOP)
	next := localtest.Dial(t, c.grpc[1])
	testkit.WaitFor(t, "the next one leads", func() bool {
		_, err := srtmv1.NewGrantServiceClient(next).ListShares(t.Context(), &srtmv1.ListSharesRequest{})
		return err == nil
	})
	way.Close()
	follows := func(broker int) {
		testkit.WaitFor(t, fmt.Sprintf("broker %d follows the next leader", broker+1), func() bool {
			address, connected := grants(broker)
			return connected && address == c.grpc[1]
		})
	}
	follows(0)
	signal(syscall.SIGCONT)
	follows(1)
	sent := l.sent.Load()
	testkit.WaitFor(t, "messages continue", func() bool { return l.sent.Load() > sent+1000 })
	store.Cut(false)
	cancel()
	wait()
	releases := c.envelope("load", loadRate, loadBurst)
	t.Logf("%d of %d messages were released, within the contract", releases, l.sent.Load())
}
