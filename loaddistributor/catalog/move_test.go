package catalog

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

func (w world) moving(s *Spec) TopicMoving {
	w.t.Helper()
	p, err := placement.Place(s.Policy, w.SnapshotFor(s.Name()), s.Demand, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	e, err := NewTopicMoving(s, p)
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

func TestAMoveToAnotherBroker(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.active(spec("t", 8, 60))
	w.must(joined("b2", 100))
	w.must(BrokerDraining{ID: "b1", Draining: true})
	old, _ := w.Topic("t")

	e := w.moving(old.Spec)
	w.must(e)
	if b1, _ := w.Broker("b1"); b1.Allocated != 60 {
		t.Errorf("while it moves the old broker has %d reserved", b1.Allocated)
	}
	if _, err := w.Apply(TopicMoved{"t"}); !errors.As(err, new(*NotReadyError)) {
		t.Errorf("moved before the new broker was prepared: %v", err)
	}
	if _, err := w.Apply(e); !errors.Is(err, ErrTopicState) {
		t.Errorf("a second move beside the first: %v", err)
	}
	w.must(MemberPrepared{"t", "b2"})
	if a, _ := w.Resolve("t", "g.0"); a.Broker != "b1" {
		t.Errorf("a publisher belongs to %s before the move", a.Broker)
	}
	effects := w.must(TopicMoved{"t"})
	if want := []Effect{PlacementChanged{"t"}}; !reflect.DeepEqual(effects, want) {
		t.Errorf("effects %+v, want %+v", effects, want)
	}
	a, err := w.Resolve("t", "g.0")
	if err != nil || a.Broker != "b2" || a.Epoch <= old.Placement.Epoch() {
		t.Errorf("%+v, %v after the move from epoch %d", a, err, old.Placement.Epoch())
	}
	now, _ := w.Topic("t")
	if !slices.Equal(now.Retiring, []string{"b1"}) || !slices.Equal(w.Placed("b1"), []string{"t"}) || w.Empty("b1") {
		t.Errorf("retiring %v, placed on b1 %v", now.Retiring, w.Placed("b1"))
	}
	// It has removed the topic: to ask again could hit what has come since.
	w.must(MemberRetired{"t", "b1"})
	if remove, _ := w.Work("b1"); remove != nil {
		t.Errorf("b1 is to remove %v", remove)
	}
	if !w.Empty("b1") {
		t.Error("b1 is not empty in the end")
	}
}

func TestAMoveThatIsAborted(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.active(spec("t", 8, 60))
	w.must(joined("b2", 100))
	larger := spec("t", 8, 150)
	w.must(w.moving(larger))
	if _, err := w.Apply(TopicMoveAborted{"t", []string{"b1"}}); !errors.Is(err, ErrBrokerUnknown) {
		t.Errorf("left on a member: %v", err)
	}
	w.must(TopicMoveAborted{"t", []string{"b2"}})
	topic, _ := w.Topic("t")
	b1, _ := w.Broker("b1")
	b2, _ := w.Broker("b2")
	if topic.Next != nil || topic.Spec.Demand.Rate != 60 || b1.Allocated != 60 || b2.Allocated != 0 {
		t.Errorf("after the abort: %+v, %+v, %+v", topic, b1, b2)
	}
	if remove, _ := w.Work("b2"); remove != nil {
		t.Errorf("b2 is to remove %v, whatever it holds", remove)
	}
	if !slices.Equal(topic.Retiring, []string{"b2"}) || !slices.Equal(w.Placed("b2"), []string{"t"}) || w.Empty("b2") {
		t.Errorf("retiring %v, placed on b2 %v", topic.Retiring, w.Placed("b2"))
	}
	w.must(MemberRetired{"t", "b2"})
	if !w.Empty("b2") {
		t.Error("b2 is not empty in the end")
	}
}

// A key stands for the request that created the topic, whatever became of it.
func TestAKeyOutlivesAnUpdate(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 1000))
	first := spec("t", 8, 60)
	w.active(first)
	w.must(w.moving(spec("t", 10, 80)))
	w.must(MemberPrepared{"t", "b1"})
	w.must(TopicMoved{"t"})
	if topic, _ := w.Topic("t"); topic.Ordered != first || topic.Spec.Demand.Rate != 80 || len(topic.Retiring) > 0 {
		t.Errorf("%+v", topic)
	}
}

