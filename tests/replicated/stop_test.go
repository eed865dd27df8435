package replicated_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// stopHang bounds how long a broker may take to stop. The broker's own limit is 10 s; the rest is for
// a busy machine. Without its own limit the broker would take minutes.
const stopHang = time.Minute

// A broker stops within its limit whatever the NATS servers do, and reports the messages that are not
// stored. Their publishers got no OK.
func TestABrokerStopsThoughJetStreamDoesNotStore(t *testing.T) {
	const topics = 40 // more than the broker stores at a time
	for _, c := range []struct {
		name  string
		size  int // of a message, in bytes
		start func(t *testing.T) (url string, replicas int, trouble func())
	}{
		{"no server answers", 10, func(t *testing.T) (string, int, func()) {
			s := startServers(t, 1)
			proxy := testkit.Result(local.NewProxy(strings.TrimPrefix(s.url(), "nats://"))).Must(t)
			t.Cleanup(proxy.Close)
			return "nats://" + proxy.Address(), 1, func() { proxy.Cut(true) }
		}},
		{"most servers are gone", 10, func(t *testing.T) (string, int, func()) {
			s := startServers(t, 3)
			return s.url(), 3, func() { s.stop(1); s.stop(2) }
		}},
		{"the server is frozen", 500_000, func(t *testing.T) (string, int, func()) { // the server's sockets fill up
			stores, url, err := local.NATS(natsProgram(t), t.TempDir(), 1)
			testkit.Must(t, err)
			t.Cleanup(func() { testkit.NoError(t, stores[0].Kill()) })
			return url, 1, func() {
				testkit.Must(t, stores[0].Signal(syscall.SIGSTOP))
				testkit.WaitFor(t, "the server stands still", func() bool { // the server may answer for a moment
					stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", stores[0].Pid()))
					return err == nil && strings.Contains(string(stat), ") T ")
				})
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			url, replicas, trouble := c.start(t)
			b := localtest.NSQD(t, "", "--durability=replicated", "--jetstream-url="+url, fmt.Sprint("--jetstream-replicas=", replicas), "--broker-id=b")
			publish := func(topic string) (code int, err error) {
				_, code, err = localtest.Ask(http.MethodPost, "http://"+b.HTTP+"/pub?topic="+topic, strings.Repeat("x", c.size))
				return code, err
			}
			for n := range topics {
				if code, err := publish(fmt.Sprint("t", n)); err != nil || code != http.StatusOK {
					t.Fatalf("topic t%d: %d, %v", n, code, err)
				}
				localtest.MustAsk(t, http.MethodPost, "http://"+b.HTTP+fmt.Sprint("/channel/create?topic=t", n, "&channel=c"), "")
			}
			trouble()
			var all sync.WaitGroup
			defer all.Wait()
			for n := range topics {
				all.Go(func() {
					if code, err := publish(fmt.Sprint("t", n)); err == nil && code == http.StatusOK {
						t.Errorf("topic t%d: the publisher was answered OK", n)
					}
				})
			}
			all.Go(func() { _, _ = publish("claimed") }) // the claim gets no answer
			within(t, "the broker has what was published", func() bool {
				n, err := localtest.Metric(b, "srtm_nsqd_topic_messages_accepted_total")
				return err == nil && int(n) >= 2*topics
			})
			began := time.Now()
			testkit.Must(t, b.Signal(syscall.SIGTERM))
			select {
			case <-b.Done():
			case <-time.After(stopHang):
				testkit.Must(t, b.Kill())
				t.Fatalf("the broker did not stop within %v", stopHang)
			}
			t.Logf("the broker stopped after %v", time.Since(began))
			said := b.AllOutput()
			for n := range topics {
				want := fmt.Sprintf("topic t%d: not stored in JetStream, as far as is known: 1 message (%d bytes); their publishers were not answered OK", n, c.size)
				if !strings.Contains(said, want) {
					t.Errorf("the broker does not say %q", want)
				}
			}
		})
	}
}
