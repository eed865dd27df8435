package broker_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/tokenbucket"
)

// failing is a writer that takes so many lines and then fails.
type failing struct {
	bytes.Buffer
	lines int
}

var errFull = errors.New("full")

func (f *failing) Write(b []byte) (int, error) {
	if f.lines -= bytes.Count(b, []byte("\n")); f.lines < 0 {
		return 0, errFull
	}
	return f.Buffer.Write(b)
}

var _ = Describe("A release trace", func() {
	It("has a line for every message released, with its times in order", func() {
		var out, log failing
		out.lines, log.lines = 3, 100
		b := start(func(c *broker.Config) { c.Trace = broker.NewTrace(&out, slog.New(slog.NewTextHandler(&log, nil))) })
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		before := clock.Mono()
		t.SetShare(tokenbucket.Share{}, 0)
		for range 3 {
			Expect(publish(t, "m")).To(Succeed())
		}
		Expect(out.String()).To(BeEmpty(), "nothing is released without a share")
		t.SetShare(tokenbucket.Share{Rate: tokenbucket.MinRate, Burst: 5}, 3*tokenbucket.Token)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		Expect(lines).To(HaveLen(3))
		for _, line := range lines {
			var arrival, eligible, released int64
			n, err := fmt.Sscanf(line, "t,%d,%d,%d", &arrival, &eligible, &released)
			Expect(err).NotTo(HaveOccurred())
			Expect(n).To(Equal(3))
			Expect(slices.IsSorted([]int64{int64(before), arrival, eligible, released, int64(clock.Mono())})).To(BeTrue(), line)
		}

		// A trace with a hole would prove nothing. The trace ends at the first failure, and the broker logs the end
		// once.
		t.SetShare(tokenbucket.Share{Rate: tokenbucket.PerSecond(1e6), Burst: 5}, 0)
		r := read(t, "c", 10, true)
		for range 2 {
			Expect(publish(t, "m")).To(Succeed())
		}
		Eventually(r.count).Should(Equal(5))
		Expect(strings.Count(out.String(), "\n")).To(Equal(3))
		Expect(strings.Count(log.String(), "cannot write the release trace; tracing stopped")).To(Equal(1))
	})

	It("shows the end of a lease at its end", func() {
		b := start(nil)
		t := topic(b, "t")
		whole, base := tokenbucket.Share{Rate: 2000, Burst: 2}, tokenbucket.Share{Rate: 1000, Burst: 1}
		testkit.Result(b.Node().Grant("t", whole, base, clock.Mono().Add(time.Hour), mono.Never, 0)).Must(GinkgoTB())
		Expect(t.Renew(clock.Mono().Add(2*time.Hour), clock.Mono().Add(3*time.Hour))).To(BeTrue())
		Expect(t.Stats().Share).To(Equal(whole))
		Expect(t.Renew(clock.Mono().Add(-time.Hour), clock.Mono().Add(time.Hour))).To(BeTrue(), "until now")
		Expect(t.Renew(clock.Mono().Add(time.Hour), clock.Mono().Add(time.Hour))).To(BeFalse())
		Expect(t.Stats().Share).To(Equal(base))
	})
})
