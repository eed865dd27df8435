package catalog

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// spec orders a topic of publishers that send 1 msg/s each. Half of the publishers are in a group, and
// r is a little above their total rate.
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

// world is a catalog under test. Its methods fail the test when the catalog refuses an event that must
// pass.
type world struct {
	t testing.TB
	*Catalog
}

func newWorld(t testing.TB) world { return world{t, New()} }

func (w world) mustApply(e Event) []Effect {
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
	p, err := placement.Place(s.Policy, w.Snapshot(""), s.Demand, rand.New(rand.NewPCG(1, 1)))
	if err != nil {
		w.t.Fatalf("place %s: %v", s.Name(), err)
	}
	e, err := NewTopicPlaced(s, p, "")
	if err != nil {
		w.t.Fatalf("place %s: %v", s.Name(), err)
	}
	return e
}

// active creates a topic and activates it.
func (w world) active(s *Spec) {
	w.t.Helper()
	e := w.plan(s)
	w.mustApply(e)
	for _, q := range e.Plan.Quotas {
		w.mustApply(MemberPrepared{s.Name(), q.Broker})
	}
	w.mustApply(TopicActivated{s.Name()})
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
		func(s *Spec) { s.Pacing = PacingPolice },
		func(s *Spec) { s.Demand.Groups[0].Weight = 2 },
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
	w.mustApply(joined("b1", 1000))
	for _, name := range []string{"d", "a", "c", "b"} {
		w.mustApply(w.plan(spec(name, 2, 10)))
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
	testkit.EqualSlices(t, names, []string{"a", "b", "c", "d"}, "pages list")
	if page := w.Topics("bb", 9); len(page) != 2 || page[0].Spec.Name() != "c" {
		t.Errorf("after a name that is not there: %+v", page)
	}
}

func TestBrokersThatAreGoneAreForgottenInTheEnd(t *testing.T) {
	w := newWorld(t)
	w.mustApply(joined("used", 100))
	w.mustApply(w.plan(spec("t", 2, 10)))
	w.mustApply(BrokerLeft{"used"})
	for i := range MaxGone + 5 {
		id := fmt.Sprint("b", i)
		testkit.Result(w.Apply(joined(id, 1))).Must(t)
		testkit.Result(w.Apply(BrokerLeft{id})).Must(t)
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

// All catalogs that replay one log must forget the same brokers.
func TestOfBrokersThatWentAtOnceTheFirstByIDIsForgotten(t *testing.T) {
	w := newWorld(t)
	for i := range MaxGone + 5 {
		testkit.Result(w.Apply(joined(fmt.Sprintf("b%04d", i), 1))).Must(t)
	}
	w.mustApply(Restarted{})
	w.mustApply(joined("last", 1))
	w.mustApply(BrokerLeft{"last"})
	w.check()
	applyAll := w.Brokers()
	if len(applyAll) != MaxGone || applyAll[0].ID != "b0006" || applyAll[MaxGone-1].ID != "last" {
		t.Errorf("%d are remembered, %s to %s", len(applyAll), applyAll[0].ID, applyAll[len(applyAll)-1].ID)
	}
}

// After any events in any order: the invariants hold after every event, a refused event changes
// nothing, epochs only grow, nothing is placed beyond an mcap, and a replay of the accepted events
// gives the same state.
func TestAnyHistoryKeepsTheInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := New()
		var accepted []Event
		epochs := map[string]uint64{}
		apply := func(e Event) error {
			version := c.version
			before, handedOut := fingerprint(c), c.Topics("", 100)
			members := fmt.Sprint(placements(handedOut))
			effects, err := c.Apply(e)
			c.check()
			if after := fmt.Sprint(placements(handedOut)); after != members {
				t.Fatalf("%+v changed what readers have: %s to %s", e, members, after)
			}
			if err != nil {
				if after := fingerprint(c); effects != nil || after != before {
					t.Fatalf("%+v was refused (%v) and changed\n%s\nto\n%s", e, err, before, after)
				}
				return err
			}
			testkit.MustEqual(t, c.version, version+1, "version after %d", version)
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
				_ = apply(e) // apply checks every refusal
			case 2:
				_ = apply(BrokerLeft{broker})
			case 3, 4:
				s := spec(name, rapid.IntRange(4, 8).Draw(t, "publishers"), rapid.Int64Range(8, 100).Draw(t, "rate"))
				p, err := placement.Place(s.Policy, c.Snapshot(""), s.Demand, nil)
				if err != nil {
					continue
				}
				e := testkit.Result(NewTopicPlaced(s, p, rapid.SampledFrom([]string{"", "k1", "k2"}).Draw(t, "key"))).Must(t)
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
				if b, _ := c.Broker(broker); !b.Forgotten {
					_ = apply(SharesUnconfirmed{
						Topic: name, Raising: rapid.Bool().Draw(t, "raising"), Vague: rapid.Bool().Draw(t, "vague"),
						Shares: []UnconfirmedShare{{broker, tokenbucket.Share{Rate: 1000, Burst: rapid.Int64Range(0, 2).Draw(t, "unconfirmed")}}},
					})
				}
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
				p, err := placement.Place(s.Policy, c.Snapshot(name), s.Demand, nil)
				if err != nil {
					continue
				}
				if q := &p.Quotas[0]; len(q.Publishers) > 1 && rapid.Bool().Draw(t, "one is left out") {
					p.Unplaced, q.Publishers = q.Publishers[:1:1], q.Publishers[1:]
				}
				e := testkit.Result(NewTopicMoving(s, p)).Must(t)
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
					_ = apply(MemberFound{name, broker})
				case 6:
					_ = apply(Restarted{})
				}
			case 9:
				before := c.Dump()
				switch rapid.IntRange(0, 4).Draw(t, "end") {
				case 4: // a topic is removed, and restored from an earlier dump
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
		reloaded := New()
		for _, e := range accepted {
			var err error
			switch from := e.(type) { // as read from a store
			case TopicPlaced:
				e, err = NewTopicPlaced(from.Spec, from.Plan, from.Key)
			case TopicMoving:
				e, err = NewTopicMoving(from.Spec, from.Plan)
			}
			testkit.Must(t, err)
			if _, err := reloaded.Apply(e); err != nil {
				t.Fatalf("replay: %+v: %v", e, err)
			}
		}
		if !reflect.DeepEqual(c, reloaded) {
			t.Fatalf("replayed:\n%s\noriginal:\n%s", fingerprint(reloaded), fingerprint(c))
		}
		loaded, err := Load(c.Dump())
		if len(c.names.pieces) == 0 {
			c.names.pieces = nil
		}
		if len(c.byID) == 0 {
			c.byID = nil
		}
		if err != nil || !reflect.DeepEqual(c, loaded) {
			t.Fatalf("loaded (%v):\n%s\noriginal:\n%s", err, fingerprint(loaded), fingerprint(c))
		}
	})
}

func placements(topics []Topic) (all []Placement) {
	for _, t := range topics {
		all = append(all, *t.Placement)
	}
	return all
}

// fingerprint prints everything in c that an event could change.
func fingerprint(c *Catalog) string {
	var b strings.Builder
	fmt.Fprintln(&b, c.version, c.ahead, c.names, c.keys, c.contracts)
	for name := range c.names.after("") {
		t := c.topics[name]
		fmt.Fprintln(&b, name, t.key, t.phase, t.plan, *t.placement, t.prepared, t.next, t.retiring, t.channels)
	}
	for _, broker := range c.Brokers() {
		x := c.brokers[broker.ID]
		fmt.Fprintln(&b, x.Broker, x.topics, x.retiring, x.leftovers, x.leftAt)
	}
	return b.String()
}

func TestLoadRefusesWhatCannotBe(t *testing.T) {
	w := newWorld(t)
	w.mustApply(joined("b1", 100))
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
		copied.mustApply(joined("b1", 100))
		copied.active(spec("t", 8, 60))
		d := copied.Dump()
		change(&d)
		if _, err := Load(d); err == nil {
			t.Errorf("%s was loaded", name)
		}
	}
}

