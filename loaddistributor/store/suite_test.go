package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// etcdStore returns a store whose leader keeps its lease on a busy machine.
func etcdStore(t *testing.T, address, prefix string) *Etcd {
	t.Helper()
	return leasedStore(t, address, prefix, time.Minute)
}

func leasedStore(t *testing.T, address, prefix string, lease time.Duration) *Etcd {
	t.Helper()
	s, err := NewEtcd(t.Context(), EtcdConfig{
		Client: clientv3.Config{Endpoints: []string{address}, DialTimeout: testkit.Hang, Logger: zap.NewNop()},
		Prefix: prefix, Lease: lease,
	})
	testkit.Must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// stores are the implementations under test. open returns a function, and each call of the function
// returns a Store on the same data.
func stores(t *testing.T) map[string]func(*testing.T) func() Store {
	safe := newSafe(t)
	address := etcdtest.Start(t, etcdtest.Config{}).URL
	return map[string]func(*testing.T) func() Store{
		"memory": func(*testing.T) func() Store {
			m := &Memory{}
			return func() Store { return m }
		},
		"bolt": func(t *testing.T) func() Store {
			dir := t.TempDir()
			t.Cleanup(func() { testkit.Private(t, dir) })
			return func() Store {
				return testkit.Result(NewBolt(filepath.Join(dir, "new", "folder"), slog.New(slog.DiscardHandler))).Must(t)
			}
		},
		"etcd": func(t *testing.T) func() Store {
			prefix := "/" + strings.ReplaceAll(t.Name(), "/", "-") + "/"
			return func() Store { return etcdStore(t, address, prefix) }
		},
		"etcd with certificates and a password": func(t *testing.T) func() Store {
			cfg := safe.config()
			cfg.Prefix += strings.ReplaceAll(t.Name(), "/", "-") + "/"
			return func() Store { return safe.store(t, cfg) }
		},
	}
}

func TestStores(t *testing.T) {
	open := stores(t)
	for name, property := range map[string]func(*testing.T, func() Store){
		"ChangesAreRead":                   changesAreRead,
		"WhatWasAppendedIsThereAfterwards": whatWasAppendedIsThereAfterwards,
		"ADumpOfThePast":                   aDumpOfThePast,
		"EventsThatDoNotContinueTheLog":    eventsThatDoNotContinueTheLog,
		"ATermThatIsOver":                  aTermThatIsOver,
		"ALargeTopic":                      aLargeTopic,
		"ManyEventsAtOnce":                 manyEventsAtOnce,
		"EachTermHasAGreaterNumber":        eachTermHasAGreaterNumber,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // most of the time it waits for etcd
			for name, open := range open {
				t.Run(name, func(t *testing.T) { property(t, open(t)) })
			}
		})
	}
}

// leader is a term and its catalog.
type leader struct {
	t    testing.TB
	term Term
	cat  *catalog.Catalog
}

func lead(t testing.TB, s Store) *leader {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	term, cat, err := s.Lead(ctx, "me:1")
	testkit.Must(t, err)
	t.Cleanup(func() { _ = term.Resign(context.Background()) })
	return &leader{t, term, cat}
}

// append applies and appends events that must pass.
func (l *leader) append(events ...catalog.Event) {
	l.t.Helper()
	base := l.cat.Version()
	for _, e := range events {
		if _, err := l.cat.Apply(e); err != nil {
			l.t.Fatalf("%+v: %v", e, err)
		}
	}
	testkit.Must(l.t, l.term.Append(l.t.Context(), base, events))
}

func (l *leader) resign() {
	l.t.Helper()
	testkit.Must(l.t, l.term.Resign(context.Background()))
}

func joined(id string) catalog.BrokerJoined {
	return catalog.BrokerJoined{
		ID: id, Instance: id + "-1", TCPAddress: id + ":4150", HTTPAddress: id + ":4151", MQTTAddress: id + ":1883", MQTTSAddress: id + ":8883", Hostname: "h", Version: "1", Mcap: 1_000_000,
	}
}

