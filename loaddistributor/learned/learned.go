// Package learned finds the publishers of an open topic, their rates, and which of them
// fire together. It uses the arrivals that the topic's brokers record. The package is
// pure: pieces of records come in, and the publishers for the topic's placement come out.
//
// # Rates
//
// Messages are counted over Windows. A publisher's rate is the mean of its rate in the
// last window and its previous rate, so older windows decay by half with each window. The
// publisher counts with its highest rate of the last Peaks windows. So a publisher with
// bursts of seconds is not placed anew with each burst. A publisher with messages in two
// windows is learned. A publisher silent for Forget is forgotten. A publisher counts as silent
// only if its broker reports. While a broker does not report, its publishers keep their
// rates, and the contract does not fall. The contract falls only by windows that all
// brokers reported, and rises by the report of any broker.
//
// # When the topic is placed anew
//
// The topic is placed anew at most once in Pause, when a publisher came or went or a
// correlation key changed. It is also placed anew, once in a window, if the sum of all
// rate changes exceeds a quarter of the placed rates, and when the first publisher is
// learned. loaddistributor/placement chooses the publishers to move: no publisher moves
// while its broker can carry it. The leader writes every change to the journal. So a
// change waits until the earlier changes amount to WriteRate bytes/s, except for the
// first WriteBurst bytes.
//
// # Bounds
//
// At most Max publishers are learned, the publishers with the highest rates. A placed
// publisher gives way only to a publisher of more than twice its rate. Twice Max
// publishers are followed. Further publishers count as others. If half of the followed
// places are taken at the end of a window, two kinds of publishers make room: publishers
// with a single message, and publishers outside the placement that were silent for a
// minute. So identities invented for one use do not last. The learner looks at Budget
// messages per broker and window.
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
	// Window is the period over which messages are counted.
	Window = 10 * time.Second
	// Peaks is the number of windows over which the highest rate counts.
	Peaks = 6
	// Sizes is the number of windows that an automatic contract considers. Among
	// consecutive windows without messages, only each Peaks-th counts.
	Sizes = 60
	// Pause is the minimum time between two placements of a topic, except for changed
	// rates.
	Pause = 30 * time.Second
	// Forget is the silence after which a publisher is forgotten.
	Forget = 10 * time.Minute
	// Max is the maximum number of learned publishers.
	Max = 10_000
	// Budget is the number of messages per broker and window to look at.
	Budget = 100_000
	// Grouping is the interval between searches for groups.
	Grouping = time.Minute
	// WriteRate, in bytes/s, and WriteBurst, in bytes, bound the store writes of a topic's
	// changes. The change that reaches the bound is still made.
	WriteRate, WriteBurst = 1500, 1 << 20

	maxFollowed = 2 * Max
	// tolerance is the relative difference from which rates count as different.
	tolerance = 0.25
	// memberAdvantage is the factor by which a new publisher must exceed a placed publisher to
	// replace it at Max.
	memberAdvantage = 2
	// ahead is the ratio of an automatic contract's rate to the highest measured rate.
	ahead = 1.25
	// holes is the tolerated part of missing messages in a window.
	holes = 0.01
	// steps is the number of rates, each ahead times the previous rate, for which a
	// window's burst is kept.
	steps = 16
	// recordBytes estimates the store bytes of a publisher beside its id and its key.
	recordBytes = 64
	// minRate is the lowest reported rate, msg/s.
	minRate = 0.001
	// captureFor is the recording time of one request to a broker. captureAgain is the
	// interval between requests. A record with more than restartAt names is started again.
	captureFor   = 20 * time.Second
	captureAgain = 5 * time.Second
	restartAt    = 1 << 14
)

// Publisher is a learned publisher.
type Publisher struct {
	ID string
	// Key is the label of the publisher's group, or empty.
	Key string
	// Rate is the rate for the placement and Now the present rate, both msg/s.
	Rate, Now float64
	Since     time.Time
	Heard     time.Time // time of the last message
	Broker    string    // the broker that receives most of its messages
	Forwarder string    // the broker that forwards to Broker for the publisher, as last named; "": none
}

