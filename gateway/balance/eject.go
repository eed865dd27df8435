package balance

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	tolerated   = 5                // failures in a row that eject
	firstPeriod = time.Second      // of an ejection
	longestOf   = 30 * time.Second // ejections, each twice as long as the one before
	patience    = time.Second      // for a request that may be repeated, before any other probes
)

// health is what failures mean. A server that fails 5 times in a row is ejected; when
// the period is over it gets one request, a probe, and what ends first while that is on
// its way decides: an answer takes it back, a failure ejects it for twice as long.
type health struct {
	failures int // in a row
	ejected  bool
	since    mono.Time     // the ejection began, while ejected
	period   time.Duration // of it
	trying   bool          // a probe is on its way

	// A failed request leaves Q, and yet is owed the time that an answer would have
	// taken: without that the server that refuses at once is always the idle one, and
	// gets more the more it fails, if it only answers one in five.
	debt   float64 // requests, when they were counted
	debtAt mono.Time
}

// due reports whether the ejection is over, since so long, and its probe has not gone.
func (h *health) due(now mono.Time, since time.Duration) bool {
	return h.ejected && !h.trying && now.Sub(h.since) >= h.period+since
}

// fail counts a failure of a server with the interval t.
func (h *health) fail(now mono.Time, t time.Duration) {
	h.debt, h.debtAt = h.owed(now, 0, t)+1, now
	h.failures++
	if h.ejected && !h.trying || !h.ejected && h.failures < tolerated {
		return // one of those sent before the ejection; or not enough
	}
	h.period = min(max(2*h.period, firstPeriod), longestOf)
	h.ejected, h.since, h.trying = true, now, false
}

// refuse counts a refusal that took worked: it is owed the rest of what an answer would
// have taken. The server is well.
func (h *health) refuse(now mono.Time, worked, t time.Duration) {
	h.succeed(now, worked, t)
	h.debt, h.debtAt = h.debt+max(1-float64(worked)/float64(t), 0), now
}

// succeed counts an answer that took worked.
func (h *health) succeed(now mono.Time, worked, t time.Duration) {
	h.failures = 0
	h.debt, h.debtAt = h.owed(now, worked, t), now
	if h.ejected && h.trying {
		*h = health{}
	}
}

// owed is the failed requests that an equal server would still be busy with: it works
// one off in every t, but for the time it worked on others.
func (h *health) owed(now mono.Time, worked, t time.Duration) float64 {
	if h.debt == 0 {
		return 0
	}
	idle := max(now.Sub(h.debtAt)-worked, 0)
	return max(h.debt-float64(idle)/float64(t), 0)
}

// firstEjected returns, where every server is ejected, the one that has been for the
// longest, unless one has a request: they get one at a time. -1 where not.
func (b *Balancer) firstEjected(fits []int) int {
	if slices.ContainsFunc(b.servers, func(s server) bool { return s.present && (!s.ejected || s.trying) }) {
		return -1
	}
	first := -1
	for _, i := range fits {
		if s := &b.servers[i]; s.present && (first < 0 || s.since < b.servers[first].since) {
			first = i
		}
	}
	return first
}
