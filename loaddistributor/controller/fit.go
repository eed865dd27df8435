package controller

import (
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/fitting"
	"github.com/srtm-io/srtm/loaddistributor/placement"
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
// A fit lives in memory. Whoever leads next, or an operator who moves the topic
// meanwhile, ends it with the placement as it is.

// fit is a topic's search. Its fields are guarded by Controller.mu, but for the
// search, which only the goroutine of Run uses, without the lock: a replay of many
// arrivals takes its time.
type fit struct {
	search fitting.Search // nil: waiting for traffic
	setup  fitting.Setup
	epoch  uint64               // of the placement under test
	sum    observed             // of what was reported since the last look
	from   time.Time            // intervals that began earlier do not count
	seen   map[string]time.Time // the newest report that counted, by broker
	record *recording           // nil: none is wanted
	next   *fitting.Action      // what the search wants, once nobody holds the topic
	moving bool
	done   bool
	step   string

	began, over time.Time       // of the search; zero: not yet
	outcome     fitting.Outcome // once it is done; without rounds if it was broken off
}

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

// fitSettle is how long publishers may take to move before measurements count.
const fitSettle = time.Second

// fitTraffic is how much of its publishers' rates a topic has to offer before it is
// measured: until they are connected, latencies are those of connecting.
const fitTraffic = 0.8

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
	c.mu.fits[name] = &fit{step: "waiting for publishers"}
}

// fit moves every fit under way on.
func (c *Controller) fit(now time.Time) {
	type turn struct {
		name     string
		f        *fit
		observed fitting.Observation
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
		case f.done || c.mu.closing:
			continue
		case f.search != nil && !f.moving && c.mu.names[name] == nil && topic.Placement.Epoch() != f.epoch:
			c.endFitLocked(name, f, fitEnded, "another placement came between", now)
			continue
		}
		if f.record != nil || c.offeredLocked(topic) > 0 {
			c.recordLocked(topic, f, now)
		}
		switch {
		case f.moving || c.mu.names[name] != nil:
		case f.next != nil:
			c.followLocked(topic, f, now)
		case f.search == nil:
			if c.beginFitLocked(topic, f, now) {
				turns = append(turns, turn{name, f, fitting.Observation{}})
			}
		case c.observeLocked(topic, f, now):
			turns = append(turns, turn{name, f, f.take()})
		}
	}
	c.mu.Unlock()
	for _, t := range turns {
		a := t.f.search.Next(t.observed)
		c.mu.Lock()
		t.f.next = &a
		topic, ok := c.mu.cat.Topic(t.name)
		// What may have come between is seen to at the next look.
		if ok && topic.Placement.Epoch() == t.f.epoch && c.mu.fits[t.name] == t.f && c.mu.names[t.name] == nil && !c.mu.closing {
			c.followLocked(topic, t.f, now)
		}
		c.mu.Unlock()
	}
}

// endFitLocked ends a fit that is not over yet. Requires: mu held.
func (c *Controller) endFitLocked(name string, f *fit, how, step string, now time.Time) {
	if f.done {
		return
	}
	f.done, f.step, f.over = true, step, now
	if f.search != nil {
		c.fitFigures.ended.WithLabelValues(how).Observe(now.Sub(f.began).Seconds())
	}
	c.stopRecordingLocked(name, f)
}

// offeredLocked is the rate, in msg/s, of the newest reports. Requires: mu held.
func (c *Controller) offeredLocked(topic catalog.Topic) (offered float64) {
	for _, q := range topic.Plan.Quotas {
		if figures := c.figuresLocked(topic.Spec.Name(), q.Broker); figures != nil {
			last := figures.reports[len(figures.reports)-1]
			offered += float64(last.stats.Offered) / last.stats.Interval.AsDuration().Seconds()
		}
	}
	return offered
}

// beginFitLocked makes the search once the topic's publishers send. Requires: mu
// held.
func (c *Controller) beginFitLocked(topic catalog.Topic, f *fit, now time.Time) (begun bool) {
	expected := 0.0
	for _, p := range topic.Spec.Demand.Expand() {
		expected += p.Rate
	}
	if c.offeredLocked(topic) < fitTraffic*expected || f.record.starting(topic, now) {
		return false
	}
	f.setup = fitting.Setup{
		Policy: topic.Spec.Policy, Brokers: c.mu.cat.SnapshotFor(topic.Spec.Name()), Demand: topic.Spec.Demand,
		Quantile: topic.Spec.SLO.Quantile, Latency: topic.Spec.SLO.Latency, Start: topic.Plan,
	}
	rng := rand.New(rand.NewPCG(c.cfg.Seed, topic.Placement.Epoch()))
	cfg := fitting.FastConfig{Step: c.cfg.ReportInterval, Capture: time.Second}
	cfg.Keep = min(30*time.Second, max(cfg.Capture, time.Duration(keptArrivals/expected*float64(time.Second))))
	cfg.Absorbed = map[string]fitting.Absorption{}
	for _, b := range f.setup.Brokers {
		// Of another latency it says little.
		if known, _ := c.mu.next.Broker(b.ID); known.Absorbed.Latency == f.setup.Latency {
			cfg.Absorbed[b.ID] = fitting.Absorption{Rate: tokenbucket.Rate(known.Absorbed.Rate), Burst: known.Absorbed.Burst}
		}
	}
	search, err := fitting.NewFast(f.setup, cfg, rng)
	if err != nil {
		c.endFitLocked(topic.Spec.Name(), f, fitEnded, err.Error(), now)
		return false
	}
	f.search, f.began = search, now
	f.record.trace.Skip(wall(now)) // of while they connected
	f.measureFrom(topic.Placement.Epoch(), now)
	return true
}

