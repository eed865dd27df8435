package balance

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	tolerated   = 5                // failures in a row before ejection
	firstPeriod = time.Second      // first ejection
	longestOf   = 30 * time.Second // longest ejection; each is twice as long as the previous
	patience    = time.Second      // wait for a repeatable request before any request may probe
)

// health ejects a server that fails. After 5 failures in a row the server is ejected. When the ejection
// period is over, the server gets one request as a probe. The first request that ends while the probe
// is in flight decides: an answer ends the ejection, a failure doubles the period.
type health struct {
	failures int // in a row
	ejected  bool
	since    mono.Time     // start of the ejection, if ejected
	period   time.Duration // length of the ejection
	trying   bool          // a probe is in flight

	// A failed request leaves Q but stays as a debt for the time that an answer would have taken.
	// Otherwise a server that refuses at once would always be idle, and would get more requests the
	// more it fails, as long as it answers one in five.
	debt   float64 // requests, at debtAt
	debtAt mono.Time
}

// due reports whether the ejection ended at least since ago and no probe is in flight.
func (h *health) due(now mono.Time, since time.Duration) bool {
	return h.ejected && !h.trying && now.Sub(h.since) >= h.period+since
}

// fail counts a failure of a server with interval t.
func (h *health) fail(now mono.Time, t time.Duration) {
	h.debt, h.debtAt = h.remaining(now, 0, t)+1, now
	h.failures++
	if h.ejected && !h.trying || !h.ejected && h.failures < tolerated {
		return // sent before the ejection, or too few failures
	}
	h.period = min(max(2*h.period, firstPeriod), longestOf)
	h.ejected, h.since, h.trying = true, now, false
}

// refuse counts a refusal after worked time. The rest of the time of an answer becomes debt. The server
// is healthy.
func (h *health) refuse(now mono.Time, worked, t time.Duration) {
	h.succeed(now, worked, t)
	h.debt, h.debtAt = h.debt+max(1-float64(worked)/float64(t), 0), now
}

// succeed counts an answer after worked time.
func (h *health) succeed(now mono.Time, worked, t time.Duration) {
	h.failures = 0
	h.debt, h.debtAt = h.remaining(now, worked, t), now
	if h.ejected && h.trying {
		*h = health{}
	}
}

// remaining returns the failed requests that an equal server would still be busy with. The debt
// falls by one each t, except during the time worked on other requests.
func (h *health) remaining(now mono.Time, worked, t time.Duration) float64 {
	if h.debt == 0 {
		return 0
	}
	idle := max(now.Sub(h.debtAt)-worked, 0)
	return max(h.debt-float64(idle)/float64(t), 0)
}

// firstEjected returns the server in fits that was ejected first, if all servers are ejected and no
// probe is in flight. Otherwise it returns -1.
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
