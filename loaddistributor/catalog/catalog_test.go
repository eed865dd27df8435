package catalog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// spec orders a topic of publishers that send 1 msg/s each, half of them in a
// group, with r a little above what they send.
func spec(name string, publishers int, rate int64) *Spec {
	s := &Spec{
		Demand: placement.Demand{Topic: name, Rate: rate, RateMilli: rate * 1000, Burst: 100},
		SLO:    SLO{Quantile: 0.99, Latency: 10 * time.Millisecond},
		Policy: placement.SRTM, ShareRule: "static", Channels: []string{"c"},
	}
	for i := range publishers / 2 {
		s.Demand.Publishers = append(s.Demand.Publishers, placement.Publisher{ID: fmt.Sprintf("%s-%d", name, i), Rate: 1})
	}
	if rest := publishers - publishers/2; rest > 0 {
		s.Demand.Groups = []placement.Group{{Key: "g", Count: rest, Rate: 1}}
	}
	return s
}

func joined(id string, mcap int64) BrokerJoined {
	return BrokerJoined{ID: id, Instance: id + "-1", TCPAddress: id + ":4150", HTTPAddress: id + ":4151", Mcap: mcap}
}

// world is a catalog under test; its methods fail the test when an event that
// must pass is refused.
type world struct {
	t testing.TB
	*Catalog
}

func newWorld(t testing.TB) world { return world{t, New()} }

func (w world) must(e Event) []Effect {
	w.t.Helper()
	effects, err := w.Apply(e)
	if err != nil {
		w.t.Fatalf("%+v: %v", e, err)
	}
	w.check()
	return effects
}

func (w world) plan(s *Spec) TopicPlaced {
	w.t.Helper()
	p, err := placement.Place(s.Policy, w.Snapshot(), s.Demand, rand.New(rand.NewPCG(1, 1)))
	if err != nil {
		w.t.Fatalf("place %s: %v", s.Name(), err)
	}
	e, err := NewTopicPlaced(s, p, "")
	if err != nil {
		w.t.Fatalf("place %s: %v", s.Name(), err)
	}
	return e
}

// active creates a topic and makes it active.
func (w world) active(s *Spec) {
	w.t.Helper()
	e := w.plan(s)
	w.must(e)
	for _, q := range e.Plan.Quotas {
		w.must(MemberPrepared{s.Name(), q.Broker})
	}
	w.must(TopicActivated{s.Name()})
}

func (w world) state(name string) (State, string) {
	topic, _ := w.Topic(name)
	return topic.State, topic.Reason
}

func TestALifeOfATopic(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 60))
	w.must(joined("b2", 60))
	s := spec("t", 80, 100)
	e := w.plan(s)

	got := w.must(e)
	want := []Effect{PlacementChanged{"t"}, StateChanged{"t", Absent, Preparing, ""}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("placing: effects %+v, want %+v", got, want)
	}
	if _, err := w.Resolve("t", "t-0"); !errors.Is(err, ErrNotActive) {
		t.Errorf("resolve while preparing: %v", err)
	}
	if _, err := w.Apply(TopicActivated{"t"}); !errors.As(err, new(*NotReadyError)) {
		t.Errorf("activate without prepared members: %v", err)
	}
	w.must(MemberPrepared{"t", "b1"})
	w.must(MemberPrepared{"t", "b2"})
	got = w.must(TopicActivated{"t"})
	if want := []Effect{StateChanged{"t", Preparing, Active, ""}}; !reflect.DeepEqual(got, want) {
		t.Errorf("activating: effects %+v, want %+v", got, want)
	}
	perBroker := map[string]int{}
	for _, p := range s.Demand.Expand() {
		a, err := w.Resolve("t", p.ID)
		if err != nil {
			t.Fatal(err)
		}
		if a.Publisher != p.ID || a.TCPAddress != a.Broker+":4150" || a.HTTPAddress != a.Broker+":4151" || a.Epoch == 0 {
			t.Fatalf("assignment %+v of %s", a, p.ID)
		}
		perBroker[a.Broker]++
	}
	if perBroker["b1"] != 40 || perBroker["b2"] != 40 {
		t.Errorf("publishers per broker: %v, want 40 and 40", perBroker)
	}
	for _, b := range w.Brokers() {
		if b.Allocated != 50 {
			t.Errorf("%s has %d msg/s allocated, want 50", b.ID, b.Allocated)
		}
	}

	got = w.must(TopicDeleting{"t"})
	if want := []Effect{StateChanged{"t", Active, Deleting, ""}}; !reflect.DeepEqual(got, want) {
		t.Errorf("deleting: effects %+v, want %+v", got, want)
	}
	if _, err := w.Resolve("t", "t-0"); !errors.Is(err, ErrNotActive) {
		t.Errorf("resolve while deleting: %v", err)
	}
	got = w.must(TopicRemoved{Topic: "t"})
	if want := []Effect{PlacementChanged{"t"}, StateChanged{"t", Deleting, Absent, ""}}; !reflect.DeepEqual(got, want) {
		t.Errorf("removing: effects %+v, want %+v", got, want)
	}
	for _, b := range w.Brokers() {
		if b.Allocated != 0 {
			t.Errorf("%s keeps %d msg/s", b.ID, b.Allocated)
		}
	}
}

