package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// cable is a store that can be cut off from its server.
type cable struct {
	*store.Store
	calls     sync.RWMutex // held for reading during a call that the cut would refuse
	cut       atomic.Bool  // see cutOff
	unreached atomic.Bool  // no renewal arrives
	lost      atomic.Bool  // the next Join or HandOver is executed, and then the store is cut off
	renewals  atomic.Int64
	unsaved   atomic.Bool  // no checkpoint arrives
	saves     atomic.Int64 // saves that succeeded
	polls     atomic.Int64
	hole      atomic.Pointer[string] // the next operation without an answer: save, poll, join or renewal
	room      atomic.Int64           // 0, or how many credits the store can save in the given time
	slow      atomic.Pointer[func()] // called once, before the next renewal
	unaware   atomic.Bool            // renewals do not show the newest change of the owners
	behind    atomic.Bool            // Owners returns the owners before their newest change
	reads     atomic.Int64           // reads of the owners
}

// cutOff cuts the store off. It waits for the calls that began before: one of them might otherwise
// reach the store after the store has a later owner.
func (c *cable) cutOff() {
	c.calls.Lock()
	defer c.calls.Unlock()
	c.cut.Store(true)
}

// renewed waits for two renewals that begin after the call.
func (c *cable) renewed(t *testing.T) {
	t.Helper()
	before := c.renewals.Load()
	testkit.WaitFor(t, "renewals", func() bool { return c.renewals.Load() > before+2 })
}

// swallowed waits until the caller gives up, if hole names the caller's operation.
func (c *cable) swallowed(ctx context.Context, what string) bool {
	hole := c.hole.Load()
	if hole == nil || *hole != what || !c.hole.CompareAndSwap(hole, nil) {
		return false
	}
	<-ctx.Done()
	return true
}

var errCut = errors.New("cut off")

func (c *cable) Renew(ctx context.Context, me store.Member) ([]store.Member, uint64, error) {
	c.calls.RLock()
	defer c.calls.RUnlock()
	if c.cut.Load() || c.unreached.Load() {
		return nil, 0, errCut
	}
	if c.swallowed(ctx, "renewal") {
		return nil, 0, ctx.Err()
	}
	defer c.renewals.Add(1)
	if slow := c.slow.Swap(nil); slow != nil {
		(*slow)()
	}
	members, owners, err := c.Store.Renew(ctx, me)
	if c.unaware.Load() {
		owners--
	}
	return members, owners, err
}

func (c *cable) Owners(ctx context.Context) (all []store.Partition, number uint64, err error) {
	defer c.reads.Add(1)
	all, number, err = c.Store.Owners(ctx)
	if c.behind.Load() && err == nil {
		number--
		for i := range all {
			all[i].Epoch--
		}
	}
	return all, number, err
}

func (c *cable) SaveCredits(ctx context.Context, me store.Member, owners uint64, credits []table.Credit) error {
	c.calls.RLock()
	defer c.calls.RUnlock()
	if c.cut.Load() || c.unsaved.Load() {
		return errCut
	}
	if c.swallowed(ctx, "save") {
		return ctx.Err()
	}
	if room := c.room.Load(); room > 0 && int64(len(credits)) > room {
		return context.DeadlineExceeded
	}
	defer c.saves.Add(1)
	return c.Store.SaveCredits(ctx, me, owners, credits)
}

func (c *cable) Join(ctx context.Context, me store.Member, wall func() time.Duration) (time.Duration, error) {
	c.calls.RLock()
	defer c.calls.RUnlock()
	if c.cut.Load() {
		return 0, errCut
	}
	if c.swallowed(ctx, "join") {
		return 0, ctx.Err()
	}
	floor, err := c.Store.Join(ctx, me, wall)
	return floor, c.answer(err)
}

func (c *cable) Changes(ctx context.Context, after uint64, n int) ([]store.Change, error) {
	if c.swallowed(ctx, "poll") {
		return nil, ctx.Err()
	}
	c.polls.Add(1)
	return c.Store.Changes(ctx, after, n)
}

func (c *cable) answer(err error) error {
	if err == nil && c.lost.Swap(false) {
		c.cut.Store(true)
		return errCut
	}
	return err
}

func (c *cable) HandOver(ctx context.Context, me store.Member, to string, partitions []int, credits []table.Credit) error {
	c.calls.RLock()
	defer c.calls.RUnlock()
	if c.cut.Load() {
		return errCut
	}
	return c.answer(c.Store.HandOver(ctx, me, to, partitions, credits))
}

