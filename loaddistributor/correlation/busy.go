package correlation

import (
	"math/bits"
	"slices"
)

const (
	// A window is 67 ms, the width that would follow the widest of widths.
	inWindow = 4 + 2*widths
	windows  = 2048 // windows kept per publisher, one bit each
	// Joint windows at a shift of nearest to farthest windows show activity that is common
	// for longer or recurs.
	nearest, farthest = 32, 128
	// most is the maximum number of publishers compared by windows: the busiest.
	most = 4096
	// alongside is the minimum share of joint windows beyond chance for a link.
	alongside = 0.1
)

// busy marks the recent windows in which a publisher sent. The last bit is the latest
// window.
type busy [windows / 64]uint64

func (b *busy) count() (n int) {
	for _, word := range b {
		n += bits.OnesCount64(word)
	}
	return n
}

// joint returns the number of windows in which both publishers sent.
func (b *busy) joint(with *busy) (n int) {
	for i, word := range b {
		n += bits.OnesCount64(word & with[i])
	}
	return n
}

// later returns b shifted n windows later. Windows shifted past the end are lost. n may
// be negative.
func (b *busy) later(n int) (moved busy) {
	words, rest := n>>6, uint(n&63)
	for i := range moved {
		if from := i - words; from >= 0 && from < len(b) {
			moved[i] = b[from] << rest
		}
		if from := i - words - 1; from >= 0 && from < len(b) {
			moved[i] |= b[from] >> (64 - rest)
		}
	}
	return moved
}

// since returns b without the windows before window n.
func (b *busy) since(n int) busy {
	only := *b
	for i := range n >> 6 {
		only[i] = 0
	}
	if n < windows {
		only[n>>6] &= ^uint64(0) << (n & 63)
	}
	return only
}

// send records a message at time t, in units from the origin.
func (p *publisher) send(t int64) {
	window := t >> inWindow
	if p.n == 0 {
		p.busy, p.window, p.since = busy{}, window, window
	}
	if by := window - p.window; by > 0 {
		p.busy = p.busy.later(-int(min(by, windows)))
		p.window = window
	}
	p.busy[len(p.busy)-1] |= 1 << 63
}

// look prepares the comparison by windows.
func (v *view) look(now int64) {
	v.busy, v.from, v.total, v.square = make([]busy, len(v.publishers)), make([]int, len(v.publishers)), make([]float64, windows+1), make([]float64, windows+1)
	for i, p := range v.publishers {
		v.busy[i] = p.busy.later(-int(min(now>>inWindow-p.window, windows)))
		v.from[i] = int(max(0, windows-1-(now>>inWindow-p.since)))
		for w, word := range v.busy[i] {
			for ; word != 0; word &= word - 1 {
				v.total[w<<6+bits.TrailingZeros64(word)+1]++
			}
		}
	}
	for w := 1; w <= windows; w++ {
		n := v.total[w]
		v.total[w], v.square[w] = v.total[w-1]+n, v.square[w-1]+n*n
	}
}

// chance returns the expected number of joint windows of two publishers with a and b busy
// windows since window from. It assumes that each publisher is busy in proportion to the
// number of busy publishers of a window.
func (v *view) chance(a, b, from int) float64 {
	total, square := v.total[windows]-v.total[from], v.square[windows]-v.square[from]
	if total == 0 {
		return 0
	}
	return float64(a) * float64(b) * square / total / total
}

// windows compares two publishers by their busy windows; see the package comment.
func (v *view) windows(i, j int32, need float64) pair {
	if !v.records[i].irregular || !v.records[j].irregular {
		return pair{}
	}
	from := max(v.from[i], v.from[j])
	a, b := v.busy[i].since(from), v.busy[j].since(from)
	na, nb, joint := a.count(), b.count(), a.joint(&b)
	p := pair{firings: min(na, nb), joint: joint, expected: v.chance(na, nb, from), width: widths}
	if min(na, nb) < minFirings || chernoff(joint, p.expected) < need {
		return pair{}
	}
	for away := nearest; away <= farthest; away++ {
		for _, away := range [2]int{away, -away} {
			moved := b.later(away)
			p.expected = max(p.expected, float64(a.joint(&moved))*float64(windows-from)/float64(max(1, windows-from-max(away, -away))))
		}
	}
	p.share = (float64(joint) - p.expected) / float64(max(na, nb))
	p.evidence = chernoff(joint, p.expected)
	p.linked = p.evidence >= need && p.share >= alongside
	return p
}

// together returns the pairs worth comparing by windows: for each publisher the
// candidates with the largest share of joint windows beyond chance.
func (v *view) together() (ties []uint64) {
	type other struct {
		who   int32
		share float64
	}
	var who []int32
	counts := make([]int, len(v.busy))
	for i := range v.busy {
		if counts[i] = v.busy[i].count(); v.records[i].irregular && counts[i] >= minFirings {
			who = append(who, int32(i))
		}
	}
	if len(who) > most {
		slices.SortStableFunc(who, func(a, b int32) int { return counts[b] - counts[a] })
		who = who[:most]
	}
	best := make([][]other, len(v.busy))
	keep := func(i, j int32, share float64) {
		if len(best[i]) < candidates {
			best[i] = append(best[i], other{j, share})
			return
		}
		worst := 0
		for k, o := range best[i] {
			if o.share < best[i][worst].share {
				worst = k
			}
		}
		if share > best[i][worst].share {
			best[i][worst] = other{j, share}
		}
	}
	unit := v.chance(1, 1, 0)
	for k, i := range who {
		for _, j := range who[:k] {
			joint, expected := v.busy[i].joint(&v.busy[j]), unit*float64(counts[i])*float64(counts[j])
			if float64(joint) < expected+minFirings || chernoff(joint, expected) < v.threshold/2 {
				continue
			}
			share := (float64(joint) - expected) / float64(max(counts[i], counts[j]))
			if share >= alongside {
				keep(i, j, share)
				keep(j, i, share)
			}
		}
	}
	for i := range best {
		for _, o := range best[i] {
			ties = append(ties, tie(int32(i), o.who))
		}
	}
	return ties
}