// plannedFor returns a spec with the given numbers of publishers, and a plan for it.
func plannedFor(t testing.TB, cat *catalog.Catalog, name string, single, grouped int, rate int64) (*catalog.Spec, placement.Plan) {
	t.Helper()
	s := &catalog.Spec{
		Demand: placement.Demand{Topic: name, Rate: rate, RateMilli: rate*1000 - 1, Burst: 100},
		SLO:    catalog.SLO{Quantile: 0.999, Latency: 7 * time.Millisecond}, OverLimit: catalog.Reject,
		Policy: placement.SRTM, ShareRule: "static", Channels: []string{"c", "d"},
	}
	for i := range single {
		s.Demand.Publishers = append(s.Demand.Publishers, placement.Publisher{ID: fmt.Sprintf("%s-%d", name, i), Rate: 0.1, Batch: i % 3})
	}
	if grouped > 0 {
		s.Demand.Groups = []placement.Group{{Key: "g", Count: grouped, Rate: 0.1, Batch: 2}}
	}
	p := testkit.Result(placement.Place(s.Policy, cat.Snapshot(name), s.Demand, nil)).Must(t)
	return s, p
}

func placed(t testing.TB, cat *catalog.Catalog, name, key string, single, grouped int) catalog.Event {
	t.Helper()
	s, p := plannedFor(t, cat, name, single, grouped, 1+int64(single+grouped))
	return testkit.Result(catalog.NewTopicPlaced(s, p, key)).Must(t)
}

func moving(t testing.TB, cat *catalog.Catalog, name string, single, grouped int) catalog.Event {
	t.Helper()
	s, p := plannedFor(t, cat, name, single, grouped, 2_000+int64(single+grouped))
	// The last two publishers of a broker have no place.
	q := &p.Quotas[0]
	if n := len(q.Publishers) - 2; n > 0 && single == 3 {
		p.Unplaced, q.Publishers = slices.Clone(q.Publishers[n:]), q.Publishers[:n]
	}
	return testkit.Result(catalog.NewTopicMoving(s, p)).Must(t)
}

