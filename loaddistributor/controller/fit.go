package controller

import (
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Fitting a topic begins when it is active and its publishers send: until then
// there is nothing to measure. What its brokers have reported goes to the topic's
// search; where that wants another placement, the topic moves, as it would for any
// other reason.
//
// Brokers report histograms, which is enough to test a placement. To forecast
// others the search replays arrivals: those the brokers are asked for while the
// fit lasts (recording). A topic whose brokers do not say them is fitted all the
// same, one broker more at a time.
//
// The paper's search keeps publishers silent while it finds out how many a broker
// holds: they have no place then, and no part of the contract.
//
// A fit lives in memory. Whoever leads next, or an operator who moves the topic
// meanwhile, ends it with the placement as it is; publishers without a place get
// one (settle).

// fit is a topic's search. Its fields are guarded by Controller.mu, but for the
// search, which only the goroutine of Run uses, without the lock: a replay of many
// arrivals takes its time.
type fit struct {
	search tuner.Search // nil: waiting for traffic, or over
	rate   float64      // of all publishers, msg/s
	setup  tuner.Setup
	epoch  uint64               // of the placement under test
	sum    observed             // of what was reported since the last look
	from   time.Time            // intervals that began earlier do not count
	deaf   time.Time            // since when a broker has no subscriber; zero: all have
	round  time.Duration        // how long a measurement lasts; 0: until the next report
	seen   map[string]time.Time // the newest report that counted, by broker
	record *recording           // nil: none is wanted
	next   *tuner.Action        // what the search wants, once nobody holds the topic
	moving bool
	again  int // how often a search was begun anew, since its plan could not be had
	done   bool
	step   string
	there  time.Time // when the search had all it needs last
	retry  time.Time // of one that is done: when the topic is fitted anew; zero: it is not

	began, over time.Time     // of the search; zero: not yet
	outcome     tuner.Outcome // once it is done; without rounds if it was broken off
}

// running reports whether there is a search that is not over; nil has none.
func (f *fit) running() bool { return f != nil && (f.search != nil || f.moving) }

// proto is TopicStatus.fit. Requires: Controller.mu held, for reading.
func (f *fit) proto(now time.Time) *srtmv1.Fit {
	ended := f.done && !f.moving // to what it ended with
	p := &srtmv1.Fit{Ended: ended, Fitted: ended && f.outcome.Fitted}
	for _, r := range f.outcome.Rounds {
		p.Rounds = append(p.Rounds, &srtmv1.FitRounds{K: uint32(r.K), Rounds: uint32(r.Rounds)})
	}
	if f.done {
		now = f.over
	}
	if !f.began.IsZero() {
		p.Took = durationpb.New(now.Sub(f.began))
	}
	return p
}

// fitSettle is how long publishers may take to move before measurements count, or
// an interval of reports if that is less.
const fitSettle = time.Second

// fitDrain bounds how long a broker without subscribers has to drain what it has
// gathered, once it has one: as long as it had none.
const fitDrain = 10 * time.Second

// fitTraffic is how much of its publishers' rates a topic has to offer before it is
// measured: until they are connected, latencies are those of connecting.
const fitTraffic = 0.8

// fitStall is how long a broker's host may stall without a fit taking its lateness for
// independent messages'.
const fitStall = 100 * time.Millisecond

// In intervals of reports: for how long a fit goes on without the traffic or the
// subscribers that it began with, and when one that found no placement is made again.
const (
	fitGone  = 30
	fitRetry = 600
)

// fitAgain is how often a search is begun anew with the brokers as they are then,
// because one that it chose was gone or had no room any more.
const fitAgain = 5

// keptArrivals bounds how many arrivals a search keeps: less of a large topic.
const keptArrivals = 500_000

// fitLocked begins to fit a new topic. Requires: mu held.
func (c *Controller) fitLocked(topic catalog.Topic) {
	d := topic.Spec.Demand
	if c.cfg.Fitting == "" || len(d.Publishers) == 0 && len(d.Groups) == 0 {
		return
	}
	name := topic.Spec.Name()
	if old := c.mu.fits[name]; old != nil {
		c.endFitLocked(name, old, fitEnded, "the topic is gone", c.now())
	}
	f := &fit{step: "waiting for publishers"}
	for _, p := range d.Expand() {
		f.rate += p.Rate
	}
	c.mu.fits[name] = f
}

// fit moves every fit under way on.
func (c *Controller) fit(now time.Time) {
	type turn struct {
		name     string
		f        *fit
		search   tuner.Search
		observed tuner.Observation
	}
	var turns []turn
	c.mu.Lock()
	for name, f := range c.mu.fits {
		topic, ok := c.mu.cat.Topic(name)
		switch {
		case !ok || !open(topic):
			c.endFitLocked(name, f, fitEnded, "the topic is gone", now)
			delete(c.mu.fits, name)
			continue
		case f.done && !f.moving && !f.retry.IsZero() && !now.Before(f.retry) && !c.ownedLocked(name) && !c.mu.closing:
			c.fitLocked(topic)
			continue
		case f.done || c.mu.closing:
			continue
		case f.search != nil && !f.moving && !c.ownedLocked(name) && topic.Placement.Epoch() != f.epoch:
			c.endFitLocked(name, f, fitEnded, "another placement came between", now)
			continue
		}
		ready := f.search != nil || !c.overLocked(name) && c.offeredLocked(topic) >= fitTraffic*f.rate && !c.deafLocked(topic, f, now)
		if f.search != nil && !f.moving && !c.ownedLocked(name) {
			if why := c.brokenOffLocked(topic, f, now); why != "" {
				c.endFitLocked(name, f, fitEnded, why, now)
				f.retry = now
				continue
			}
		}
		if f.search == nil && c.overLocked(name) {
			f.step = "waiting until the topic keeps to its contract"
		}
		if f.record != nil || c.cfg.Fitting == tuner.ModeFast && ready {
			c.recordLocked(topic, f, now)
		}
		switch {
		case f.moving || c.ownedLocked(name):
		case f.next != nil:
			c.followLocked(topic, f, now)
		case !ready:
		case f.search == nil:
			if c.beginFitLocked(topic, f, now) {
				turns = append(turns, turn{name, f, f.search, tuner.Observation{}})
			}
		case c.deafLocked(topic, f, now):
			if f.record != nil {
				f.record.trace.Skip(wall(now)) // nobody takes it meanwhile, however long
			}
		case c.observeLocked(topic, f, now):
			turns = append(turns, turn{name, f, f.search, f.take()})
		}
	}
	c.mu.Unlock()
	for _, t := range turns {
		a := t.search.Next(t.observed)
		c.mu.Lock()
		t.f.next = &a
		topic, ok := c.mu.cat.Topic(t.name)
		// What may have come between is seen to at the next look.
		if ok && topic.Placement.Epoch() == t.f.epoch && c.mu.fits[t.name] == t.f && !c.ownedLocked(t.name) && !c.mu.closing {
			c.followLocked(topic, t.f, now)
		}
		c.mu.Unlock()
	}
}

// endFitLocked ends a fit that is not over yet, and keeps of it what is asked for
// later: how it ended. Requires: mu held.
func (c *Controller) endFitLocked(name string, f *fit, how, step string, now time.Time) {
	if f.done {
		return
	}
	f.done, f.step, f.over = true, step, now
	if !f.began.IsZero() {
		c.fitFigures.ended.WithLabelValues(how).Observe(now.Sub(f.began).Seconds())
	}
	c.stopRecordingLocked(name, f)
	f.search, f.next, f.setup, f.sum, f.seen = nil, nil, tuner.Setup{}, observed{}, nil
}

// brokenOffLocked says what the search lacks, if that has lasted: nothing is measured then,
// or what will not be so. Requires: mu held; there is a search.
func (c *Controller) brokenOffLocked(topic catalog.Topic, f *fit, now time.Time) string {
	// In the paper's way publishers are silenced.
	least := fitTraffic * f.rate
	if c.cfg.Fitting == tuner.ModePaper {
		least = 0
	}
	over, offered := c.overLocked(topic.Spec.Name()), c.offeredLocked(topic)
	quiet := offered < least || offered == 0
	if !over && !quiet && f.deaf.IsZero() {
		f.there = now
	}
	switch {
	case over:
		return "the topic offers more than its contract"
	case now.Sub(f.there) < fitGone*c.cfg.ReportInterval:
		return ""
	case quiet:
		return "the publishers have gone"
	default:
		return "the subscribers have gone"
	}
}

// deafLocked reports whether measurements would be of subscribers that have not
// come: they look for a topic's brokers from time to time only. Requires: mu held.
func (c *Controller) deafLocked(topic catalog.Topic, f *fit, now time.Time) bool {
	var without []string
	for _, q := range topic.Plan.Quotas {
		window := c.reportsLocked(topic.Spec.Name(), q.Broker)
		if window == nil || window.reports[len(window.reports)-1].stats.Subscribers == 0 {
			without = append(without, q.Broker)
		}
	}
	switch {
	case len(without) == 0 && f.deaf.IsZero():
		return false
	case len(without) == 0:
		f.measureFrom(f.epoch, now.Add(max(c.fitSettle(), min(now.Sub(f.deaf), fitDrain))))
		f.deaf = time.Time{}
		return false
	case f.deaf.IsZero():
		f.deaf = now
	}
	f.step = "waiting for subscribers on " + strings.Join(without, ", ")
	return true
}

func (c *Controller) fitSettle() time.Duration { return min(fitSettle, c.cfg.ReportInterval) }

// offeredLocked is the rate, in msg/s, of the newest reports, or of the window where
// that is more: publishers may send more rarely than brokers report. Requires: mu
// held.
func (c *Controller) offeredLocked(topic catalog.Topic) float64 {
	newest, mean := 0.0, 0.0
	for _, q := range topic.Plan.Quotas {
		window := c.reportsLocked(topic.Spec.Name(), q.Broker)
		if window == nil {
			continue
		}
		n, d := uint64(0), time.Duration(0)
		for _, r := range window.reports {
			n += r.stats.Offered
			d += r.stats.Interval.AsDuration()
		}
		mean += float64(n) / d.Seconds()
		last := window.reports[len(window.reports)-1].stats
		newest += float64(last.Offered) / last.Interval.AsDuration().Seconds()
	}
	return max(newest, mean)
}

// beginFitLocked makes the search of a topic whose publishers send, once its brokers
// record. Requires: mu held.
func (c *Controller) beginFitLocked(topic catalog.Topic, f *fit, now time.Time) (begun bool) {
	if f.record != nil && f.record.starting(topic, now) {
		return false
	}
	f.setup = tuner.Setup{
		Policy: topic.Spec.Policy, Brokers: c.mu.cat.SnapshotFor(topic.Spec.Name()), Demand: topic.Spec.Demand,
		Quantile: topic.Spec.SLO.Quantile, Latency: topic.Spec.SLO.Latency, Start: topic.Plan,
	}
	rng := rand.New(rand.NewPCG(c.cfg.Seed, topic.Placement.Epoch()))
	var err error
	if c.cfg.Fitting == tuner.ModePaper {
		f.search, err = tuner.NewPaper(f.setup, c.cfg.FittingRound, rng)
		f.round = c.cfg.FittingRound
	} else {
		f.search, err = tuner.NewFast(f.setup, c.fastConfigLocked(f.setup, f.rate), rng)
	}
	if err != nil {
		f.search = nil
		c.endFitLocked(topic.Spec.Name(), f, fitEnded, err.Error(), now)
		return false
	}
	if f.began.IsZero() {
		f.began = now
	}
	f.there = now
	if f.record != nil {
		f.record.trace.Skip(wall(now)) // of while they connected
	}
	from := now
	if f.from.After(now) { // subscribers have just come
		from = f.from
	}
	f.measureFrom(topic.Placement.Epoch(), from)
	return true
}

// fastConfigLocked is for a topic of so many msg/s. Requires: mu held.
func (c *Controller) fastConfigLocked(setup tuner.Setup, rate float64) tuner.FastConfig {
	cfg := tuner.FastConfig{Stall: fitStall, Step: c.cfg.ReportInterval, Capture: time.Second, Absorbed: map[string]tuner.Absorption{}}
	cfg.Keep = min(30*time.Second, max(cfg.Capture, time.Duration(keptArrivals/rate*float64(time.Second))))
	for _, b := range setup.Brokers {
		// Of another latency it says little.
		if known, _ := c.mu.next.Broker(b.ID); known.Absorbed.Latency == setup.Latency {
			cfg.Absorbed[b.ID] = tuner.Absorption{Rate: tokenbucket.Rate(known.Absorbed.Rate), Burst: known.Absorbed.Burst}
		}
	}
	return cfg
}

// followLocked does what the search wants next. Requires: mu held; nobody holds the
// topic's name.
func (c *Controller) followLocked(topic catalog.Topic, f *fit, now time.Time) {
	name := topic.Spec.Name()
	a := *f.next
	f.next = nil
	a.Plan.Unplaced = a.Unplaced
	if a.Step != f.step {
		f.step = a.Step
		c.cfg.Log.Debug("fitting", obs.KeyTopic, name, "step", a.Step)
	}
	stays := samePlan(a.Plan, topic.Plan) || len(a.Plan.Quotas) == 0
	if a.Final {
		c.cfg.Log.Info("topic fitted", obs.KeyTopic, name, "kept", a.Outcome.Fitted, obs.KeyReason, a.Outcome.Reason,
			"brokers", a.Plan.K, obs.KeyDuration, now.Sub(f.began))
		f.outcome = a.Outcome
		c.rememberLocked(f)
		how := fitMissed
		if a.Outcome.Fitted {
			how = fitKept
		}
		c.endFitLocked(name, f, how, a.Outcome.Reason, now)
		if !a.Outcome.Fitted {
			f.retry = now.Add(fitRetry * c.cfg.ReportInterval)
		}
		if stays || len(a.Unplaced) > 0 {
			return // who has no place gets one from settle
		}
	}
	if stays {
		if a.Changed && f.from.Before(now) {
			f.measureFrom(topic.Placement.Epoch(), now)
		}
		return
	}
	f.moving = true
	op := c.moving(name, "fitting", func(topic catalog.Topic, _ []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		return topic.Spec, a.Plan, nil
	})
	op.end = func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		f.moving = false
		if !f.done && f.again < fitAgain && (errors.Is(err, ErrUnsteady) || errors.As(err, new(*BrokerError))) {
			f.again++
			f.search, f.step = nil, "begins anew: "+err.Error()
			c.cfg.Log.Info("fitting begins anew", obs.KeyTopic, name, obs.KeyError, err)
			return
		}
		if err != nil {
			f.outcome.Fitted, f.step = false, "not moved: "+err.Error()
			c.endFitLocked(name, f, fitEnded, f.step, c.now())
			return
		}
		if f.done {
			return
		}
		moved, _ := c.mu.cat.Topic(name)
		f.measureFrom(moved.Placement.Epoch(), c.now().Add(c.fitSettle()))
		if f.record != nil {
			c.recordLocked(moved, f, c.now()) // at once, on those that are new
		}
	}
	c.wantLocked(op)
}