// publisher is a followed publisher.
type publisher struct {
	Publisher
	owner      string // identity that answers for the publisher; empty: none
	total      uint64 // messages since the first, without the current window
	windows    int    // number of windows with messages
	member     bool   // the topic's placement contains the publisher
	silent     time.Duration
	number     int32 // number in the record for groups
	peaks      [Peaks]float64
	window     float64 // rate in the window that is being closed
	brokerRate float64 // the part of window on Broker
	absent     bool    // Broker did not report in that window
	gone       bool    // no longer followed
}

// Topic is the knowledge of one open topic's publishers. Make it with New. One goroutine
// calls CloseWindow and Propose. The Job between them may run concurrently with everything else.
type Topic struct {
	publishers   map[string]*publisher
	recordings   map[string]*recording // by broker
	window       time.Time             // start of the current window
	windowCount  int                   // of windows
	placed       time.Time             // time of the last placement
	sizes        []size                // the last Sizes windows
	quiet        int                   // windows without messages since the last window with messages
	disconnected bool                  // a broker of the topic is not connected
	measured     bool                  // all brokers reported in the last window
	room         float64               // bytes that may be written now; below 0: none
	whole        bool                  // look at all messages
	others       float64               // msg/s, of publishers that are not followed
	offered      float64               // msg/s, of all publishers in the last window
	capped       tokenbucket.Rate      // rate that the contract would follow without its tenant's limit; 0: the limit does not matter
	counting     float64               // messages of other publishers in the current window

	// For groups.
	trace                           *tuner.Trace
	numbers                         []string // publisher ids by their number in trace; 0 stands for the others
	earlierMissing, earlierRecorded uint64   // of earlier traces
	missingBefore, recordedBefore   uint64   // missing and recorded at the end of the last window
	// renumber means that new publishers have no number in the current records.
	renumber bool
	learner  *correlation.Learner
	grouped  time.Time
	groups   []correlation.Group
	keys     map[string]string // label by member id
	origin   mono.Wall
}

// recording is the record of one broker.
type recording struct {
	started   bool
	named     []*publisher // by number; nil: not followed
	counts    []uint32     // messages, by number
	tally     map[*publisher]uint64
	lastPiece time.Time
	covered   time.Duration // recorded part of the window
	messages  uint64        // messages in the window
	requested time.Time
	stopped   bool // recording is off for the rest of the window
	full      bool // to be started again, because the record has named too many publishers
}

// New returns the knowledge after a start: the publishers of the topic's placement.
func New(spec *catalog.Spec, now time.Time) *Topic {
	placed := spec.Demand.Publishers
	t := &Topic{publishers: map[string]*publisher{}, recordings: map[string]*recording{}, window: now, placed: now, grouped: now, room: WriteBurst}
	t.origin, t.learner = mono.Wall(now.UnixNano()), restored(placed)
	t.group()
	for i, p := range placed {
		added := &publisher{Publisher: Publisher{ID: p.ID, Key: p.Key, Rate: p.Rate, Now: p.Rate, Since: now, Heard: now}, windows: 2, total: 2, member: true}
		if i < len(spec.Since) {
			added.Since = time.Unix(spec.Since[i], 0)
		}
		for w := range added.peaks {
			added.peaks[w] = p.Rate
		}
		t.publishers[p.ID] = added
	}
	t.anew()
	return t
}

// restored returns a learner with the groups of the placement's keys.
func restored(placed []placement.Publisher) *correlation.Learner {
	labels := make(map[string]string, len(placed))
	for _, p := range placed {
		labels[p.ID] = p.Key
	}
	return correlation.Restore(correlation.Config{Publishers: maxFollowed}, labels)
}

// group adopts the groups of the learner.
func (t *Topic) group() {
	t.groups, t.keys = t.learner.Groups(), map[string]string{}
	for _, g := range t.groups {
		for _, m := range g.Members {
			t.keys[m.ID] = g.Label
		}
	}
}

