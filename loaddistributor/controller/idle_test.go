package controller

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// idle returns a controller with a number of active topics. The controller does not run.
func idle(t testing.TB, topics int) *Controller {
	cat := catalog.New()
	apply := func(e catalog.Event) {
		t.Helper()
		if _, err := cat.Apply(e); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{"b1", "b2"} {
		apply(catalog.BrokerJoined{ID: id, Instance: id, Mcap: int64(topics)})
	}
	for i := range topics {
		s := &catalog.Spec{
			Demand:    placement.Demand{Topic: fmt.Sprintf("t%d", i), Rate: 1, RateMilli: 1000, Burst: 1, Groups: []placement.Group{{Key: "g", Count: 1, Rate: 1}}},
			SLO:       catalog.SLO{Quantile: 0.99, Latency: time.Second},
			Policy:    placement.SRTM,
			ShareRule: "static",
		}
		plan, err := placement.Place(s.Policy, cat.Snapshot(""), s.Demand, nil)
		testkit.Must(t, err)
		placed, err := catalog.NewTopicPlaced(s, plan, "")
		testkit.Must(t, err)
		apply(placed)
		apply(catalog.MemberPrepared{Topic: s.Name(), Broker: plan.Quotas[0].Broker})
		apply(catalog.TopicActivated{Topic: s.Name()})
	}
	c, err := New(Config{
		Catalog: cat, ReportInterval: time.Second, PrepareTimeout: time.Second, Window: time.Minute,
		Rebalance: RebalanceOff, Fitting: tuner.ModeFast, Log: slog.New(slog.DiscardHandler),
	}, nil)
	testkit.Must(t, err)
	clear(c.brokers.disconnectedSince) // the brokers have joined this controller
	return c
}

// session is the session of a broker that has no topic yet.
func session(c *Controller, broker string) *Session {
	return &Session{broker: broker, reports: reports.NewBroker(c.cfg.ReportInterval, c.cfg.Window), unprepared: map[string]bool{}}
}

// Allocations stand for the topics that are looked at, because each look copies the topic's catalog
// entry.
func TestATickLooksAtNoIdleTopic(t *testing.T) {
	comparisons := func(topics int) float64 {
		c, now := idle(t, topics), time.Now()
		return testing.AllocsPerRun(10, func() {
			c.tick(now)
		})
	}
	if few, many := comparisons(10), comparisons(500); many > few+20 {
		t.Errorf("a turn without anything to do allocates %.0f times with 10 topics, %.0f times with 500", few, many)
	}
}

func TestATickGoesToWhatWantsIt(t *testing.T) {
	c, now := idle(t, 50), time.Now()
	if c.judge.run(now); len(c.topics.busy) > 0 {
		t.Errorf("of idle topics, %q want a tick", c.topics.busy)
	}
	c.topics.byName["t7"].retry = now.Add(time.Second)
	c.topics.byName["t30"].reminders = []reminder{{broker: "b1", time: now.Add(time.Second)}}
	if c.judge.run(now); !slices.Equal(c.topics.busy, []string{"t30", "t7"}) {
		t.Errorf("%q want a tick", c.topics.busy)
	}
	now = now.Add(2 * time.Second)
	c.mover.run(now)
	c.mover.remind(now)
	if c.judge.run(now); len(c.topics.busy) > 0 {
		t.Errorf("when all is done, %q want a tick", c.topics.busy)
	}
}

// turns records how many topics were judged when a turn with the lock began.
type turns struct {
	sync.Locker
	judged func() int
	at     []int
}

func (t *turns) Lock() {
	t.at = append(t.at, t.judged())
	t.Locker.Lock()
}

func TestJudgeHoldsTheLockForAFewTopics(t *testing.T) {
	c, now := idle(t, 3*judgeAtOnce+1), time.Now()
	judged := func() (n int) {
		for _, l := range c.topics.byName {
			if l.condition != nil {
				n++
			}
		}
		return n
	}
	lock := &turns{Locker: &c.mu, judged: judged}
	c.cat.inTurns(lock, func(name string) (work int) { work, _ = c.judge.judge(name, now); return work })
	if want := []int{0, judgeAtOnce, 2 * judgeAtOnce, 3 * judgeAtOnce}; !slices.Equal(lock.at, want) {
		t.Errorf("turns began after %v topics, want %v", lock.at, want)
	}
	if n := judged(); n != c.cat.committed.Len() {
		t.Errorf("%d topics were looked at, of %d", n, c.cat.committed.Len())
	}
}

// A quiet topic is looked at when a report arrives and when its broker leaves. Whatever the topic
// missed before counts for nothing.
func TestAQuietTopicIsWoken(t *testing.T) {
	c, now := idle(t, 1), time.Now()
	d := func() *condition.Topic { return c.topics.byName["t0"].condition }
	if c.judge.run(now); !d().Quiet {
		t.Fatal("an idle topic is not quiet")
	}
	id := c.cat.committed.Topics("", 1)[0].Plan.Quotas[0].Broker
	s := session(c, id)
	c.brokers.sessions[id] = s
	report := func(offered uint64) {
		t.Helper()
		now = now.Add(time.Second)
		r := &srtmv1.BrokerReport{Topics: []*srtmv1.TopicStats{{Topic: "t0", Interval: durationpb.New(time.Second), Offered: offered}}}
		testkit.Must(t, c.report(s, r, now))
		c.judge.run(now)
	}
	if report(0); !d().Quiet {
		t.Error("a report of nothing woke it")
	}
	if report(1000); d().Quiet || d().Over.IsZero() {
		t.Errorf("1000 messages of 1 msg/s: %+v", d())
	}
	for range 1100 { // until the contract would have made up for the excess, plus a window
		report(0)
	}
	if !d().Quiet {
		t.Errorf("it is not quiet after 1100 s: %+v", d())
	}
	now = now.Add(time.Hour)
	c.judge.run(now)
	if _, err := c.cat.committed.Apply(catalog.BrokerLeft{ID: id}); err != nil {
		t.Fatal(err)
	}
	c.brokers.sessionEnded[id] = true
	now = now.Add(2 * time.Second)
	if c.judge.run(now); d().Stranded != 1 || d().Refused() > 2 {
		t.Errorf("2 s after its broker went: %d stranded, %d not accepted at 1 msg/s", d().Stranded, d().Refused())
	}
}

// The time in which a topic was quiet makes up for nothing that comes after it.
func TestAQuietTopicSavesNothing(t *testing.T) {
	c, now := idle(t, 1), time.Now()
	id := c.cat.committed.Topics("", 1)[0].Plan.Quotas[0].Broker
	s := session(c, id)
	c.brokers.sessions[id] = s
	report := func(offered uint64) *condition.Topic {
		t.Helper()
		now = now.Add(time.Second)
		r := &srtmv1.BrokerReport{Topics: []*srtmv1.TopicStats{{Topic: "t0", Interval: durationpb.New(time.Second), Offered: offered}}}
		testkit.Must(t, c.report(s, r, now))
		c.judge.run(now)
		return c.topics.byName["t0"].condition
	}
	for range 120 {
		if !report(0).Quiet {
			t.Fatal("an idle topic is not quiet")
		}
	}
	const offered = 200 // 1 msg/s and a burst of 1: made up for after 198 s
	report(offered)
	lasted := 0
	for ; lasted < 1000 && !report(0).Over.IsZero(); lasted++ {
	}
	if minimum := offered - 2 + int(c.cfg.Window/time.Second) - 2; lasted < minimum {
		t.Errorf("over its contract for %d s, want at least %d", lasted, minimum)
	}
}

// Reports that omit unchanged topics have the same effect as full reports.
func TestWhatReportsLeaveOutIsKnown(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		const topics = 3
		type side struct {
			c *Controller
			s *Session
		}
		var whole, changes side
		for _, at := range []*side{&whole, &changes} {
			at.c = idle(t, topics)
			at.c.cfg.Window = 5 * time.Second
			at.s = session(at.c, "b1")
			at.c.brokers.sessions["b1"] = at.s
		}
		now := time.Now()
		listed := map[string]*srtmv1.TopicStats{} // from the last report that listed the topic
		for step := range rapid.IntRange(1, 30).Draw(r, "steps") {
			now = now.Add(time.Second)
			interval := time.Second
			if step == 0 {
				interval = 50 * time.Millisecond // the first interval begins with the topic
			}
			var all, some []*srtmv1.TopicStats
			for i := range topics {
				name := fmt.Sprint("t", i)
				stats := &srtmv1.TopicStats{Topic: name, Interval: durationpb.New(interval)}
				if was := listed[name]; was != nil {
					stats.Depth, stats.Publishers, stats.Channels, stats.ChannelSubscribers = was.Depth, was.Publishers, was.Channels, was.ChannelSubscribers
				}
				switch rapid.SampledFrom([]string{"still", "still", "still", "still", "still", "still", "messages", "depth", "publisher"}).Draw(r, "what") {
				case "messages":
					stats.Offered = rapid.Uint64Range(1, 20).Draw(r, "offered")
					stats.Released, stats.Delivered, stats.Exceeded = stats.Offered, stats.Offered, stats.Offered/2
				case "depth":
					stats.Depth++
				case "publisher":
					stats.Publishers = 1 - stats.Publishers
				}
				all = append(all, stats)
				was := listed[name]
				var same *srtmv1.TopicStats
				if was != nil {
					same = proto.CloneOf(was)
					same.Interval = stats.Interval
				}
				if was == nil || was.Offered > 0 || !proto.Equal(same, stats) {
					some = append(some, stats)
					listed[name] = stats
				}
			}
			for _, at := range []struct {
				side
				report *srtmv1.BrokerReport
			}{{whole, &srtmv1.BrokerReport{Topics: all}}, {changes, &srtmv1.BrokerReport{Topics: some, Changes: step > 0}}} {
				if err := at.c.report(at.s, at.report, now); err != nil {
					r.Fatal(err)
				}
				at.c.judge.run(now)
			}
			for i := range topics {
				name := fmt.Sprint("t", i)
				says := func(at side) string {
					topic, _ := at.c.cat.committed.Topic(name)
					if topic.Plan.Quotas[0].Broker != "b1" {
						return ""
					}
					f, d := at.s.reports.Topic(name), at.c.topics.peek(name).condition
					delivered, exceeded := f.Counts(now.Add(-at.c.cfg.Window))
					last := f.Newest()
					return fmt.Sprint(delivered, " of ", exceeded, " late; ", last.At, last.Stats.Depth, last.Stats.Publishers, last.Stats.Offered,
						"; emptied ", at.c.mover.emptied(topic, "b1", now), ", untaken ", at.c.brokers.untaken(topic.Spec.Name(), catalog.Broker{ID: "b1", Forced: true}, now),
						"; missed ", d.Missed, ", over ", d.Over, d.ExcessRate, ", quiet ", d.Quiet, "; offered ", at.s.reports.Offered())
				}
				if stats, want := says(changes), says(whole); stats != want {
					r.Fatalf("after step %d, %s:\n%s, want\n%s", step, name, stats, want)
				}
			}
		}
	})
}

