// Package learned finds out who publishes to an open topic, how much, and which of them
// fire together, from the arrivals that its brokers record. It is pure: pieces of records
// come in, and out comes whom the topic is to be placed by.
//
// # Rates
//
// Messages are counted over Windows. A publisher's rate is the mean of its last window's
// and of what it was before, so that what is older decays by half with each; it counts
// for as much as its highest rate of the last Peaks windows, so that one who sends in
// bursts of seconds is not placed anew with each. One that was heard in two windows is
// learned; one that is silent for Forget is forgotten. Silence is what a broker reports:
// while one says nothing, those who may send to it stay as they are, and so does the
// contract, which falls by what all brokers report and rises by what any one does.
//
// # When a topic is placed by them
//
// At most once in Pause, when a publisher came or went or a correlation key changed; or
// once in a window if rates, all together, differ by a quarter from those that it is
// placed by, and when the first publisher is learned. Which publishers move then,
// loaddistributor/placement says: none whose broker still carries it. The leader
// writes all of it down, so a change waits until what was written before amounts to
// WriteRate bytes/s, but for the first WriteBurst.
//
// # Bounds
//
// At most Max publishers are learned, those of the highest rates, and one that the topic is
// placed by gives way to one of more than twice its rate; twice as many are followed.
// Who is beyond that is counted with the others. One of whom a single message was heard, or
// who is not learned and silent for a minute, makes room at the end of a window when half of
// the room is taken, so that identities which are thought up as they are used do not last.
// Of one broker Budget messages are looked at in a window.
package learned

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/correlation"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	// Window is the time over which messages are counted.
	Window = 10 * time.Second
	// Peaks is of how many windows the highest rate counts.
	Peaks = 6
	// Sizes is of how many windows a contract that follows knows. Of those without messages
	// it takes one of Peaks.
	Sizes = 60
	// Pause is how long a topic is left alone after it was placed anew.
	Pause = 30 * time.Second
	// Forget is how long a publisher may be silent.
	Forget = 10 * time.Minute
	// Max is how many publishers are learned.
	Max = 10_000
	// Budget is how many messages of one broker are looked at in a window.
	Budget = 100_000
	// Grouping is how often groups are looked for.
	Grouping = time.Minute
	// WriteRate and WriteBurst bound what a topic's changes take in a store: bytes/s, and
	// bytes that go before that. The change that reaches the bound is still made.
	WriteRate, WriteBurst = 1500, 1 << 20

	followed = 2 * Max
	// differs is by what part rates differ before they count.
	differs = 0.25
	// stays is how many times its rate one must send who takes another's place below Max.
	stays = 2
	// ahead is r over the highest rate, of a contract that follows.
	ahead = 1.25
	// holes is the part of a window's messages that may be missing.
	holes = 0.01
	// steps is for how many rates, each ahead times the one before, a window's burst is kept.
	steps = 16
	// recordBytes is what a publisher takes in a store beside its id and its key.
	recordBytes = 64
	// minRate is the lowest rate that is reported, msg/s.
	minRate = 0.001
	// captureFor is what a broker is asked for at a time, captureAgain when it is asked
	// again, and restartAt at how many names its record is begun anew.
	captureFor   = 20 * time.Second
	captureAgain = 5 * time.Second
	restartAt    = 1 << 14
)

// Publisher is one that was learned.
type Publisher struct {
	ID string
	// Key is the label of the group that it fires with; empty: of none.
	Key string
	// Rate is what it counts for, and Now what it sends at present, both msg/s.
	Rate, Now float64
	Since     time.Time
	Heard     time.Time // last
	Broker    string    // where most of its messages came
	Forwarder string    // the broker that forwards for it there, as last named; "": none
}

// publisher is one that is followed.
type publisher struct {
	Publisher
	owner   string // who answers for it; empty: none
	total   uint64 // messages since it is followed, those in a window under way left out
	windows int    // in which it was heard
	member  bool   // the topic is placed by it
	silent  time.Duration
	number  int32 // for the groups
	peaks   [Peaks]float64
	window  float64 // rate in the window that is being closed
	most    float64 // of that on Broker
	absent  bool    // its broker said nothing of that window
	gone    bool    // it is followed no more
}