// two starts two servers on one store. Both look at the store continuously.
func two(t *testing.T, rules ...rule.Rule) (b *bench, s [2]*server.Server, cables [2]*cable) {
	b = newBench(t, rules...)
	s, cables = b.two()
	return b, s, cables
}

func (b *bench) two() (s [2]*server.Server, cables [2]*cable) {
	b.cfg.Renew, b.cfg.Advertise = 20*time.Millisecond, ""
	for i := range s {
		cables[i] = &cable{Store: b.store}
		b.cfg.Store = server.NewStore(cables[i])
		s[i], _ = b.start()
	}
	return s, cables
}

// passes advances the time as fast as a server looks at the store, until the server owns all
// partitions.
func (b *bench) passes(s *server.Server, c *cable) {
	b.t.Helper()
	looked := c.renewals.Load()
	testkit.WaitFor(b.t, "another takes over", func() bool {
		if now := c.renewals.Load(); now != looked {
			looked = now
			b.clock.pass(500 * time.Millisecond)
		}
		return owns(s, rule.Partitions)()
	})
}

func owns(s *server.Server, n int64) func() bool {
	return func() bool { return s.State().Partitions == n }
}

func (b *bench) both(s [2]*server.Server) *client.Client {
	c, err := client.New(client.Config{Servers: []string{s[1].Addr().String(), s[0].Addr().String()}, Attempts: 10_000, Wait: testkit.Hang})
	testkit.Must(b.t, err)
	b.t.Cleanup(c.Close)
	return c
}

// A key is admitted exactly its capacity, however often the key moves while clients ask for it. A move
// that cannot be written changes nothing.
func TestMovedKeyIsAdmittedItsCapacity(t *testing.T) {
	const capacity, moves, whileItMoves = 5000, 6, 500
	b, s, cables := two(t, rule.Rule{Key: "k", Share: share(1, capacity), Strict: true})
	c := b.both(s)
	p := rule.Partition("k", rule.Partitions)
	admitted := 0
	ask := func() bool {
		d := c.Ask(t.Context(), "k", 1)
		if d.Admit {
			admitted++
		}
		return d.Admit || d.Unanswered // the key was moving for longer than a client waits; nothing was charged
	}
	for move := range moves {
		from, to := move%2, 1-move%2
		cut := move == 1
		if cut && !ask() { // from here on the owner has the key without the store
			t.Fatalf("denied before move %d", move)
		}
		if cut {
			cables[from].cutOff()
		}
		testkit.Must(t, b.store.Move(t.Context(), p, p, s[to].Addr().String()))
		there := owns(s[to], int64(to+(1-to)*rule.Partitions))
		for asked := 0; asked < whileItMoves && !there(); asked++ {
			if !ask() {
				t.Fatalf("denied in move %d, when %d of %d were admitted", move, admitted, capacity)
			}
			if cut && asked == 5 {
				if there() {
					t.Error("moved, and it could not be written")
				}
				cables[from].cut.Store(false)
			}
		}
		testkit.WaitFor(t, "the key is moved", there)
	}
	for ask() {
	}
	if admitted != capacity {
		t.Errorf("%d admitted of %d, through %d moves", admitted, capacity, moves)
	}
}

// A new owner's clock is behind the clock of the previous owner. The new owner's writes must not count
// as older than the previous owner's writes.
func TestClocksApart(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1, Burst: 100}, Strict: true})
	b.cfg.Renew, b.cfg.Advertise = 20*time.Millisecond, ""
	var s [2]*server.Server
	for i := range s {
		b.cfg.Now = func() table.Now {
			now := b.clock.Now()
			now.Wall += time.Duration(i) * 10 * time.Second
			return now
		}
		s[i], _ = b.start()
	}
	p := rule.Partition("k", rule.Partitions)
	for moves := range 5 {
		from, to := s[moves%2], s[1-moves%2]
		testkit.MustEqual(t, sure(t, b.client(from), "k", 10).Left, int64(90-10*moves), "left after %d moves", moves)
		testkit.Must(t, b.store.Move(t.Context(), p, p, to.Addr().String()))
		moved := int64(1 - moves%2)
		testkit.WaitFor(t, "the partition leaves and comes", func() bool { return owns(s[0], rule.Partitions-moved)() && owns(s[1], moved)() })
	}
}