// appendEveryEvent appends each kind of event at least once, in three appends.
func (l *leader) appendEveryEvent() {
	l.t.Helper()
	l.append(joined("b1"), joined("b2"))
	l.append(placed(l.t, l.cat, "t", "key", 5, 7))
	var members []string
	topic, _ := l.cat.Topic("t")
	for _, q := range topic.Plan.Quotas {
		members = append(members, q.Broker)
	}
	for _, m := range members {
		l.append(catalog.MemberPrepared{Topic: "t", Broker: m})
	}
	l.append(catalog.TopicActivated{Topic: "t"}, catalog.SLOJudged{Topic: "t", Missed: "late"})
	l.append(catalog.BrokerDraining{ID: members[0], Draining: true})
	l.append(moving(l.t, l.cat, "t", 6, 7))
	l.append(catalog.TopicMoveAborted{Topic: "t"})
	l.append(moving(l.t, l.cat, "t", 6, 7))
	topic, _ = l.cat.Topic("t")
	for _, q := range topic.Next.Plan.Quotas {
		l.append(catalog.MemberPrepared{Topic: "t", Broker: q.Broker})
	}
	l.append(catalog.TopicMoved{Topic: "t"}, catalog.MemberRetired{Topic: "t", Broker: members[0]},
		catalog.MemberFound{Topic: "t", Broker: members[0]}, catalog.MemberRetired{Topic: "t", Broker: members[0]},
		catalog.LeftoverRemoved{Topic: "t", Broker: members[0]})
	l.append(placed(l.t, l.cat, "gone", "", 1, 0), catalog.TopicDeleting{Topic: "gone"})
	gone, _ := l.cat.Topic("gone")
	l.append(catalog.TopicRemoved{Topic: "gone", Left: []string{gone.Plan.Quotas[0].Broker}, ContractLeft: true})
	l.append(placed(l.t, l.cat, "other", "", 0, 1), catalog.TopicRemoved{Topic: "other", ContractLeft: true},
		catalog.LeftoverContractRemoved{Topic: "other"})
	l.append(moving(l.t, l.cat, "t", 3, 1), catalog.BrokerLeft{ID: "b1"}, catalog.Restarted{})
	l.append(catalog.BrokerCalibrated{ID: "b1", Mcap: 12_345})
	l.append(catalog.BrokerNoted{ID: "b2", Forgotten: true, Strict: true})
	l.append(joined("b8"), catalog.BrokerLeft{ID: "b8"}, catalog.BrokerRemoved{ID: "b8"})
	from := l.cat.Dump().Topics[0]
	spec := *from.Spec
	spec.Demand.Topic = "back"
	from.Spec, from.Ordered, from.Epoch, from.Key = &spec, &spec, 5000, "other key"
	absent := catalog.BrokerDump{Broker: catalog.Broker{ID: "b7", Mcap: 5, Configured: 5, Draining: true}, Leftovers: []string{"gone"}}
	l.append(catalog.TopicRestored{TopicDump: from}, catalog.BrokerRestored{BrokerDump: absent})
	l.append(catalog.BrokerAbsorbed{ID: "b2", Absorption: catalog.Absorption{Latency: 7 * time.Millisecond, Rate: 5_000_000, Burst: 34}})
	l.append(joined("b3"), joined("b4"))
	l.active("many", 0, 1000)
	l.append(l.shifted("many", 2))
	l.append(catalog.SharesUnconfirmed{Topic: "gone", Shares: []catalog.UnconfirmedShare{{Broker: "b1", Share: tokenbucket.Share{Rate: 5000, Burst: 3}}}},
		catalog.SharesUnconfirmed{Topic: "t", Shares: []catalog.UnconfirmedShare{{Broker: "b1", Share: tokenbucket.Share{Rate: 1, Burst: 1}}}}, catalog.SharesUnconfirmed{Topic: "t"}, catalog.SharesUnconfirmed{Topic: "t", Raising: true, Vague: true})
	l.append(catalog.ChannelsCreated{Topic: "many", Channels: []catalog.Channel{{Name: "e", Paused: true}, {Name: "f"}}},
		catalog.ChannelsSet{Topic: "many", Channels: []catalog.Channel{{Name: "c", Paused: true}, {Name: "e", Session: "b1"}}},
		catalog.ChannelsDeleted{Topic: "many", Channels: []catalog.Channel{{Name: "d"}}})
}

// active appends the events that make a topic active.
func (l *leader) active(name string, single, grouped int) {
	l.t.Helper()
	l.append(placed(l.t, l.cat, name, "", single, grouped))
	topic, _ := l.cat.Topic(name)
	for _, q := range topic.Plan.Quotas {
		l.append(catalog.MemberPrepared{Topic: name, Broker: q.Broker})
	}
	l.append(catalog.TopicActivated{Topic: name})
}

// shifted moves the first n publishers of a topic to a broker outside the topic's placement.
func (l *leader) shifted(name string, n int) catalog.Event {
	l.t.Helper()
	topic, _ := l.cat.Topic(name)
	var moved []int
	for i := range n {
		moved = append(moved, i)
	}
	to := "b4"
	if topic.Plan.Quotas[0].Broker == to {
		to = "b3"
	}
	plan := testkit.Result(placement.Shift(topic.Plan, topic.Spec.Demand, moved, to)).Must(l.t)
	return testkit.Result(catalog.NewTopicChanging(topic, topic.Spec, plan)).Must(l.t)
}

// move appends the event that ends a move.
func (l *leader) move(name string) {
	l.t.Helper()
	topic, _ := l.cat.Topic(name)
	for _, q := range topic.Next.Plan.Quotas {
		l.append(catalog.MemberPrepared{Topic: name, Broker: q.Broker})
	}
	l.append(catalog.TopicMoved{Topic: name})
}