// Topic is what is known of one open topic's publishers. Make it with New. Look and Act
// are one goroutine's, and what is between them may go on beside everything else.
type Topic struct {
	publishers map[string]*publisher
	feeds      map[string]*feed // by broker
	window     time.Time        // when the one under way began
	turn       int              // of windows
	placed     time.Time        // anew, last
	sizes      []size           // of the last Sizes windows
	quiet      int              // windows without messages since one with
	away       bool             // a broker of the topic is not connected
	measured   bool             // all brokers said something of the last window
	room       float64          // bytes that may be written now; below 0: none
	whole      bool             // all messages are looked at
	others     float64          // msg/s, of those that are not followed
	offered    float64          // msg/s, of all in the last window
	capped     tokenbucket.Rate // that the contract would follow; 0: its tenant's limit does not matter
	counting   float64          // messages of theirs in the window under way

	// Of groups.
	trace             *tuner.Trace
	numbers           []string // publishers by their number in trace; 0 stands for the others
	missing, recorded uint64   // in traces before
	missed, had       uint64   // likewise, up to the last window's end
	// renumber: there are new ones, which have no number in the records under way.
	renumber bool
	learner  *correlation.Learner
	grouped  time.Time
	groups   []correlation.Group
	keys     map[string]string // of their members
	origin   mono.Wall
}

// feed is one broker's record.
type feed struct {
	begun   bool
	named   []*publisher // by number; nil: not followed
	counts  []uint32     // messages, by number
	tally   map[*publisher]uint64
	heard   time.Time
	covered time.Duration // of the window
	seen    uint64        // messages in the window
	asked   time.Time
	off     bool // for the rest of the window
	full    bool // it is to be begun anew, for it has named too many
}

// New returns what is known after a start: those that the topic is placed by.
func New(spec *catalog.Spec, now time.Time) *Topic {
	placed := spec.Demand.Publishers
	t := &Topic{publishers: map[string]*publisher{}, feeds: map[string]*feed{}, window: now, placed: now, grouped: now, room: WriteBurst}
	t.origin, t.learner = mono.Wall(now.UnixNano()), restored(placed)
	t.group()
	for i, p := range placed {
		one := &publisher{Publisher: Publisher{ID: p.ID, Key: p.Key, Rate: p.Rate, Now: p.Rate, Since: now, Heard: now}, windows: 2, total: 2, member: true}
		if i < len(spec.Since) {
			one.Since = time.Unix(spec.Since[i], 0)
		}
		for w := range one.peaks {
			one.peaks[w] = p.Rate
		}
		t.publishers[p.ID] = one
	}
	t.anew()
	return t
}

// restored goes on with the groups that keys stand for.
func restored(placed []placement.Publisher) *correlation.Learner {
	labels := make(map[string]string, len(placed))
	for _, p := range placed {
		labels[p.ID] = p.Key
	}
	return correlation.Restore(correlation.Config{Publishers: followed}, labels)
}

// group takes over the groups that were found.
func (t *Topic) group() {
	t.groups, t.keys = t.learner.Groups(), map[string]string{}
	for _, g := range t.groups {
		for _, m := range g.Members {
			t.keys[m.ID] = g.Label
		}
	}
}

// anew begins the records for groups.
func (t *Topic) anew() {
	if t.trace != nil {
		t.missing, t.recorded = t.Missing()
	}
	t.numbers, t.renumber = []string{""}, false
	// order: each by itself
	for _, p := range t.publishers {
		p.number = 0
	}
	t.trace = tuner.NewTrace(t.origin, func(id string) (int, bool) {
		p := t.publishers[id]
		if p == nil || p.windows < 2 || p.number == 0 && len(t.numbers) > followed {
			return 0, true
		}
		if p.number == 0 {
			p.number = int32(len(t.numbers))
			t.numbers = append(t.numbers, id)
		}
		return int(p.number), true
	})
	// order: likewise
	for _, f := range t.feeds {
		f.asked, f.begun = time.Time{}, false
	}
}

