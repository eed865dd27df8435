package faults

import (
	"context"
	"strings"
	"syscall"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A broker id belongs to one process at a time. A second process with the id of a living process
// exits. It gets the id once the first process is silent for its lease, and with the id the whole
// share. If the first process then continues, it releases nothing more, and exits. All the while the
// processes together keep the contract.
func TestABrokerIDBelongsToOneProcess(t *testing.T) {
	const idRate, idBurst = 200, 20
	for name, apart := range map[string]bool{"embedded": false, "daemon": true} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, apart, shortLeases, "available")
			first := c.brokers[0]
			at := localtest.Ports(t, 2)
			twin := &broker{name: first.name, dir: t.TempDir(), tcp: at[0], web: at[1], policy: first.policy}
			twin.proxy = testkit.Result(local.NewProxy(c.grpc)).Must(t)
			t.Cleanup(twin.proxy.Close)
			start := func() {
				c.startBroker(twin)
				process := twin.process
				t.Cleanup(func() { testkit.NoError(t, process.Kill()) })
			}
			ended := func(b *broker, parts ...string) {
				t.Helper()
				testkit.WaitFor(t, "the end of the process that was refused", func() bool {
					select {
					case <-b.process.Done():
						return true
					default:
						return false
					}
				})
				testkit.Equal(t, b.process.ExitCode(), 1, "exit code")
				text := b.process.Output()
				for _, part := range append(parts, first.tcp, first.dir, twin.tcp, twin.dir, "--broker-id") {
					if !strings.Contains(text, part) {
						t.Errorf("it does not say %q:\n%s", part, text)
					}
				}
			}
			create, cancel := context.WithTimeout(t.Context(), local.Patience)
			defer cancel()
			conn := localtest.Dial(t, c.grpc)
			spec := &srtmv1.TopicSpec{
				Name: topic, Contract: &srtmv1.Contract{RateMilli: idRate * 1000, Burst: idBurst, Slo: sloOf(0)},
				Groups: []*srtmv1.PublisherGroup{{Count: 10, Rate: idRate / 10}}, Channels: []string{"c"}, ShareRule: "robust",
			}
			testkit.WaitFor(t, "topic, for which the broker has to join", func() bool {
				_, err := localtest.CreateTopic(create, conn, &srtmv1.CreateTopicRequest{Spec: spec})
				return err == nil
			})
			c.brokers = append(c.brokers, twin)
			_, stop := c.load(2*idRate, 2*idRate)
			releases := func(b *broker) int { return len(testkit.ReadTrace(t, b.trace(), topic)) }
			flows := func(b *broker, process string) {
				t.Helper()
				before := releases(b)
				testkit.WaitFor(t, "messages that "+process+" releases", func() bool { return releases(b) > before+idRate/2 })
			}

			for range 2 { // a supervisor restarts the process
				start()
				ended(twin, "is in use")
			}
			flows(first, "the first process, which kept its share,")
			admin := srtmv1.NewAdminServiceClient(conn)
			brokers := testkit.Result(admin.ListBrokers(t.Context(), &srtmv1.ListBrokersRequest{})).Must(t).Brokers
			if r := brokers[0].GetRefused(); r.GetTcpAddress() != twin.tcp || r.GetDataPath() != twin.dir || brokers[0].GetTcpAddress() != first.tcp || !brokers[0].GetConnected() {
				t.Errorf("shown is %v", brokers[0])
			}
			testkit.Equal(t, releases(twin), 0, "messages that the refused process released")

			c.must(first.process.Signal(syscall.SIGSTOP))
			start()
			flows(twin, "the second process, while the first one is frozen,")
			c.must(first.process.Signal(syscall.SIGCONT))
			ended(first, "later process")
			flows(twin, "the second process")

			c.must(twin.process.Kill())
			start()
			flows(twin, "the second process after a restart")
			stop()

			c.must(twin.process.Kill())
			var all []testkit.Release
			for _, b := range c.brokers {
				all = append(all, testkit.ReadTrace(t, b.trace(), topic)...)
			}
			eligible, released := testkit.Times(all)
			slack, err := testkit.Envelope(eligible, idRate*1000, idBurst)
			testkit.NoError(t, err)
			lateSlack, err := testkit.Envelope(released, idRate*1000, idBurst+idRate*backdating.Milliseconds()/1000)
			testkit.NoError(t, err)
			t.Logf("%d messages, worst slack %.3f messages (eligible), %.3f (released)", len(all), slack, lateSlack)
		})
	}
}