func TestABrokerGoesAndComesBack(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 60))
	w.must(joined("b2", 60))
	w.active(spec("t", 10, 100))
	before, _ := w.Topic("t")

	got := w.must(BrokerLeft{"b1"})
	if want := []Effect{StateChanged{"t", Active, Degraded, "broker b1 is gone"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("leaving: effects %+v, want %+v", got, want)
	}
	if _, err := w.Resolve("t", "t-0"); err != nil {
		t.Errorf("a degraded topic does not resolve: %v", err)
	}
	if b, _ := w.Broker("b1"); b.Connected || b.Allocated != 50 {
		t.Errorf("the broker that left: %+v, want its promise kept", b)
	}
	if _, prepare := w.Work("b1"); prepare != nil {
		t.Errorf("work %v for a broker that is away", prepare)
	}

	got = w.must(joined("b1", 60))
	want := []Effect{StateChanged{"t", Degraded, Degraded, "broker b1 has not prepared the topic"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("coming back: effects %+v, want %+v", got, want)
	}
	if _, prepare := w.Work("b1"); !slices.Equal(prepare, []string{"t"}) {
		t.Errorf("work of the broker that came back: %v, want t", prepare)
	}
	if after, _ := w.Topic("t"); after.Placement != before.Placement {
		t.Error("the placement changed although the broker has its old addresses")
	}
	w.must(MemberPrepared{"t", "b1"})
	if s, reason := w.state("t"); s != Active || reason != "" {
		t.Errorf("the topic is %v (%s), want active", s, reason)
	}

	moved := joined("b1", 60)
	moved.TCPAddress = "elsewhere:4150"
	got = w.must(moved) // a new session, the old one not even ended
	if want := []Effect{
		PlacementChanged{"t"}, StateChanged{"t", Active, Degraded, "broker b1 has not prepared the topic"},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("moving: effects %+v, want %+v", got, want)
	}
	after, _ := w.Topic("t")
	if after.Placement.Epoch() <= before.Placement.Epoch() {
		t.Errorf("epoch %d after %d", after.Placement.Epoch(), before.Placement.Epoch())
	}
	for i := range before.Placement.Len() {
		old, now := before.Placement.At(i), after.Placement.At(i)
		if old.Publisher != now.Publisher || old.Broker != now.Broker {
			t.Fatalf("%+v became %+v", old, now)
		}
		if old.TCPAddress == "elsewhere:4150" {
			t.Fatal("a placement that was handed out has changed")
		}
	}
}

func TestAReasonNamesAllThatIsWrong(t *testing.T) {
	w := newWorld(t)
	for _, id := range []string{"b1", "b2", "b3"} {
		w.must(joined(id, 40))
	}
	w.active(spec("t", 12, 110))
	w.must(BrokerLeft{"b1"})
	w.must(joined("b2", 10))
	w.must(MemberPrepared{"t", "b2"})
	s, reason := w.state("t")
	want := "broker b1 is gone; broker b2 carries 10 msg/s, less than the 37 promised"
	if s != Degraded || reason != want {
		t.Errorf("the topic is %v: %q\nwant degraded: %q", s, reason, want)
	}
	for _, b := range w.Snapshot() {
		if b.ID == "b1" {
			t.Error("a broker that is away is offered to the placement")
		}
	}
	// As journals of before 0.2.0 have it.
	if got := w.must(SLOJudged{"t", "late"}); got != nil {
		t.Errorf("effects %+v of a verdict, want none", got)
	}
}

func TestLeftovers(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 60))
	w.must(joined("b2", 60))
	w.active(spec("t", 10, 100))
	w.must(BrokerLeft{"b2"})
	w.must(TopicRemoved{Topic: "t", Left: []string{"b2"}, ContractLeft: true})

	if remove, _ := w.Work("b1"); remove != nil {
		t.Errorf("b1 is to remove %v, want nothing", remove)
	}
	w.must(joined("b2", 60))
	if remove, _ := w.Work("b2"); !slices.Equal(remove, []string{"t"}) {
		t.Errorf("b2 is to remove %v, want t", remove)
	}
	if got := w.LeftoverContracts(); !slices.Equal(got, []string{"t"}) {
		t.Errorf("contracts left: %v, want t", got)
	}

	// Created again: what is new there must not be removed for what was old.
	w.active(spec("t", 10, 100))
	if remove, _ := w.Work("b2"); remove != nil {
		t.Errorf("b2 is to remove %v, which has been created again", remove)
	}
	if got := w.LeftoverContracts(); len(got) != 0 {
		t.Errorf("contracts left: %v, want none: the new one took its place", got)
	}
	w.must(TopicRemoved{Topic: "t"})
	if remove, _ := w.Work("b2"); remove != nil {
		t.Errorf("b2 is to remove %v, which it has been seen to remove", remove)
	}

	w.active(spec("t", 10, 100))
	w.must(TopicRemoved{Topic: "t", Left: []string{"b1"}, ContractLeft: true})
	w.must(LeftoverRemoved{"t", "b1"})
	w.must(LeftoverContractRemoved{"t"})
	if remove, _ := w.Work("b1"); remove != nil || len(w.LeftoverContracts()) != 0 {
		t.Errorf("still left: %v, %v", remove, w.LeftoverContracts())
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.must(joined("b2", 100))
	first := w.plan(spec("t", 4, 90))
	first.Key = "key"
	w.must(first)

	fresh := func(change func(*TopicPlaced)) TopicPlaced {
		e, err := NewTopicPlaced(spec("other", 4, 10), placement.Plan{Quotas: []placement.Quota{
			{Broker: "b1", Rate: 5, Publishers: []int{0, 1}}, {Broker: "b2", Rate: 5, Publishers: []int{2, 3}},
		}}, "")
		if err != nil {
			t.Fatal(err)
		}
		e.Plan.Quotas = slices.Clone(e.Plan.Quotas)
		change(&e)
		return e
	}
	w.must(joined("b3", 5))
	w.must(BrokerLeft{"b3"})
	for _, test := range []struct {
		name  string
		event Event
		want  error  // errors.Is, if set
		text  string // else part of the text
	}{
		{"a broker without a name", BrokerJoined{Mcap: 1}, nil, "want a name"},
		{"a broker without capacity", BrokerJoined{ID: "b9"}, nil, "positive mcap"},
		{"an unknown broker leaves", BrokerLeft{"b9"}, ErrBrokerUnknown, ""},
		{"a broker that is away leaves", BrokerLeft{"b3"}, ErrBrokerUnknown, ""},
		{"the topic exists", first, ErrTopicExists, ""},
		{"the key is taken", fresh(func(e *TopicPlaced) { e.Key = "key" }), ErrKeyReused, ""},
		{"a plan on an unknown broker", fresh(func(e *TopicPlaced) { e.Plan.Quotas[0].Broker = "b9" }), nil, "not connected"},
		{"a plan on a broker that is away", fresh(func(e *TopicPlaced) { e.Plan.Quotas[0].Broker = "b3" }), nil, "not connected"},
		{"two quotas for a broker", fresh(func(e *TopicPlaced) { e.Plan.Quotas[0].Broker = "b2" }), nil, "two quotas"},
		{"a negative quota", fresh(func(e *TopicPlaced) { e.Plan.Quotas[0].Rate = -1 }), nil, "quota of -1"},
		{"more than is left", fresh(func(e *TopicPlaced) { e.Plan.Quotas[0].Rate = 101 }), nil, "with mcap 100"},
		{"prepared: no such topic", MemberPrepared{"x", "b1"}, ErrTopicUnknown, ""},
		{"prepared: no member", MemberPrepared{"t", "b3"}, ErrBrokerUnknown, ""},
		{"activate: no such topic", TopicActivated{"x"}, ErrTopicUnknown, ""},
		{"judge: no such topic", SLOJudged{"x", ""}, ErrTopicUnknown, ""},
		{"delete: no such topic", TopicDeleting{"x"}, ErrTopicUnknown, ""},
		{"remove: no such topic", TopicRemoved{Topic: "x"}, ErrTopicUnknown, ""},
		{"left on a broker that is no member", TopicRemoved{Topic: "t", Left: []string{"b3"}}, ErrBrokerUnknown, ""},
		{"leftover of an unknown broker", LeftoverRemoved{"t", "b9"}, ErrBrokerUnknown, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			version := w.Version()
			effects, err := w.Apply(test.event)
			w.check()
			switch {
			case err == nil:
				t.Fatal("accepted")
			case test.want != nil && !errors.Is(err, test.want):
				t.Errorf("got %v, want %v", err, test.want)
			case !strings.Contains(err.Error(), test.text):
				t.Errorf("got %v, want it to say %q", err, test.text)
			}
			if effects != nil || w.Version() != version {
				t.Errorf("effects %v, version %d after %d", effects, w.Version(), version)
			}
		})
	}
	w.must(MemberPrepared{"t", first.Plan.Quotas[0].Broker})
	w.must(TopicActivated{"t"})
	if _, err := w.Apply(TopicActivated{"t"}); !errors.Is(err, ErrTopicState) {
		t.Errorf("activated twice: %v", err)
	}
	w.must(TopicDeleting{"t"})
	if _, err := w.Apply(TopicDeleting{"t"}); !errors.Is(err, ErrTopicState) {
		t.Errorf("deleted twice: %v", err)
	}
}