// anew starts new records for groups.
func (t *Topic) anew() {
	if t.trace != nil {
		t.earlierMissing, t.earlierRecorded = t.Missing()
	}
	t.numbers, t.renumber = []string{""}, false
	// order: each by itself
	for _, p := range t.publishers {
		p.number = 0
	}
	t.trace = tuner.NewTrace(t.origin, func(id string) (int, bool) {
		p := t.publishers[id]
		if p == nil || p.windows < 2 || p.number == 0 && len(t.numbers) > maxFollowed {
			return 0, true
		}
		if p.number == 0 {
			p.number = int32(len(t.numbers))
			t.numbers = append(t.numbers, id)
		}
		return int(p.number), true
	})
	// order: each by itself
	for _, f := range t.recordings {
		f.requested, f.started = time.Time{}, false
	}
}

// Order is a request to a broker to record arrivals for Lasts; 0 ends the recording. Anew
// first ends the present record.
type Order struct {
	Broker string
	Lasts  time.Duration
	Anew   bool
}

// Orders returns the requests that the topic's connected brokers should receive now.
// disconnected means that other brokers of the topic are not connected.
func (t *Topic) Orders(brokers []string, disconnected bool, now time.Time) (orders []Order) {
	t.disconnected = t.disconnected || disconnected
	for _, id := range slices.Sorted(maps.Keys(t.recordings)) {
		if !slices.Contains(brokers, id) {
			t.recordings[id].flush(t)
			delete(t.recordings, id)
		}
	}
	t.trace.Expect(brokers, mono.Wall(now.UnixNano()))
	for _, id := range brokers {
		f := t.recordings[id]
		if f == nil {
			f = &recording{tally: map[*publisher]uint64{}, lastPiece: now}
			t.recordings[id] = f
		}
		switch {
		case f.stopped:
		case f.messages > Budget && !t.whole:
			f.stopped = true
			orders = append(orders, Order{Broker: id})
		case !f.started || f.full:
			f.full = false
			if now.Sub(f.requested) >= captureAgain {
				f.requested = now
				orders = append(orders, Order{id, captureFor, true})
			}
		case now.Sub(f.requested) >= captureAgain:
			f.requested = now
			orders = append(orders, Order{id, captureFor, false})
		}
	}
	return orders
}

// Whole selects whether to look at all messages of all brokers or at Budget messages.
func (t *Topic) Whole(whole bool) { t.whole = whole }

// Missing returns the number of messages without a complete record, and the number of
// recorded messages.
func (t *Topic) Missing() (missing, recorded uint64) {
	c := t.trace.Counts()
	return t.earlierMissing + c.Lost + c.Late + c.Holed, t.earlierRecorded + c.Captured
}

// Ended records that a broker has stopped recording, because its session is new or a fit
// has ended the recording.
func (t *Topic) Ended(broker string) {
	if f := t.recordings[broker]; f != nil {
		f.started, f.requested = false, time.Time{}
	}
}

// Count adds a piece of a broker's record. others is the number of messages from
// publishers that the broker does not distinguish. owners are the known owners of the
// piece's publishers. A publisher whose owner differs from the first owner of its id is
// renamed in the piece. forwarders are the brokers that forward for the piece's
// publishers. An invalid piece ends the record.
func (t *Topic) Count(broker string, piece tuner.Piece, owners, forwarders []string, others uint64, now time.Time) error {
	f := t.recordings[broker]
	if f == nil || !piece.First && !f.started {
		return nil // the record is over
	}
	for i, owner := range owners[:min(len(owners), len(piece.Publishers))] {
		piece.Publishers[i] = t.nameOf(piece.Publishers[i], owner, now)
	}
	piece.Lost -= min(piece.Lost, others)
	if err := t.trace.Add(broker, piece, mono.Wall(now.UnixNano())); err != nil {
		f.flush(t)
		f.started, f.requested = false, now
		return err
	}
	if piece.First {
		f.flush(t)
		f.started, f.lastPiece = true, now
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
		f.covered += time.Duration(float64(now.Sub(f.lastPiece)) * n / (n + float64(piece.Lost)))
	} else {
		f.covered += now.Sub(f.lastPiece)
	}
	f.lastPiece = now
	f.messages += uint64(n)
	t.counting += float64(others)
	return nil
}

