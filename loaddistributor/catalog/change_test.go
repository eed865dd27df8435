package catalog

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Applying the stored form of a change gives the same topic as the move itself.
func TestStoredChangeEqualsTheMove(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		brokers := []string{"b0", "b1", "b2", "b3"}
		w := newWorld(t)
		for _, id := range brokers {
			w.mustApply(joined(id, 1_000_000))
		}
		publisher := func(id int) placement.Publisher {
			return placement.Publisher{ID: fmt.Sprint("p", id), Rate: 0.001}
		}
		before := spec("t", 1, 100)
		before.Demand.Publishers, before.Demand.Groups = nil, nil
		since := rapid.Bool().Draw(rt, "since")
		for i := range rapid.SampledFrom([]int{0, 600, 1200}).Draw(rt, "declared") {
			before.Demand.Publishers = append(before.Demand.Publishers, publisher(i))
			if since {
				before.Since = append(before.Since, int64(i+1))
			}
		}
		before.Demand.Groups = []placement.Group{
			{Key: "g", Count: 700, Rate: 0.001}, {Key: "h", Count: 500, Rate: 0.001},
		}
		place := func(s *Spec, at func(i int) int, ids ...string) placement.Plan {
			p := placement.Plan{Policy: "srtm", K: len(ids)}
			for _, id := range ids {
				p.Quotas = append(p.Quotas, placement.Quota{Broker: id, Rate: 100})
			}
			for i := range s.Demand.Count() {
				if m := at(i); m < 0 {
					p.Unplaced = append(p.Unplaced, i)
				} else {
					p.Quotas[m].Publishers = append(p.Quotas[m].Publishers, i)
				}
			}
			return p
		}
		oldPlan := place(before, func(i int) int { return i%4 - 1 }, "b0", "b1", "b2")
		e := testkit.Result(NewTopicPlaced(before, oldPlan, "")).Must(rt)
		w.mustApply(e)
		for _, q := range oldPlan.Quotas {
			w.mustApply(MemberPrepared{"t", q.Broker})
		}
		w.mustApply(TopicActivated{"t"})

		is := *before
		is.Demand.Publishers, is.Since, is.Demand.Groups = slices.Clone(before.Demand.Publishers), slices.Clone(before.Since), slices.Clone(before.Demand.Groups)
		places := make([]int, 0, before.Demand.Count())
		for i := range before.Demand.Count() {
			places = append(places, i%4-1)
		}
		for n := range rapid.IntRange(0, 8).Draw(rt, "edits") {
			at := rapid.IntRange(0, len(is.Demand.Publishers)).Draw(rt, "at")
			switch rapid.IntRange(0, 2).Draw(rt, "edit") {
			case 0:
				is.Demand.Publishers = slices.Insert(is.Demand.Publishers, at, publisher(10_000+n))
				places = slices.Insert(places, at, 0)
				if len(is.Since) > 0 {
					is.Since = slices.Insert(is.Since, at, 7)
				} else if since {
					is.Since = append(is.Since, 7)
				}
			case 1:
				if at < len(is.Demand.Publishers) {
					is.Demand.Publishers, places = slices.Delete(is.Demand.Publishers, at, at+1), slices.Delete(places, at, at+1)
					if since {
						is.Since = slices.Delete(is.Since, at, at+1)
					}
				}
			case 2:
				if at < len(is.Demand.Publishers) {
					is.Demand.Publishers[at].Rate = 0.002
				}
			}
		}
		if len(is.Demand.Publishers) == 0 {
			is.Demand.Publishers, is.Since = nil, nil
		}
		if more := rapid.IntRange(-3, 3).Draw(rt, "grown"); more > 0 {
			is.Demand.Groups[1].Count += more
			places = append(places, make([]int, more)...)
		} else {
			is.Demand.Groups[1].Count += more
			places = places[:len(places)+more]
		}
		for range rapid.IntRange(0, 8).Draw(rt, "moves") {
			places[rapid.IntRange(0, len(places)-1).Draw(rt, "who")] = rapid.IntRange(-1, 2).Draw(rt, "to")
		}
		to := rapid.SampledFrom([][]string{{"b0", "b1", "b2"}, {"b0", "b1", "b2", "b3"}, {"b2", "b0", "b1"}}).Draw(rt, "brokers")
		after := place(&is, func(i int) int {
			if places[i] < 0 {
				return -1
			}
			return slices.Index(to, brokers[places[i]])
		}, to...)

		topic, _ := w.Topic("t")
		moving := testkit.Result(NewTopicChanging(topic, &is, after)).Must(rt)
		change := moving.Change()
		if change == nil {
			rt.Fatal("it is kept whole")
		}
		if named := len(change.Removed) + len(change.Added) + len(change.Publishers); named > 30 {
			rt.Errorf("it names %d", named)
		}
		other := testkit.Result(Load(w.Dump())).Must(rt)
		if w.Based(moving).Change() == nil || other.Based(moving).Change() == nil {
			rt.Fatal("it is of this very topic")
		}
		w.mustApply(moving)
		testkit.Result(other.Apply(*change)).Must(rt)
		if a, b := w.Dump(), other.Dump(); !reflect.DeepEqual(a, b) {
			rt.Fatalf("the change gives\n%+v\nthe move\n%+v", b.Topics[0].Next, a.Topics[0].Next)
		}
		if w.Based(moving).Change() == nil {
			rt.Error("the topic has not moved yet")
		}
		w.mustApply(TopicMoveAborted{Topic: "t"})
		again := testkit.Result(NewTopicMoving(topic.Spec.Keeping("fsync"), topic.Plan)).Must(rt)
		w.mustApply(again)
		for _, q := range again.Plan.Quotas {
			w.mustApply(MemberPrepared{"t", q.Broker})
		}
		w.mustApply(TopicMoved{"t"})
		if w.Based(moving).Change() != nil {
			rt.Error("the topic has changed since")
		}
	})
}