func TestNewTopicPlacedRefusesWhatIsNoPartition(t *testing.T) {
	s := spec("t", 4, 10)
	plan := func(quotas ...[]int) placement.Plan {
		var p placement.Plan
		for i, publishers := range quotas {
			p.Quotas = append(p.Quotas, placement.Quota{Broker: fmt.Sprint("b", i), Rate: 1, Publishers: publishers})
		}
		return p
	}
	for _, test := range []struct {
		name string
		plan placement.Plan
		want string
	}{
		{"no broker", plan(), "uses no broker"},
		{"one missing", plan([]int{0, 1}, []int{3}), "3 of 4 publishers are placed"},
		{"one twice", plan([]int{0, 1}, []int{1, 2, 3}), "placed twice"},
		{"one too many", plan([]int{0, 1}, []int{2, 3, 4}), "publisher 4 of 4"},
		{"a negative one", plan([]int{0, 1}, []int{2, 3, -1}), "publisher -1 of 4"},
	} {
		_, err := NewTopicPlaced(s, test.plan, "")
		if plan := new(PlanError); !errors.As(err, &plan) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", test.name, err, test.want)
		}
	}
	twice := spec("t", 4, 10)
	twice.Demand.Publishers[0].ID = "g.0"
	if _, err := NewTopicPlaced(twice, plan([]int{0, 1}, []int{2, 3}), ""); err == nil || !strings.Contains(err.Error(), "appears twice") {
		t.Errorf("a repeated publisher: %v", err)
	}
}

