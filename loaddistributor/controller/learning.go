package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// An open topic has no list of publishers. Its brokers record arrivals all the time, and
// loaddistributor/learned derives publishers from the records. The learned publishers are
// stored in the topic's specification. A change of them is a normal move, in which most
// publishers stay. So the learned publishers are durable, and the next leader has them.

// learning places open topics by the learned publishers.
type learning struct {
	// Set once.
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	topics  *topics
	tenants *tenants
	tuner   *tuner.Tuner
	owners  *owners
	tuning  *tuning
}

// run places open topics by their publishers.
func (t *learning) run(now time.Time) {
	for _, e := range t.begin(now) {
		e.job.FindGroups()
		t.end(e, now)
	}
}

// evaluation is an evaluation of a topic in progress.
type evaluation struct {
	name    string
	learned *learned.Topic
	job     *learned.Job
}

// begin makes brokers record, and returns the evaluations to compute.
func (t *learning) begin(now time.Time) (evaluations []evaluation) {
	t.mu.Lock()
	defer t.mu.Unlock()
	extended := map[learned.Order][]string{} // topics whose recordings continue
	for _, name := range t.topics.busy {
		topic, found := t.cat.committed.Topic(name)
		l := t.topics.byName[name]
		if !found || l == nil || !l.learning && l.learned == nil && l.profile == nil {
			continue
		}
		switch {
		case !topic.Spec.Demand.Open && l.profile == nil:
			l.learned = nil // running records end by themselves
			continue
		case !topic.Open():
			continue
		case l.learned == nil || l.learnedOf != topic.Created:
			l.learned, l.learnedOf = learned.New(topic.Spec, now), topic.Created
		}
		l.learned.Whole(l.profile != nil)
		holders := topic.Holders()
		brokers := slices.DeleteFunc(slices.Clone(holders), func(id string) bool { return t.brokers.sessions[id] == nil })
		for _, o := range l.learned.Orders(brokers, len(brokers) < len(holders), now) {
			if t.record(t.brokers.sessions[o.Broker], l.learned, name, o, now) {
				extended[o] = append(extended[o], name)
			}
		}
		if job := l.learned.CloseWindow(topic.Spec, now); job != nil {
			evaluations = append(evaluations, evaluation{name, l.learned, job})
		}
	}
	// order: each broker by itself
	for o, names := range extended {
		t.brokers.sessions[o.Broker].captureAll(names, o.Lasts)
	}
	return evaluations
}

// end acts on the result of an evaluation, unless the topic of the name or its learned data has
// been replaced.
func (t *learning) end(e evaluation, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	topic, found := t.cat.committed.Topic(e.name)
	l := t.topics.peek(e.name)
	if !found || l.learned != e.learned {
		return
	}
	if l.profile != nil {
		l.profile.addWindow(e.learned, e.job)
	}
	if topic.Spec.Demand.Open && topic.Open() && l.owner == nil && !t.tuner.Status(e.name, now).Running {
		maxRate, limited := t.tenants.remaining(topic.Spec)
		if p := e.learned.Propose(e.job, topic.Spec, topic.Plan.K, maxRate, limited, now); p != nil {
			t.placeBy(topic, p)
		}
	}
}

// placeBy places a topic by the learned publishers. Requires: the lock held.
func (t *learning) placeBy(topic catalog.Topic, proposal *learned.Proposal) {
	name := topic.Spec.Name()
	cause := cause{reason: srtmv1.MoveReason_MOVE_REASON_CORRELATION, text: "publishers learned"}
	op := moving(name, cause, func(p planning) (*catalog.Spec, placement.Plan, error) {
		if p.topic.Spec != topic.Spec {
			return nil, placement.Plan{}, reconcile.ErrSettled // another change came first
		}
		if err := p.afford(proposal.Spec); err != nil {
			return nil, placement.Plan{}, err
		}
		plan, err := p.replaceAsWide(proposal.Spec, proposal.Brokers)
		return proposal.Spec, plan, err
	})
	op.end = func(err error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		topic, found := t.cat.committed.Topic(name)
		if err != nil || !found {
			if errors.As(err, new(*placement.Infeasible)) || errors.As(err, new(*QuotaError)) {
				t.cfg.Log.Warn("topic is not placed by the publishers that were learned", obs.KeyTopic, name, obs.KeyError, err)
			}
			return
		}
		if proposal.Grew {
			t.tuning.perform(t.tuner.Begin(name, topic.Spec.Demand, time.Now()))
		}
		// Publishers that have just become known and belong to another broker.
		for _, id := range slices.Sorted(maps.Keys(proposal.Brokers)) {
			if assignment, home := topic.Placement.Of(id), proposal.Brokers[id]; assignment.Broker != home && home != "" {
				t.brokers.disconnect(name, home, []string{id})
				t.topics.recordMoves(name, []movedPublisher{{&cause, time.Now(), topic.Placement.Epoch(), id, home, assignment.Broker}}, t.cat.committed.Len())
				t.cfg.Log.Info("a publisher belongs to another broker", obs.KeyTopic, name, "publisher", id, obs.KeyBroker, home, "to", assignment.Broker, obs.KeyAddress, assignment.TCPAddress)
			}
		}
	}
	t.owners.enqueue(op)
}

