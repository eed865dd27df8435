package balance

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// pickLiteral is the paper's pickTheBestQueue (Algorithm 1) but for counting, which is
// Sent's: T starts at 0, so the first server takes everything until it has two requests
// at once, then the second.
func (b *Balancer) pickLiteral(fits []int) int {
	best, least := -1, math.Inf(1)
	for _, i := range fits {
		s := &b.servers[i]
		if cost := float64(1+s.inFlight) * float64(s.interval); s.present && cost < least {
			best, least = i, cost
		}
	}
	return best
}

// departLiteral is the paper's handleRequestCompletion: only what departs from a server
// that the departure before left busy is measured, so a server that has one request at
// a time never is. Requires: the request no longer counts in inFlight.
func (s *server) departLiteral(now mono.Time) {
	if s.measured {
		s.samples++
		s.interval = time.Duration((1-gamma)*float64(s.interval) + gamma*float64(now.Sub(s.departure)))
	}
	s.measured = s.inFlight > 0
	if s.measured {
		s.departure = now
	}
}
