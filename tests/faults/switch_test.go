package faults

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsqd/agent"
)

// state returns the state that the broker's agent reports.
func (b *broker) state() (s agent.State, err error) {
	text, _, err := localtest.Ask(http.MethodGet, "http://"+b.web+"/debug/state", "")
	var all struct{ Agent agent.State }
	if err == nil {
		err = json.Unmarshal([]byte(text), &all)
	}
	return all.Agent, err
}

// held returns the broker's share of the topic; nothing: a zero epoch.
func held(s agent.State) agent.HoldingState {
	for _, h := range s.Held {
		if h.Topic == topic {
			return h
		}
	}
	return agent.HoldingState{}
}

// watch follows a broker's holding until ctx ends. The broker always holds a share, epochs never fall,
// and the share changes only by grants, which have a greater epoch. An expired lease would show as the
// same epoch with a smaller share.
func (c *cluster) watch(ctx context.Context, b *broker) {
	var last agent.HoldingState
	for ; ctx.Err() == nil; wait(20 * time.Millisecond) {
		s, err := b.state()
		if err != nil {
			c.t.Errorf("%s: %v", b.name, err)
			return
		}
		h := held(s)
		if h.RateMilli <= 0 || h.Burst <= 0 || h.Epoch < last.Epoch || h.Epoch == last.Epoch && h != last {
			c.t.Errorf("%s holds %+v, after %+v", b.name, h, last)
		}
		last = h
	}
}

// shares reads the shares from the process with the adaptor.
func (c *cluster) shares() *srtmv1.TopicShares {
	address := c.grpc
	if c.apart {
		address = by(c.link, c.adaptorGRPC)
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), local.Patience)
	defer cancel()
	conn := localtest.Dial(c.t, address)
	defer conn.Close() // a connection per question: none of them waits to reconnect
	r, err := srtmv1.NewGrantServiceClient(conn).ListShares(ctx, &srtmv1.ListSharesRequest{Topic: topic, History: 512})
	if err != nil || len(r.Topics) != 1 {
		return &srtmv1.TopicShares{}
	}
	return r.Topics[0]
}

// whole reports whether the adaptor has the contract, and the brokers together hold all of it.
func whole(s *srtmv1.TopicShares, brokers int) bool {
	var r, b int64
	for _, m := range s.Members {
		if !m.Connected {
			return false
		}
		r += m.GetAcknowledged().GetRateMilli()
		b += m.GetAcknowledged().GetBurst()
	}
	return len(s.Members) == brokers && s.Contract != nil && r == rate*1000 && b == burst
}

// redeploy stops the control plane in order, and starts the control plane with the adaptor elsewhere.
// The old control plane ends before the new begins.
func (c *cluster) redeploy(apart bool, meanwhile func()) (before map[string]agent.HoldingState) {
	c.t.Helper()
	c.must(c.control.Stop())
	if c.apart {
		c.must(c.adaptor.Stop())
	}
	before = map[string]agent.HoldingState{}
	testkit.WaitFor(c.t, "brokers see that the adaptor is unavailable", func() bool {
		for _, b := range c.brokers {
			s, err := b.state()
			if err != nil || s.Grants.Connected {
				return false
			}
			before[b.name] = held(s)
		}
		return true
	})
	meanwhile()
	if c.apart = apart; apart {
		c.startAdaptor()
	}
	c.startControl()
	return before
}

func TestTheAdaptorMovesOutAndBack(t *testing.T) {
	// Leases outlast the switch, so only a revocation can end a share.
	c := newCluster(t, false, []string{"--flex-lease=30s", "--session-lease=1m", "--clock-bound=60ms"}, "available", "strict", "available")
	create, cancel := context.WithTimeout(t.Context(), local.Patience)
	defer cancel()
	c.create(create)
	initial := c.shares()
	// The offered load exceeds the contract. Two brokers' publishers stay well within their part.
	accepted, stop := c.load(offered*2/3, offered/24, offered/24)
	testkit.WaitFor(c.t, "shares follow the traffic", func() bool {
		s := c.shares()
		return whole(s, 3) && s.Members[0].Acknowledged.RateMilli > initial.Members[0].Acknowledged.RateMilli*5/4
	})
	testkit.WaitFor(c.t, "brokers show what they hold", func() bool {
		return !slices.ContainsFunc(c.brokers, func(b *broker) bool {
			s, err := b.state()
			return err != nil || held(s).Epoch == 0
		})
	})
	watching, over := context.WithCancel(t.Context())
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer over()
	for _, b := range c.brokers {
		watchers.Go(func() { c.watch(watching, b) })
	}
	for _, apart := range []bool{true, false} {
		before := c.redeploy(apart, func() {
			n := accepted.Load()
			c.flows(rate / 3)
			testkit.WaitFor(c.t, "publishes continue", func() bool { return accepted.Load() > n+rate/3 })
		})
		testkit.WaitFor(c.t, "the shares are the contract again", func() bool { return whole(c.shares(), 3) })
		grown := map[string]bool{}
		for _, h := range c.shares().History {
			switch {
			case h.Event == "acknowledged", h.Reason == "rule", h.Reason == "rest":
			case h.Event != "granted", h.Share.RateMilli < before[h.BrokerId].RateMilli, h.Share.Burst < before[h.BrokerId].Burst:
				t.Errorf("daemon %v: %s held %+v, and then: %v", apart, h.BrokerId, before[h.BrokerId], h)
			default:
				grown[h.BrokerId] = true // the stop came between a decrease and its increase
			}
		}
		t.Logf("daemon %v: brokers then used %+v; grown by grants on their way: %v", apart, before, grown)
		c.flows(rate)
	}
	over()
	watchers.Wait()
	c.verify(stop(), fixed())
}
