package learned_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

var start = time.Unix(1_700_000_000, 0)

// world is a topic with recording brokers, and the loaddistributor's clock.
type world struct {
	t                 *testing.T
	subject           *learned.Topic
	now               time.Time
	contract          tokenbucket.Share
	auto              catalog.Auto
	tenantLeft        tokenbucket.Rate // of the tenant's limit
	limited           bool
	brokers           map[string]*recorder
	ids               []string
	otherDisconnected bool // another broker is not connected
	placed            []placement.Publisher
	since             []int64
	// Results.
	proposals int
	last      *learned.Proposal
	changes   int // of the placed publishers
	written   int // bytes, at least
}

type recorder struct {
	on      bool
	mute    bool // the broker reports nothing
	numbers map[string]uint32
	bound   int           // distinct publishers that the broker can report; 0: all
	slow    time.Duration // how far the broker's clock is behind the loaddistributor's
	sources []func(from, to time.Time) []message
	orders  int
}

type message struct {
	at time.Time
	id string
}

func newWorld(t *testing.T, limit float64, brokers ...string) *world {
	w := &world{t: t, now: start, contract: tokenbucket.Share{Rate: tokenbucket.PerSecond(limit), Burst: 10}, ids: brokers, brokers: map[string]*recorder{}, subject: learned.New(&catalog.Spec{}, start)}
	for _, id := range brokers {
		w.brokers[id] = &recorder{}
	}
	return w
}

// sendEvery is a publisher that sends at even intervals.
func sendEvery(id string, gap time.Duration) func(from, to time.Time) []message {
	offset := time.Duration(len(id)*7919) * time.Microsecond % gap
	return func(from, to time.Time) (all []message) {
		for n := max(0, (from.Sub(start)-offset)/gap); ; n++ {
			switch at := start.Add(offset + n*gap); {
			case !at.Before(to):
				return all
			case !at.Before(from):
				all = append(all, message{at, id})
			}
		}
	}
}

// sendWhile limits a source to a part of the time.
func sendWhile(source func(from, to time.Time) []message, when func(time.Duration) bool) func(from, to time.Time) []message {
	return func(from, to time.Time) []message {
		return slices.DeleteFunc(source(from, to), func(m message) bool { return !when(m.at.Sub(start)) })
	}
}

// run advances time: brokers record, and each proposal of the topic is applied.
func (w *world) run(d time.Duration) {
	w.t.Helper()
	const step = 250 * time.Millisecond
	for end := w.now.Add(d); w.now.Before(end); {
		from := w.now
		if from.Sub(start)%time.Second == 0 {
			for _, o := range w.subject.Orders(w.ids, w.otherDisconnected, from) {
				r := w.brokers[o.Broker]
				if r.orders++; r.mute {
					continue
				}
				if o.Lasts == 0 {
					r.on = false
				} else if o.Anew || !r.on {
					r.on, r.numbers = true, map[string]uint32{}
					testkit.Must(w.t, w.subject.Count(o.Broker, tuner.Piece{First: true}, nil, nil, 0, from))
				}
			}
			if job := w.subject.CloseWindow(w.spec(), from); job != nil {
				job.FindGroups()
				if p := w.subject.Propose(job, w.spec(), 1, w.tenantLeft, w.limited, from); p != nil {
					w.proposals++
					w.count(p.Spec)
					w.last, w.placed, w.since, w.auto = p, p.Spec.Demand.Publishers, p.Spec.Since, p.Spec.Auto
					w.contract = tokenbucket.Share{Rate: tokenbucket.Rate(p.Spec.Demand.RateMilli), Burst: p.Spec.Demand.Burst}
				}
			}
		}
		w.now = from.Add(step)
		for _, id := range w.ids {
			w.brokers[id].record(w, id, from)
		}
	}
}

// spec returns the current specification of the topic.
func (w *world) spec() *catalog.Spec {
	return &catalog.Spec{
		Demand: placement.Demand{Topic: "t", RateMilli: int64(w.contract.Rate), Burst: w.contract.Burst, Open: true, Publishers: w.placed},
		SLO:    catalog.SLO{Quantile: 0.99}, Since: w.since, Auto: w.auto,
	}
}