func TestARestartForgetsSessionsAndNothingElse(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.active(spec("t", 8, 60))
	w.must(Restarted{})
	if state, reason := w.state("t"); state != Degraded || reason != "broker b1 is gone" {
		t.Errorf("%v: %s", state, reason)
	}
	if _, err := w.Resolve("t", "g.0"); err != nil {
		t.Errorf("publishers cannot resolve: %v", err)
	}
	w.must(joined("b1", 100))
	w.must(MemberPrepared{"t", "b1"})
	if state, reason := w.state("t"); state != Active {
		t.Errorf("%v: %s", state, reason)
	}
}

func TestLoadRefusesWhatCannotBe(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.active(spec("t", 8, 60))
	for name, change := range map[string]func(*Dump){
		"a topic on a broker that is not there": func(d *Dump) { d.Brokers = nil },
		"a broker twice":                        func(d *Dump) { d.Brokers = append(d.Brokers, d.Brokers[0]) },
		"a topic twice":                         func(d *Dump) { d.Topics = append(d.Topics, d.Topics[0]) },
		"a topic without a specification":       func(d *Dump) { d.Topics[0].Spec = nil },
		"an epoch of the future":                func(d *Dump) { d.Topics[0].Epoch = d.Version + 1 },
		"a state that is derived":               func(d *Dump) { d.Topics[0].Phase = Degraded },
		"members that do not match":             func(d *Dump) { d.Topics[0].Prepared = nil },
		"publishers without a place":            func(d *Dump) { d.Topics[0].Plan.Quotas[0].Publishers = nil },
	} {
		copied := newWorld(t)
		copied.must(joined("b1", 100))
		copied.active(spec("t", 8, 60))
		d := copied.Dump()
		change(&d)
		if _, err := Load(d); err == nil {
			t.Errorf("%s was loaded", name)
		}
	}
}

// A fit may leave publishers without a place for a while.
func TestAMoveThatLeavesPublishersOut(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.active(spec("t", 8, 60))
	old, _ := w.Topic("t")
	plan := placement.Plan{Policy: old.Plan.Policy, K: 1, Quotas: slices.Clone(old.Plan.Quotas), Unplaced: []int{2, 5}}
	plan.Quotas[0].Publishers = []int{0, 1, 3, 4, 6, 7}
	move := func(p placement.Plan) []Effect {
		t.Helper()
		e, err := NewTopicMoving(old.Spec, p)
		if err != nil {
			t.Fatal(err)
		}
		w.must(e)
		return w.must(TopicMoved{"t"})
	}
	effects := move(plan)
	if want := []Effect{PlacementChanged{"t"}, StateChanged{"t", Active, Degraded, "2 publishers are not placed yet"}}; !reflect.DeepEqual(effects, want) {
		t.Errorf("effects %+v, want %+v", effects, want)
	}
	now, _ := w.Topic("t")
	for i := range 8 {
		a := now.Placement.At(i)
		_, err := w.Resolve("t", a.Publisher)
		out := i == 2 || i == 5
		if (a.Endpoint == Endpoint{}) != out || a.Epoch != now.Placement.Epoch() || errors.Is(err, ErrUnplaced) != out {
			t.Errorf("publisher %d: %+v, %v", i, a, err)
		}
	}
	if n := now.Placement.Unplaced(); n != 2 {
		t.Errorf("%d unplaced", n)
	}
	for _, bad := range [][]int{{2}, {2, 5, 5}, {2, 5, 8}, {-1, 2, 5}, {1, 2, 5}} {
		p := plan
		p.Unplaced = bad
		if _, err := NewTopicMoving(old.Spec, p); !errors.As(err, new(*PlanError)) {
			t.Errorf("unplaced %v: %v", bad, err)
		}
	}
	effects = move(old.Plan)
	if want := []Effect{PlacementChanged{"t"}, StateChanged{"t", Degraded, Active, ""}}; !reflect.DeepEqual(effects, want) {
		t.Errorf("effects %+v, want %+v", effects, want)
	}
}