// Order is what a broker is to be asked for: arrivals for so long, 0: no more. Anew: it is
// to end first what it records now.
type Order struct {
	Broker string
	Lasts  time.Duration
	Anew   bool
}

// Orders returns what is to be asked of the topic's connected brokers now. away: others of
// its brokers are not connected.
func (t *Topic) Orders(brokers []string, away bool, now time.Time) (orders []Order) {
	t.away = t.away || away
	for _, id := range slices.Sorted(maps.Keys(t.feeds)) {
		if !slices.Contains(brokers, id) {
			t.feeds[id].flush(t)
			delete(t.feeds, id)
		}
	}
	t.trace.Expect(brokers, mono.Wall(now.UnixNano()))
	for _, id := range brokers {
		f := t.feeds[id]
		if f == nil {
			f = &feed{tally: map[*publisher]uint64{}, heard: now}
			t.feeds[id] = f
		}
		switch {
		case f.off:
		case f.seen > Budget && !t.whole:
			f.off = true
			orders = append(orders, Order{Broker: id})
		case !f.begun || f.full:
			f.full = false
			if now.Sub(f.asked) >= captureAgain {
				f.asked = now
				orders = append(orders, Order{id, captureFor, true})
			}
		case now.Sub(f.asked) >= captureAgain:
			f.asked = now
			orders = append(orders, Order{id, captureFor, false})
		}
	}
	return orders
}

// Whole says whether all messages of all brokers are wanted, or Budget is enough.
func (t *Topic) Whole(whole bool) { t.whole = whole }

// Missing returns how many messages were not recorded whole, and how many were.
func (t *Topic) Missing() (missing, recorded uint64) {
	c := t.trace.Counts()
	return t.missing + c.Lost + c.Late + c.Holed, t.recorded + c.Captured
}

// Ended says that a broker records no more: its session is another, or a fit has asked it not to.
func (t *Topic) Ended(broker string) {
	if f := t.feeds[broker]; f != nil {
		f.begun, f.asked = false, time.Time{}
	}
}

// Count takes a piece of a broker's record, of which others messages are of publishers
// that the broker does not tell apart. owners are who answers for those that it names, if
// known; one of another owner than the first of that id is given another name in the piece.
// forwarders are the brokers that forward for those that it names.
// What is wrong with it ends the record.
func (t *Topic) Count(broker string, piece tuner.Piece, owners, forwarders []string, others uint64, now time.Time) error {
	f := t.feeds[broker]
	if f == nil || !piece.First && !f.begun {
		return nil // of a record that is over
	}
	for i, owner := range owners[:min(len(owners), len(piece.Publishers))] {
		piece.Publishers[i] = t.own(piece.Publishers[i], owner, now)
	}
	piece.Lost -= min(piece.Lost, others)
	if err := t.trace.Add(broker, piece, mono.Wall(now.UnixNano())); err != nil {
		f.flush(t)
		f.begun, f.asked = false, now
		return err
	}
	if piece.First {
		f.flush(t)
		f.begun, f.heard = true, now
	}
	for i, id := range piece.Publishers {
		p := t.follow(id, now)
		if p != nil {
			p.Forwarder = ""
			if i < len(forwarders) {
				p.Forwarder = forwarders[i]
			}
		}
		f.named = append(f.named, p)
		f.counts = append(f.counts, 0)
	}
	for _, n := range piece.From {
		f.counts[n]++
	}
	n := float64(len(piece.From)) + float64(others)
	if n+float64(piece.Lost) > 0 {
		f.covered += time.Duration(float64(now.Sub(f.heard)) * n / (n + float64(piece.Lost)))
	} else {
		f.covered += now.Sub(f.heard)
	}
	f.heard = now
	f.seen += uint64(n)
	t.counting += float64(others)
	return nil
}

