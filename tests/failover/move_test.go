package failover

import (
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Publishers move from broker to broker all the time: nothing is lost, nothing is duplicated, and each
// publisher's messages are accepted in order.
//
// SRTM_MOVE_MESSAGES=1000000 SRTM_MOVE_EVERY=1s is the full size.
func TestPublishersMove(t *testing.T) {
	messages, every := 20_000, 50*time.Millisecond
	if s := os.Getenv("SRTM_MOVE_MESSAGES"); s != "" {
		messages = testkit.Result(strconv.Atoi(s)).Must(t)
	}
	if s := os.Getenv("SRTM_MOVE_EVERY"); s != "" {
		every = testkit.Result(time.ParseDuration(s)).Must(t)
	}
	const publishers, rate, burst = 40, 100_000, 20_000
	each := messages / publishers
	rng := testkit.Rand(t)
	c := newCluster(t, 1, 3, "--store=bbolt")
	c.create(contract("t", rate, burst, publishers))
	all := c.consume("t")
	log := &clientLog{t: t}
	cl := newLoggedClient(c, log)

	began := time.Now()
	var moves atomic.Int32
	done := pace(t, cl, "t", publishers, each, time.Nanosecond, func() bool { return moves.Load() > 0 })
	moved, taken := 0, time.Duration(0)
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var sent []int
	for sent == nil {
		select {
		case sent = <-done:
			continue
		case <-ticker.C:
		}
		// A third of the publishers, to any broker.
		var ids []string
		for i := range publishers {
			if rng.IntN(3) == 0 {
				ids = append(ids, fmt.Sprintf("g.%d", i))
			}
		}
		if len(ids) == 0 {
			continue
		}
		at := time.Now()
		to := fmt.Sprintf("b%d", 1+rng.IntN(3))
		if err := c.move(ids, to); err != nil {
			t.Errorf("move %v to %s: %v", ids, to, err)
			continue
		}
		taken += time.Since(at)
		moves.Add(1)
		moved += len(ids)
	}
	published := time.Since(began)
	if moves.Load() == 0 {
		t.Fatal("nothing moved while messages were published")
	}
	finish(t, cl, all, sent)
	t.Logf("all delivered after %.1f s", time.Since(began).Seconds())
	all.once(t, sent)
	// The publishers follow; the old broker disconnects only a publisher that has not followed within
	// a second.
	if n := int(log.lost.Load()); n > moved/10 {
		t.Errorf("%d connections were cut in %d moves of %d publishers", n, moves.Load(), moved)
	}
	t.Logf("%d messages in %.1f s, %d moves of %d publishers, %.1f ms each", all.count(), published.Seconds(), moves.Load(), moved,
		float64(taken.Milliseconds())/float64(moves.Load()))
	t.Logf("%d releases within %d msg/s, burst %d", c.envelope("t", rate, burst), rate, burst)
}