// count adds up the changes of a proposal, and the bytes to write them.
func (w *world) count(spec *catalog.Spec) {
	now := map[string]bool{}
	_, added, short := catalog.Edits(w.spec(), spec)
	for i, publisher := range spec.Demand.Publishers {
		if now[publisher.ID] = true; short && !slices.Contains(added, i) {
			continue
		}
		w.written += len(fmt.Sprintf(`{"id":%q,"key":%q,"rate":%v},`, publisher.ID, publisher.Key, publisher.Rate))
	}
	for _, publisher := range w.placed {
		if !now[publisher.ID] {
			w.changes++
		}
	}
}

func (r *recorder) record(w *world, broker string, from time.Time) {
	var all []message
	for _, s := range r.sources {
		all = append(all, s(from, w.now)...)
	}
	if !r.on || r.mute {
		return
	}
	slices.SortStableFunc(all, func(a, b message) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.id, b.id)) })
	p, unnamed := tuner.Piece{}, uint64(0)
	last := time.Time{}
	for _, m := range all {
		n, found := r.numbers[m.id]
		if !found && r.bound > 0 && len(r.numbers) >= r.bound {
			unnamed++
			continue
		}
		if !found {
			n = uint32(len(r.numbers))
			r.numbers[m.id] = n
			p.Publishers = append(p.Publishers, m.id)
		}
		gap := uint64(0)
		if last.IsZero() {
			p.Start = mono.Wall(m.at.Add(-r.slow).UnixNano())
		} else {
			gap = uint64(m.at.Sub(last))
		}
		last = m.at
		p.Gaps, p.From = append(p.Gaps, gap), append(p.From, n)
	}
	p.Lost = unnamed
	testkit.Must(w.t, w.subject.Count(broker, p, nil, nil, unnamed, w.now))
}

func (w *world) rates() string {
	var text []string
	for _, p := range w.placed {
		text = append(text, fmt.Sprintf("%s:%.3g", p.ID, p.Rate))
	}
	return strings.Join(text, " ")
}

func (w *world) want(proposals int, rates string) {
	w.t.Helper()
	if w.proposals != proposals || w.rates() != rates {
		w.t.Fatalf("after %v: %d proposals, %s; want %d, %s", w.now.Sub(start), w.proposals, w.rates(), proposals, rates)
	}
}

func TestWhoIsHeardTwiceIsLearned(t *testing.T) {
	w := newWorld(t, 1000, "b1", "b2")
	b1 := w.brokers["b1"]
	b1.sources = append(b1.sources, sendEvery("a", 100*time.Millisecond))
	w.run(11 * time.Second)
	w.want(0, "")
	w.run(10 * time.Second)
	w.want(1, "a:10")
	if w.last.Brokers["a"] != "b1" || w.last.Grew || w.since[0] != start.Unix() {
		t.Fatalf("%+v", w.last)
	}
	w.run(3 * time.Minute)
	w.want(1, "a:10") // nothing has changed

	// Another publisher, at the other broker: it is placed once the pause is over, or at once if its
	// rate is high.
	b2 := w.brokers["b2"]
	since := w.now.Sub(start)
	b2.sources = append(b2.sources, sendWhile(sendEvery("bb", time.Second), func(at time.Duration) bool { return at >= since }))
	w.run(21 * time.Second)
	w.want(2, "a:10 bb:1")
	if len(w.last.Brokers) != 1 || w.last.Brokers["bb"] != "b2" || w.last.Grew {
		t.Fatalf("%+v", w.last)
	}
}

func TestRatesFollowWhatIsSentAndNoNoise(t *testing.T) {
	w := newWorld(t, 1000, "b1")
	b1 := w.brokers["b1"]
	// A publisher that sends in every other period of ten seconds, and a publisher that later sends
	// five times as much.
	b1.sources = append(b1.sources,
		sendWhile(sendEvery("onoff", 10*time.Millisecond), func(at time.Duration) bool { return at/(10*time.Second)%2 == 0 }),
		sendEvery("steady", 20*time.Millisecond))
	w.run(5 * time.Minute)
	before := w.proposals
	if before > 2 {
		t.Fatalf("%d proposals, the last %s", before, w.rates())
	}
	w.run(20 * time.Minute)
	if w.proposals != before {
		t.Fatalf("it flaps: %d proposals, %d after five minutes", w.proposals, before)
	}
	since := w.now.Sub(start)
	b1.sources = append(b1.sources, sendWhile(sendEvery("steady", 5*time.Millisecond), func(at time.Duration) bool { return at >= since }))
	w.run(time.Minute)
	if w.proposals == before || w.placed[1].Rate < 200 {
		t.Fatalf("%d proposals, %s", w.proposals, w.rates())
	}
}