// own returns what a publisher is known as: by its id, unless another owner answers for that.
func (t *Topic) own(id, owner string, now time.Time) string {
	p := t.follow(id, now)
	switch {
	case p == nil || p.owner == owner:
		return id
	case p.owner == "":
		p.owner = owner
		return id
	}
	return cmp.Or(owner, "addr:") + "/" + id
}

// follow returns the publisher of a name; nil: it is one of the others.
func (t *Topic) follow(id string, now time.Time) *publisher {
	p := t.publishers[id]
	if p == nil && len(t.publishers) < followed && id != "" && len(id) <= placement.MaxID {
		p = &publisher{Publisher: Publisher{ID: id, Since: now, Heard: now}}
		t.publishers[id] = p
	}
	return p
}

// flush takes the counts out of a record.
func (f *feed) flush(t *Topic) {
	for i, n := range f.counts {
		p := f.named[i]
		switch {
		case n == 0:
			continue
		case p != nil && p.gone: // and is back
			p = t.follow(t.own(p.ID, p.owner, f.heard), f.heard)
			f.named[i] = p
		}
		if p == nil {
			t.counting += float64(n)
		} else {
			f.tally[p] += uint64(n)
		}
	}
	f.named, f.counts = nil, nil
}

// close ends a window.
func (t *Topic) close(now time.Time) {
	took := now.Sub(t.window)
	t.measured, t.away = !t.away && len(t.feeds) > 0, false
	for _, id := range slices.Sorted(maps.Keys(t.feeds)) {
		f := t.feeds[id]
		named := f.named
		f.flush(t)
		f.named, f.counts = named, make([]uint32, len(named)) // the record goes on
		covered := f.covered.Seconds()
		silent := f.covered < time.Second
		// order: each publisher by itself
		for p, n := range f.tally {
			if rate := float64(n) / max(covered, 1); rate > p.most {
				p.most, p.Broker = rate, id
			}
			p.window += float64(n) / max(covered, 1)
			p.total += n
			p.Heard = now
		}
		if silent {
			t.measured = false
			// order: likewise
			for _, p := range t.publishers {
				p.absent = p.absent || p.Broker == id
			}
		}
		f.tally, f.covered, f.seen, f.off = map[*publisher]uint64{}, 0, 0, false
		f.full = len(named) > restartAt
	}
	t.offered = t.counting / took.Seconds()
	t.others = (t.others + t.counting/took.Seconds()) / 2
	t.room = min(WriteBurst, t.room+WriteRate*took.Seconds())
	t.counting = 0
	t.window = now
	t.turn++
	crowded := len(t.publishers) > followed/2
	// order: each by itself
	for id, p := range t.publishers {
		t.offered += p.window
		// It may send to a broker that has not said so.
		unknown := p.window == 0 && (p.absent || !t.measured && t.feeds[p.Broker] == nil)
		switch {
		case p.windows < 2: // the first was not whole
			p.Now = p.window
		case !unknown:
			p.Now = (p.Now + p.window) / 2
		}
		if p.window > 0 {
			p.silent = 0
		} else if !unknown {
			p.silent += took
		}
		if p.window > 0 {
			p.windows++
			t.renumber = t.renumber || p.windows == 2
		}
		p.peaks[t.turn%Peaks] = p.Now
		p.Rate = slices.Max(p.peaks[:])
		p.window, p.most, p.absent = 0, 0, false
		if p.silent >= Forget || crowded && (p.total < 2 || !p.member && p.silent >= Peaks*Window) {
			delete(t.publishers, id)
			p.gone = true
		}
	}
}

// size is what a window would have needed.
type size struct {
	rate   float64 // msg/s
	bursts []need
	holed  bool // more of its messages than holes are missing: it needed at least so much
}

// need is the burst that it takes at a rate.
type need struct {
	rate  tokenbucket.Rate
	burst int64
}

