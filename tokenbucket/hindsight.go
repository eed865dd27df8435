package tokenbucket

import (
	"math"
	"math/bits"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Horizon is how long Hindsight remembers, if at most maxPoints messages were taken and the share
// changed at most maxIntervals times meanwhile.
const Horizon = time.Second

const (
	maxPoints = 8192 // 32 bytes each
	minPoints = 16

	// fine is the minimum number of points for the time in which a burst is earned. Messages closer
	// together share a point.
	fine         = 256
	maxIntervals = 8

	// deepestKnown is the largest burst for which an int64 can count subtokens with room to add the
	// same amount again.
	deepestKnown = 4_000_000
)

// Hindsight is a Bucket for messages that are judged out of order. It judges a message by what the
// bucket held when the message arrived, even if younger messages were taken before. A Bucket
// forgets: the first young message moves the TAT to its own arrival, and the tokens that accrued
// between an older message and that arrival are lost. Goroutines read connections up to 100 ms late
// and in any order. With a Bucket, a stream that keeps its contract would wait as if it were judged
// by the times of reading.
//
// Messages with stamps in order are judged exactly as by Bucket. The zero value has no share and
// admits nothing. A Hindsight must not be copied after use, and is not safe for concurrent use.
//
// Method. The level L(t) is what the bucket holds at t <= latest. It earns r, stops at b, changes
// at retunes, and each message pays 1 at its eligible time. W(t) is what was lost so far because
// the bucket was full. Another message at e changes the level at every t >= e to
//
//	L'(t) = L(t) - max{0, 1 - (W(t) - W(e))}
//
// The level is one token lower until a token would have been lost anyway. So a message that arrived
// at a is eligible at the first e >= a for which no L' is below 0. Such an e before latest exists
// only if tokens were lost or are still there. Tokens that a retune returned (released) are not
// lost but belong to another broker, so they compensate for nothing.
//
// Hindsight stores each taken message as a point (e, L(e)), the oldest known state as the beginning
// of the first interval, and a Bucket for the time after latest. It counts in subtokens, exactly,
// with one exception. Messages with equal or close eligible times share a point with the lowest L
// among them, and tokens lost between them compensate for nothing. Close means less than a 256th of
// the time in which a burst is earned (0 for bursts below 256). So the stored L may be lower than
// the true level but never higher, and the difference never grows from one point to the next. So
// the counted loss is never more than the true loss. This costs a late message of a topic with a
// large burst up to a 256th of the burst, and lets a topic take a million messages per second.
//
// Envelope. Let e_1 <= e_2 <= .. be the eligible times of all taken messages, taken in any order.
// Then L >= 0 at each e_i and L <= b. So under one share, for all i < j,
//
//	j-i+1 <= b + r*(e_j - e_i)
//
// and over retunes at t_1 .. t_n between them, with g_m granted and f_m released by the m-th
// retune,
//
//	j-i+1 <= b_0 + sum(g_m - f_m) + r_0*(t_1 - e_i) + .. + r_n*(e_j - t_n).
//
// This is more than Bucket guarantees: Bucket counts messages in the order taken, and a stamp that
// goes back gives up credit. So a stream that keeps (r, b) by its stamps is not delayed, in
// whatever order it is judged, as far as the memory reaches. (For b >= 256 the stream must leave
// two 256ths of b unused.) An older message is judged as if it had arrived at the beginning of the
// memory, which delays the message and creates no token.
//
// Three designs lost. Counting messages per time slot has an error of the tokens that a slot earns
// (a sixteenth of the burst in a prototype). Exact slots would be as many as the points. Sorting
// waiting messages does not help by itself, because a message with credit does not wait for older
// messages that may come. A tree over the points would pay off with thousands of points between a
// late message and the newest; with a thousand points, moving them takes 0.2 us.
type Hindsight struct {
	// bucket judges messages that arrive after latest.
	bucket Bucket
	// latest is the time of the last point or of the last change of the share.
	latest mono.Time

	// The history. Invariant: points are in order and do not overlap. intervals[i].first never
	// decreases. Points [intervals[i].first, intervals[i+1].first) were taken in interval i, no
	// earlier than its beginning and no later than the beginning of the next interval.
	points     points
	intervals  [maxIntervals]interval
	nIntervals int // 0: no share yet

	// closed is a range of time in which no message can get a token. Later messages only lower L
	// and the lost tokens, so the range stays closed. It saves waiting messages the same search.
	closed struct{ from, to mono.Time }
}

// point is a taken message, or several messages with about the same eligible time.
type point struct {
	first, last mono.Time // eligible times of the first and the last message
	before      int64     // subtokens held at from, before the first message
	held        int64     // lowest number of subtokens after one of the messages
}

// interval is the time under one share. It begins at a retune or at the beginning of the memory.
type interval struct {
	from   mono.Time
	rate   int64 // subtokens per nanosecond
	room   int64 // subtokens, the burst
	before int64 // subtokens held at from, before the retune
	after  int64 // subtokens held at from, after the retune
	first  int   // index of the interval's first point
	merge  int64 // maximum duration of a point in nanoseconds
}

// Share returns the bucket's share.
func (h *Hindsight) Share() Share { return h.bucket.Share() }

// Tokens returns what the bucket holds at now or, if later, when the last message was taken;
// rounded down.
func (h *Hindsight) Tokens(now mono.Time) Tokens { return h.bucket.Tokens(h.notBefore(now)) }

// notBefore returns the later of at and latest.
func (h *Hindsight) notBefore(at mono.Time) mono.Time {
	if h.nIntervals == 0 {
		return at
	}
	return max(at, h.latest)
}

// Eligible returns when a message that arrived at at could be released if it took its token now.
// The result is never before at, and mono.Never as for Bucket. A message that arrived earlier is
// never eligible later.
func (h *Hindsight) Eligible(at mono.Time) mono.Time {
	if e, _, ok := h.search(at); ok {
		return e
	}
	return h.bucket.Eligible(h.notBefore(at))
}

// Take is Eligible and also takes the token if the message is eligible by now. Otherwise ok is
// false and nothing changes.
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
	h.discard(e)
	return e, true
}

