package publishers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// Publishers that want more than the contract are paced by their broker alone. Without the control
// plane the advice continues, and the contract holds.
func TestPacingWithoutTheControlPlane(t *testing.T) {
	const rate, burst = 400, 40
	c := &cluster{t, localtest.Start(t, 1, []string{"--fitting=off"}, "--mcap=1000")}
	localtest.Srtm(t, c.RPC, "topic", "create", topic, fmt.Sprintf("--rate=%d", rate), fmt.Sprintf("--burst=%d", burst),
		"--slo-latency=10s", "--pacing", "--group=light:2:50:1:1", "--group=heavy:2:150:1:4")
	c.consume(make(localtest.Bodies, 1_000_000))

	var advised [4]atomic.Int64 // how often each publisher was advised
	ids := []string{"light.0", "light.1", "heavy.0", "heavy.1"}
	clients := make([]*client.Client, len(ids))
	ctx, stop := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	defer func() {
		stop()
		sending.Wait()
		for _, k := range clients {
			_ = k.Close(context.WithoutCancel(ctx)) // nothing is in flight
		}
	}()
	for i, id := range ids {
		var err error
		clients[i], err = client.New(client.Config{
			Address: c.RPC, Weight: []uint8{1, 1, 4, 4}[i],
			OnPace: func(_ *client.Publisher, p client.Pace) {
				if p.Paced {
					advised[i].Add(1)
				}
			},
		})
		testkit.Must(t, err)
		p, err := clients[i].Publisher(ctx, topic, id)
		testkit.Must(t, err)
		sending.Go(func() {
			for ctx.Err() == nil {
				if err := p.Publish(ctx, []byte(id)); err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("%s: %v", id, err)
					return
				}
			}
		})
	}
	again := func(what string) {
		t.Helper()
		for i := range advised {
			n := advised[i].Load()
			testkit.WaitFor(t, ids[i]+" is advised "+what, func() bool { return advised[i].Load() >= n+5 })
		}
	}
	again("its pace")
	testkit.Must(t, c.Control.Kill())
	began := time.Now()
	before := c.released()
	again("its pace without a control plane")
	again("its pace still")
	if got, most := c.released()-before, burst+rate*time.Since(began).Seconds(); got > most {
		t.Errorf("%.0f messages were released, the contract has %.0f", got, most)
	}
}

// released returns how many messages have had their token.
func (c *cluster) released() float64 {
	c.t.Helper()
	return testkit.Result(localtest.Metric(c.Brokers[0], "srtm_nsqd_topic_messages_released_total")).Must(c.t)
}