// at returns the burst that is enough at a rate: that of the highest rate known up to it.
func (s size) at(rate tokenbucket.Rate) int64 {
	burst := int64(1)
	for i, n := range s.bursts { // in order of rate
		if i == 0 || n.rate <= rate {
			burst = n.burst
		}
	}
	return burst
}

// follows is the rate of a contract for so many msg/s.
func follows(rate float64) tokenbucket.Rate {
	return max(tokenbucket.PerSecond(round(ahead*max(rate, minRate))), 1000)
}

// sized takes what the last window would have needed, if it is evidence: of a window that
// not all brokers reported only that it was at least so much is known.
func (t *Topic) sized(j *Job, is tokenbucket.Share, measured bool) {
	if t.sizes == nil && measured { // before a restart
		t.sizes = slices.Repeat([]size{{is.Rate.PerSecond() / ahead, []need{{is.Rate, is.Burst}}, false}}, Sizes)
	}
	s := size{j.offered, j.bursts, j.holed}
	switch {
	case j.offered > 0:
		t.quiet = 0
		if !j.measured && j.offered <= is.Rate.PerSecond()/ahead && s.at(is.Rate) <= is.Burst {
			return
		}
	case !j.measured || len(t.sizes) == 0:
		return
	default:
		if t.quiet++; t.quiet%Peaks != 0 {
			return
		}
	}
	t.sizes = append(t.sizes[max(0, len(t.sizes)-Sizes+1):], s)
}

// contract is what follows from the windows known; that which is, if nothing does. Each of
// the brokers needs a token.
func (t *Topic) contract(is tokenbucket.Share, auto catalog.Auto, brokers int, now time.Time) tokenbucket.Share {
	if len(t.sizes) < Peaks || auto == (catalog.Auto{}) {
		return is
	}
	to, rate, burst, holed := is, 0.0, int64(1), 0
	for _, s := range t.sizes {
		rate = max(rate, s.rate)
	}
	if auto.MaxRate > 0 {
		to.Rate = min(tokenbucket.Rate(auto.MaxRate), follows(rate))
	}
	for _, s := range t.sizes {
		burst = max(burst, s.at(to.Rate))
		if s.holed {
			holed++
		}
	}
	if 2*holed > len(t.sizes) {
		burst = max(burst, is.Burst)
	}
	if auto.MaxBurst > 0 {
		to.Burst = min(max(burst, auto.MinBurst, int64(brokers)), auto.MaxBurst)
	}
	apart := func(a, b int64) bool { return math.Abs(float64(a-b)) > differs*float64(b) }
	grows := to.Rate > is.Rate && (apart(int64(to.Rate), int64(is.Rate)) || int64(to.Rate) == auto.MaxRate)
	if auto.Measured && !grows && (now.Sub(t.placed) < Pause || !apart(int64(to.Rate), int64(is.Rate)) && !apart(to.Burst, is.Burst)) {
		return is
	}
	return to
}

// Job is a look at a topic. Think uses nothing that the Topic does elsewhere.
type Job struct {
	arrivals []tuner.Arrival
	numbers  []string
	learner  *correlation.Learner
	learns   bool
	torn     bool
	until    mono.Time // of the record that arrivals are the end of
	offered  float64   // msg/s
	measured bool      // by all brokers
	holed    bool

	// Which bursts the window needed, so that a quantile of messages waits for no token: at the
	// contract's rate, and at those below it that the contract may fall to; 0: none is asked for.
	rate     tokenbucket.Rate
	quantile float64
	bursts   []need
}

