package cost

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
)

// Drift: the part of a resource that a server reports as busy and the part that the
// scheduler has left free disagree.
const (
	busyOver  = 0.95 // reported, with more than freeOver free: costs are larger
	freeOver  = 0.20
	growth    = 1.1 // of costs, in a second
	maxDrift  = 4.0 // of costs, up and down
	silentFor = 10 * time.Second
)

// drift is how much more than estimated requests cost at a server: its capacities are
// divided by the factors, which is as if the entries of all vectors grew there alone.
type drift struct {
	factor []float64
	last   mono.Time // of the last report; 0: there was none
}

// Observe takes what a server reported at now, while free, in percent, was left of its
// capacity, both as the scheduler's Server has them. It reports whether the server's
// Capacity has changed. The time before the first report after 10 seconds of silence
// changes nothing.
func (t *Table) Observe(server int, r *Report, free, capacity schedule.Vector, now mono.Time) (changed bool) {
	if r.reports == 0 {
		return false
	}
	d := &t.drift[server]
	since := now.Sub(d.last)
	silent := d.last == 0 || since > silentFor || since < 0
	if d.last = now; silent {
		return false
	}
	step := math.Pow(growth, since.Seconds())
	for k := range d.factor {
		if r.reports&(1<<k) == 0 || !(capacity[k] > 0) {
			continue
		}
		was, left := d.factor[k], free[k]/capacity[k]
		switch {
		case r.busy[k] > busyOver && left > freeOver:
			d.factor[k] = min(was*step, maxDrift)
		case r.busy[k] < 1-freeOver && left < 1-busyOver:
			d.factor[k] = max(was/step, 1/maxDrift)
		}
		changed = changed || d.factor[k] != was
	}
	return changed
}