func TestNoMoreThanTheContractIsPlanned(t *testing.T) {
	w := newWorld(t, 100, "b1")
	w.brokers["b1"].sources = append(w.brokers["b1"].sources, sendEvery("a", 5*time.Millisecond), sendEvery("bb", 5*time.Millisecond))
	w.run(30 * time.Second)
	d := placement.Demand{Topic: "t", Rate: 100, Burst: 10, Publishers: w.placed}
	if err := d.Validate(); err != nil || len(w.placed) != 2 || w.placed[0].Rate < 49 {
		t.Fatalf("%v: %s", err, w.rates())
	}
}

func TestTheSilentAreForgottenAndARestartForgetsNobody(t *testing.T) {
	w := newWorld(t, 1000, "b1")
	b1 := w.brokers["b1"]
	b1.sources = append(b1.sources, sendEvery("a", 100*time.Millisecond), sendWhile(sendEvery("bb", 100*time.Millisecond), func(at time.Duration) bool { return at < time.Minute }))
	w.run(time.Minute)
	w.want(1, "a:10 bb:10")

	w.subject = learned.New(w.spec(), w.now)
	b1.on = false
	w.run(30 * time.Second)
	w.want(1, "a:10 bb:10")
	if all := w.subject.Publishers(); len(all) != 2 || !all[1].Since.Equal(start) || all[0].Now < 9 {
		t.Fatalf("%+v", all)
	}
	w.run(learned.Forget + time.Minute)
	testkit.MustEqual(t, w.rates(), "a:10")
}

// A host that invents identities fills the identities that a broker reports and that the
// loaddistributor follows. Learned publishers stay as they are, and new publishers are learned.
func TestAFloodOfIdentitiesHarmsNobody(t *testing.T) {
	w := newWorld(t, 1e6, "b1")
	b1 := w.brokers["b1"]
	b1.bound = 30_000
	b1.sources = append(b1.sources, sendEvery("a", 100*time.Millisecond))
	w.run(30 * time.Second)
	w.want(1, "a:10")
	n := 0
	b1.sources = append(b1.sources, func(from, _ time.Time) (all []message) {
		for range 1250 { // 5,000 identities a second: 100,000 in 20 s
			n++
			all = append(all, message{from, fmt.Sprintf("flood%d", n)})
		}
		return all
	}, sendWhile(sendEvery("bb", 100*time.Millisecond), func(at time.Duration) bool { return at > 40*time.Second }))
	w.run(2 * time.Minute)
	testkit.MustEqual(t, w.rates(), "a:10 bb:10", "%d publishers", len(w.placed))
	if got := w.subject.Others(); got < 1000 || got > 5000 {
		t.Fatalf("others send %v msg/s", got)
	}
	if all := w.subject.Publishers(); len(all) != 2 || all[0].Now < 9 || all[0].Now > 11 {
		t.Fatalf("%+v", all)
	}
}

func TestABrokerIsLookedAtForAsMuchAsTheBudgetAllows(t *testing.T) {
	w := newWorld(t, 1e6, "b1")
	w.brokers["b1"].sources = append(w.brokers["b1"].sources, sendEvery("a", 20*time.Microsecond))
	w.run(30 * time.Second)
	if len(w.placed) != 1 || w.placed[0].Rate < 49_000 || w.placed[0].Rate > 51_000 {
		t.Fatal(w.rates())
	}
	if w.brokers["b1"].on {
		t.Fatal("it is recorded all the time")
	}
}

