package link

import (
	"math"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

func TestWindow(t *testing.T) {
	const rtt = 100 * time.Millisecond
	whole := newWindow(windowConfig{packet: 1000, whole: true}, 2)
	smooth := newWindow(windowConfig{alpha: 1, packet: 1000}, 2)
	for i := range 200 {
		now := mono.Time(i) * mono.Time(rtt/10)
		whole.feedback(now, 18_000, false, rtt, rtt)
		smooth.feedback(now, 18_000, false, rtt, rtt)
		smooth.feedback(now, 0, false, rtt, rtt) // the router gives no feedback
	}
	if whole.packets() != 3 || math.Abs(smooth.packets()-3.6) > 1e-9 {
		t.Errorf("windows %v and %v, want 3 and 3.6", whole.packets(), smooth.packets())
	}
	if g, r := smooth.gap(rtt), smooth.rate(rtt); g != 27_777_777 || math.Abs(r-36_000) > 1e-6 {
		t.Errorf("gap %v, rate %v", g, r)
	}
	smooth.feedback(mono.Time(10*time.Second), 0, true, rtt, rtt)
	smooth.feedback(mono.Time(10*time.Second), 0, true, rtt, rtt) // within the round trip
	if math.Abs(smooth.packets()-3.15) > 1e-9 {
		t.Errorf("after an overload %v, want 3.15", smooth.packets())
	}
}
