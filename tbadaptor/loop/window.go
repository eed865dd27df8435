package loop

import (
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
)

// maxSteps bounds the steps that a window keeps, whatever the pace of reports.
const maxSteps = 256

// step is one interval of one broker's traffic of one topic.
type step struct {
	at         stamp.Mono // when the report came
	length     time.Duration
	offered    uint64
	maxBacklog int64
	backlog    int64
}

// window is the load of one broker for one topic over the last while. It is
// pure. The zero value is empty.
type window struct{ steps []step }

// add appends a step and drops those that lie before from.
func (w *window) add(s step, from stamp.Mono) {
	w.prune(from)
	if len(w.steps) == maxSteps {
		w.steps = w.steps[1:]
	}
	w.steps = append(w.steps, s)
}

func (w *window) prune(from stamp.Mono) {
	old := 0
	for old < len(w.steps) && w.steps[old].at.Before(from) {
		old++
	}
	w.steps = w.steps[old:]
}

// load returns the mean offered rate in msg/s, the largest backlog, and the
// newest one, of the steps from then on; zero without any.
func (w *window) load(from stamp.Mono) (rate float64, maxBacklog, backlog int64) {
	w.prune(from)
	var offered float64
	var length time.Duration
	for _, s := range w.steps {
		offered += float64(s.offered)
		length += s.length
		maxBacklog = max(maxBacklog, s.maxBacklog)
		backlog = s.backlog
	}
	if length > 0 {
		rate = offered / length.Seconds()
	}
	return rate, maxBacklog, backlog
}