func TestSpecEqual(t *testing.T) {
	base := func() *Spec { return spec("t", 4, 10) }
	if !base().Equal(base()) {
		t.Error("a specification differs from itself")
	}
	empty := base()
	empty.Channels, empty.Demand.Groups = nil, nil
	other := base()
	other.Channels, other.Demand.Groups = []string{}, []placement.Group{}
	if !empty.Equal(other) {
		t.Error("nil and empty lists differ")
	}
	for i, change := range []func(*Spec){
		func(s *Spec) { s.Demand.Topic = "u" },
		func(s *Spec) { s.Demand.Rate++ },
		func(s *Spec) { s.Demand.RateMilli++ },
		func(s *Spec) { s.Demand.Burst++ },
		func(s *Spec) { s.Demand.Publishers[1].Key = "k" },
		func(s *Spec) { s.Demand.Groups[0].Count++ },
		func(s *Spec) { s.SLO.Latency++ },
		func(s *Spec) { s.OverLimit = Reject },
		func(s *Spec) { s.Policy = placement.Conc },
		func(s *Spec) { s.ShareRule = "proportional" },
		func(s *Spec) { s.Channels = append(s.Channels, "d") },
	} {
		s := base()
		change(s)
		if s.Equal(base()) {
			t.Errorf("change %d makes no difference", i)
		}
	}
}

