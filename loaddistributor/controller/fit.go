package controller

import (
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/fitting"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Fitting a topic begins when it is active and its publishers send: until then
// there is nothing to measure. Once a period, what brokers have reported since goes
// to the topic's search; where that wants another placement, the topic moves, as it
// would for any other reason, and nobody stops sending.
//
// Brokers report histograms and no arrivals, so the search cannot forecast: it tests
// the placement in force, and one broker more while the test fails.
//
// A fit lives in memory. Whoever leads next, or an operator who moves the topic
// meanwhile, ends it with the placement as it is.

// fit is a topic's search. Guarded by Controller.mu.
type fit struct {
	search fitting.Search // nil: waiting for traffic
	setup  fitting.Setup
	epoch  uint64               // of the placement under test
	from   time.Time            // intervals that began earlier do not count
	seen   map[string]time.Time // the newest report that counted, by broker
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

// fitLocked begins to fit a new topic. Requires: mu held.
func (c *Controller) fitLocked(topic catalog.Topic) {
	d := topic.Spec.Demand
	if c.cfg.Fitting == "" || len(d.Publishers) == 0 && len(d.Groups) == 0 {
		return
	}
	c.mu.fits[topic.Spec.Name()] = &fit{step: "waiting for publishers"}
}

// fit moves every fit under way on.
func (c *Controller) fit(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, f := range c.mu.fits {
		topic, ok := c.mu.cat.Topic(name)
		switch {
		case !ok || !open(topic):
			delete(c.mu.fits, name)
		case f.done || f.moving || c.mu.closing || c.mu.names[name] != nil:
		case f.search == nil:
			c.beginFitLocked(topic, f, now)
		case topic.Placement.Epoch() != f.epoch:
			f.end("another placement came between", now)
		default:
			if o, ok := c.observeLocked(topic, f); ok {
				c.followLocked(topic, f, f.search.Next(o), now)
			}
		}
	}
}

func (f *fit) end(step string, now time.Time) {
	f.done, f.search, f.step, f.over = true, nil, step, now
}

// beginFitLocked begins the search once the topic's publishers send. Requires: mu
// held.
func (c *Controller) beginFitLocked(topic catalog.Topic, f *fit, now time.Time) {
	offered, expected := 0.0, 0.0
	for _, q := range topic.Plan.Quotas {
		if figures := c.figuresLocked(topic.Spec.Name(), q.Broker); figures != nil {
			last := figures.reports[len(figures.reports)-1]
			offered += float64(last.stats.Offered) / last.stats.Interval.AsDuration().Seconds()
		}
	}
	for _, p := range topic.Spec.Demand.Expand() {
		expected += p.Rate
	}
	if offered < fitTraffic*expected {
		return
	}
	f.setup = fitting.Setup{
		Policy: topic.Spec.Policy, Brokers: c.mu.cat.SnapshotFor(topic.Spec.Name()), Demand: topic.Spec.Demand,
		Quantile: topic.Spec.SLO.Quantile, Latency: topic.Spec.SLO.Latency, Start: topic.Plan,
	}
	rng := rand.New(rand.NewPCG(c.cfg.Seed, topic.Placement.Epoch()))
	search, err := fitting.NewFast(f.setup, fitting.FastConfig{Step: c.cfg.ReportInterval}, rng)
	if err != nil {
		f.end(err.Error(), now)
		return
	}
	f.search, f.began = search, now
	c.followLocked(topic, f, search.Next(fitting.Observation{}), now)
}

// followLocked does what the search says. Requires: mu held.
func (c *Controller) followLocked(topic catalog.Topic, f *fit, a fitting.Action, now time.Time) {
	name := topic.Spec.Name()
	if a.Step != f.step {
		f.step = a.Step
		c.cfg.Log.Debug("fitting", obs.KeyTopic, name, "step", a.Step)
	}
	stays := samePlan(a.Plan, topic.Plan) || len(a.Plan.Quotas) == 0
	if a.Final {
		c.cfg.Log.Info("topic fitted", obs.KeyTopic, name, "kept", a.Outcome.Fitted, obs.KeyReason, a.Outcome.Reason, "brokers", a.Plan.K)
		f.outcome = a.Outcome
		f.end(a.Outcome.Reason, now)
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
			f.outcome.Fitted = false
			f.end("not moved: "+err.Error(), c.now())
			return
		}
		now, _ := c.mu.cat.Topic(name)
		f.measureFrom(now.Placement.Epoch(), c.now().Add(fitSettle))
	}()
}

func (f *fit) measureFrom(epoch uint64, from time.Time) {
	f.epoch, f.from, f.seen = epoch, from, map[string]time.Time{}
}

// samePlan: the same publishers at the same brokers.
func samePlan(a, b placement.Plan) bool {
	return slices.EqualFunc(a.Quotas, b.Quotas, func(p, q placement.Quota) bool {
		return p.Broker == q.Broker && slices.Equal(p.Publishers, q.Publishers)
	})
}

// observeLocked gathers the reports since the last time; false: there are none.
// Requires: mu held.
func (c *Controller) observeLocked(topic catalog.Topic, f *fit) (o fitting.Observation, any bool) {
	name := topic.Spec.Name()
	processing, access := obs.NewLatency(), obs.NewLatency()
	o.Slices = make([][]fitting.Slice, len(f.setup.Brokers))
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
			slice, err := sliceOf(r.stats, f.setup.Latency, processing, access)
			if err != nil {
				continue // checkStats has refused such reports
			}
			o.Slices[l] = append(o.Slices[l], slice)
			any = true
		}
	}
	o.Lone = processing.Quantile(0.1)
	o.Access = fitting.Slice{Delivered: uint64(access.Count()), Late: uint64(access.CountAbove(max(0, f.setup.Latency-o.Lone)))}
	return o, any
}

// sliceOf counts a report's processing delays, and adds its histograms to those
// given.
func sliceOf(s *srtmv1.TopicStats, latency time.Duration, processing, access *obs.Latency) (fitting.Slice, error) {
	p, err := obs.LatencyFromProto(s.Processing)
	a, err2 := obs.LatencyFromProto(s.Access)
	if err := errors.Join(err, err2); err != nil {
		return fitting.Slice{}, err
	}
	processing.Merge(p)
	access.Merge(a)
	return fitting.Slice{Delivered: uint64(p.Count()), Late: uint64(p.CountAbove(latency)), HalfLate: uint64(p.CountAbove(latency / 2))}, nil
}
