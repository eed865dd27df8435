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
	// maxCompared is the maximum number of publishers compared by windows: the busiest.
	maxCompared = 4096
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
func (b *busy) joint(other *busy) (n int) {
	for i, word := range b {
		n += bits.OnesCount64(word & other[i])
	}
	return n
}

// shift returns b shifted n windows later. Windows shifted past the end are lost. n may
// be negative.
func (b *busy) shift(n int) (shifted busy) {
	words, rest := n>>6, uint(n&63)
	for i := range shifted {
		if source := i - words; source >= 0 && source < len(b) {
			shifted[i] = b[source] << rest
		}
		if source := i - words - 1; source >= 0 && source < len(b) {
			shifted[i] |= b[source] >> (64 - rest)
		}
	}
	return shifted
}

// withoutBefore returns b without the windows before window n.
func (b *busy) withoutBefore(n int) busy {
	recent := *b
	for i := range n >> 6 {
		recent[i] = 0
	}
	if n < windows {
		recent[n>>6] &= ^uint64(0) << (n & 63)
	}
	return recent
}

// send records a message at time t, in units from the origin.
func (p *publisher) send(t int64) {
	window := t >> inWindow
	if p.n == 0 {
		p.busy, p.window, p.since = busy{}, window, window
	}
	if passed := window - p.window; passed > 0 {
		p.busy = p.busy.shift(-int(min(passed, windows)))
		p.window = window
	}
	p.busy[len(p.busy)-1] |= 1 << 63
}

// prepareWindows prepares the comparison by windows.
func (v *view) prepareWindows(now int64) {
	v.busy, v.firstWindow, v.total, v.square = make([]busy, len(v.publishers)), make([]int, len(v.publishers)), make([]float64, windows+1), make([]float64, windows+1)
	for i, p := range v.publishers {
		v.busy[i] = p.busy.shift(-int(min(now>>inWindow-p.window, windows)))
		v.firstWindow[i] = int(max(0, windows-1-(now>>inWindow-p.since)))
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
// windows since window start. It assumes that each publisher is busy in proportion to the
// number of busy publishers of a window.
func (v *view) chance(a, b, start int) float64 {
	total, square := v.total[windows]-v.total[start], v.square[windows]-v.square[start]
	if total == 0 {
		return 0
	}
	return float64(a) * float64(b) * square / total / total
}

// windows compares two publishers by their busy windows; see the package comment.
func (v *view) windows(i, j int32, threshold float64) pair {
	if !v.records[i].irregular || !v.records[j].irregular {
		return pair{}
	}
	start := max(v.firstWindow[i], v.firstWindow[j])
	a, b := v.busy[i].withoutBefore(start), v.busy[j].withoutBefore(start)
	na, nb, joint := a.count(), b.count(), a.joint(&b)
	p := pair{firings: min(na, nb), joint: joint, expected: v.chance(na, nb, start), width: widths}
	if min(na, nb) < minFirings || chernoff(joint, p.expected) < threshold {
		return pair{}
	}
	for offset := nearest; offset <= farthest; offset++ {
		for _, offset := range [2]int{offset, -offset} {
			shifted := b.shift(offset)
			p.expected = max(p.expected, float64(a.joint(&shifted))*float64(windows-start)/float64(max(1, windows-start-max(offset, -offset))))
		}
	}
	p.share = (float64(joint) - p.expected) / float64(max(na, nb))
	p.evidence = chernoff(joint, p.expected)
	p.linked = p.evidence >= threshold && p.share >= alongside
	return p
}

// windowPairs returns the pairs worth comparing by windows: for each publisher the
// candidates with the largest share of joint windows beyond chance.
func (v *view) windowPairs() (ties []uint64) {
	type candidate struct {
		publisher int32
		share     float64
	}
	var compared []int32
	counts := make([]int, len(v.busy))
	for i := range v.busy {
		if counts[i] = v.busy[i].count(); v.records[i].irregular && counts[i] >= minFirings {
			compared = append(compared, int32(i))
		}
	}
	if len(compared) > maxCompared {
		slices.SortStableFunc(compared, func(a, b int32) int { return counts[b] - counts[a] })
		compared = compared[:maxCompared]
	}
	best := make([][]candidate, len(v.busy))
	keep := func(i, j int32, share float64) {
		if len(best[i]) < candidates {
			best[i] = append(best[i], candidate{j, share})
			return
		}
		worst := 0
		for k, o := range best[i] {
			if o.share < best[i][worst].share {
				worst = k
			}
		}
		if share > best[i][worst].share {
			best[i][worst] = candidate{j, share}
		}
	}
	unit := v.chance(1, 1, 0)
	for k, i := range compared {
		for _, j := range compared[:k] {
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
			ties = append(ties, tie(int32(i), o.publisher))
		}
	}
	return ties
}