// Look ends the window if it is over, and returns what is to be thought about; nil: nothing.
func (t *Topic) Look(spec *catalog.Spec, now time.Time) *Job {
	if now.Sub(t.window) < Window {
		return nil
	}
	t.close(now)
	j := &Job{arrivals: t.trace.Take(mono.Wall(now.UnixNano())), numbers: t.numbers, learner: t.learner, offered: t.offered, measured: t.measured}
	j.until = t.trace.Taken()
	missing, recorded := t.Missing()
	j.holed = float64(missing-t.missed) > holes*float64(missing-t.missed+recorded-t.had)
	t.missed, t.had = missing, recorded
	if spec.Auto != (catalog.Auto{}) {
		j.rate, j.quantile = tokenbucket.Rate(spec.Demand.RateMilli), spec.SLO.Quantile
	}
	if t.renumber && (!t.whole || t.turn < 4) || len(t.numbers) > followed { // it tears the record
		j.torn = true
		t.anew()
	}
	if now.Sub(t.grouped) >= Grouping {
		t.grouped, j.learns = now, true
	}
	return j
}

// Arrivals calls f with each message that was recorded in the window before, in order; without
// an id are those of publishers that are not told apart.
func (j *Job) Arrivals(f func(id string, at mono.Time)) {
	for _, a := range j.arrivals {
		f(j.numbers[a.Publisher], a.At)
	}
}

// Until returns the end of the time in which all messages that were recorded are among the
// Arrivals of this job and of those before.
func (j *Job) Until() mono.Time { return j.until }

// Torn reports whether the record began anew after these arrivals: some are missing between
// them and the next.
func (j *Job) Torn() bool { return j.torn }

// Think may take its time, for it looks for groups.
func (j *Job) Think() {
	for _, a := range j.arrivals {
		if a.Publisher > 0 {
			j.learner.Arrive(j.numbers[a.Publisher], a.At)
		}
	}
	if j.learns {
		j.learner.Learn()
	}
	if j.rate > 0 && len(j.arrivals) > 0 {
		rate := follows(j.offered)
		for n := 0; n < steps && rate < j.rate; n++ {
			j.bursts = append(j.bursts, need{rate, sizing.Burst(j.arrivals, rate.PerSecond(), j.quantile, 0)})
			rate = tokenbucket.Rate(ahead * float64(rate))
		}
		j.bursts = append(j.bursts, need{j.rate, sizing.Burst(j.arrivals, j.rate.PerSecond(), j.quantile, 0)})
	}
}

// Proposal is what a topic is to become.
type Proposal struct {
	Spec *catalog.Spec
	At   map[string]string // where those are that are new, by id
	// Grew: their rates sum to a quarter more than those before, and than half the contract,
	// which the topic was placed for before any publisher was known.
	Grew bool
}

// Capped returns the rate that the contract would have without its tenant's limit; 0: the limit
// does not matter.
func (t *Topic) Capped() tokenbucket.Rate { return t.capped }

// Act ends a job; nil: the topic, which is on so many brokers, stays as it is. The rates of
// its publishers sum to at most that of the contract.
//
// limited: the tenant of the topic has a limit, and the contract follows up to most, what the
// tenant's other topics leave of it.
func (t *Topic) Act(j *Job, spec *catalog.Spec, brokers int, most tokenbucket.Rate, limited bool, now time.Time) *Proposal {
	placed, contract := spec.Demand.Publishers, tokenbucket.Share{Rate: tokenbucket.Rate(spec.Demand.RateMilli), Burst: spec.Demand.Burst}
	t.sized(j, contract, spec.Auto.Measured)
	to := t.contract(contract, spec.Auto, brokers, now)
	t.capped = 0
	if most = max(most, contract.Rate); limited && to.Rate > most {
		t.capped = to.Rate
		auto := spec.Auto
		auto.MaxRate = int64(most)
		to = t.contract(contract, auto, brokers, now)
	}
	known := spec.Auto != (catalog.Auto{}) && len(t.sizes) >= Peaks
	limit := to.Rate.PerSecond()
	if j.learns {
		t.group()
	}
	was := make(map[string]placement.Publisher, len(placed))
	before, apart := 0.0, 0.0
	for _, p := range placed {
		was[p.ID] = p
		before += p.Rate
	}
	// order: each by itself
	for id, p := range t.publishers {
		_, p.member = was[id]
	}
	learned := t.Publishers()
	sum := 0.0
	for _, p := range learned {
		sum += p.Rate
	}
	scale := min(1, 0.999*limit/max(sum, minRate)) // a topic may be offered more than its contract
	changed := len(learned) != len(placed)
	for _, p := range learned {
		old, known := was[p.ID]
		changed = changed || !known || old.Key != p.Key
		apart += math.Abs(old.Rate - scale*p.Rate)
	}
	if !(to != contract || known && !spec.Auto.Measured || apart > differs*before || changed && now.Sub(t.placed) >= Pause) || t.room < 0 {
		return nil
	}
	next := *spec
	next.Demand.RateMilli, next.Demand.Rate, next.Demand.Burst = int64(to.Rate), (int64(to.Rate)+999)/1000, to.Burst
	next.Demand.Publishers, next.Since = nil, nil
	next.Auto.Measured = spec.Auto.Measured || known
	at := map[string]string{}
	for _, p := range learned {
		if _, known := was[p.ID]; !known {
			at[p.ID] = p.Broker
		}
		next.Demand.Publishers = append(next.Demand.Publishers, placement.Publisher{ID: p.ID, Key: p.Key, Rate: round(scale * p.Rate)})
		next.Since = append(next.Since, p.Since.Unix())
	}
	t.placed = now
	t.room -= float64(written(spec, &next))
	return &Proposal{Spec: &next, At: at, Grew: scale*sum > (1+differs)*max(before, limit/2)}
}

