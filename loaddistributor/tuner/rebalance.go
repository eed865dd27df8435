package tuner

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// RebalanceConfig is fixed at start.
type RebalanceConfig struct {
	// Sustained is the minimum duration of an overload before a move.
	Sustained time.Duration
	// Cooldown follows every move of a topic, because earlier measurements are no longer
	// valid. For ReturnFactor times Cooldown no publisher moves to a broker that gave up
	// publishers.
	Cooldown time.Duration
	// MaxPart bounds one step, as a part of the topic's publishers; at least one publisher
	// may move. In (0, 1].
	MaxPart float64
	// Capture is the recording time at an overloaded broker before a move, for a replay
	// through its bucket; 0: no recording, the reported access delays decide.
	Capture time.Duration
}

// Defaults of RebalanceConfig.
const (
	DefaultSustained = 20 * time.Second
	DefaultCooldown  = 30 * time.Second
	DefaultMaxPart   = 0.05
	DefaultCapture   = 4 * time.Second
)

const (
	// ReturnFactor keeps two brokers at their limit from passing publishers back and
	// forth.
	ReturnFactor = 10
	// calm is the part of the SLO's budget below which a broker counts as healthy: its
	// overload ends, and it may take publishers. Between calm and the budget nothing
	// begins and nothing ends.
	calm = 0.5
	// step is the part of its rate that an overloaded broker gives up at a time, within
	// MaxPart, if no replay gives a number. Delays show that the load is too much, not by
	// how much.
	step = 0.10
	// minCount is the minimum number of deliveries or arrivals for a fraction.
	minCount = 100
	// maxCapture is the maximum time that a broker records at once.
	maxCapture = 15 * time.Second
)

// Validate returns all problems at once.
func (c RebalanceConfig) Validate() error {
	var f faults.List
	f.If(c.Sustained <= 0, "--rebalance-after %v is not positive", c.Sustained)
	f.If(c.Cooldown <= 0, "--rebalance-cooldown %v is not positive", c.Cooldown)
	f.If(c.Capture < 0 || c.Capture > maxCapture, "--rebalance-capture %v: want 0s to %v", c.Capture, maxCapture)
	f.If(!(c.MaxPart > 0 && c.MaxPart <= 1), "--rebalance-step %v: want more than 0, at most 1", c.MaxPart)
	return f.Err()
}

// Load is one broker's load from the topic in the window.
type Load struct {
	Broker string
	// Delivered counts deliveries, Exceeded deliveries later than the SLO. Waited counts
	// messages that waited longer than the SLO's latency for a token alone. No other
	// broker would have delivered them sooner.
	Delivered, Exceeded, Waited uint64
}

// Suspect is the input of Decide.
type Suspect struct {
	Quantile float64       // of the SLO
	Latency  time.Duration // of the SLO
	Plan     placement.Plan
	Demand   placement.Demand
	Loads    []Load // of the members
	// Brokers are the brokers that may take publishers. The topic's reservation counts as
	// allocated.
	Brokers []placement.Broker
	// Recorded is the broker whose arrivals are being recorded, and Evidence the result;
	// empty and nil: none.
	Recorded string
	Evidence *Evidence
}

// Finding is the result of Decide.
type Finding uint8

const (
	// Nothing is due.
	Nothing Finding = iota
	// Suspected: record the arrivals at Move.From.
	Suspected
	// BucketLimited: the bucket of Move.From is the cause, so nothing moves.
	BucketLimited
	// Overloaded: the Move is due.
	Overloaded
)

// Move is a set of publishers to move, as ascending indices into Demand.Expand(), and the
// target.
type Move struct {
	From, To   string
	Publishers []int
	Reason     string // for people: the basis of the verdict
}

// Watch is the memory about one topic. The zero value is ready.
type Watch struct {
	overloadedSince map[string]mono.Time // by broker: start of the overload
	quiet           mono.Time            // nothing moves before
	blockedUntil    map[string]mono.Time // by broker: nothing moves to the broker before
}