func TestTopicsArePagedByName(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 1000))
	for _, name := range []string{"d", "a", "c", "b"} {
		w.must(w.plan(spec(name, 2, 10)))
	}
	var names []string
	for after := ""; ; {
		page := w.Topics(after, 3)
		for _, topic := range page {
			names = append(names, topic.Spec.Name())
		}
		if len(page) < 3 {
			break
		}
		after = page[2].Spec.Name()
	}
	if want := []string{"a", "b", "c", "d"}; !slices.Equal(names, want) {
		t.Errorf("pages list %v, want %v", names, want)
	}
	if page := w.Topics("bb", 9); len(page) != 2 || page[0].Spec.Name() != "c" {
		t.Errorf("after a name that is not there: %+v", page)
	}
}

func TestBrokersThatAreGoneAreForgottenInTheEnd(t *testing.T) {
	w := newWorld(t)
	w.must(joined("used", 100))
	w.must(w.plan(spec("t", 2, 10)))
	w.must(BrokerLeft{"used"})
	for i := range MaxGone + 5 {
		id := fmt.Sprint("b", i)
		if _, err := w.Apply(joined(id, 1)); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Apply(BrokerLeft{id}); err != nil {
			t.Fatal(err)
		}
	}
	w.check()
	if got := len(w.Brokers()); got != MaxGone+1 {
		t.Errorf("%d brokers are remembered, want %d and the one that is used", got, MaxGone)
	}
	if _, ok := w.Broker("used"); !ok {
		t.Error("a broker with a topic was forgotten")
	}
	if _, ok := w.Broker("b4"); ok {
		t.Error("the one that left first is remembered")
	}
	if _, ok := w.Broker("b5"); !ok {
		t.Error("the one that left sixth was forgotten")
	}
}

