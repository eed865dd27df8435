package console

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"
)

// busyMetric is the processor time that each event loop of a broker took.
const busyMetric = "srtm_nsqd_loop_busy_seconds_total"

// utilised is how busy an event loop was: 1 when it did nothing else.
type utilised struct {
	Loop string
	Part float64 // 0 .. 1
}

// loops are what brokers' event loops did between the last two looks at each.
type loops struct {
	mu    sync.Mutex
	known map[string]lookedAt // guarded by mu; by address, at most maxRemembered
}

type lookedAt struct {
	at   time.Time
	busy map[string]float64 // s since the start, by loop
	used []utilised
}

// look returns how busy the loops of a broker were since the look before, by number; nil at
// the first. busy are their seconds now.
func (l *loops) look(address string, busy map[string]float64, now time.Time) []utilised {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, known := l.known[address]
	took := now.Sub(last.at).Seconds()
	if known && (took <= 0 || maps.Equal(busy, last.busy)) && now.Sub(last.at) < 2*tick { // it was remembered
		return last.used
	}
	next := lookedAt{at: now, busy: busy}
	for _, loop := range slices.SortedFunc(maps.Keys(busy), func(a, b string) int {
		m, _ := strconv.Atoi(a) // they are numbers
		n, _ := strconv.Atoi(b)
		return m - n
	}) {
		if before, there := last.busy[loop]; there && busy[loop] >= before { // else it has begun since
			next.used = append(next.used, utilised{loop, min(1, (busy[loop]-before)/took)})
		}
	}
	if l.known == nil || len(l.known) >= maxRemembered && !known {
		l.known = map[string]lookedAt{}
	}
	l.known[address] = next
	return next.used
}