// A broker that is drained by force keeps messages that no consumer takes for a window after the last
// message. This also holds for a topic that the broker had before the topic was placed there.
func TestWhatABrokerHadBeforeIsKeptForAWindow(t *testing.T) {
	c, now := idle(t, 1), time.Now()
	apply := func(e catalog.Event) {
		t.Helper()
		if _, err := c.cat.next.Apply(e); err != nil {
			t.Fatal(err)
		}
	}
	apply(catalog.BrokerJoined{ID: "b3", Instance: "b3", Mcap: 1})
	is, _ := c.cat.next.Topic("t0")
	spec := *is.Spec
	spec.Demand.Topic = "had"
	plan, err := placement.Place(spec.Policy, c.cat.next.Snapshot(""), spec.Demand, nil)
	testkit.Must(t, err)
	s := session(c, "b3")
	c.brokers.sessions["b3"] = s
	report := func(r *srtmv1.BrokerReport) {
		t.Helper()
		now = now.Add(time.Second)
		testkit.Must(t, c.report(s, r, now))
	}
	says := func(delivered uint64, publishers uint32) []*srtmv1.TopicStats {
		return []*srtmv1.TopicStats{{Topic: "had", Interval: durationpb.New(time.Second), Delivered: delivered, Depth: 5, Publishers: publishers}}
	}
	report(&srtmv1.BrokerReport{Topics: says(1, 0)})
	report(&srtmv1.BrokerReport{Topics: says(0, 0), Changes: true})
	still := now
	placed, err := catalog.NewTopicPlaced(&spec, plan, "")
	testkit.Must(t, err)
	apply(placed)
	topic, _ := c.cat.next.Topic("had")
	for now.Sub(still) < 2*c.cfg.Window {
		kept := now.Sub(still) < c.cfg.Window-2*c.cfg.ReportInterval
		if given := c.brokers.untaken(topic.Spec.Name(), catalog.Broker{ID: "b3", Forced: true}, now); given == kept {
			t.Fatalf("%v after the last message: given up is %v", now.Sub(still), given)
		}
		r := &srtmv1.BrokerReport{Changes: true}
		if now.Sub(still) == 5*time.Second {
			r.Topics = says(0, 1)
		}
		report(r)
	}
}