// nameOf returns the name of a publisher: its id, unless another owner already answers for
// the id.
func (t *Topic) nameOf(id, owner string, now time.Time) string {
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

// follow returns the publisher of the given name, or nil if the publisher counts as one
// of the others.
func (t *Topic) follow(id string, now time.Time) *publisher {
	p := t.publishers[id]
	if p == nil && len(t.publishers) < maxFollowed && id != "" && len(id) <= placement.MaxID {
		p = &publisher{Publisher: Publisher{ID: id, Since: now, Heard: now}}
		t.publishers[id] = p
	}
	return p
}

// flush moves the record's counts into its tally.
func (f *recording) flush(t *Topic) {
	for i, n := range f.counts {
		p := f.named[i]
		switch {
		case n == 0:
			continue
		case p != nil && p.gone: // and sends again
			p = t.follow(t.nameOf(p.ID, p.owner, f.lastPiece), f.lastPiece)
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
	elapsed := now.Sub(t.window)
	t.measured, t.disconnected = !t.disconnected && len(t.recordings) > 0, false
	for _, id := range slices.Sorted(maps.Keys(t.recordings)) {
		f := t.recordings[id]
		named := f.named
		f.flush(t)
		f.named, f.counts = named, make([]uint32, len(named)) // the record continues
		covered := f.covered.Seconds()
		silent := f.covered < time.Second
		// order: each publisher by itself
		for p, n := range f.tally {
			if rate := float64(n) / max(covered, 1); rate > p.brokerRate {
				p.brokerRate, p.Broker = rate, id
			}
			p.window += float64(n) / max(covered, 1)
			p.total += n
			p.Heard = now
		}
		if silent {
			t.measured = false
			// order: each publisher by itself
			for _, p := range t.publishers {
				p.absent = p.absent || p.Broker == id
			}
		}
		f.tally, f.covered, f.messages, f.stopped = map[*publisher]uint64{}, 0, 0, false
		f.full = len(named) > restartAt
	}
	t.offered = t.counting / elapsed.Seconds()
	t.others = (t.others + t.counting/elapsed.Seconds()) / 2
	t.room = min(WriteBurst, t.room+WriteRate*elapsed.Seconds())
	t.counting = 0
	t.window = now
	t.windowCount++
	crowded := len(t.publishers) > maxFollowed/2
	// order: each by itself
	for id, p := range t.publishers {
		t.offered += p.window
		// The publisher may have sent to a broker without a report.
		unknown := p.window == 0 && (p.absent || !t.measured && t.recordings[p.Broker] == nil)
		switch {
		case p.windows < 2: // the first window was not complete
			p.Now = p.window
		case !unknown:
			p.Now = (p.Now + p.window) / 2
		}
		if p.window > 0 {
			p.silent = 0
		} else if !unknown {
			p.silent += elapsed
		}
		if p.window > 0 {
			p.windows++
			t.renumber = t.renumber || p.windows == 2
		}
		p.peaks[t.windowCount%Peaks] = p.Now
		p.Rate = slices.Max(p.peaks[:])
		p.window, p.brokerRate, p.absent = 0, 0, false
		if p.silent >= Forget || crowded && (p.total < 2 || !p.member && p.silent >= Peaks*Window) {
			delete(t.publishers, id)
			p.gone = true
		}
	}
}

// size is the contract that a window would have needed.
type size struct {
	rate   float64 // msg/s
	bursts []burstAt
	holed  bool // more than holes of its messages are missing, so the window needed at least bursts
}

// burstAt is the burst needed at a rate.
type burstAt struct {
	rate  tokenbucket.Rate
	burst int64
}

// burst returns the burst needed at a rate: the burst of the highest known rate that does
// not exceed the rate.
func (s size) burst(rate tokenbucket.Rate) int64 {
	burst := int64(1)
	for i, n := range s.bursts { // in order of rate
		if i == 0 || n.rate <= rate {
			burst = n.burst
		}
	}
	return burst
}

// contractRate returns the contract's rate for a measured rate in msg/s.
func contractRate(rate float64) tokenbucket.Rate {
	return max(tokenbucket.PerSecond(round(ahead*max(rate, minRate))), 1000)
}

// recordSize records the needs of the last window if they are evidence. A window without
// reports of all brokers shows only a lower bound.
func (t *Topic) recordSize(j *Job, current tokenbucket.Share, measured bool) {
	if t.sizes == nil && measured { // after a restart
		t.sizes = slices.Repeat([]size{{current.Rate.PerSecond() / ahead, []burstAt{{current.Rate, current.Burst}}, false}}, Sizes)
	}
	s := size{j.offered, j.bursts, j.holed}
	switch {
	case j.offered > 0:
		t.quiet = 0
		if !j.measured && j.offered <= current.Rate.PerSecond()/ahead && s.burst(current.Rate) <= current.Burst {
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

// contract returns the contract that follows from the known windows, or current. Each of the
// brokers needs at least one token of burst.
func (t *Topic) contract(current tokenbucket.Share, auto catalog.Auto, brokers int, now time.Time) tokenbucket.Share {
	if len(t.sizes) < Peaks || auto == (catalog.Auto{}) {
		return current
	}
	next, rate, burst, holed := current, 0.0, int64(1), 0
	for _, s := range t.sizes {
		rate = max(rate, s.rate)
	}
	if auto.MaxRate > 0 {
		next.Rate = min(tokenbucket.Rate(auto.MaxRate), contractRate(rate))
	}
	for _, s := range t.sizes {
		burst = max(burst, s.burst(next.Rate))
		if s.holed {
			holed++
		}
	}
	if 2*holed > len(t.sizes) {
		burst = max(burst, current.Burst)
	}
	if auto.MaxBurst > 0 {
		next.Burst = min(max(burst, auto.MinBurst, int64(brokers)), auto.MaxBurst)
	}
	apart := func(a, b int64) bool { return math.Abs(float64(a-b)) > tolerance*float64(b) }
	grows := next.Rate > current.Rate && (apart(int64(next.Rate), int64(current.Rate)) || int64(next.Rate) == auto.MaxRate)
	if auto.Measured && !grows && (now.Sub(t.placed) < Pause || !apart(int64(next.Rate), int64(current.Rate)) && !apart(next.Burst, current.Burst)) {
		return current
	}
	return next
}

// Job is one evaluation of a topic. FindGroups uses no data that Topic uses concurrently.
type Job struct {
	arrivals      []tuner.Arrival
	numbers       []string
	learner       *correlation.Learner
	findGroups    bool
	torn          bool
	recordedUntil mono.Time // end of the record that contains arrivals
	offered       float64   // msg/s
	measured      bool      // all brokers reported
	holed         bool

	// bursts are the window's needs at which a quantile of messages waits for no token: at
	// rate, the contract's rate, and at lower rates that the contract may fall to. Rate 0
	// requests no bursts.
	rate     tokenbucket.Rate
	quantile float64
	bursts   []burstAt
}

// CloseWindow ends the window if its time is over, and returns the job to evaluate, or nil.
func (t *Topic) CloseWindow(spec *catalog.Spec, now time.Time) *Job {
	if now.Sub(t.window) < Window {
		return nil
	}
	t.close(now)
	j := &Job{arrivals: t.trace.Take(mono.Wall(now.UnixNano())), numbers: t.numbers, learner: t.learner, offered: t.offered, measured: t.measured}
	j.recordedUntil = t.trace.TakenUntil()
	missing, recorded := t.Missing()
	j.holed = float64(missing-t.missingBefore) > holes*float64(missing-t.missingBefore+recorded-t.recordedBefore)
	t.missingBefore, t.recordedBefore = missing, recorded
	if spec.Auto != (catalog.Auto{}) {
		j.rate, j.quantile = tokenbucket.Rate(spec.Demand.RateMilli), spec.SLO.Quantile
	}
	if t.renumber && (!t.whole || t.windowCount < 4) || len(t.numbers) > maxFollowed { // restarting tears the record
		j.torn = true
		t.anew()
	}
	if now.Sub(t.grouped) >= Grouping {
		t.grouped, j.findGroups = now, true
	}
	return j
}

// Arrivals calls f with each message recorded in the last window, in order. The id is
// empty for publishers that are not distinguished.
func (j *Job) Arrivals(f func(id string, at mono.Time)) {
	for _, a := range j.arrivals {
		f(j.numbers[a.Publisher], a.At)
	}
}

// Until returns the end of the completely recorded time: all recorded messages before
// Until are in the Arrivals of this job or of earlier jobs.
func (j *Job) Until() mono.Time { return j.recordedUntil }

// Torn reports whether the record restarted after these arrivals, so messages are missing
// before the next arrivals.
func (j *Job) Torn() bool { return j.torn }

// FindGroups searches for groups, which may take long.
func (j *Job) FindGroups() {
	for _, a := range j.arrivals {
		if a.Publisher > 0 {
			j.learner.Arrive(j.numbers[a.Publisher], a.At)
		}
	}
	if j.findGroups {
		j.learner.Learn()
	}
	if j.rate > 0 && len(j.arrivals) > 0 {
		rate := contractRate(j.offered)
		for n := 0; n < steps && rate < j.rate; n++ {
			j.bursts = append(j.bursts, burstAt{rate, sizing.Burst(j.arrivals, rate.PerSecond(), j.quantile, 0)})
			rate = tokenbucket.Rate(ahead * float64(rate))
		}
		j.bursts = append(j.bursts, burstAt{j.rate, sizing.Burst(j.arrivals, j.rate.PerSecond(), j.quantile, 0)})
	}
}

// Proposal is a new placement of a topic.
type Proposal struct {
	Spec    *catalog.Spec
	Brokers map[string]string // broker of each new publisher, by id
	// Grew means that the rates sum to a quarter more than the previous rates and than
	// half the contract. The topic was placed for half the contract before any publisher
	// was known.
	Grew bool
}

// Capped returns the rate that the contract would have without its tenant's limit; 0: the
// limit does not matter.
func (t *Topic) Capped() tokenbucket.Rate { return t.capped }

// Propose ends a job. It returns nil if the topic, which is on the given number of brokers,
// stays as it is. The rates of its publishers sum to at most the rate of the contract.
//
// limited means that the topic's tenant has a limit. The contract then follows up to
// maxRate, the rest of the limit beside the tenant's other topics.
func (t *Topic) Propose(j *Job, spec *catalog.Spec, brokers int, maxRate tokenbucket.Rate, limited bool, now time.Time) *Proposal {
	placed, contract := spec.Demand.Publishers, tokenbucket.Share{Rate: tokenbucket.Rate(spec.Demand.RateMilli), Burst: spec.Demand.Burst}
	t.recordSize(j, contract, spec.Auto.Measured)
	size := t.contract(contract, spec.Auto, brokers, now)
	t.capped = 0
	if maxRate = max(maxRate, contract.Rate); limited && size.Rate > maxRate {
		t.capped = size.Rate
		auto := spec.Auto
		auto.MaxRate = int64(maxRate)
		size = t.contract(contract, auto, brokers, now)
	}
	firstContract := spec.Auto != (catalog.Auto{}) && len(t.sizes) >= Peaks
	limit := size.Rate.PerSecond()
	if j.findGroups {
		t.group()
	}
	placedByID := make(map[string]placement.Publisher, len(placed))
	placedRate, difference := 0.0, 0.0
	for _, p := range placed {
		placedByID[p.ID] = p
		placedRate += p.Rate
	}
	// order: each by itself
	for id, p := range t.publishers {
		_, p.member = placedByID[id]
	}
	learned := t.Publishers()
	sum := 0.0
	for _, p := range learned {
		sum += p.Rate
	}
	scale := min(1, 0.999*limit/max(sum, minRate)) // the offered rate may exceed the contract
	changed := len(learned) != len(placed)
	for _, p := range learned {
		old, found := placedByID[p.ID]
		changed = changed || !found || old.Key != p.Key
		difference += math.Abs(old.Rate - scale*p.Rate)
	}
	if !(size != contract || firstContract && !spec.Auto.Measured || difference > tolerance*placedRate || changed && now.Sub(t.placed) >= Pause) || t.room < 0 {
		return nil
	}
	next := *spec
	next.Demand.RateMilli, next.Demand.Rate, next.Demand.Burst = int64(size.Rate), (int64(size.Rate)+999)/1000, size.Burst
	next.Demand.Publishers, next.Since = nil, nil
	next.Auto.Measured = spec.Auto.Measured || firstContract
	home := map[string]string{}
	for _, p := range learned {
		if _, found := placedByID[p.ID]; !found {
			home[p.ID] = p.Broker
		}
		next.Demand.Publishers = append(next.Demand.Publishers, placement.Publisher{ID: p.ID, Key: p.Key, Rate: round(scale * p.Rate)})
		next.Since = append(next.Since, p.Since.Unix())
	}
	t.placed = now
	t.room -= float64(written(spec, &next))
	return &Proposal{Spec: &next, Brokers: home, Grew: scale*sum > (1+tolerance)*max(placedRate, limit/2)}
}

// written estimates the store bytes of a change.
func written(before, after *catalog.Spec) (bytes int) {
	publishers := after.Demand.Publishers
	if _, added, short := catalog.Edits(before, after); short {
		publishers = nil
		for _, i := range added {
			publishers = append(publishers, after.Demand.Publishers[i])
		}
	}
	for _, p := range publishers {
		bytes += recordBytes + len(p.ID) + len(p.Key)
	}
	return bytes
}

// ScaleTo returns the publishers, with rates scaled down if their sum exceeds limit.
func ScaleTo(publishers []placement.Publisher, limit float64) []placement.Publisher {
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

// round rounds down to three digits, so noise takes no room in a store.
func round(rate float64) float64 {
	digit := math.Pow(10, math.Floor(math.Log10(rate))-2)
	return max(math.Floor(rate/digit)*digit, 1e-9)
}

// Publishers returns the learned publishers, by id.
func (t *Topic) Publishers() []Publisher {
	publishers, _ := t.learned()
	return publishers
}

// learned returns Publishers and the rate of the publishers beyond Max.
func (t *Topic) learned() (publishers []Publisher, beyond float64) {
	var candidates []*publisher
	// order: sorted below
	for _, p := range t.publishers {
		if p.windows > 1 {
			candidates = append(candidates, p)
		}
	}
	if len(candidates) > Max {
		rank := func(p *publisher) float64 {
			if p.member {
				return memberAdvantage * p.Rate
			}
			return p.Rate
		}
		slices.SortFunc(candidates, func(a, b *publisher) int { return cmp.Or(cmp.Compare(rank(b), rank(a)), cmp.Compare(a.ID, b.ID)) })
		for _, p := range candidates[Max:] {
			beyond += p.Now
		}
		candidates = candidates[:Max]
	}
	for _, p := range candidates {
		publisher := p.Publisher
		publisher.Key, publisher.Rate = t.keys[p.ID], max(p.Rate, minRate)
		publishers = append(publishers, publisher)
	}
	slices.SortFunc(publishers, func(a, b Publisher) int { return cmp.Compare(a.ID, b.ID) })
	return publishers, beyond
}

// Others returns the rate in msg/s of the publishers that are not distinguished or are
// beyond Max.
func (t *Topic) Others() float64 {
	_, beyond := t.learned()
	return t.others + beyond
}

// Groups returns the latest groups with their evidence.
func (t *Topic) Groups() []correlation.Group { return t.groups }