// rememberLocked keeps what was learned of brokers for the next fit. Requires: mu
// held.
func (c *Controller) rememberLocked(f *fit) {
	for _, id := range slices.Sorted(maps.Keys(f.outcome.Absorbed)) {
		a := f.outcome.Absorbed[id]
		learned := catalog.Absorption{Latency: f.setup.Latency, Rate: int64(a.Rate), Burst: a.Burst}
		if known, there := c.mu.next.Broker(id); there && known.Absorbed != learned {
			_, err := c.stageLocked(catalog.BrokerAbsorbed{ID: id, Absorption: learned})
			if must("remember what "+id+" absorbs", err) != nil {
				return // the next fit learns it
			}
		}
	}
}

// settle gives a place to publishers that a fit has left without one: at its end,
// when something came between, or because another controller led. They go where
// their rates fit, on the brokers that carry the topic if they can: better late
// than silent for ever.
func (c *Controller) settle(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for topic := range all(c.mu.cat) {
		if topic.Placement.Unplaced() > 0 {
			c.settleLocked(topic, now)
		}
	}
}

// settleLocked requires mu held.
func (c *Controller) settleLocked(topic catalog.Topic, now time.Time) {
	name := topic.Spec.Name()
	if !open(topic) || c.ownedLocked(name) || c.mu.closing || c.mu.fits[name].running() || now.Before(c.mu.topics.see(name).retry) {
		return
	}
	c.mu.topics.at(name).retry = now.Add(moveRetry)
	c.wantLocked(c.moving(name, "publishers have no place", func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		if topic.Placement.Unplaced() == 0 {
			return nil, placement.Plan{}, reconcile.ErrSettled
		}
		plan, err := c.replaceAsWide(topic, brokers)
		return topic.Spec, plan, err
	}))
}