// followLocked does what the search wants next. Requires: mu held; nobody holds the
// topic's name.
func (c *Controller) followLocked(topic catalog.Topic, f *fit, now time.Time) {
	name := topic.Spec.Name()
	a := *f.next
	f.next = nil
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
		if stays {
			return
		}
	}
	if stays {
		if a.Changed {
			f.measureFrom(topic.Placement.Epoch(), now)
		}
		return
	}
	f.moving = true
	release := c.holdLocked(name)
	c.work.Add(1)
	go func() {
		defer c.work.Done()
		defer release()
		err := c.move(name, "fitting", func(topic catalog.Topic, _ []placement.Broker) (*catalog.Spec, placement.Plan, error) {
			return topic.Spec, a.Plan, nil
		})
		c.mu.Lock()
		defer c.mu.Unlock()
		f.moving = false
		if err != nil {
			f.outcome.Fitted, f.step = false, "not moved: "+err.Error()
			c.endFitLocked(name, f, fitEnded, f.step, c.now())
			return
		}
		moved, _ := c.mu.cat.Topic(name)
		f.measureFrom(moved.Placement.Epoch(), c.now().Add(fitSettle))
		if !f.done {
			c.recordLocked(moved, f, c.now()) // at once, on those that are new
		}
	}()
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

func (f *fit) measureFrom(epoch uint64, from time.Time) {
	f.epoch, f.from, f.seen = epoch, from, map[string]time.Time{}
	f.sum = newObserved(len(f.setup.Brokers))
}

// samePlan: the same publishers at the same brokers.
func samePlan(a, b placement.Plan) bool {
	return slices.EqualFunc(a.Quotas, b.Quotas, func(p, q placement.Quota) bool {
		return p.Broker == q.Broker && slices.Equal(p.Publishers, q.Publishers)
	})
}

// observed is what was reported of a topic since a search was told last.
type observed struct {
	any                bool
	slices             [][]fitting.Slice // by broker of the setup
	processing, access *obs.Latency
	arrivals           []fitting.Arrival
}

func newObserved(brokers int) observed {
	return observed{slices: make([][]fitting.Slice, brokers), processing: obs.NewLatency(), access: obs.NewLatency()}
}

// observeLocked gathers the reports since the last time, and reports whether it is
// time to tell the search. Requires: mu held.
func (c *Controller) observeLocked(topic catalog.Topic, f *fit, now time.Time) bool {
	name := topic.Spec.Name()
	f.sum.arrivals = append(f.sum.arrivals, f.record.trace.Take(wall(now))...)
	for _, q := range topic.Plan.Quotas {
		l := slices.IndexFunc(f.setup.Brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		figures := c.figuresLocked(name, q.Broker)
		if l < 0 || figures == nil {
			continue
		}
		for _, r := range figures.reports {
			if !r.at.After(f.seen[q.Broker]) || r.at.Add(-r.stats.Interval.AsDuration()).Before(f.from) {
				continue
			}
			f.seen[q.Broker] = r.at
			if slice, err := f.sum.sliceOf(r.stats, f.setup.Latency); err == nil { // checkStats has refused others
				f.sum.slices[l] = append(f.sum.slices[l], slice)
				f.sum.any = true
			}
		}
	}
	// A search that has no arrivals takes it that there are none.
	return f.sum.any && (len(f.sum.arrivals) > 0 || f.record.told || f.record.dry(topic, now.Sub(f.began)))
}

// take returns what was gathered, and begins anew.
func (f *fit) take() fitting.Observation {
	s := f.sum
	f.sum = newObserved(len(f.setup.Brokers))
	f.record.told = f.record.told || len(s.arrivals) > 0
	o := fitting.Observation{Slices: s.slices, Arrivals: s.arrivals, Lone: s.processing.Quantile(0.1)}
	o.Access = fitting.Slice{Delivered: uint64(s.access.Count()), Late: uint64(s.access.CountAbove(max(0, f.setup.Latency-o.Lone)))}
	return o
}

// sliceOf counts a report's processing delays, and adds its histograms.
func (o *observed) sliceOf(s *srtmv1.TopicStats, latency time.Duration) (fitting.Slice, error) {
	p, err := obs.LatencyFromProto(s.Processing)
	a, err2 := obs.LatencyFromProto(s.Access)
	if err := errors.Join(err, err2); err != nil {
		return fitting.Slice{}, err
	}
	o.processing.Merge(p)
	o.access.Merge(a)
	return fitting.Slice{Delivered: uint64(p.Count()), Late: uint64(p.CountAbove(latency)), HalfLate: uint64(p.CountAbove(latency / 2))}, nil
}

// wall is a time as brokers' stamps have it.
func wall(t time.Time) stamp.Wall { return stamp.Wall(t.UnixNano()) }