// A server did not own a key when the question came first, and owns the key when the question comes
// again. The server charges nothing, because the client has gone to another server by now.
func TestMovedIsTheAnswer(t *testing.T) {
	b, s, _ := two(t, rule.Rule{Key: "k", Share: share(1, 10)})
	testkit.WaitFor(t, "the first server owns all", owns(s[0], rule.Partitions))
	r := newRaw(t, s[1])
	question := r.ask(r.send()[0].Session, 1, "k")
	before := r.send(question)[0]
	testkit.MustEqual(t, before.Kind, wire.Moved, "%+v", before)
	p := rule.Partition("k", rule.Partitions)
	testkit.Must(t, b.store.Move(t.Context(), p, p, s[1].Addr().String()))
	testkit.WaitFor(t, "the partition moves", owns(s[1], 1))
	c := b.client(s[1])
	if d := sure(t, c, "k", 1); d.Left != 9 { // the key is in memory from now on
		t.Fatalf("%+v", d)
	}
	if again := r.send(question)[0]; again != before {
		t.Errorf("%+v, and then %+v", before, again)
	}
	testkit.Equal(t, c.Peek(t.Context(), "k", 0).Left, 9, "credits left")
}

// An owner that is cut off from the store stops strict keys before another server takes over. The
// other server begins these keys empty. Admissions of other keys since the last checkpoint may be
// repeated. When the old owner is connected again, it owns nothing.
func TestCutOffOwnerStopsStrictKeys(t *testing.T) {
	b, s, cables := two(t, rule.Rule{Key: "key", Share: share(1, 10)}, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	old, next := b.client(s[0]), b.client(s[1])
	testkit.WaitFor(t, "the first server owns all", owns(s[0], rule.Partitions))
	count := func(c *client.Client, key string) (n int) {
		t.Helper()
		for sure(t, c, key, 1).Admit {
			n++
		}
		return n
	}
	testkit.MustEqual(t, count(old, "strict")+count(old, "key"), 20, "admitted of 20")
	cables[0].cutOff()
	b.clock.pass(4 * time.Second)
	testkit.Equal(t, count(old, "strict")+count(old, "key"), 8, "admitted in 4 s by an owner whose lease runs")
	b.clock.pass(1100 * time.Millisecond)
	testkit.Equal(t, count(old, "strict"), 0, "of a strict key by an owner that may be replaced")
	testkit.Equal(t, s[1].State().Partitions, 0, "replaced after 5 s")
	cut := b.clock.Now().Wall
	// Another server takes over 6 s after the last sign of life that it saw.
	b.passes(s[1], cables[1])
	if n, most := count(next, "strict"), (b.clock.Now().Wall - cut).Seconds(); float64(n) > most {
		t.Errorf("a strict key began with %d, and was empty at most %.1f s before", n, most)
	}
	if n := count(next, "key"); n < 10 { // nothing was saved: the key is full once more
		t.Errorf("a key was admitted %d after a failover", n)
	}
	testkit.Equal(t, count(old, "strict"), 0, "of a strict key by an owner that was replaced")
	cables[0].cut.Store(false)
	testkit.WaitFor(t, "the old owner knows of the claim", owns(s[0], 0))
	if d := b.both(s).Ask(t.Context(), "key", 1); d.Unanswered {
		t.Error("no server decides")
	}
}

// If the answer to a hand-over or to a join is lost, the previous owner writes nothing over the writes
// of the next owner.
func TestAnAnswerIsLost(t *testing.T) {
	for _, what := range []string{"hand-over", "join"} {
		t.Run(what, func(t *testing.T) {
			b := newBench(t, rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1, Burst: 10}})
			b.cfg.Checkpoint = 5 * time.Millisecond
			s, cables := b.two()
			testkit.WaitFor(t, "the first server owns all", owns(s[0], rule.Partitions))
			cables[0].unsaved.Store(true)
			if d := sure(t, b.client(s[0]), "k", 1); d.Left != 9 {
				t.Fatalf("%+v", d)
			}
			if what == "join" {
				cables[0].cutOff()
				b.passes(s[1], cables[1])
				cables[0].lost.Store(true)
				cables[0].cut.Store(false)
			} else {
				cables[0].lost.Store(true)
				p := rule.Partition("k", rule.Partitions)
				testkit.Must(t, b.store.Move(t.Context(), p, p, s[1].Addr().String()))
			}
			testkit.WaitFor(t, "an answer is lost", cables[0].cut.Load)
			testkit.WaitFor(t, "the new owner knows of the move", func() bool { return s[1].State().Partitions > 0 })
			want := sure(t, b.client(s[1]), "k", 7).Left
			saved := func() tokenbucket.Tokens {
				credits := testkit.Result(b.store.Credits(t.Context(), []string{"k"})).Must(t)
				if c, ok := credits["k"]; ok {
					return c.Credits / tokenbucket.Token
				}
				return -1
			}
			testkit.WaitFor(t, "the new owner saves", func() bool { return saved() == tokenbucket.Tokens(want) })
			cables[0].unreached.Store(true)
			cables[0].unsaved.Store(false)
			cables[0].cut.Store(false)
			testkit.WaitFor(t, "the old owner saves", func() bool { return cables[0].saves.Load() > 0 })
			testkit.Equal(t, saved(), tokenbucket.Tokens(want), "the key holds %d, and after the one before has saved", want)
		})
	}
}

