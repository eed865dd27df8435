package cost

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
)

// Drift: a server reports a resource as busy while the scheduler counts it as free, or the reverse.
const (
	busyOver  = 0.95 // reported as busy, with more than freeOver free: costs are larger
	freeOver  = 0.20
	growth    = 1.1 // of costs, per second
	maxDrift  = 4.0 // of costs, in both directions
	silentFor = 10 * time.Second
)

// drift is the factor by which requests cost more at a server than estimated. Dividing the server's
// capacities by the factors has the effect of larger costs at this server alone.
type drift struct {
	factor []float64
	last   mono.Time // time of the last report; 0: none
}

// Observe applies a server's report at now. free is the free part of capacity; both come from the
// scheduler's Server, in percent. Observe reports whether the server's Capacity has changed. The first
// report after 10 seconds of silence changes nothing.
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