// record stores a message taken at e in an interval, before the point next, with held subtokens
// before the message. The later points are already charged.
func (h *Hindsight) record(interval, next int, e mono.Time, held int64) {
	if next > h.intervals[interval].first {
		last := h.points.get(next - 1)
		if e <= last.last {
			last.held -= subtoken
			h.points.set(next-1, last)
			return
		}
		if uint64(e)-uint64(last.first) <= uint64(h.intervals[interval].merge) {
			last.last, last.held = e, min(last.held, held-subtoken)
			h.points.set(next-1, last)
			return
		}
	}
	h.points.insert(next, point{e, e, held, held - subtoken})
	for i := interval + 1; i < h.nIntervals; i++ {
		h.intervals[i].first++
	}
}

// After returns when the last of n messages, the first of which arrived at at, would have its
// token, if no other message took any and all lost tokens stayed lost. It returns at if all tokens
// are there. Requires: n >= 1.
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

// Retune is like Bucket's Retune. It acts at now or, if later, when the last message was taken: of
// two callers that read the clock before they waited for a lock, the first may hold the later time.
func (h *Hindsight) Retune(now mono.Time, s Share, granted Tokens) (released Tokens) {
	now = h.notBefore(now)
	old, held := h.bucket, h.bucket.subtokens(now)
	released = h.bucket.Retune(now, s, granted)
	if h.bucket == old {
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
		// Too large to count in int64. In such an interval, and before it at its expense, nothing
		// is taken in hindsight. Nothing is missed either: a burst of millions does not run out
		// because of the tokens that accrue within a horizon.
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

// place is where in the history a message is taken: at the time at, in an interval, before the
// point next.
type place struct {
	at             mono.Time
	interval, next int
	// held is the number of subtokens at end.
	held int64
	end  mono.Time // the later of at and the end of at's point
}

// search finds the first time from at on, and before latest, at which another message can be taken.
// It adds the times without a token to closed.
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
		end, found := h.walk(&p)
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
	// All of [from, p.at) is closed: skip jumped over a part, and try refused the rest.
	if from.Before(p.at) && p.at >= h.closed.to {
		h.closed.from, h.closed.to = from, p.at
	}
	return p.at, p, ok
}

// locate finds the interval of p.at and the first point after p.at.
func (h *Hindsight) locate(p *place) {
	p.interval = h.nIntervals - 1
	for p.interval > 0 && p.at.Before(h.intervals[p.interval].from) {
		p.interval--
	}
	p.next = h.points.after(p.at)
}

// pass advances p past all points and intervals until p.at.
func (h *Hindsight) pass(p *place) {
	for p.interval+1 < h.nIntervals && !p.at.Before(h.intervals[p.interval+1].from) {
		p.interval++
		p.next = max(p.next, h.intervals[p.interval].first)
	}
	for p.next < h.end(p.interval) && !p.at.Before(h.points.get(p.next).first) {
		p.next++
	}
}

// end returns the number of points up to the end of an interval.
func (h *Hindsight) end(i int) int {
	if i+1 < h.nIntervals {
		return h.intervals[i+1].first
	}
	return h.points.n
}

// walk looks for a time from p.at on, and before the next point or interval, at which a message can
// be taken. If there is none, it returns where to continue: at the next point or interval, or at
// the later obstacle.
func (h *Hindsight) walk(p *place) (end mono.Time, ok bool) {
	e := &h.intervals[p.interval]
	prev := point{last: e.from, held: e.after}
	if p.next > e.first {
		prev = h.points.get(p.next - 1)
	}
	end = h.latest
	if p.interval+1 < h.nIntervals {
		end = h.intervals[p.interval+1].from
	}
	if e.rate == 0 {
		return end, false
	}
	if p.next < h.end(p.interval) {
		end = h.points.get(p.next).first
	}
	level := func() int64 { return min(e.room, prev.held+earned(e.rate, prev.last, p.end)) }
	p.end = max(p.at, prev.last)
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

// charge checks whether all points and intervals after p can have one token less, until a token was
// lost anyway. If not, obstacle is the time of the first such point or interval that cannot. With
// apply, charge also takes the token. Requires: with apply, taking the token is possible.
func (h *Hindsight) charge(p place, apply bool) (obstacle mono.Time, ok bool) {
	deficit := int64(subtoken)
	prev := point{last: p.end, held: p.held}
	for i, k := p.interval, p.next; ; {
		e := &h.intervals[i]
		switch {
		case k < h.end(i):
			q := h.points.get(k)
			deficit -= max(0, prev.held+earned(e.rate, prev.last, q.first)-q.before)
			if deficit <= 0 {
				return 0, true
			}
			if q.held < deficit {
				return q.last, false
			}
			if apply {
				h.points.set(k, point{q.first, q.last, q.before - deficit, q.held - deficit})
			}
			prev = q
			k++
		case i+1 < h.nIntervals:
			next := &h.intervals[i+1]
			deficit -= max(0, prev.held+earned(e.rate, prev.last, next.from)-next.before)
			if deficit <= 0 {
				return 0, true
			}
			if next.after < deficit {
				return next.from, false
			}
			prev = point{last: next.from, held: next.after}
			if apply {
				next.before -= deficit
				next.after -= deficit
			}
			i++
		default:
			if apply {
				h.bucket.zero = h.bucket.zero.add(from64(deficit))
			}
			return 0, true
		}
	}
}

// insert takes a message at p, a result of search.
func (h *Hindsight) insert(p place) {
	h.charge(p, true)
	h.record(p.interval, p.next, p.at, p.held)
	h.discard(h.latest)
}

// Used returns the largest number of tokens in use at once by the remembered messages, rounded up.
// A bucket that was full at the beginning of the memory would have required a burst of this size.
// The result is 0 without messages, or if a burst is too large to count here. short means that the
// tokens ran out, so messages that waited may have required more.
func (h *Hindsight) Used() (tokens int64, short bool) {
	var work, maxWork int64 // subtokens
	for i := range h.nIntervals {
		e := &h.intervals[i]
		if e.rate == 0 {
			work = 0
			continue
		}
		at := e.from
		work = min(work, e.room)
		for k := e.first; k < h.end(i); k++ {
			p := h.points.get(k)
			work = max(0, work-earned(e.rate, at, p.first)) + p.before - p.held
			maxWork, short = max(maxWork, work), short || p.held < subtoken
			at = p.last
		}
		if i+1 < h.nIntervals {
			work = max(0, work-earned(e.rate, at, h.intervals[i+1].from))
		}
	}
	return (maxWork + subtoken - 1) / subtoken, short
}

// earned returns the subtokens earned at a rate from from to to. Values beyond any burst are not
// exact. Requires: from <= to.
func earned(rate int64, from, to mono.Time) int64 {
	const maxEarned = 1 << 62
	hi, lo := bits.Mul64(uint64(rate), uint64(to)-uint64(from))
	if hi > 0 || lo > maxEarned {
		return maxEarned
	}
	return int64(lo)
}

// discard drops points older than the horizon at now, and points beyond maxPoints.
func (h *Hindsight) discard(now mono.Time) {
	oldest := mono.Time(math.MinInt64)
	if int64(now) >= math.MinInt64+int64(Horizon) {
		oldest = now.Add(-Horizon)
	}
	for h.points.n > 0 {
		if p := h.points.get(0); h.points.n <= maxPoints && !p.last.Before(oldest) {
			return
		}
		for h.end(0) == 0 {
			h.forgetInterval()
		}
		p := h.points.pop()
		h.intervals[0].from, h.intervals[0].after = p.last, p.held
		for i := 1; i < h.nIntervals; i++ {
			h.intervals[i].first--
		}
	}
}

// forgetInterval drops the oldest interval. Requires: a younger interval exists.
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

// points is a queue that supports insertion in the middle. It grows by doubling, and shrinks when
// it is almost empty.
//
// Invariant: the n points are buf[head], buf[head+1], .. modulo len(buf), which is 0 or a power of
// two.
type points struct {
	buf  []point
	head int
	n    int
}

func (p *points) get(i int) point    { return p.buf[(p.head+i)&(len(p.buf)-1)] }
func (p *points) set(i int, q point) { p.buf[(p.head+i)&(len(p.buf)-1)] = q }

func (p *points) push(q point) {
	if p.n == len(p.buf) {
		p.resize(max(minPoints, 2*len(p.buf)))
	}
	p.n++
	p.set(p.n-1, q)
}

// insert inserts q before the i-th point and moves the later points.
func (p *points) insert(i int, q point) {
	p.push(q)
	for to := p.n - 1; to > i; {
		// Move contiguous runs at once.
		mask := len(p.buf) - 1
		last := (p.head + to) & mask // destination of the move; the source is one place before
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

// after returns the index of the first point that begins after at.
func (p *points) after(at mono.Time) int {
	lo, hi := 0, p.n
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); p.get(mid).first <= at {
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
		buf[i] = p.get(i)
	}
	p.buf, p.head = buf, 0
}