// Learned returns the learned data of an open topic, with at most limit publishers,
// highest rates first; nil for other topics.
func (r *View) Learned(topic catalog.Topic, limit int) *srtmv1.Learned {
	if !topic.Spec.Demand.Open {
		return nil
	}
	name := topic.Spec.Name()
	r.mu.RLock()
	defer r.mu.RUnlock()
	p := &srtmv1.Learned{}
	live := r.topics.peek(name).learned
	if live == nil {
		return p
	}
	publishers := live.Publishers()
	slices.SortStableFunc(publishers, func(a, b learned.Publisher) int { return cmp.Compare(b.Rate, a.Rate) })
	p.Count, p.OthersRate = uint32(len(publishers)), live.Others()
	wrong := 0
	for i, publisher := range publishers {
		assignment := topic.Placement.Of(publisher.ID).Broker
		if publisher.Broker != "" && publisher.Broker != assignment {
			wrong++
		}
		if i < limit {
			p.Publishers = append(p.Publishers, &srtmv1.LearnedPublisher{
				Id: publisher.ID, CorrelationKey: publisher.Key, Rate: publisher.Now, PlacedRate: publisher.Rate,
				Since: timestamppb.New(publisher.Since), LastHeard: timestamppb.New(publisher.Heard), BrokerId: assignment, SendsTo: publisher.Broker, Forwarder: publisher.Forwarder,
			})
		}
	}
	const remedy = "they need nothing to know behind srtm agent; else point them at the broker that each belongs to"
	if wrong > 0 {
		p.Notes = append(p.Notes, plural.Count(wrong, "publisher")+" at another broker of the topic than the assigned one, and served there: "+remedy)
	}
	for _, id := range slices.Sorted(maps.Keys(r.brokers.sessions)) {
		if t := r.brokers.reported(id).Topic(name); t != nil && t.Used && !r.cat.committed.Holds(name, id) {
			assignment, last := topic.Placement.Of(""), t.Newest().Stats
			if messages := last.Depth + last.Backlog; messages > 0 {
				p.Notes = append(p.Notes, fmt.Sprintf("broker %s, which does not have the topic, keeps %s of it: consumers do not find the broker. Connect a consumer to the broker's own address", id, plural.Count(messages, "message")))
			}
			if last.Publishers == 0 && last.Offered == 0 {
				continue
			}
			p.Notes = append(p.Notes, fmt.Sprintf("publishers send to broker %s, which does not have the topic: consumers do not find it there. Point them at %s (broker %s), or run srtm agent beside them", id, assignment.TCPAddress, assignment.Broker))
		}
	}
	if a := topic.Spec.Auto; a != (catalog.Auto{}) && !a.Measured {
		p.Notes = append(p.Notes, "the topic is being measured: its contract is provisional, until a minute of traffic is known")
	}
	if capped := live.Capped(); capped > 0 {
		maxRate, _ := r.tenants.remaining(topic.Spec)
		p.Notes = append(p.Notes, fmt.Sprintf("the contract would follow the traffic to %s msg/s, and --tenant-rate leaves tenant %s %s msg/s for it: raise --tenant-rate, or lower another topic of the tenant",
			capped.Text(), topic.Spec.Tenant, max(maxRate, tokenbucket.Rate(topic.Spec.Demand.RateMilli)).Text()))
	}
	for _, g := range live.Groups() {
		group := &srtmv1.LearnedGroup{Key: g.Label, SinceLearning: g.Since}
		for _, m := range g.Members {
			if len(group.Members) < limit {
				group.Members = append(group.Members, &srtmv1.LearnedMember{Id: m.ID, Firings: uint32(m.Firings), Joint: uint32(m.Joint), Expected: m.Expected, Width: durationpb.New(m.Width)})
			}
		}
		group.Count = uint32(len(g.Members))
		p.Groups = append(p.Groups, group)
	}
	return p
}

// maxProfiled is the maximum number of messages of a profile: 32 MB, and about as much
// again for the proposal. maxProfiles is the maximum number of concurrent profiles.
const maxProfiled, maxProfiles = 2_000_000, 4