// A server gives up an operation that the store does not answer, and continues with the next.
func TestServerGivesUpAHungStoreCall(t *testing.T) {
	for _, what := range []string{"save", "poll", "join", "renewal"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, rule.Rule{Key: "k", Share: share(1, 1e6)})
			c := &cable{Store: b.store}
			b.cfg.Store, b.cfg.Renew, b.cfg.Checkpoint, b.cfg.Poll = server.NewStore(c), 20*time.Millisecond, 20*time.Millisecond, 20*time.Millisecond
			s, _ := b.start()
			ask := b.client(s)
			c.hole.Store(&what)
			if what == "join" {
				testkit.Result(b.store.Join(t.Context(), store.Member{Address: "one", Instance: 1}, func() time.Duration { return 0 })).Must(t)
			}
			testkit.WaitFor(t, "it retries", func() bool {
				ask.Ask(t.Context(), "k", 1)
				return c.hole.Load() == nil
			})
			renewals, polls, saves := c.renewals.Load(), c.polls.Load(), c.saves.Load()
			testkit.WaitFor(t, "it decides again", func() bool {
				ask.Ask(t.Context(), "k", 1)
				return c.renewals.Load() > renewals && c.polls.Load() > polls && c.saves.Load() > saves
			})
		})
	}
}

