package controller

import (
	"context"
	"log/slog"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/learned"
)

// The controller keeps nothing about a broker that the catalog has forgotten. While any broker is
// disconnected, no topic counts as quiet, and the controller reads all of the adaptor's shares.
func TestABrokerThatIsForgottenIsNotAway(t *testing.T) {
	c, now := idle(t, 1), time.Now()
	c.brokers.disconnectedSince["b9"], c.brokers.sessionEnded["b9"], c.brokers.drainers["b9"] = now, true, "somebody"
	c.judge.run(now)
	if n := len(c.brokers.disconnectedSince) + len(c.brokers.sessionEnded) + len(c.brokers.drainers); n > 0 {
		t.Errorf("%d entries are kept", n)
	}
}

// A follower keeps nothing of a topic that no client watches any more.
func TestAFollowerForgetsWhoWatched(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		leader := idle(t, 1)
		c, err := NewFollower(Config{
			ReportInterval: time.Second, PrepareTimeout: time.Second, Window: time.Minute, Log: slog.New(slog.DiscardHandler),
		}, nil, func() string { return "" })
		testkit.Must(t, err)
		c.Reset(leader.cat.committed)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		for range 2 {
			go func() { ended <- c.view.Watch(ctx, "t0", nil, func(Change) error { return nil }) }()
		}
		synctest.Wait()
		if n := len(c.topics.peek("t0").watchers); n != 2 {
			t.Fatalf("%d watch", n)
		}
		cancel()
		<-ended
		<-ended
		if len(c.topics.byName) > 0 {
			t.Errorf("it keeps %d topics", len(c.topics.byName))
		}
	})
}

// replicatedOnTwo returns a controller with a replicated topic on b1 and b2, which b3 has left: b3 is
// back without the topic.
func replicatedOnTwo(t *testing.T) (c *Controller, topic catalog.Topic, now time.Time) {
	t.Helper()
	c, now = idle(t, 1), time.Now()
	topic = c.cat.committed.Topics("", 1)[0]
	spec := *topic.Spec
	spec.Durability = catalog.DurabilityReplicated
	topic.Spec = &spec
	topic.Plan.Quotas = append(topic.Plan.Quotas[:1:1], topic.Plan.Quotas[0])
	topic.Plan.Quotas[0].Broker, topic.Plan.Quotas[1].Broker = "b1", "b2"
	topic.Retiring = []string{"b3"}
	for _, id := range []string{"b1", "b2", "b3"} {
		s := session(c, id)
		s.durability = catalog.DurabilityReplicated
		c.brokers.sessions[id] = s
	}
	for range 2 { // the session lists all its topics
		now = now.Add(time.Second)
		testkit.Result(c.brokers.sessions["b3"].reports.Apply(&srtmv1.BrokerReport{}, now, nil)).Must(t)
	}
	return c, topic, now
}

// Brokers are ordered in turn to take over messages of another broker, also once the other broker is
// back without the topic.
func TestTakersHaveTurns(t *testing.T) {
	c, topic, now := replicatedOnTwo(t)
	asked := map[string]bool{}
	for range 4 {
		now = now.Add(takersTurn)
		asked[c.mover.taker(topic, catalog.Broker{ID: "b3"}, now)] = true
	}
	if !asked["b1"] || !asked["b2"] || len(asked) > 2 {
		t.Errorf("asked: %v", asked)
	}
}

// A broker is back without the topic, since other brokers began to take its messages over. While no
// broker can end the take-over, the topic does not leave the broker: the messages would be stranded.
func TestAPartThatNobodyCanTakeOverIsKept(t *testing.T) {
	for name, gone := range map[string][]string{"the broker that began is gone": {"b1"}, "all brokers of the topic are gone": {"b1", "b2"}} {
		c, topic, now := replicatedOnTwo(t)
		c.mover.recordTakeOver(topic.Spec.Name(), "b3", "b1")
		for _, id := range gone {
			delete(c.brokers.sessions, id)
		}
		op, due := c.mover.nextOperation(topic, catalog.Broker{ID: "b3", Connected: true}, now)
		if due && op.target.Retire != "" {
			t.Errorf("%s: %+v", name, op.target)
		}
	}
}

// A profile takes nothing from an earlier topic of the same name.
func TestAProfileTakesNothingOfAnotherTopic(t *testing.T) {
	c, now := idle(t, 1), time.Now()
	begin := func() *profile {
		p := &profile{numbers: map[string]int32{}, wake: make(chan struct{}, 1)}
		c.topics.byName["t0"] = &liveTopic{profile: p}
		c.topics.busy = []string{"t0"}
		return p
	}
	begin()
	looks := c.learning.begin(now)
	now = now.Add(learned.Window)
	looks = append(looks, c.learning.begin(now)...)
	if len(looks) != 1 {
		t.Fatalf("%d looks after a window", len(looks))
	}
	p := begin()
	c.learning.begin(now)
	if c.learning.end(looks[0], now); p.started {
		t.Error("it has begun with what was recorded of another topic")
	}
}

// A caller that sees a broker drain also sees who requested the drain.
func TestWhoHasABrokerDrainedIsKnownAtOnce(t *testing.T) {
	c := idle(t, 1)
	stop, ended := make(chan struct{}), make(chan error, 1)
	commits := &committer{&c.mu, c.cat, c.announcer, nil, slog.New(slog.DiscardHandler), nil, false}
	go func() { ended <- commits.run(context.Background(), stop) }()
	defer func() {
		close(stop)
		testkit.Must(t, <-ended)
	}()
	for range 50 {
		known := make(chan bool)
		go func() {
			for {
				c.mu.RLock()
				b, _ := c.cat.committed.Broker("b1")
				_, by := c.brokers.drainers["b1"]
				c.mu.RUnlock()
				if b.Draining {
					known <- by
					return
				}
				runtime.Gosched()
			}
		}()
		testkit.Result(c.Drain(t.Context(), "b1", true, false)).Must(t)
		if !<-known {
			t.Fatal("it is not known")
		}
		testkit.Result(c.Drain(t.Context(), "b1", false, false)).Must(t)
		c.mover.run(time.Now())
		if len(c.brokers.drainers) > 0 {
			t.Fatal("it is known of one that does not drain")
		}
	}
}