// Messages that wait for tokens on a broker drained by force are given up after the window, even if
// the window has more reports than are kept. They are never given up while the broker is silent.
func TestALongWindowEnds(t *testing.T) {
	c, now := idle(t, 1), time.Now()
	c.cfg.Window = 2048 * c.cfg.ReportInterval // more reports than are kept
	topic := c.cat.committed.Topics("", 1)[0]
	id := topic.Plan.Quotas[0].Broker
	s := session(c, id)
	c.brokers.sessions[id] = s
	given := func() bool { return c.brokers.untaken(topic.Spec.Name(), catalog.Broker{ID: id, Forced: true}, now) }
	report := func(delivered uint64) {
		t.Helper()
		now = now.Add(c.cfg.ReportInterval)
		if err := c.report(s, &srtmv1.BrokerReport{Topics: []*srtmv1.TopicStats{{
			Topic: "t0", Interval: durationpb.New(c.cfg.ReportInterval), Delivered: delivered, Backlog: 5,
		}}}, now); err != nil {
			t.Fatal(err)
		}
	}
	report(1)
	last := now
	for now.Sub(last) < c.cfg.Window-2*c.cfg.ReportInterval {
		if report(0); given() {
			t.Fatalf("given up after %v", now.Sub(last))
		}
	}
	report(0)
	if report(0); !given() {
		t.Errorf("%v after the last message nothing is given up", now.Sub(last))
	}
	if now = now.Add(c.cfg.Window + 1); given() {
		t.Error("given up of a broker that says nothing any more")
	}
}