// profile is the record for Profile. Guarded by the controller's lock.
type profile struct {
	trace             []tuner.Arrival
	start, end        mono.Time // the recorded period, including silence
	numbers           map[string]int32
	missing, recorded uint64        // before the profile began
	lost              float64       // lost fraction of the messages since the beginning
	wake              chan struct{} // 1 deep
	deleted           chan struct{} // closed when the topic is deleted
	started           bool
	windows           int // complete windows since the beginning
}

// tearsFor is the number of windows in which publishers may still become known. When a
// publisher becomes known, the record begins again, and so does the profile: the gap
// would look like silence.
const tearsFor = 4

// addWindow adds a window.
func (p *profile) addWindow(live *learned.Topic, job *learned.Job) {
	if job.Torn() && p.windows < tearsFor {
		p.trace, p.windows, p.started, p.lost = nil, 0, false, 0
		return
	}
	missing, recorded := live.Missing()
	if !p.started { // the first window began before the profile
		p.started, p.missing, p.recorded, p.start = true, missing, recorded, job.Until()
		return
	}
	p.windows++
	p.end = job.Until()
	if publishers := missing - p.missing + recorded - p.recorded; publishers > 0 {
		p.lost = float64(missing-p.missing) / float64(publishers)
	}
	job.Arrivals(func(id string, at mono.Time) {
		n, found := p.numbers[id]
		if !found {
			n = int32(len(p.numbers))
			p.numbers[id] = n
		}
		if len(p.trace) < maxProfiled {
			p.trace = append(p.trace, tuner.Arrival{At: at, Publisher: n})
		} else {
			p.end = min(p.end, at)
		}
	})
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Profiled is a proposal, and the fraction of messages missing from its record.
type Profiled struct {
	*sizing.Proposal
	Missing float64
}

// Profile records a topic's arrivals for the given time, or up to 2,000,000 messages, and
// proposes a contract. Once per learned.Window it calls progress with the number of
// messages. Errors: catalog.ErrTopicUnknown, at once when the topic is deleted;
// catalog.ErrTopicState if the topic is not active, is being profiled, or four others
// are; sizing.ErrShort; the errors of progress.
func (c *Controller) Profile(ctx context.Context, name string, lasts time.Duration, w sizing.Wanted, progress func(messages int) error) (Profiled, error) {
	if err := c.knowledge.following(); err != nil {
		return Profiled{}, err
	}
	p := &profile{numbers: map[string]int32{}, wake: make(chan struct{}, 1), deleted: make(chan struct{})}
	c.mu.Lock()
	topic, found := c.cat.committed.Topic(name)
	ending := c.life.ending
	var err error
	switch {
	case c.life.closing:
		err = ErrClosing
	case !found:
		err = fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
	case !topic.Open():
		err = fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
	case c.topics.peek(name).profile != nil:
		err = fmt.Errorf("topic %s is being profiled: %w", name, catalog.ErrTopicState)
	case c.profiles == maxProfiles:
		err = fmt.Errorf("topic %s: %d others are being profiled, and no more may be: %w", name, maxProfiles, catalog.ErrTopicState)
	default:
		c.profiles++
		c.topics.entry(name).profile = p
	}
	c.mu.Unlock()
	if err != nil {
		return Profiled{}, err
	}
	end := func() {
		if c.topics.peek(name).profile == p {
			c.topics.entry(name).profile = nil
		}
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		end()
		c.profiles--
	}()
	// Records arrive by window, and the first window began before.
	windows := int((lasts + learned.Window - 1) / learned.Window)
	timer := time.NewTimer(lasts + (2+2*tearsFor)*learned.Window)
	defer timer.Stop()
	for running := true; running; {
		select {
		case <-p.wake:
			c.mu.RLock()
			n, whole := len(p.trace), p.windows >= windows
			c.mu.RUnlock()
			if err := progress(n); err != nil {
				return Profiled{}, err
			}
			running = n < maxProfiled && !whole
		case <-timer.C:
			running = false
		case <-p.deleted:
			return Profiled{}, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
		case <-ending:
			return Profiled{}, ErrClosing
		case <-ctx.Done():
			return Profiled{}, context.Cause(ctx)
		}
	}
	c.mu.Lock()
	end()
	c.mu.Unlock()
	proposal, err := sizing.Propose(p.trace, p.start, p.end, w, rand.New(rand.NewPCG(c.cfg.Seed, uint64(len(p.trace)))))
	if err != nil {
		return Profiled{}, fmt.Errorf("topic %s, %s recorded: %w", name, plural.Count(len(p.trace), "message"), err)
	}
	return Profiled{proposal, p.lost}, nil
}