// A change that does not fit the topic is refused, and changes nothing.
func TestChangesThatAreRefused(t *testing.T) {
	w := newWorld(t)
	w.mustApply(joined("b", 1000))
	s := spec("t", 4, 10)
	w.active(s)
	head := *s
	head.Demand.Publishers = nil
	topic, _ := w.Topic("t")
	plan := topic.Plan
	plan.Quotas = slices.Clone(plan.Quotas)
	plan.Quotas[0].Publishers = nil
	many := len(s.Demand.Publishers)
	for name, change := range map[string]func(e *TopicChanging){
		"groups":       func(e *TopicChanging) { e.Spec.Demand.Groups = append(e.Spec.Demand.Groups, placement.Group{}) },
		"removed":      func(e *TopicChanging) { e.Removed = []int{many} },
		"descending":   func(e *TopicChanging) { e.Removed = []int{1, 0} },
		"negative":     func(e *TopicChanging) { e.Removed = []int{-1} },
		"added":        func(e *TopicChanging) { e.Added = []int{many + 1}; e.Publishers = make([]placement.Publisher, 1) },
		"missing":      func(e *TopicChanging) { e.Added = []int{0} },
		"empty":        func(e *TopicChanging) { e.Added = []int{0}; e.Publishers = make([]placement.Publisher, 1) },
		"since":        func(e *TopicChanging) { e.Since = []int64{1} },
		"placed":       func(e *TopicChanging) { e.Plan.Quotas[0].Publishers = []int{1 << 40} },
		"unplaced":     func(e *TopicChanging) { e.Plan.Unplaced = []int{s.Demand.Count()} },
		"no place":     func(e *TopicChanging) { e.Plan.Quotas = nil },
		"other topic":  func(e *TopicChanging) { e.Spec.Demand.Topic = "u" },
		"other broker": func(e *TopicChanging) { e.Plan.Quotas[0].Broker = "c" },
	} {
		h := head
		p := plan
		p.Quotas = slices.Clone(plan.Quotas)
		e := TopicChanging{Spec: &h, Plan: p}
		change(&e)
		before := fingerprint(w.Catalog)
		if _, err := w.Apply(e); err == nil {
			t.Errorf("%s: it is taken", name)
		}
		testkit.Equal(t, fingerprint(w.Catalog), before, "%s: it changed something", name)
	}
	_, err := w.Apply(TopicChanging{Spec: &head, Plan: plan})
	testkit.NoError(t, err)
}