// For a topic with many publishers only the changes are written. A new leader, with or without a dump,
// and followers all read the same topic.
func TestAMoveOfOneOfManyPublishersIsASmallRecord(t *testing.T) {
	l := lead(t, &Memory{})
	l.append(joined("b3"), joined("b4"))
	l.active("large", 100_000, 0)
	record := testkit.Result(encodeEvent(l.shifted("large", 1))).Must(t)
	if len(record) > 1000 {
		t.Errorf("%d bytes: %.2000s", len(record), record)
	}
}

func changesAreRead(t *testing.T, open func() Store) {
	l := lead(t, open())
	l.append(joined("b3"), joined("b4"))
	l.active("many", 1500, 10)
	l.append(l.shifted("many", 1))
	l.move("many")
	dump := l.cat.Dump()
	l.append(l.shifted("many", 3))
	testkit.Must(t, l.term.Compact(t.Context(), dump)) // while the topic moves
	l.move("many")
	l.resign()
	second := lead(t, open())
	mustEqual(t, second.cat, l.cat)
	second.append(second.shifted("many", 2))
	second.move("many")
	testkit.Must(t, second.term.Compact(t.Context(), second.cat.Dump()))
	second.append(second.shifted("many", 4))
	second.resign()
	mustEqual(t, lead(t, open()).cat, second.cat)
}

func mustEqual(t *testing.T, got, want *catalog.Catalog) {
	t.Helper()
	a, b := got.Dump(), want.Dump()
	if !reflect.DeepEqual(a, b) {
		t.Fatalf("got\n%+v\nwant\n%+v", a, b)
	}
}

func whatWasAppendedIsThereAfterwards(t *testing.T, open func() Store) {
	first := lead(t, open())
	testkit.MustEqual(t, first.cat.Version(), 0, "a new store is at")
	first.appendEveryEvent()
	first.resign()
	second := lead(t, open())
	mustEqual(t, second.cat, first.cat)

	testkit.Must(t, second.term.Compact(t.Context(), second.cat.Dump()))
	second.append(joined("b9"))
	second.resign()
	third := lead(t, open())
	mustEqual(t, third.cat, second.cat)
	third.append(catalog.Restarted{})
}

// A dump is taken while events arrive.
func aDumpOfThePast(t *testing.T, open func() Store) {
	l := lead(t, open())
	l.append(joined("b1"))
	dump := l.cat.Dump()
	l.append(joined("b2"), joined("b3"))
	testkit.Must(t, l.term.Compact(t.Context(), dump))
	l.append(joined("b4"))
	future := l.cat.Dump()
	future.Version++
	testkit.ErrorIs(t, l.term.Compact(t.Context(), future), ErrGap, "a dump of the future")
	l.resign()
	mustEqual(t, lead(t, open()).cat, l.cat)
}

func eventsThatDoNotContinueTheLog(t *testing.T, open func() Store) {
	l := lead(t, open())
	l.append(joined("b1"))
	for _, base := range []uint64{0, 2} {
		testkit.ErrorIs(t, l.term.Append(t.Context(), base, []catalog.Event{joined("b2")}), ErrGap, "append after %d", base)
	}
	l.resign()
	mustEqual(t, lead(t, open()).cat, l.cat)
}

func aTermThatIsOver(t *testing.T, open func() Store) {
	l := lead(t, open())
	l.append(joined("b1"))
	l.resign()
	l.resign() // harmless
	testkit.ErrorIs(t, l.term.Append(t.Context(), 1, []catalog.Event{joined("b2")}), ErrLost, "append")
	testkit.ErrorIs(t, l.term.Compact(t.Context(), l.cat.Dump()), ErrLost, "compact")
	mustEqual(t, lead(t, open()).cat, l.cat)
}