func (f *fit) measureFrom(epoch uint64, from time.Time) {
	f.epoch, f.from, f.seen = epoch, from, map[string]time.Time{}
	f.sum = newObserved(len(f.setup.Brokers))
}

// samePlan: the same publishers at the same brokers.
func samePlan(a, b placement.Plan) bool {
	return slices.Equal(a.Unplaced, b.Unplaced) && slices.EqualFunc(a.Quotas, b.Quotas, func(p, q placement.Quota) bool {
		return p.Broker == q.Broker && slices.Equal(p.Publishers, q.Publishers)
	})
}

// observed is what was reported of a topic since a search was told last.
type observed struct {
	any                bool
	slices             [][]tuner.Slice // by broker of the setup
	processing, access *obs.Latency
	arrivals           []tuner.Arrival
	parts              []part // by broker of the setup
}

// part is what one broker delivered.
type part struct {
	delivered, exceeded uint64
	delivery            *obs.Latency
}

func newObserved(brokers int) observed {
	o := observed{slices: make([][]tuner.Slice, brokers), processing: obs.NewLatency(), access: obs.NewLatency(), parts: make([]part, brokers)}
	for l := range o.parts {
		o.parts[l].delivery = obs.NewLatency()
	}
	return o
}

// observeLocked gathers the reports since the last time, and reports whether it is
// time to tell the search: after a round, or where there are none, with every
// report. Requires: mu held.
func (c *Controller) observeLocked(topic catalog.Topic, f *fit, now time.Time) bool {
	name := topic.Spec.Name()
	if f.record != nil {
		f.sum.arrivals = append(f.sum.arrivals, f.record.trace.Take(wall(now))...)
	}
	over := f.from.Add(f.round)
	all := true // brokers have reported all of the round
	for _, q := range topic.Plan.Quotas {
		l := slices.IndexFunc(f.setup.Brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		window := c.reportsLocked(name, q.Broker)
		if l < 0 || window == nil {
			all = false
			continue
		}
		for _, r := range window.reports {
			if !r.at.After(f.seen[q.Broker]) || r.at.Add(-r.stats.Interval.AsDuration()).Before(f.from) {
				continue
			}
			f.seen[q.Broker] = r.at
			if f.sum.add(l, r.stats, f.setup.Latency) == nil { // checkStats has refused others
				f.sum.any = true
			}
		}
		all = all && !f.seen[q.Broker].Before(over)
	}
	if f.round > 0 {
		return f.sum.any && (all || now.Sub(over) > roundGrace)
	}
	// A search that has no arrivals takes it that there are none.
	return f.sum.any && (len(f.sum.arrivals) > 0 || f.record == nil || f.record.told || f.record.dry(topic, now.Sub(f.began)))
}

// roundGrace is how long after a round a broker's last report of it is waited for.
const roundGrace = 5 * time.Second

// take returns what was gathered, and begins anew.
func (f *fit) take() tuner.Observation {
	s := f.sum
	f.sum = newObserved(len(f.setup.Brokers))
	o := tuner.Observation{Slices: s.slices, Arrivals: s.arrivals, Lone: s.processing.Quantile(0.1)}
	o.Access = tuner.Slice{Delivered: uint64(s.access.Count()), Late: uint64(s.access.CountAbove(tuner.LongestWait(f.setup.Latency, o.Lone)))}
	for l, p := range s.parts {
		o.Parts = append(o.Parts, tuner.Part{
			Count:    tuner.Count{Part: f.setup.Brokers[l].ID, Delivered: p.delivered, Exceeded: p.exceeded},
			Quantile: p.delivery.Quantile(f.setup.Quantile),
		})
	}
	if f.record != nil {
		f.record.told = f.record.told || len(s.arrivals) > 0
	}
	return o
}

// add counts a report of broker l.
func (o *observed) add(l int, s *srtmv1.TopicStats, latency time.Duration) error {
	processing, err := obs.LatencyFromProto(s.Processing)
	access, err2 := obs.LatencyFromProto(s.Access)
	delivery, err3 := obs.LatencyFromProto(s.Delivery)
	if err := errors.Join(err, err2, err3); err != nil {
		return err
	}
	o.processing.Merge(processing)
	o.access.Merge(access)
	o.slices[l] = append(o.slices[l], tuner.Slice{
		Delivered: uint64(processing.Count()), Late: uint64(processing.CountAbove(latency)), HalfLate: uint64(processing.CountAbove(latency / 2)),
	})
	p := &o.parts[l]
	p.delivered += s.Delivered
	p.exceeded += s.Exceeded
	p.delivery.Merge(delivery)
	return nil
}

// wall is a time as brokers' stamps have it.
func wall(t time.Time) mono.Wall { return mono.Wall(t.UnixNano()) }