func TestThoseWhoFireTogetherGetAKey(t *testing.T) {
	w := newWorld(t, 1000, "b1", "b2")
	salt := func(id string, n int) time.Duration { // when the n-th second's firing is
		h := uint64(n)*0x9e3779b97f4a7c15 + uint64(id[0])*0xbf58476d1ce4e5b9
		h ^= h >> 31
		h *= 0x94d049bb133111eb
		return time.Duration(h>>33) % (900 * time.Millisecond)
	}
	for i := range 12 {
		id := fmt.Sprintf("%c%02d", "gh"[i%2], i)
		b := w.brokers[w.ids[i/6]]
		b.sources = append(b.sources, func(from, to time.Time) (all []message) {
			n := int(from.Sub(start) / time.Second)
			if at := start.Add(time.Duration(n)*time.Second + salt(id, n)); !at.Before(from) && at.Before(to) {
				all = append(all, message{at, id})
			}
			return all
		})
	}
	w.run(3 * time.Minute)
	keys := map[string]int{}
	for _, p := range w.placed {
		keys[p.ID[:1]+" "+p.Key]++
	}
	if len(w.placed) != 12 || len(keys) != 2 || keys["g "] > 0 || keys["h "] > 0 {
		t.Fatalf("%v", keys)
	}
	if g := w.subject.Groups(); len(g) != 2 || g[0].Members[1].Joint == 0 {
		t.Fatalf("%+v", g)
	}
	restored := learned.New(w.spec(), w.now)
	for i, p := range restored.Publishers() {
		if p.Key != w.placed[i].Key {
			t.Fatalf("%s has %q, had %q", p.ID, p.Key, w.placed[i].Key)
		}
	}
}

// The offered load decides the contract, within the operator's limits, once a minute of the load is
// known.
func TestAContractFollows(t *testing.T) {
	w := newWorld(t, 1000, "b1")
	w.contract.Burst = 500
	w.auto = catalog.Auto{MaxRate: 1_000_000, MinBurst: 4, MaxBurst: 500}
	rate := func() float64 { return w.contract.Rate.PerSecond() }
	b1 := w.brokers["b1"]
	w.run(2 * time.Minute)
	w.want(0, "") // silence says nothing
	b1.sources = append(b1.sources, sendWhile(func(from, to time.Time) (all []message) {
		for _, m := range sendEvery("a", time.Second)(from, to) {
			all = append(all, slices.Repeat([]message{m}, 20)...)
		}
		return all
	}, func(at time.Duration) bool { return at < 20*time.Minute }))
	w.run(40 * time.Second)
	testkit.MustEqual(t, rate(), 1000, "after 40 s: %+v", w.contract)
	w.run(2 * time.Minute)
	if rate() < 24 || rate() > 26 || w.contract.Burst < 20 || w.contract.Burst > 25 {
		t.Fatalf("20 at once each second: %+v", w.contract)
	}
	n := w.proposals
	w.run(10 * time.Minute)
	testkit.MustEqual(t, w.proposals, n, "it flaps")
	// More than the operator allows.
	since := w.now.Sub(start)
	b1.sources = append(b1.sources, sendWhile(sendEvery("flood", 100*time.Microsecond), func(at time.Duration) bool { return at >= since }))
	w.run(time.Minute)
	if rate() != 1000 || w.contract.Burst != 500 {
		t.Fatalf("a flood: %+v", w.contract)
	}
}

// A contract that reaches its limit follows the traffic up to the limit, and reports how far it would
// follow.
func TestAContractFollowsUpToTheTenantsLimit(t *testing.T) {
	w := newWorld(t, 100, "b1")
	w.contract.Burst = 500
	w.auto = catalog.Auto{MaxRate: 1_000_000, MinBurst: 4, MaxBurst: 500}
	w.tenantLeft, w.limited = 200_000, true
	w.brokers["b1"].sources = append(w.brokers["b1"].sources, sendEvery("a", 2*time.Millisecond))
	expect := func(rate tokenbucket.Rate, capped bool, when string) {
		t.Helper()
		w.run(2 * time.Minute)
		if w.contract.Rate != rate || !w.auto.Measured || (w.subject.Capped() > 0) != capped {
			t.Fatalf("%s: %+v, measured %v, capped at %v", when, w.contract, w.auto.Measured, w.subject.Capped())
		}
	}
	expect(200_000, true, "half of what is offered")
	if capped := w.subject.Capped().PerSecond(); capped < 600 || capped > 650 {
		t.Errorf("it would follow to %v msg/s", capped)
	}
	w.tenantLeft = 50_000
	expect(200_000, true, "less is left than the topic has")
	w.tenantLeft = 2_000_000
	w.run(2 * time.Minute)
	if rate := w.contract.Rate.PerSecond(); rate < 600 || rate > 650 || w.subject.Capped() != 0 {
		t.Errorf("enough is left: %v msg/s, capped at %v", rate, w.subject.Capped())
	}
}