// A topic of 40,000 publishers with individual names takes megabytes.
func aLargeTopic(t *testing.T, open func() Store) {
	l := lead(t, open())
	l.append(joined("b1"), joined("b2"))
	l.append(placed(t, l.cat, "t", "", 40_000, 10), joined("b3"))
	l.resign()
	again := lead(t, open())
	mustEqual(t, again.cat, l.cat)
	testkit.Must(t, again.term.Compact(t.Context(), again.cat.Dump()))
	again.resign()
	mustEqual(t, lead(t, open()).cat, l.cat)
}

func manyEventsAtOnce(t *testing.T, open func() Store) {
	l := lead(t, open())
	var events []catalog.Event
	for i := range 1000 {
		events = append(events, joined(fmt.Sprintf("b%d", i)))
	}
	l.append(events...)
	l.resign()
	mustEqual(t, lead(t, open()).cat, l.cat)
}

// follower collects what its callbacks receive.
type follower struct {
	mu     sync.Mutex
	cat    *catalog.Catalog
	resets int
	missed error // the error if the follower was cut off because records were gone
	cuts   int
}

func (f *follower) Reset(c *catalog.Catalog) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cat = c
	f.resets++
}

func (f *follower) Cut(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cuts++
	if errors.Is(err, ErrGap) || errors.Is(err, errMissing) || errors.Is(err, rpctypes.ErrCompacted) {
		f.missed = err
	}
}

func (f *follower) Apply(e catalog.Event) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := f.cat.Apply(e)
	return err
}

func (f *follower) version() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cat == nil {
		return 0
	}
	return f.cat.Version()
}

func follow(t *testing.T, s Store) *follower {
	f := &follower{}
	testkit.Run(t, func(ctx context.Context) error { return s.Follow(ctx, f) })
	return f
}

func TestFollowersOfEtcd(t *testing.T) {
	t.Parallel()
	address := etcdtest.Start(t, etcdtest.Config{}).URL
	open := func() *Etcd { return etcdStore(t, address, "/f/") }
	l := lead(t, open())
	testkit.Result(open().Leader(t.Context())).Equal(t, "me:1", "the leader")
	l.append(joined("b0"))
	f := follow(t, open())
	testkit.WaitFor(t, "the follower has the state", func() bool { return f.version() == l.cat.Version() })
	l.appendEveryEvent()
	l.append(joined("b6")) // every ends with a restart, and b7 is draining
	l.append(placed(t, l.cat, "large", "", 50_000, 0))
	testkit.WaitFor(t, "the follower has all events", func() bool { return f.version() == l.cat.Version() })
	mustEqual(t, f.cat, l.cat)
	testkit.Must(t, l.term.Compact(t.Context(), l.cat.Dump()))
	late := follow(t, open())
	l.append(joined("b9"))
	testkit.WaitFor(t, "both followers have the event after the dump", func() bool {
		return f.version() == l.cat.Version() && late.version() == l.cat.Version()
	})
	mustEqual(t, late.cat, l.cat)
	// On a busy machine the follower may get no answer from etcd in time, and start again.
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.resets == 0 || f.missed != nil {
		t.Errorf("the first follower was reset %d times: %v", f.resets, f.missed)
	}
}