// A slow renewal does not make other servers seem silent for longer than they are.
func TestASlowStore(t *testing.T) {
	b, s, cables := two(t, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	testkit.WaitFor(t, "the first server owns all", owns(s[0], rule.Partitions))
	passed := make(chan struct{})
	slow := func() {
		b.clock.pass(4900 * time.Millisecond)
		cables[0].renewed(t)
		cables[0].cutOff()
		close(passed)
	}
	cables[1].slow.Store(&slow)
	<-passed
	b.clock.pass(1500 * time.Millisecond) // since the first server's last sign of life, and 6.4 s since that renewal began
	cables[1].renewed(t)
	testkit.Equal(t, s[1].State().Partitions, 0, "took partitions of a server whose lease runs")
	cables[0].cut.Store(false)
	if d := sure(t, b.client(s[0]), "strict", 1); !d.Admit {
		t.Errorf("%+v", d)
	}
}

// If a batch of a checkpoint takes longer than allowed, the next batch is half as large. The lease is
// renewed meanwhile, strict keys continue, and in the end everything is saved.
func TestSlowCheckpointHalvesItsBatches(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key/*", Share: share(1, 10)}, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	c := &cable{Store: b.store}
	c.room.Store(1)
	b.cfg.Store, b.cfg.Renew, b.cfg.Checkpoint = server.NewStore(c), 20*time.Millisecond, 5*time.Millisecond
	s, _ := b.start()
	ask := b.client(s)
	const keys = 80 // some keys share a shard
	for i := range keys {
		if d := sure(t, ask, fmt.Sprint("key/", i), 9); !d.Admit { // the key will not fill up in this test and be forgotten
			t.Fatalf("%+v", d)
		}
	}
	for range 3 {
		b.clock.pass(2 * time.Second)
		c.renewed(t)
		if d := sure(t, ask, "strict", 1); !d.Admit {
			t.Errorf("%+v", d)
		}
	}
	testkit.WaitFor(t, "all is saved", func() bool {
		saved := testkit.Result(b.store.Saved(t.Context(), "", 2*keys)).Must(t)
		return len(saved) == keys+1
	})
}

// A machine that was suspended does not know yet that another server may have taken over.
func TestSuspendedServerStopsStrictKeys(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true}, rule.Rule{Key: "key", Share: share(1, 10)})
	var asleep atomic.Int64
	c := &cable{Store: b.store}
	b.cfg.Store, b.cfg.Renew = server.NewStore(c), 20*time.Millisecond
	b.cfg.Boot = func() mono.Time { return b.clock.Now().Mono.Add(time.Duration(asleep.Load())) }
	s, _ := b.start()
	ask := b.client(s)
	if d := sure(t, ask, "strict", 1); !d.Admit {
		t.Fatalf("%+v", d)
	}
	c.unreached.Store(true) // a renewal may be in progress
	asleep.Store(int64(time.Minute))
	testkit.WaitFor(t, "a strict key is denied", func() bool { return !sure(t, ask, "strict", 0).Admit })
	if d := sure(t, ask, "key", 1); !d.Admit {
		t.Errorf("%+v", d)
	}
	c.unreached.Store(false)
	testkit.WaitFor(t, "the lease is renewed", func() bool { return sure(t, ask, "strict", 0).Admit })
}

// The next owner takes over exactly the credits of a server that stopped in order.
func TestAServerLeaves(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	c := &cable{Store: b.store}
	b.cfg.Renew, b.cfg.Advertise, b.cfg.Store = 20*time.Millisecond, "", server.NewStore(c)
	first, stop := b.start()
	if d := sure(t, b.client(first), "strict", 7); !d.Admit {
		t.Fatalf("%+v", d)
	}
	second, _ := b.start()
	stop()
	b.passes(second, c)
	d := sure(t, b.client(second), "strict", 4)
	if !d.Admit { // 3 credits, and what the key earned in 6 s or more
		t.Errorf("%+v", d)
	}
}

// The store can be read but takes no writes. Strict keys are decided until the lease ends, and
// /healthz shows the end. Then strict keys are denied, and /healthz shows it.
func TestTheStoreTakesNoWrites(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true}, rule.Rule{Key: "key", Share: share(1, 10)})
	var log testkit.Buffer
	registry := prometheus.NewRegistry()
	c := &cable{Store: b.store}
	b.cfg.Store, b.cfg.Renew, b.cfg.Poll, b.cfg.Checkpoint = server.NewStore(c), 5*time.Millisecond, 5*time.Millisecond, 5*time.Millisecond
	b.cfg.Log, b.cfg.Metrics = slog.New(slog.NewTextHandler(&log, nil)), registry
	s, _ := b.start()
	ask := b.client(s)
	certain := func() float64 { return testkit.Metric(t, registry, "srtm_admission_certain_seconds") }
	admits := func(key string, want bool) {
		t.Helper()
		if d := sure(t, ask, key, 1); d.Admit != want {
			t.Errorf("%s: %+v", key, d)
		}
	}
	health := func(want string) {
		t.Helper()
		testkit.WaitFor(t, "health: "+want, func() bool {
			err := s.Healthy()
			return err != nil && strings.Contains(err.Error(), want)
		})
	}
	admits("strict", true)
	testkit.Equal(t, s.Healthy(), nil)
	testkit.Equal(t, certain(), 5.0, "seconds")

	c.unreached.Store(true)
	health("has not been renewed for 0s")
	b.clock.pass(4 * time.Second)
	admits("strict", true)
	err := s.Healthy()
	_, well := errors.AsType[obs.Notice](err)
	testkit.Equal(t, well, true, "a notice: %v", err)
	health("has not been renewed for 4s; decisions on strict keys are certain until 22:13:25Z")
	testkit.Equal(t, certain(), 1.0, "seconds")

	b.clock.pass(2 * time.Second)
	admits("strict", false)
	admits("key", true)
	health("strict keys are denied: decisions on them were certain until 22:13:25Z, and the lease on the partitions has not been renewed for 6s: cut off")
	testkit.Equal(t, certain(), -1.0, "seconds")
	testkit.WaitFor(t, "a line of the log", func() bool {
		return strings.Contains(log.String(), "strict keys are denied until the lease on the partitions is renewed")
	})

	// The server tries the store again at once, and not after a period.
	c.unreached.Store(false)
	testkit.WaitFor(t, "a renewal", func() bool { return s.Healthy() == nil })
	admits("strict", true)
	testkit.WaitFor(t, "a line of the log", func() bool { return strings.Contains(log.String(), "strict keys are decided again") })
}
