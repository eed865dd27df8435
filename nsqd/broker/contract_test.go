package broker_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/tokenbucket"
)

// releases reads a release trace.
func releases(trace string) (eligible, released []mono.Time) {
	GinkgoHelper()
	for line := range strings.Lines(trace) {
		var arrival, e, r int64
		_, err := fmt.Sscanf(line, "t,%d,%d,%d", &arrival, &e, &r)
		Expect(err).NotTo(HaveOccurred())
		eligible, released = append(eligible, mono.Time(e)), append(released, mono.Time(r))
	}
	return eligible, released
}

var _ = Describe("a topic that is deleted and created again under its contract", func() {
	const ms, cycles = 1_000_000, 100
	contract := metadata.Contract{RateMilli: 100_000, Burst: 5}
	for name, preset := range map[string]bool{"that is preset": true, "that is given each time": false} {
		It("releases no more than if it had stayed, under one "+name, func() {
			var now atomic.Int64
			now.Store(1_000_000 * ms)
			var trace bytes.Buffer
			b := start(func(c *broker.Config) {
				c.Now = func() mono.Time { return mono.Time(now.Load()) }
				c.Trace = broker.NewTrace(&trace, slog.New(slog.DiscardHandler))
				if preset {
					c.Presets = map[string]metadata.Contract{"t": contract}
				}
			})
			for range cycles {
				t := topic(b, "t")
				if !preset {
					t.Contract(contract.Share(), false)
				}
				Expect(t.CreateChannel("c")).To(Succeed())
				Expect(t.Stats().Share).To(Equal(contract.Share()))
				now.Add(30 * ms)
				for range 10 {
					at := mono.Time(now.Load())
					Expect(t.Publish(at, 0, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: at}})).To(Succeed())
				}
				Expect(b.DeleteTopic("t")).To(Succeed())
			}
			eligible, released := releases(trace.String())
			Expect(eligible).To(HaveLen(3*cycles), "three have their token each time")
			for _, times := range [][]mono.Time{eligible, released} {
				_, err := testkit.Envelope(times, contract.RateMilli, contract.Burst)
				Expect(err).NotTo(HaveOccurred())
			}
		})
	}

	It("has the preset one also where another had taken its place", func() {
		b := start(func(c *broker.Config) { c.Presets = map[string]metadata.Contract{"t": contract} })
		other := tokenbucket.Share{Rate: tokenbucket.MaxRate, Burst: tokenbucket.MaxBurst}
		t := topic(b, "t")
		t.Contract(other, false)
		Expect(t.Stats().Share).To(Equal(other))
		Expect(b.DeleteTopic("t")).To(Succeed())
		Expect(topic(b, "t").Stats().Share).To(Equal(contract.Share()))
		Expect(topic(b, "u").Stats().Limited).To(BeFalse())
	})
})
