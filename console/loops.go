package console

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"
)

// busyMetric is the processor time of each event loop of a broker.
const busyMetric = "srtm_nsqd_loop_busy_seconds_total"

// utilised is the utilisation of an event loop: 1 means always busy.
type utilised struct {
	Loop string
	Part float64 // 0 .. 1
}

// loops holds the event loops' busy times at the last look, by broker.
type loops struct {
	mu      sync.Mutex
	samples map[string]lookedAt // guarded by mu; by address, at most maxRemembered
}

type lookedAt struct {
	time time.Time
	busy map[string]float64 // s since the start, by loop
	used []utilised
}

// update returns the utilisation of a broker's loops since the previous look, in numeric
// order; nil at the first look. busy are the loops' busy seconds now.
func (l *loops) update(address string, busy map[string]float64, now time.Time) []utilised {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, found := l.samples[address]
	elapsed := now.Sub(last.time).Seconds()
	if found && (elapsed <= 0 || maps.Equal(busy, last.busy)) && now.Sub(last.time) < 2*tick { // a remembered answer
		return last.used
	}
	next := lookedAt{time: now, busy: busy}
	for _, loop := range slices.SortedFunc(maps.Keys(busy), func(a, b string) int {
		m, _ := strconv.Atoi(a) // loop names are numbers
		n, _ := strconv.Atoi(b)
		return m - n
	}) {
		if before, there := last.busy[loop]; there && busy[loop] >= before { // else the loop has started since
			next.used = append(next.used, utilised{loop, min(1, (busy[loop]-before)/elapsed)})
		}
	}
	if l.samples == nil || len(l.samples) >= maxRemembered && !found {
		l.samples = map[string]lookedAt{}
	}
	l.samples[address] = next
	return next.used
}