// The shares of a contract that brokers may still use outlive the topic. They end when a new topic of
// the same name is active, or when the broker is known to hold nothing.
func TestUnconfirmedSharesOutliveTheirTopic(t *testing.T) {
	held := func(brokers ...string) (shares []UnconfirmedShare) {
		for _, id := range brokers {
			shares = append(shares, UnconfirmedShare{id, tokenbucket.Share{Rate: 300_000, Burst: 20}})
		}
		return shares
	}
	w := newWorld(t)
	applyAll := func(events ...Event) {
		for _, e := range events {
			w.mustApply(e)
		}
	}
	applyAll(joined("a", 100), joined("b", 100))
	applyAll(w.plan(spec("t", 4, 10)), SharesUnconfirmed{Topic: "t", Shares: held("a", "b")}, TopicDeleting{"t"}, TopicRemoved{Topic: "t"}, BrokerLeft{"a"}, BrokerLeft{"b"})
	testkit.Equal(t, fmt.Sprint(w.UnconfirmedTopics(), w.Unconfirmed("t")), fmt.Sprint([]string{"t"}, held("a", "b")), "the topic is deleted")
	reloaded := testkit.Result(Load(w.Dump())).Must(t)
	testkit.Equal(t, fmt.Sprint(reloaded.Unconfirmed("t")), fmt.Sprint(held("a", "b")), "after a restart")
	w.mustApply(BrokerNoted{ID: "a", Forgotten: true})
	testkit.Equal(t, fmt.Sprint(w.Unconfirmed("t")), fmt.Sprint(held("b")), "a holds nothing")
	w.mustApply(BrokerRemoved{"b"})
	testkit.Equal(t, len(w.UnconfirmedTopics()), 0, "and b was removed")

	applyAll(joined("a", 100), SharesUnconfirmed{Topic: "t", Shares: held("a")})
	applyAll(w.plan(spec("t", 4, 10)), MemberPrepared{"t", "a"})
	testkit.Equal(t, fmt.Sprint(w.Unconfirmed("t")), fmt.Sprint(held("a")), "a topic of the name is being created")
	w.mustApply(TopicActivated{"t"})
	testkit.Equal(t, len(w.UnconfirmedTopics()), 0, "it is active")
	applyAll(SharesUnconfirmed{Topic: "t", Shares: held("a")}, SharesUnconfirmed{Topic: "t"})
	testkit.Equal(t, len(w.UnconfirmedTopics()), 0, "all have confirmed")
	for _, invalid := range [][]UnconfirmedShare{held("b", "a"), held("a", "a"), held(""), {{"a", tokenbucket.Share{Rate: 1}}}} {
		if _, err := w.Apply(SharesUnconfirmed{Topic: "t", Shares: invalid}); err == nil {
			t.Errorf("accepted: %+v", invalid)
		}
	}
}