// Decide returns the move that is due now.
//
// A broker becomes suspect if its blamed fraction exceeds the budget for
// RebalanceConfig.Sustained without being healthy in between. The blamed fraction is the
// late deliveries minus the deliveries that by the reports waited for tokens longer than
// the SLO allows. Then its arrivals are recorded for RebalanceConfig.Capture and replayed
// through its bucket. If the late fraction beyond the bucket's part is within the budget,
// the bucket is the cause, and the broker is left alone until it has been suspect for
// RebalanceConfig.Sustained again. Otherwise the broker is overloaded.
//
// From an overloaded broker the fewest publishers move without which the recorded
// arrivals would have kept the SLO. The replay uses a broker that absorbs what this
// broker did. The largest publishers move first, from each correlation group in turn.
// Without a record, or if that is not enough, a tenth of the broker's rate moves. At most
// MaxPart of the topic's publishers move. They move to the healthy member with the most
// free capacity. If no member has enough, they move to the broker outside the topic with
// the most free capacity. The worst broker comes first.
func (w *Watch) Decide(now mono.Time, cfg RebalanceConfig, t Suspect) (m Move, v Finding) {
	if w.overloadedSince == nil {
		w.overloadedSince, w.blockedUntil = map[string]mono.Time{}, map[string]mono.Time{}
	}
	budget := 1 - t.Quantile
	healthy := map[string]bool{}
	worst, highest, keepRecorded := "", 0.0, false
	present := map[string]bool{}
	for _, l := range t.Loads {
		present[l.Broker] = true
		fraction := l.blame()
		switch {
		case l.Delivered < minCount:
			healthy[l.Broker] = l.Exceeded == 0
			delete(w.overloadedSince, l.Broker)
			continue
		case fraction <= calm*budget:
			healthy[l.Broker] = true
			delete(w.overloadedSince, l.Broker)
			continue
		case fraction <= budget:
			if _, found := w.overloadedSince[l.Broker]; !found {
				continue
			}
		}
		since, found := w.overloadedSince[l.Broker]
		if !found {
			since = now
			w.overloadedSince[l.Broker] = now
		}
		if now.Sub(since) < cfg.Sustained {
			continue
		}
		// The recorded broker keeps its turn, or two brokers that are worse in turn would
		// both lose theirs.
		if l.Broker == t.Recorded {
			keepRecorded = true
		}
		if fraction > highest {
			worst, highest = l.Broker, fraction
		}
	}
	// order: each entry on its own
	for id := range w.overloadedSince {
		if !present[id] {
			delete(w.overloadedSince, id)
		}
	}
	// order: each entry on its own
	for id, end := range w.blockedUntil {
		if !now.Before(end) {
			delete(w.blockedUntil, id)
		}
	}
	if keepRecorded {
		worst = t.Recorded
	}
	if worst == "" || now.Before(w.quiet) {
		return Move{}, Nothing
	}
	e := t.Evidence
	if e != nil && e.Broker != worst {
		e = nil
	}
	chosen, rate := choose(t, worst, cfg.MaxPart, e)
	target := w.target(t, healthy, worst, rate)
	if len(chosen) == 0 || target == "" {
		return Move{}, Nothing
	}
	reason := "by the access delays that the broker reports"
	if cfg.Capture > 0 {
		if e == nil {
			return Move{From: worst}, Suspected
		}
		blamed, explanation := e.judge(t, budget)
		if blamed {
			delete(w.overloadedSince, worst)
			return Move{From: worst, Reason: explanation}, BucketLimited
		}
		reason = explanation
	}
	w.quiet = now.Add(cfg.Cooldown)
	w.blockedUntil[worst] = now.Add(ReturnFactor * cfg.Cooldown)
	clear(w.overloadedSince)
	return Move{From: worst, To: target, Publishers: chosen, Reason: reason}, Overloaded
}

// blame returns the fraction of deliveries made late by the broker's load.
func (l Load) blame() float64 {
	if l.Delivered == 0 || l.Exceeded <= l.Waited {
		return 0
	}
	return float64(l.Exceeded-l.Waited) / float64(l.Delivered)
}

// choose returns the publishers of the broker to move, and their rate.
func choose(t Suspect, broker string, maxPart float64, e *Evidence) (chosen []int, rate float64) {
	quota := t.Plan.On(broker)
	if quota < 0 {
		return nil, 0
	}
	publishers := t.Demand.Expand()
	candidates := t.Plan.Quotas[quota].Publishers
	total := 0.0
	byKey := map[string][]int{}
	var keys []string
	for _, i := range candidates {
		total += publishers[i].Rate
		key := publishers[i].Key
		if byKey[key] == nil {
			keys = append(keys, key)
		}
		byKey[key] = append(byKey[key], i)
	}
	sizes := make(map[string]int, len(keys)) // of the group, on this broker
	for _, key := range keys {
		sizes[key] = len(byKey[key])
		slices.SortStableFunc(byKey[key], func(a, b int) int { return cmp.Compare(publishers[b].Rate, publishers[a].Rate) })
	}
	limit := max(1, int(math.Floor(maxPart*float64(len(publishers)))))
	tenth := 0
	for len(chosen) < limit {
		if rate < step*total {
			tenth = len(chosen) + 1
		} else if e == nil {
			break
		}
		// The group that has given up the smallest part.
		best, part := "", math.Inf(1)
		for _, key := range keys {
			if remaining := len(byKey[key]); remaining > 0 {
				movedPart := float64(sizes[key]-remaining) / float64(sizes[key])
				if movedPart < part || movedPart == part && publishers[byKey[key][0]].Rate > publishers[byKey[best][0]].Rate {
					best, part = key, movedPart
				}
			}
		}
		if math.IsInf(part, 1) {
			break
		}
		i := byKey[best][0]
		byKey[best] = byKey[best][1:]
		chosen = append(chosen, i)
		rate += publishers[i].Rate
	}
	n := min(tenth, len(chosen))
	if e != nil {
		if count, ok := e.fewest(t, chosen); ok {
			n = count
		}
	}
	chosen, rate = chosen[:n], 0
	for _, i := range chosen {
		rate += publishers[i].Rate
	}
	slices.Sort(chosen)
	return chosen, rate
}

// target returns the broker that can take the rate; "" if none.
func (w *Watch) target(t Suspect, healthy map[string]bool, source string, rate float64) string {
	best := [2]string{}
	room := [2]int64{}
	for _, b := range t.Brokers {
		free := b.Mcap - b.Allocated
		if _, blocked := w.blockedUntil[b.ID]; blocked || b.ID == source || float64(free) < rate || free < 1 {
			continue
		}
		tier := 1 // outside
		if t.Plan.On(b.ID) >= 0 {
			if !healthy[b.ID] {
				continue
			}
			tier = 0
		}
		if best[tier] == "" || free > room[tier] {
			best[tier], room[tier] = b.ID, free
		}
	}
	if best[0] == "" && t.Demand.Burst > int64(len(t.Plan.Quotas)) {
		return best[1] // one more broker, which needs a token of the burst
	}
	return best[0]
}
