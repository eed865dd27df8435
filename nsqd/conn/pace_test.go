package conn

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
)

// A client that reads in any pieces and waits as advised gets no more than the burst, the rate and the ratio. Data within
// the ratio need not wait.
func TestPaceBoundsWhatIsDecompressed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const most = 64 << 10
		var p pace
		now, began := mono.Time(1e9), mono.Time(1e9)
		out, in := 0, 0
		for range rapid.IntRange(1, 500).Draw(t, "reads") {
			n, came := rapid.IntRange(0, most).Draw(t, "bytes"), rapid.IntRange(0, 1000).Draw(t, "came")
			out, in = out+n, in+came
			now = now.Add(p.delay(now, n, came))
			now = now.Add(time.Duration(rapid.IntRange(0, 1e5).Draw(t, "ns between")))
			may := unpackBurst + float64(unpackRatio*in) + float64(unpackRate)*now.Sub(began).Seconds() + 1000
			if float64(out) > may {
				t.Fatalf("%d bytes of %d in %v, may be %.0f", out, in, now.Sub(began), may)
			}
		}
		now = now.Add(time.Minute)
		for range 100 {
			if wait := p.delay(now, unpackRatio*1000, 1000); wait > 0 {
				t.Fatalf("one who sends what is usual waits %v", wait)
			}
		}
	})
}