// At a rate that needs no burst no burst is seen, and the rate falls until it needs a burst.
func TestTheBurstIsThatOfTheRateLearned(t *testing.T) {
	w := newWorld(t, 100_000, "b1")
	w.contract.Burst = 500
	w.auto = catalog.Auto{MaxRate: 1_000_000_000, MinBurst: 1, MaxBurst: 500}
	w.brokers["b1"].sources = append(w.brokers["b1"].sources, // 100 msg/s, within a tenth of each second
		sendWhile(sendEvery("a", time.Millisecond), func(at time.Duration) bool { return at%time.Second < 100*time.Millisecond }))
	w.run(65 * time.Second)
	if rate := w.contract.Rate.PerSecond(); rate < 110 || rate > 130 || w.contract.Burst < 85 || w.contract.Burst > 110 {
		t.Fatalf("%+v", w.contract)
	}
}

// The clock of a broker is behind, so the times of its messages are over. The burst is unknown, and
// the rate fully known.
func TestABurstThatWasNotSeenIsNotSmall(t *testing.T) {
	w := newWorld(t, 1000, "b1")
	w.contract.Burst = 500
	w.auto = catalog.Auto{MaxRate: 1_000_000, MinBurst: 1, MaxBurst: 500}
	b1 := w.brokers["b1"]
	b1.slow = 5 * time.Second
	b1.sources = append(b1.sources, sendEvery("a", 10*time.Millisecond), sendEvery("bb", 20*time.Millisecond))
	w.run(20 * time.Minute)
	if rate := w.contract.Rate.PerSecond(); rate < 180 || rate > 190 || w.contract.Burst != 500 {
		t.Fatalf("%+v", w.contract)
	}
}

// A new leader has measured nothing yet, and the brokers are still connecting to it. The learned state
// stays until brokers report that nothing is sent.
func TestWhatNobodyMeasuredIsNotZero(t *testing.T) {
	w := newWorld(t, 1000, "b1", "b2")
	b1, b2 := w.brokers["b1"], w.brokers["b2"]
	w.contract.Burst = 500
	w.auto = catalog.Auto{MaxRate: 1_000_000, MinBurst: 4, MaxBurst: 500}
	always := func(time.Duration) bool { return true }
	sends := func(d time.Duration) bool { return always(d) }
	b1.sources = append(b1.sources, sendWhile(sendEvery("a", 10*time.Millisecond), sends))
	b2.sources = append(b2.sources, sendWhile(sendEvery("bb", 5*time.Millisecond), sends))
	w.run(5 * time.Minute)
	if w.rates() != "a:100 bb:200" || w.contract.Rate.PerSecond() < 370 {
		t.Fatalf("%s, %+v", w.rates(), w.contract)
	}
	check := func(what string, proposals int, contract tokenbucket.Share) {
		t.Helper()
		if w.proposals != proposals || w.contract != contract || w.rates() != "a:100 bb:200" {
			t.Fatalf("%s: %d proposals more, %s, %+v was %+v", what, w.proposals-proposals, w.rates(), w.contract, contract)
		}
	}
	proposals, contract := w.proposals, w.contract
	for _, step := range []struct {
		what  string
		start func()
	}{
		{"no publisher is connected", func() { w.ids, w.otherDisconnected = nil, true }},
		{"one is not", func() { w.ids = []string{"b1"} }},
		{"one says nothing", func() { w.ids, w.otherDisconnected, b2.mute = []string{"b1", "b2"}, false, true }},
		{"all report", func() { b2.mute = false }},
	} {
		w.subject = learned.New(w.spec(), w.now)
		b1.on, b2.on = false, false
		step.start()
		w.run(learned.Forget + 2*time.Minute)
		check(step.what, proposals, contract)
	}
	// Earlier measurements count beside the current ones.
	w.subject = learned.New(w.spec(), w.now)
	b1.on, b2.on, b2.sources = false, false, nil
	w.run(5 * time.Minute)
	testkit.MustEqual(t, w.contract, contract, "five minutes after a restart")
	w.run(6 * time.Minute)
	testkit.MustEqual(t, w.contract.Rate, tokenbucket.PerSecond(125), "another publisher is gone: %+v", w.contract)
	contract = w.contract
	// Now there is evidence.
	always = func(time.Duration) bool { return false }
	w.run(learned.Forget + 2*time.Minute)
	testkit.MustEqual(t, w.rates(), "", "silent for %v", learned.Forget)
	testkit.MustEqual(t, w.contract, contract, "silent for minutes")
	w.run(time.Hour)
	testkit.MustEqual(t, w.contract, (tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 4}), "silent for an hour")
	n := w.proposals
	w.run(10 * time.Minute)
	testkit.MustEqual(t, w.proposals, n, "it still changes")
	always = func(time.Duration) bool { return true }
	w.run(time.Minute)
	if w.contract.Rate.PerSecond() < 120 {
		t.Fatalf("and back: %+v", w.contract)
	}
}

