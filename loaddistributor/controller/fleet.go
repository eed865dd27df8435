package controller

import (
	"errors"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// fleet reports how many brokers the cluster lacks. It starts no brokers.
type fleet struct {
	// Set once.
	cfg *Config
	mu  *sync.RWMutex
	cat *pipeline

	// Guarded by mu.
	book   *shortage.Book
	missed map[string]bool // topics whose last fit found a lack of brokers
}

// planned records the result of a plan. previous is the topic before the plan, and event is
// the decision.
func (f *fleet) planned(name string, previous catalog.Topic, event catalog.Event, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if infeasible, refused := errors.AsType[*placement.Infeasible](err); refused {
		has, want := int64(0), infeasible.Need
		if previous.Spec != nil {
			has = previous.Spec.Demand.Rate
		}
		if infeasible.Bound != "rcap" {
			want = has // the rate is not known
		}
		f.book.Refuse(name, want, has, infeasible, time.Now())
	}
	if err != nil {
		return
	}
	switch e := event.(type) {
	case catalog.TopicPlaced:
		f.book.Placed(name, e.Spec.Demand.Rate)
	case catalog.TopicMoving:
		f.book.Placed(name, e.Spec.Demand.Rate)
	}
}

// recordFit records the result of a fit. Requires: the lock held.
func (f *fleet) recordFit(e tuner.Ended) {
	if delete(f.missed, e.Topic); e.Lacking {
		f.missed[e.Topic] = true
	}
}

// announce reports the number of missing brokers, if the number has changed.
func (f *fleet) announce(now time.Time) {
	f.mu.Lock()
	need := f.book.Need(f.cluster(), now)
	before := f.book.Announced()
	changed := f.book.Announce(need, now)
	f.mu.Unlock()
	if !changed {
		return
	}
	switch {
	case need.Brokers > 0:
		f.cfg.Log.Warn("more brokers are needed", obs.KeyCount, need.Brokers, "brokers", need.Present, obs.KeyReason, need.Reason())
	case before > 0:
		f.cfg.Log.Info("brokers suffice again", "brokers", need.Present, obs.KeyReason, need.Reason())
	}
	if f.cfg.Lacking != nil {
		f.cfg.Lacking(need)
	}
}

// cluster returns the cluster as placement sees it. Requires: the lock held.
func (f *fleet) cluster() shortage.Cluster {
	c := shortage.Cluster{Brokers: f.cat.committed.Snapshot("")}
	for _, b := range f.cat.committed.Brokers() {
		c.Allocated += b.Allocated
	}
	for name := range f.missed {
		topic, known := f.cat.committed.Topic(name)
		switch {
		case !known || topic.State == catalog.Deleting:
			delete(f.missed, name)
		case topic.Plan.K >= len(c.Brokers): // else a broker has come since
			c.Unfitted++
		}
	}
	return c
}