// Whatever happens in whatever order: the invariants hold after every event, a
// refused event changes nothing, epochs only grow, nothing was placed beyond
// an mcap, and replaying what was accepted gives the same state.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := New()
		var accepted []Event
		epochs := map[string]uint64{}
		apply := func(e Event) error {
			version := c.version
			before := fingerprint(c)
			effects, err := c.Apply(e)
			c.check()
			if err != nil {
				if after := fingerprint(c); effects != nil || after != before {
					t.Fatalf("%+v was refused (%v) and changed\n%s\nto\n%s", e, err, before, after)
				}
				return err
			}
			if c.version != version+1 {
				t.Fatalf("version %d after %d", c.version, version)
			}
			accepted = append(accepted, e)
			for _, topic := range c.Topics("", 100) {
				name, epoch := topic.Spec.Name(), topic.Placement.Epoch()
				if epoch < epochs[name] {
					t.Fatalf("epoch of %s fell from %d to %d", name, epochs[name], epoch)
				}
				epochs[name] = epoch
			}
			return nil
		}
		brokers := rapid.SampledFrom([]string{"b1", "b2", "b3", "b4"})
		names := rapid.SampledFrom([]string{"t1", "t2", "t3"})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			broker, name := brokers.Draw(t, "broker"), names.Draw(t, "topic")
			switch rapid.IntRange(0, 14).Draw(t, "kind") {
			case 0, 1:
				e := joined(broker, rapid.Int64Range(1, 80).Draw(t, "mcap"))
				e.TCPAddress = rapid.SampledFrom([]string{"x:1", "y:1"}).Draw(t, "address")
				_ = apply(e) // any refusal is checked in apply
			case 2:
				_ = apply(BrokerLeft{broker})
			case 3, 4:
				s := spec(name, rapid.IntRange(4, 8).Draw(t, "publishers"), rapid.Int64Range(8, 100).Draw(t, "rate"))
				p, err := placement.Place(s.Policy, c.Snapshot(), s.Demand, nil)
				if err != nil {
					continue
				}
				e, err := NewTopicPlaced(s, p, rapid.SampledFrom([]string{"", "k1", "k2"}).Draw(t, "key"))
				if err != nil {
					t.Fatal(err)
				}
				if rapid.Bool().Draw(t, "the brokers change meanwhile") {
					_ = apply(BrokerLeft{broker})
				}
				if apply(e) == nil {
					for _, q := range p.Quotas {
						if b, _ := c.Broker(q.Broker); b.Allocated > b.Mcap {
							t.Fatalf("%s was given %d, its mcap is %d", b.ID, b.Allocated, b.Mcap)
						}
					}
				}
			case 14:
				_ = apply(BrokerNoted{broker, rapid.Bool().Draw(t, "forgotten"), rapid.Bool().Draw(t, "strict")})
				if apply(BrokerRemoved{broker}) == nil && !c.Removed(broker) {
					t.Fatalf("%s was removed", broker)
				}
			case 13:
				_ = apply(BrokerCalibrated{broker, rapid.Int64Range(-1, 120).Draw(t, "calibrated")})
				_ = apply(BrokerAbsorbed{broker, Absorption{time.Second, 1, rapid.Int64Range(0, 9).Draw(t, "absorbed")}})
			case 5, 6:
				_ = apply(MemberPrepared{name, broker})
			case 7:
				_ = apply(TopicActivated{name})
			case 8:
				_ = apply(SLOJudged{name, rapid.SampledFrom([]string{"", "late"}).Draw(t, "missed")})
			case 10, 11:
				s := spec(name, rapid.IntRange(4, 8).Draw(t, "publishers"), rapid.Int64Range(8, 100).Draw(t, "rate"))
				p, err := placement.Place(s.Policy, c.SnapshotFor(name), s.Demand, nil)
				if err != nil {
					continue
				}
				if q := &p.Quotas[0]; len(q.Publishers) > 1 && rapid.Bool().Draw(t, "one is left out") {
					p.Unplaced, q.Publishers = q.Publishers[:1:1], q.Publishers[1:]
				}
				e, err := NewTopicMoving(s, p)
				if err != nil {
					t.Fatal(err)
				}
				if apply(e) != nil {
					continue
				}
				for _, q := range p.Quotas {
					if rapid.IntRange(0, 5).Draw(t, "prepared") > 0 {
						_ = apply(MemberPrepared{name, q.Broker})
					}
				}
				fallthrough
			case 12:
				switch rapid.IntRange(0, 6).Draw(t, "move") {
				case 0, 1, 2:
					_ = apply(TopicMoved{name})
				case 3:
					_ = apply(TopicMoveAborted{name, []string{broker}})
				case 4:
					_ = apply(BrokerDraining{broker, rapid.Bool().Draw(t, "draining"), rapid.Bool().Draw(t, "forced")})
				case 5:
					_ = apply(MemberRetired{name, broker})
				case 6:
					_ = apply(Restarted{})
				}
			case 9:
				before := c.Dump()
				switch rapid.IntRange(0, 4).Draw(t, "end") {
				case 4: // removed, and back from a dump of before
					_ = apply(TopicRemoved{Topic: name, Left: []string{broker}})
					for _, one := range before.Brokers {
						if one.Broker.ID == broker {
							_ = apply(BrokerRestored{one})
						}
					}
					for _, one := range before.Topics {
						if one.Spec.Name() == name && apply(TopicRestored{one}) == nil {
							if now, _ := c.Topic(name); now.Placement.Epoch() <= one.Epoch || now.Created != c.version || now.Next != nil {
								t.Fatalf("%+v was restored as %+v", one, now)
							}
						}
					}
				case 0:
					_ = apply(TopicDeleting{name})
				case 1:
					_ = apply(TopicRemoved{Topic: name, Left: []string{broker}, ContractLeft: true})
				case 2:
					_ = apply(LeftoverRemoved{name, broker})
				case 3:
					_ = apply(LeftoverContractRemoved{name})
				}
			}
		}
		again := New()
		for _, e := range accepted {
			switch from := e.(type) { // as read from a store
			case TopicPlaced:
				from.spread = nil
				e = from
			case TopicMoving:
				from.spread = nil
				e = from
			}
			if _, err := again.Apply(e); err != nil {
				t.Fatalf("replay: %+v: %v", e, err)
			}
		}
		if !reflect.DeepEqual(c, again) {
			t.Fatalf("replayed:\n%s\noriginal:\n%s", fingerprint(again), fingerprint(c))
		}
		loaded, err := Load(c.Dump())
		if len(c.names) == 0 {
			c.names = nil
		}
		if err != nil || !reflect.DeepEqual(c, loaded) {
			t.Fatalf("loaded (%v):\n%s\noriginal:\n%s", err, fingerprint(loaded), fingerprint(c))
		}
	})
}