// 19 msg/s of a contract of 500 msg/s are too little growth to fit the topic for.
func TestATopicThatBeginsHasNotGrown(t *testing.T) {
	w := newWorld(t, 500, "b1")
	sendFrom := func(start time.Duration) func(time.Duration) bool {
		return func(at time.Duration) bool { return at >= start }
	}
	for i, rate := range []int{9, 19, 200, 240} { // in all 9, 28, 228, 468 msg/s
		w.brokers["b1"].sources = append(w.brokers["b1"].sources,
			sendWhile(sendEvery(strings.Repeat("p", i+1), time.Second/time.Duration(rate)), sendFrom(time.Duration(i)*time.Minute)))
		w.run(time.Minute)
		if len(w.placed) != i+1 || w.last.Grew != (i == 3) {
			t.Fatalf("%d: grew %v, %s", i, w.last.Grew, w.rates())
		}
	}
}

// More publishers than can be learned, all with about one rate: learned publishers stay, and the
// others are one sum.
func TestWhoIsInStaysIn(t *testing.T) {
	const all = learned.Max + 2000
	w := newWorld(t, 1e6, "b1")
	var ids []string
	for i := range all {
		ids = append(ids, fmt.Sprintf("p%05d", i))
	}
	rng := rand.New(rand.NewPCG(1, 2))
	w.brokers["b1"].sources = append(w.brokers["b1"].sources, func(from, _ time.Time) (sent []message) {
		if from.Sub(start)%(5*time.Second) == 0 {
			for _, id := range ids {
				for range 1 + rng.IntN(2) {
					sent = append(sent, message{from, id})
				}
			}
		}
		return sent
	})
	w.run(30 * time.Second)
	testkit.MustEqual(t, len(w.placed), learned.Max, "publishers")
	before := w.changes
	w.run(time.Minute)
	testkit.MustEqual(t, w.changes, before, "%d went in a minute", w.changes-before)
	if others := w.subject.Others(); others < 500 || others > 700 { // of 2000, at 0.3
		t.Fatalf("the others send %v msg/s", others)
	}
}

// A program with 10,000 identities at a time changes some of them each second. The store and other
// publishers can bear the load.
func TestWhatIsWrittenIsBounded(t *testing.T) {
	w := newWorld(t, 1e6, "b1")
	b1 := w.brokers["b1"]
	b1.sources = append(b1.sources, sendEvery("honest", 10*time.Millisecond))
	w.run(time.Minute)
	b1.sources = append(b1.sources, func(from, _ time.Time) (all []message) {
		n := int(from.Sub(start) / (250 * time.Millisecond))
		for i := range 500 { // each of 10,000 sends every 5 s, for half a minute
			id := n%20*500 + i
			all = append(all, message{from, fmt.Sprintf("feigned-%d-%d", id, (n+id)/120)})
		}
		return all
	})
	began, written := w.now, w.written
	w.run(3 * time.Minute)
	bound := learned.WriteBurst + int(learned.WriteRate*w.now.Sub(began).Seconds()) + learned.Max*100
	if got := w.written - written; got > bound || got < bound/10 {
		t.Fatalf("%d bytes in 3 minutes, at most %d", got, bound)
	}
	i := slices.IndexFunc(w.placed, func(p placement.Publisher) bool { return p.ID == "honest" })
	if len(w.placed) > learned.Max || i < 0 || w.placed[i].Rate != 100 || w.placed[i].Key != "" {
		t.Fatalf("%d publishers, honest is %d", len(w.placed), i)
	}
}