// The next candidate leads once the first leader is gone. Writes of the first leader are refused,
// although it believes that it leads.
func TestALeaderThatWasReplaced(t *testing.T) {
	t.Parallel()
	address := etcdtest.Start(t, etcdtest.Config{}).URL
	first := lead(t, leasedStore(t, address, "/r/", 10*time.Second)) // it notices its end within a fifth of the lease
	first.append(joined("b1"))

	next := make(chan *leader, 1)
	second := etcdStore(t, address, "/r/")
	client := testkit.Result(second.client(t.Context())).Must(t)
	go func() { next <- lead(t, second) }()
	testkit.WaitFor(t, "the next is in line", func() bool {
		return testkit.Result(client.Get(t.Context(), second.election()+"/", clientv3.WithPrefix())).Must(t).Count == 2
	})
	select {
	case <-next:
		t.Fatal("two leaders")
	case <-first.term.Lost():
		t.Fatal("the first lost it for no reason")
	case <-time.After(500 * time.Millisecond):
	}
	// As if the first leader hangs: its lease ends without its knowledge.
	old := first.term.(*etcdTerm)
	revoked := clientv3.LeaseID(old.session.Lease())
	blind := &etcdTerm{store: old.store, client: old.client, session: old.session, election: old.election, term: term{head: old.head}, cancel: func() {}}
	blind.certainUntil.Store(math.MaxInt64)
	testkit.Result(client.Revoke(t.Context(), revoked)).Must(t)
	l := <-next
	testkit.ErrorIs(t, blind.Append(t.Context(), 1, []catalog.Event{joined("evil")}), ErrLost, "an old leader's append")
	l.append(joined("b2"))
	testkit.ErrorIs(t, blind.Append(t.Context(), 1, []catalog.Event{joined("evil")}), ErrLost, "an old leader's append")
	<-first.term.Lost()
	l.resign()
	mustEqual(t, lead(t, etcdStore(t, address, "/r/")).cat, l.cat)
}

// A leader leads for longer than one lease.
func TestATermIsKeptUp(t *testing.T) {
	t.Parallel()
	s := leasedStore(t, etcdtest.Start(t, etcdtest.Config{}).URL, "/r/", time.Second)
	testkit.WaitFor(t, "a term that lasts", func() bool { // a busy machine may miss a lease
		l := lead(t, s)
		defer l.resign()
		select {
		case <-l.term.Lost():
			return false
		case <-time.After(2 * time.Second):
			return true
		}
	})
}

// Term numbers increase, whatever the clock says. A file of an earlier version has no number.
func eachTermHasAGreaterNumber(t *testing.T, open func() Store) {
	var last uint64
	for range 3 {
		l := lead(t, open())
		if number := l.term.Number(); number <= last || !clock.Mono().Before(l.term.Until()) {
			t.Fatalf("term %d after %d, until %d", number, last, l.term.Until())
		}
		last = l.term.Number()
		l.resign()
	}
}

func TestNumberAfterAClockThatWasFarAhead(t *testing.T) {
	testkit.Equal(t, numberAfter(math.MaxInt64), math.MaxInt64+1, "after a clock that was far ahead")
}

// A leader that has not reached etcd for the length of its lease knows that its term is over before
// another leader can begin.
func TestATermIsOverBeforeTheNextBegins(t *testing.T) {
	t.Parallel()
	address := etcdtest.Start(t, etcdtest.Config{}).URL
	first := lead(t, leasedStore(t, address, "/r/", 3*time.Second))
	old := first.term.(*etcdTerm)
	before := old.Until()
	testkit.WaitFor(t, "the term is kept up", func() bool { return old.Until() != before })
	old.cancel() // the old leader receives nothing more
	next := lead(t, etcdStore(t, address, "/r/"))
	if now := clock.Mono(); now.Before(old.Until()) {
		t.Errorf("another leads %v before the end of the first term", old.Until().Sub(now))
	}
	if next.term.Number() <= old.Number() {
		t.Errorf("term %d after %d", next.term.Number(), old.Number())
	}
	testkit.ErrorIs(t, first.term.Append(t.Context(), 0, []catalog.Event{joined("evil")}), ErrLost, "an append after the term")
}

func TestOpeningAFileInUseFails(t *testing.T) {
	dir := t.TempDir()
	b, err := NewBolt(dir, slog.New(slog.DiscardHandler))
	testkit.Must(t, err)
	l := lead(t, b)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, err := b.Lead(ctx, ""); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("a file that is in use: %v", err)
	}
	l.resign()
}