// fingerprint shows all of c that an event could change.
func fingerprint(c *Catalog) string {
	var b strings.Builder
	fmt.Fprintln(&b, c.version, c.ahead, c.names, c.keys, c.contracts)
	for _, name := range c.names {
		t := c.topics[name]
		fmt.Fprintln(&b, name, t.key, t.phase, t.plan, *t.placement, t.prepared, t.next, t.retiring)
	}
	for _, broker := range c.Brokers() {
		x := c.brokers[broker.ID]
		fmt.Fprintln(&b, x.Broker, x.topics, x.retiring, x.leftovers, x.leftAt)
	}
	return b.String()
}

// What was calibrated stands over what the broker says, until it is taken back,
// and a topic that was promised more is degraded meanwhile.
func TestACalibratedBroker(t *testing.T) {
	w := newWorld(t)
	w.must(joined("b1", 100))
	w.active(spec("t", 8, 60))
	mcap := func(want, configured, calibrated int64) {
		t.Helper()
		if b, _ := w.Broker("b1"); b.Mcap != want || b.Configured != configured || b.Calibrated != calibrated {
			t.Errorf("%+v, want %d of %d and %d", b, want, configured, calibrated)
		}
		if s := w.Snapshot(); len(s) == 1 && s[0].Mcap != want {
			t.Errorf("placed by %d, want %d", s[0].Mcap, want)
		}
	}
	w.must(BrokerCalibrated{"b1", 50})
	mcap(50, 100, 50)
	if state, reason := w.state("t"); state != Degraded || !strings.Contains(reason, "carries 50 msg/s, less than the 60 promised") {
		t.Errorf("%v: %s", state, reason)
	}
	w.must(BrokerLeft{"b1"})
	w.must(joined("b1", 200))
	mcap(50, 200, 50)
	loaded, err := Load(w.Dump())
	if err != nil {
		t.Fatal(err)
	}
	w = world{t, loaded}
	mcap(50, 200, 50)
	w.must(BrokerCalibrated{ID: "b1"})
	mcap(200, 200, 0)
	w.must(MemberPrepared{"t", "b1"})
	if state, reason := w.state("t"); state != Active {
		t.Errorf("%v: %s", state, reason)
	}
	if _, err := w.Apply(BrokerCalibrated{"nobody", 5}); !errors.Is(err, ErrBrokerUnknown) {
		t.Errorf("an unknown broker: %v", err)
	}
	if _, err := w.Apply(BrokerCalibrated{"b1", -1}); err == nil {
		t.Error("a negative capacity")
	}
}

// What was learned of a broker stands until it is another one.
func TestWhatABrokerAbsorbs(t *testing.T) {
	w := newWorld(t)
	some := Absorption{Latency: 5 * time.Millisecond, Rate: 2000, Burst: 40}
	learned := func(want Absorption) {
		t.Helper()
		if b, _ := w.Broker("b1"); b.Absorbed != want {
			t.Errorf("%+v, want %+v", b.Absorbed, want)
		}
	}
	first := joined("b1", 100)
	w.must(first)
	w.must(BrokerAbsorbed{"b1", some})
	learned(some)
	again := first
	again.Instance, again.TCPAddress = "another", "moved:4150"
	w.must(BrokerLeft{"b1"})
	w.must(again)
	learned(some)
	for _, change := range []func(*BrokerJoined){
		func(e *BrokerJoined) { e.Hostname += "x" },
		func(e *BrokerJoined) { e.Version += "x" },
		func(e *BrokerJoined) { e.Mcap++ },
	} {
		w.must(first)
		w.must(BrokerAbsorbed{"b1", some})
		other := first
		change(&other)
		w.must(other)
		learned(Absorption{})
	}
	w.must(first)
	w.must(BrokerAbsorbed{"b1", some})
	w.must(BrokerCalibrated{"b1", 100}) // as it was
	learned(some)
	w.must(BrokerCalibrated{"b1", 101})
	learned(Absorption{})
	for _, bad := range []BrokerAbsorbed{{"nobody", some}, {"b1", Absorption{}}, {"b1", Absorption{1, 1, -1}}, {"b1", Absorption{-1, 1, 1}}, {"b1", Absorption{1, 0, 1}}} {
		if _, err := w.Apply(bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}