// written is what a change takes in a store, about.
func written(was, is *catalog.Spec) (bytes int) {
	publishers := is.Demand.Publishers
	if _, added, short := catalog.Edits(was, is); short {
		publishers = nil
		for _, i := range added {
			publishers = append(publishers, is.Demand.Publishers[i])
		}
	}
	for _, p := range publishers {
		bytes += recordBytes + len(p.ID) + len(p.Key)
	}
	return bytes
}

// Within returns publishers with their rates less, as far as they sum to more than limit.
func Within(publishers []placement.Publisher, limit float64) []placement.Publisher {
	sum := 0.0
	for _, p := range publishers {
		sum += p.Rate
	}
	if sum <= limit {
		return publishers
	}
	publishers = slices.Clone(publishers)
	for i := range publishers {
		publishers[i].Rate = round(publishers[i].Rate * 0.999 * limit / sum)
	}
	return publishers
}

// round keeps three digits, downwards, so that noise takes no room in a store.
func round(rate float64) float64 {
	digit := math.Pow(10, math.Floor(math.Log10(rate))-2)
	return max(math.Floor(rate/digit)*digit, 1e-9)
}

// Publishers returns those that are learned, by id.
func (t *Topic) Publishers() []Publisher {
	all, _ := t.learned()
	return all
}

// learned is Publishers, and the rate that those send who are beyond Max.
func (t *Topic) learned() (all []Publisher, beyond float64) {
	var known []*publisher
	// order: sorted below
	for _, p := range t.publishers {
		if p.windows > 1 {
			known = append(known, p)
		}
	}
	if len(known) > Max {
		rank := func(p *publisher) float64 {
			if p.member {
				return stays * p.Rate
			}
			return p.Rate
		}
		slices.SortFunc(known, func(a, b *publisher) int { return cmp.Or(cmp.Compare(rank(b), rank(a)), cmp.Compare(a.ID, b.ID)) })
		for _, p := range known[Max:] {
			beyond += p.Now
		}
		known = known[:Max]
	}
	for _, p := range known {
		one := p.Publisher
		one.Key, one.Rate = t.keys[p.ID], max(p.Rate, minRate)
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b Publisher) int { return cmp.Compare(a.ID, b.ID) })
	return all, beyond
}

// Others returns the rate, msg/s, of those that are not told apart, or are beyond Max.
func (t *Topic) Others() float64 {
	_, beyond := t.learned()
	return t.others + beyond
}

// Groups returns those found last, with the evidence.
func (t *Topic) Groups() []correlation.Group { return t.groups }