// Whichever page is damaged, the error names the file and the recovery.
func TestADamagedFile(t *testing.T) {
	whole := func() []byte {
		dir := t.TempDir()
		b := testkit.Result(NewBolt(dir, slog.New(slog.DiscardHandler))).Must(t)
		l := lead(t, b)
		for i := range 20 {
			l.append(joined(fmt.Sprint("b", i)))
		}
		l.resign()
		return testkit.Result(os.ReadFile(filepath.Join(dir, boltFile))).Must(t)
	}()
	page, refused := os.Getpagesize(), 0
	for at := 2 * page; at < len(whole); at += page {
		for name, damage := range map[string]func([]byte) []byte{
			"zeros": func(b []byte) []byte { clear(b[at : at+page]); return b },
			"noise": func(b []byte) []byte {
				for i := range page {
					b[at+i] = byte(i*7 + 3)
				}
				return b
			},
			"zeros from here on": func(b []byte) []byte { clear(b[at:]); return b },
			"a shorter file":     func(b []byte) []byte { return b[:at] },
		} {
			dir := t.TempDir()
			testkit.Must(t, os.WriteFile(filepath.Join(dir, boltFile), damage(slices.Clone(whole)), 0o600))
			b := testkit.Result(NewBolt(dir, slog.New(slog.DiscardHandler))).Must(t)
			term, _, err := b.Lead(t.Context(), "")
			if err == nil {
				testkit.Must(t, term.Resign(t.Context())) // a free page
				continue
			}
			refused++
			if !strings.Contains(err.Error(), boltFile) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s at %d: %v", name, at, err)
			}
		}
	}
	if refused == 0 {
		t.Error("no damage was noticed")
	}
}

// A full disk refuses what does not fit, and the term continues. Refused events are absent, and the
// next events fit once there is room.
func TestAFullDiskRefuses(t *testing.T) {
	const size = 1 << 20
	dir := testkit.SmallDisk(t, size)
	l := lead(t, testkit.Result(NewBolt(dir, slog.New(slog.DiscardHandler))).Must(t))
	l.append(joined("b1"))
	ballast := filepath.Join(dir, "ballast")
	f := testkit.Result(os.Create(ballast)).Must(t)
	for chunk := make([]byte, 4096); ; {
		if _, err := f.Write(chunk); err != nil {
			break
		}
	}
	testkit.Must(t, f.Close())
	version := l.cat.Version()
	full := 0
	for i := range 400 {
		err := l.term.Append(t.Context(), version, []catalog.Event{joined(fmt.Sprint("c", i))})
		if err == nil {
			version++
			continue
		}
		testkit.ErrorIs(t, err, ErrFull, "an append to a full disk")
		if full++; full == 3 {
			break
		}
	}
	if full == 0 {
		t.Fatal("the disk was never full")
	}
	testkit.Must(t, os.Remove(ballast))
	testkit.Must(t, l.term.Append(t.Context(), version, []catalog.Event{joined("after")}))
	testkit.Must(t, l.term.Resign(t.Context()))
	term, cat, err := testkit.Result(NewBolt(dir, slog.New(slog.DiscardHandler))).Must(t).Lead(t.Context(), "")
	testkit.Must(t, err)
	testkit.Must(t, term.Resign(t.Context()))
	testkit.Equal(t, cat.Version(), version+1, "version after a restart")
}

func TestAFileOfAnotherRelease(t *testing.T) {
	dir := t.TempDir()
	b := testkit.Result(NewBolt(dir, slog.New(slog.DiscardHandler))).Must(t)
	l := lead(t, b)
	l.append(joined("b1"))
	l.resign()
	db := testkit.Result(bbolt.Open(filepath.Join(dir, boltFile), 0o600, nil)).Must(t)
	testkit.Must(t, db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketEvents).Put(versionKey(2), []byte(`{"v":2,"kind":"restarted","data":{}}`))
	}))
	testkit.Must(t, db.Close())
	_, _, err := b.Lead(t.Context(), "")
	var format *FormatError
	if !errors.As(err, &format) || !strings.Contains(err.Error(), "event 2: a record of an unknown kind cannot be read") {
		t.Errorf("got %v", err)
	}
}