// The change of a topic with many publishers is stored as a change, and new publishers are learned
// within a minute or two, however many there are.
func TestWhatIsChargedIsWhatIsWritten(t *testing.T) {
	const fleet, gap = 2500, 30 * time.Second
	w := newWorld(t, 1e6, "b1")
	w.brokers["b1"].sources = append(w.brokers["b1"].sources, func(from, to time.Time) (sent []message) {
		for i := range fleet + int(from.Sub(start)/gap) { // each sends every 5 s
			at := from.Truncate(5 * time.Second).Add(time.Duration(i) * 5 * time.Second / (2 * fleet))
			if !at.Before(from) && at.Before(to) {
				sent = append(sent, message{at, fmt.Sprintf("p%05d", i)})
			}
		}
		return sent
	})
	w.run(10 * time.Minute)
	if n := len(w.placed) - fleet; n < 16 {
		t.Fatalf("%d of 19 who came are in", n)
	}
}

// The cost of a message: counting, merging with the messages of other brokers, and the search for
// groups.
func BenchmarkMessage(b *testing.B) {
	const publishers, rate = 1000, 10_000
	subject := learned.New(&catalog.Spec{}, start)
	now, named := start, []string(nil)
	for i := range publishers {
		named = append(named, fmt.Sprintf("publisher-%d", i))
	}
	subject.Orders([]string{"b1"}, false, now)
	testkit.Must(b, subject.Count("b1", tuner.Piece{First: true, Publishers: named}, nil, nil, 0, now))
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if n%(rate/4) != 0 {
			continue // as many messages at once as come in a quarter of a second
		}
		p := tuner.Piece{Start: mono.Wall(now.UnixNano())}
		for i := range rate / 4 {
			gap := uint64(time.Second / rate)
			if i == 0 {
				gap = 0
			}
			p.Gaps, p.From = append(p.Gaps, gap), append(p.From, uint32((n+i)*7919%publishers))
		}
		now = now.Add(time.Second / 4)
		for _, o := range subject.Orders([]string{"b1"}, false, now) {
			if o.Anew {
				_ = subject.Count("b1", tuner.Piece{First: true, Publishers: named}, nil, nil, 0, now)
			}
		}
		testkit.Must(b, subject.Count("b1", p, nil, nil, 0, now))
		spec := &catalog.Spec{Demand: placement.Demand{RateMilli: 1e9, Burst: 1}}
		if job := subject.CloseWindow(spec, now); job != nil {
			job.FindGroups()
			subject.Propose(job, spec, 1, 0, false, now)
		}
	}
}

// An id belongs to its first owner, whichever broker reports the owner. The id stays the owner's while
// the owner is known.
func TestAnIdIsItsOwners(t *testing.T) {
	subject, now := learned.New(&catalog.Spec{}, start), start
	send := func(broker, id, owner string) {
		t.Helper()
		p := tuner.Piece{First: true, Publishers: []string{id}, Start: mono.Wall(now.UnixNano()), Gaps: []uint64{0}, From: []uint32{0}}
		subject.Orders([]string{"b1", "b2", "b3"}, false, now)
		testkit.Must(t, subject.Count(broker, p, []string{owner}, nil, 0, now))
	}
	names := func() (ids []string) {
		for _, p := range subject.Publishers() {
			ids = append(ids, p.ID)
		}
		return ids
	}
	for range 3 {
		send("b1", "a", "") // a publisher without an owner gives way
		send("b2", "a", "auth:fleet")
		send("b3", "a", "auth:other")
		send("b1", "a", "")
		now = now.Add(learned.Window)
		subject.CloseWindow(&catalog.Spec{}, now)
	}
	if got := names(); !slices.Equal(got, []string{"a", "addr:/a", "auth:other/a"}) {
		t.Fatalf("%q", got)
	}
	// A piece without owners is accepted unchanged.
	testkit.Must(t, subject.Count("b3", tuner.Piece{First: true, Publishers: []string{"a"}}, nil, nil, 0, now))
}
