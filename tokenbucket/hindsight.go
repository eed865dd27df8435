package tokenbucket

import (
	"math"
	"math/bits"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Horizon is how far back Hindsight remembers, if no more than maxPoints
// messages were taken meanwhile and the share did not change more than maxIntervals
// times.
const Horizon = time.Second

const (
	maxPoints = 8192 // 32 bytes each
	minPoints = 16

	// fine is how many points at least are kept for the time in which a burst is
	// earned: what comes closer together is one point.
	fine         = 256
	maxIntervals = 8

	// deepestKnown is the largest burst that an int64 can count in subtokens with
	// room to add as much again.
	deepestKnown = 4_000_000
)

// Hindsight is a Bucket for messages that are judged out of order: a message is
// judged by what the bucket held when it arrived, also if younger ones were
// taken before. A Bucket alone forgets: the first young message moves the TAT
// to its own arrival, and what had accrued between an older one and it is gone.
// With a goroutine per connection, read 100 ms late and in any order, that made
// a stream that keeps its contract wait as long as if it were judged by the
// time of its reading.
//
// Messages whose stamps come in order are judged exactly as by Bucket. The zero
// value has no share and admits nothing. It must not be copied once used, and
// is not safe for concurrent use.
//
// How. The level L(t) is what the bucket holds at t <= latest: it earns r, stops
// at b, changes at retunes, and each message taken pays 1 at its eligible time.
// W(t) is what was lost so far because the bucket was full. One message more at
// e leaves at every t >= e
//
//	L'(t) = L(t) - max{0, 1 - (W(t) - W(e))}
//
// that is, a token less until a token has been lost anyhow. So a message that
// arrived at a is eligible at the first e >= a at which that leaves no L' below
// 0, and there is such an e before latest only if tokens were lost, or are still
// there. What a retune gave up (released) is not lost but another broker's; it
// makes up for nothing.
//
// It keeps each message taken as a point (e, L(e)), the oldest state it knows
// as the beginning of the first interval, and a Bucket for all that comes after
// latest. All is counted in subtokens, exactly, with one exception: messages whose
// eligible times are the same, or closer than a 256th of a burst takes to earn
// (nothing, for bursts below 256), share a point with the least L of them, and
// what is lost between them makes up for nothing. So L may be less than it was,
// and never more, and never by more at a point than at the one before; then what
// is counted as lost is no more than what was. That costs a late message of a
// topic with a large burst up to a 256th of the burst, and it lets a topic take a
// million messages per second.
//
// Envelope. Let e_1 <= e_2 <= .. be the eligible times of all messages taken,
// in whatever order they were. Then L >= 0 at each, L <= b, and so under one
// share, for all i < j,
//
//	j-i+1 <= b + r*(e_j - e_i)
//
// and over retunes at t_1 .. t_n between them, with g_m granted and f_m released
// by the m-th,
//
//	j-i+1 <= b_0 + sum(g_m - f_m) + r_0*(t_1 - e_i) + .. + r_n*(e_j - t_n).
//
// That is more than Bucket guarantees: there the messages are counted in the
// order taken, and a stamp that goes back gives up credit. It follows that a
// stream that keeps (r, b) by its stamps (for b >= 256, one that leaves two 256ths
// of b) is not delayed at all, in whatever order it is judged, as far as the
// memory reaches. What is older is judged as
// if it had arrived where the memory begins, which delays it and creates no
// token.
//
// Three designs lost. Counting messages per slot of time is coarse by what a
// slot earns, a sixteenth of the burst in a prototype, and slots fine enough to
// be exact are as many as the points. Sorting what waits does not help by itself:
// a message with credit is not kept waiting for older ones that may come. A tree
// over the points would pay where thousands lie between a late message and the
// newest; with a thousand, moving them takes 0.2 us.
type Hindsight struct {
	// bucket judges what arrives after latest.
	bucket Bucket
	// latest is when the last point was taken or the share last changed.
	latest mono.Time

	// The history. Invariant: points are in order and do not overlap; intervals[i].first
	// never falls; points [intervals[i].first, intervals[i+1].first) were taken in interval i,
	// no earlier than its beginning and no later than the next one's.
	points     points
	intervals  [maxIntervals]interval
	nIntervals int // 0: there was no share yet

	// closed is a time in which no message has its token, whatever was judged
	// since: taking one only lowers L and what is lost. It spares a line of
	// messages that wait the same search for each.
	closed struct{ from, to mono.Time }
}

// point is a message taken, or several that were eligible at about the same time.
type point struct {
	from, to mono.Time // the first, the last
	before   int64     // subtokens held when the first was taken, before that
	held     int64     // least that was left after one of them
}

// interval is the time under one share, from the beginning of the memory or a retune.
type interval struct {
	from   mono.Time
	rate   int64 // subtokens per nanosecond
	room   int64 // subtokens, the burst
	before int64 // subtokens held when the interval began, before the retune
	after  int64 // and after it
	first  int   // of the points
	merge  int64 // nanoseconds that one point may last
}

// Share returns the share the bucket holds.
func (h *Hindsight) Share() Share { return h.bucket.Share() }

// Tokens returns what the bucket holds at now, or held when the last message was
// taken, if that is later; rounded down.
func (h *Hindsight) Tokens(now mono.Time) Tokens { return h.bucket.Tokens(h.notBefore(now)) }

// notBefore returns at, or latest if that is later.
func (h *Hindsight) notBefore(at mono.Time) mono.Time {
	if h.nIntervals == 0 {
		return at
	}
	return max(at, h.latest)
}

// Eligible returns when a message that arrived at at could be released if its
// token were taken now, never before at; mono.Never as for Bucket. Of two
// messages the one that arrived earlier is never eligible later.
func (h *Hindsight) Eligible(at mono.Time) mono.Time {
	if e, _, ok := h.search(at); ok {
		return e
	}
	return h.bucket.Eligible(h.notBefore(at))
}

// Take is Eligible, and takes the token if it is there by now. Otherwise ok is
// false and nothing is changed.
func (h *Hindsight) Take(at, now mono.Time) (e mono.Time, ok bool) {
	if e, p, found := h.search(at); found {
		if now.Before(e) {
			return e, false
		}
		h.insert(p)
		return e, true
	}
	e, zero := h.bucket.judge(h.notBefore(at))
	if e == mono.Never || now.Before(e) {
		return e, false
	}
	h.bucket.zero = zero
	h.record(h.nIntervals-1, h.points.n, e, h.bucket.subtokens(e).clamp()+subtoken)
	h.latest = e
	h.forget(e)
	return e, true
}

// record notes a message taken at e in an interval, before the point next, with so
// many subtokens held before. What it costs those after it is charged already.
func (h *Hindsight) record(interval, next int, e mono.Time, held int64) {
	if next > h.intervals[interval].first {
		last := h.points.at(next - 1)
		if e <= last.to {
			last.held -= subtoken
			h.points.set(next-1, last)
			return
		}
		if uint64(e)-uint64(last.from) <= uint64(h.intervals[interval].merge) {
			last.to, last.held = e, min(last.held, held-subtoken)
			h.points.set(next-1, last)
			return
		}
	}
	h.points.insert(next, point{e, e, held, held - subtoken})
	for i := interval + 1; i < h.nIntervals; i++ {
		h.intervals[i].first++
	}
}

// After returns when the last of n more messages of which the first arrived at
// at would have its token, if no other were taken and all tokens lost so far
// stayed lost; at, if all are there. Requires: n >= 1.
func (h *Hindsight) After(n int64, at mono.Time) mono.Time {
	rate := int64(h.bucket.share.Rate)
	if rate == 0 {
		return mono.Never
	}
	from := h.notBefore(at)
	missing := mul(n, subtoken).sub(h.bucket.subtokens(from))
	if missing.sign() <= 0 {
		return at
	}
	return mono.Time(mul(int64(from), rate).add(missing).ceilDiv(rate))
}

// Retune is Bucket's. It acts at now, or when the last message was taken, if
// that is later: of two callers who read the clock before they waited for a
// lock, the first may hold the later time.
func (h *Hindsight) Retune(now mono.Time, s Share, granted Tokens) (released Tokens) {
	now = h.notBefore(now)
	was, held := h.bucket, h.bucket.subtokens(now)
	released = h.bucket.Retune(now, s, granted)
	if h.bucket == was {
		return released
	}
	if h.nIntervals == maxIntervals {
		h.forgetInterval()
	}
	e := interval{
		from: now, first: h.points.n,
		rate: int64(h.bucket.share.Rate), room: h.bucket.cap.clamp(),
		before: held.clamp(), after: h.bucket.subtokens(now).clamp(),
	}
	if h.bucket.share.Burst > deepestKnown || e.after < -deepestKnown*subtoken {
		// Too large to count here. Nothing is taken in such an interval in hindsight,
		// or before it at its expense. Nothing is missed either: a burst of
		// millions does not run out for want of what accrues within a horizon.
		e.rate, e.room, e.after = 0, 0, -1
	}
	if n := h.bucket.share.Burst / fine; n > 0 && e.rate > 0 {
		e.merge = n * subtoken / e.rate
	}
	h.intervals[h.nIntervals] = e
	h.nIntervals++
	h.latest = now
	return released
}

// place is where in the history a message is taken: at in an interval, before the
// point next, with so many subtokens held.
type place struct {
	at             mono.Time
	interval, next int
	// held is as of at, or of the end of the point that at lies in.
	held int64
	end  mono.Time // at, or that
}

// search looks for the first time from at on, and before latest, at which a
// message more can be taken. What it learns of times at which none can, it
// keeps.
func (h *Hindsight) search(at mono.Time) (e mono.Time, p place, ok bool) {
	if h.nIntervals == 0 || !at.Before(h.latest) {
		return 0, p, false
	}
	p.at = max(at, h.intervals[0].from)
	from := p.at
	skip := func() {
		if h.closed.from <= p.at && p.at < h.closed.to {
			p.at, from = h.closed.to, min(from, h.closed.from)
		}
	}
	skip()
	h.locate(&p)
	for p.at.Before(h.latest) {
		end, found := h.try(&p)
		if found {
			ok = true
			break
		}
		p.at = end
		if skip(); p.at > end {
			h.locate(&p)
		} else {
			h.pass(&p)
		}
	}
	// All of [from, p.at) is closed: what skip jumped over, and what try refused.
	if from.Before(p.at) && p.at >= h.closed.to {
		h.closed.from, h.closed.to = from, p.at
	}
	return p.at, p, ok
}

// locate finds the interval of p.at, and the first point after it.
func (h *Hindsight) locate(p *place) {
	p.interval = h.nIntervals - 1
	for p.interval > 0 && p.at.Before(h.intervals[p.interval].from) {
		p.interval--
	}
	p.next = h.points.after(p.at)
}

// pass moves p past all that happened until p.at.
func (h *Hindsight) pass(p *place) {
	for p.interval+1 < h.nIntervals && !p.at.Before(h.intervals[p.interval+1].from) {
		p.interval++
		p.next = max(p.next, h.intervals[p.interval].first)
	}
	for p.next < h.end(p.interval) && !p.at.Before(h.points.at(p.next).from) {
		p.next++
	}
}

// end is the number of points up to the end of an interval.
func (h *Hindsight) end(i int) int {
	if i+1 < h.nIntervals {
		return h.intervals[i+1].first
	}
	return h.points.n
}

// try looks for a time from p.at on and before whatever happened next, at which
// a message can be taken. If there is none, it returns when to go on: at what
// happened next, or at what stood in the way later.
func (h *Hindsight) try(p *place) (end mono.Time, ok bool) {
	e := &h.intervals[p.interval]
	prev := point{to: e.from, held: e.after}
	if p.next > e.first {
		prev = h.points.at(p.next - 1)
	}
	end = h.latest
	if p.interval+1 < h.nIntervals {
		end = h.intervals[p.interval+1].from
	}
	if e.rate == 0 {
		return end, false
	}
	if p.next < h.end(p.interval) {
		end = h.points.at(p.next).from
	}
	level := func() int64 { return min(e.room, prev.held+earned(e.rate, prev.to, p.end)) }
	p.end = max(p.at, prev.to)
	if p.held = level(); p.held < subtoken {
		wait := (subtoken - p.held + e.rate - 1) / e.rate
		if uint64(wait) >= uint64(end)-uint64(p.end) {
			return end, false
		}
		p.end += mono.Time(wait)
		p.at = p.end
		p.held = level()
	}
	return h.charge(*p, false)
}

// charge finds out whether everything after p can do with a token less, until
// one was lost anyhow; if not, obstacle is the time of what cannot. With apply
// it takes the token, which then must be possible.
func (h *Hindsight) charge(p place, apply bool) (obstacle mono.Time, ok bool) {
	less := int64(subtoken)
	prev := point{to: p.end, held: p.held}
	for i, k := p.interval, p.next; ; {
		e := &h.intervals[i]
		switch {
		case k < h.end(i):
			q := h.points.at(k)
			less -= max(0, prev.held+earned(e.rate, prev.to, q.from)-q.before)
			if less <= 0 {
				return 0, true
			}
			if q.held < less {
				return q.to, false
			}
			if apply {
				h.points.set(k, point{q.from, q.to, q.before - less, q.held - less})
			}
			prev = q
			k++
		case i+1 < h.nIntervals:
			next := &h.intervals[i+1]
			less -= max(0, prev.held+earned(e.rate, prev.to, next.from)-next.before)
			if less <= 0 {
				return 0, true
			}
			if next.after < less {
				return next.from, false
			}
			prev = point{to: next.from, held: next.after}
			if apply {
				next.before -= less
				next.after -= less
			}
			i++
		default:
			if apply {
				h.bucket.zero = h.bucket.zero.add(from64(less))
			}
			return 0, true
		}
	}
}

// insert takes a message at p, as search found it.
func (h *Hindsight) insert(p place) {
	h.charge(p, true)
	h.record(p.interval, p.next, p.at, p.held)
	h.forget(h.latest)
}

// Used returns the most tokens that the messages it remembers have used at once,
// rounded up: the burst that they would have needed of a bucket that was full when
// the memory begins. 0 without messages, or where a burst is too large to count
// here. short: the tokens ran out, and messages may have waited that would have
// needed more.
func (h *Hindsight) Used() (tokens int64, short bool) {
	var work, most int64 // subtokens
	for i := range h.nIntervals {
		e := &h.intervals[i]
		if e.rate == 0 {
			work = 0
			continue
		}
		at := e.from
		work = min(work, e.room)
		for k := e.first; k < h.end(i); k++ {
			p := h.points.at(k)
			work = max(0, work-earned(e.rate, at, p.from)) + p.before - p.held
			most, short = max(most, work), short || p.held < subtoken
			at = p.to
		}
		if i+1 < h.nIntervals {
			work = max(0, work-earned(e.rate, at, h.intervals[i+1].from))
		}
	}
	return (most + subtoken - 1) / subtoken, short
}

// earned returns the subtokens that come at a rate in a time; beyond any room, not
// exactly. Requires: from <= to.
func earned(rate int64, from, to mono.Time) int64 {
	const beyond = 1 << 62
	hi, lo := bits.Mul64(uint64(rate), uint64(to)-uint64(from))
	if hi > 0 || lo > beyond {
		return beyond
	}
	return int64(lo)
}

// forget drops what is older than the horizon at now, or too much.
func (h *Hindsight) forget(now mono.Time) {
	oldest := mono.Time(math.MinInt64)
	if int64(now) >= math.MinInt64+int64(Horizon) {
		oldest = now.Add(-Horizon)
	}
	for h.points.n > 0 {
		if p := h.points.at(0); h.points.n <= maxPoints && !p.to.Before(oldest) {
			return
		}
		for h.end(0) == 0 {
			h.forgetInterval()
		}
		p := h.points.pop()
		h.intervals[0].from, h.intervals[0].after = p.to, p.held
		for i := 1; i < h.nIntervals; i++ {
			h.intervals[i].first--
		}
	}
}

// forgetInterval drops the oldest interval. Requires: there is a younger one.
func (h *Hindsight) forgetInterval() {
	n := h.end(0)
	for range n {
		h.points.pop()
	}
	copy(h.intervals[:], h.intervals[1:h.nIntervals])
	h.nIntervals--
	for i := range h.nIntervals {
		h.intervals[i].first -= n
	}
}

// points is a queue into whose middle points may be put. It grows by doubling,
// and gives its memory back when it has been drained far below its size.
//
// Invariant: the n points are buf[head], buf[head+1], .. modulo len(buf), which
// is 0 or a power of two.
type points struct {
	buf  []point
	head int
	n    int
}

func (p *points) at(i int) point     { return p.buf[(p.head+i)&(len(p.buf)-1)] }
func (p *points) set(i int, q point) { p.buf[(p.head+i)&(len(p.buf)-1)] = q }

func (p *points) push(q point) {
	if p.n == len(p.buf) {
		p.resize(max(minPoints, 2*len(p.buf)))
	}
	p.n++
	p.set(p.n-1, q)
}

// insert puts q before the i-th point, and moves those behind it.
func (p *points) insert(i int, q point) {
	p.push(q)
	for to := p.n - 1; to > i; {
		// As many at once as lie in a row, at both ends of the move.
		mask := len(p.buf) - 1
		last := (p.head + to) & mask // moves here, from the place before
		if last == 0 {
			p.buf[0] = p.buf[mask]
			to--
			continue
		}
		row := min(to-i, last)
		copy(p.buf[last-row+1:last+1], p.buf[last-row:last])
		to -= row
	}
	p.set(i, q)
}

func (p *points) pop() point {
	q := p.buf[p.head]
	p.head = (p.head + 1) & (len(p.buf) - 1)
	p.n--
	if len(p.buf) > 16*minPoints && p.n < len(p.buf)/8 {
		p.resize(len(p.buf) / 2)
	}
	return q
}

// after returns the index of the first point that begins later than at.
func (p *points) after(at mono.Time) int {
	lo, hi := 0, p.n
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); p.at(mid).from <= at {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (p *points) resize(size int) {
	buf := make([]point, size)
	for i := range p.n {
		buf[i] = p.at(i)
	}
	p.buf, p.head = buf, 0
}
