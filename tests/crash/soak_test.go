package crash

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// metric returns the current value of a metric.
func metric(t *testing.T, d *local.Process, name string) int {
	t.Helper()
	v := testkit.Result(localtest.Metric(d, name)).Must(t)
	return int(v)
}

// goroutines returns the broker's number of goroutines.
func goroutines(t *testing.T, d *local.Process) int { return metric(t, d, "go_goroutines") }

// connections returns the broker's number of clients.
func connections(t *testing.T, d *local.Process) int { return metric(t, d, "srtm_nsqd_connections") }

// every calls do at an interval until ctx ends or do fails.
func every(ctx context.Context, interval time.Duration, do func(i int) error) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := do(i); err != nil {
			return err
		}
	}
}

// stir puts a broker under a moderate load for a while: clients, topics and channels come and go, a
// backlog goes to disk and comes back, and a channel's consumer takes a message and finishes none.
// stir logs the broker's resources, and returns when all of the load is gone.
func stir(t *testing.T, d *local.Process, duration time.Duration) (published, finished uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var sent, done atomic.Uint64
	var wg sync.WaitGroup
	part := func(name string, interval time.Duration, do func(i int) error) {
		wg.Go(func() {
			if err := every(ctx, interval, do); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	post := func(path string) error {
		text, code, err := localtest.Ask(http.MethodPost, "http://"+d.HTTP+path, "")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("%s: %d %s", path, code, text)
		}
		return err
	}
	testkit.Must(t, post("/topic/create?topic=t"))
	testkit.Must(t, post("/channel/create?topic=t&channel=c"))

	// 800 messages a second to a topic with a consumer, through the disk whenever the channel is
	// paused.
	pub, err := dial(d.TCP)
	testkit.Must(t, err)
	defer pub.Close()
	testkit.Must(t, pub.SetDeadline(time.Time{}))
	answers := bufio.NewReader(pub)
	number := uint32(0)
	part("publish", 10*time.Millisecond, func(int) error {
		var bodies [][]byte
		for range 8 {
			bodies = append(bodies, append(body(0, number)[4:], make([]byte, 500)...))
			number++
		}
		if _, err := pub.Write(wire.AppendMpub(nil, "t", bodies)); err != nil {
			return err
		}
		answer, err := reply(pub, answers)
		if err == nil && answer != "OK" {
			err = fmt.Errorf("answer %q", answer)
		}
		sent.Add(8)
		return err
	})
	sub := subscribe(t, d.TCP, 100)
	testkit.Must(t, sub.SetDeadline(time.Time{}))
	stuck := testkit.Result(dial(d.TCP)).Must(t)
	defer stuck.Close()
	_, err = stuck.Write(wire.AppendRdy(wire.AppendSub(nil, "t", "stuck"), 1))
	testkit.Must(t, err)
	testkit.Must(t, stuck.SetDeadline(time.Time{}))
	held := make(chan struct{})
	go func() {
		defer close(held)
		for {
			kind, data, err := frames.Read(stuck, maxFrame)
			if err != nil {
				return
			}
			if kind == wire.FrameResponse && string(data) == "_heartbeat_" {
				_, _ = stuck.Write(wire.AppendNop(nil)) // the next read returns the error
			}
		}
	}()
	part("look", time.Minute, func(i int) error {
		memory, most := resident(d)
		t.Logf("after %d min: %d sent, %d finished, %d KiB resident (at most %d), %d descriptors, the topic %d files of %d MB",
			i+1, sent.Load(), done.Load(), memory, most, descriptors(d),
			metric(t, d, `srtm_nsqd_topic_disk_files{topic="t"}`), metric(t, d, `srtm_nsqd_topic_disk_bytes{topic="t"}`)/1e6)
		return nil
	})
	consumed := make(chan struct{})
	go func() {
		defer close(consumed)
		consume(sub, func() {}, func(uint32) { done.Add(1) })
	}()
	part("pause", time.Second, func(i int) error {
		return post([]string{"/channel/pause", "/channel/unpause"}[i%2] + "?topic=t&channel=c")
	})
	// Clients, topics and channels come and go. Half of the clients disconnect abruptly.
	part("come and go", 20*time.Millisecond, func(i int) error {
		nc, err := dial(d.TCP)
		if err != nil {
			return err
		}
		defer nc.Close()
		topic := fmt.Sprintf("come-%d#ephemeral", i%50)
		b := wire.AppendPub(nil, topic, []byte("x"))
		b = wire.AppendRdy(wire.AppendSub(b, topic, "c#ephemeral"), 1)
		if _, err := nc.Write(b); err != nil {
			return err
		}
		for range i % 4 {
			if _, _, err := frames.Read(nc, maxFrame); err != nil {
				return err
			}
		}
		return nil
	})
	part("topics", 200*time.Millisecond, func(i int) error {
		name := fmt.Sprintf("go-%d", i%10)
		for _, path := range []string{"/topic/create?topic=", "/pub?topic=", "/topic/delete?topic="} {
			if strings.HasPrefix(path, "/pub") {
				if _, _, err := localtest.Ask(http.MethodPost, "http://"+d.HTTP+path+name, "x"); err != nil {
					return err
				}
				continue
			}
			if err := post(path + name); err != nil {
				return err
			}
		}
		return nil
	})
	wg.Wait()
	testkit.NoError(t, post("/channel/unpause?topic=t&channel=c"))
	testkit.WaitFor(t, "all finished", func() bool { return done.Load() >= sent.Load() })
	sub.Close()
	<-consumed
	stuck.Close()
	<-held
	pub.Close()
	testkit.NoError(t, post("/topic/delete?topic=t"))
	testkit.WaitFor(t, "left by all", func() bool { return connections(t, d) == 0 })
	return sent.Load(), done.Load()
}

// After a long time under load a broker has as many goroutines and descriptors as after a short time.
// SRTM_SOAK sets the time; see make soak.
func TestSoakLeaksNothing(t *testing.T) {
	duration := 3 * time.Second
	if text := os.Getenv("SRTM_SOAK"); text != "" {
		duration = testkit.Result(time.ParseDuration(text)).Must(t)
	}
	d := localtest.NSQD(t, "", "--mem-queue-size=100", "--max-bytes-per-file=200000")
	stir(t, d, 2*time.Second) // until each kind of object has been created once
	settled := func(goroutineLimit, descriptorLimit int) func() bool {
		return func() bool { return goroutines(t, d) <= goroutineLimit && descriptors(d) <= descriptorLimit }
	}
	var g, f int
	for range 20 { // the minimum at rest
		now, files := goroutines(t, d), descriptors(d)
		if g == 0 || now < g {
			g = now
		}
		if f == 0 || files < f {
			f = files
		}
	}
	memory, _ := resident(d)
	published, finished := stir(t, d, duration)
	// The query has its own connection, which may end a moment late.
	testkit.WaitFor(t, fmt.Sprintf("back at %d goroutines and %d descriptors (now %d and %d)", g, f, goroutines(t, d), descriptors(d)), settled(g+5, f+5))
	after, most := resident(d)
	t.Logf("%v: %d published, %d finished; before and after: %d and %d goroutines, %d and %d descriptors, %d and %d KiB (at most %d)",
		duration, published, finished, g, goroutines(t, d), f, descriptors(d), memory, after, most)
}
