package lease

import (
	"time"

	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/holder"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Part is what a holder has of a key. Not safe for concurrent use.
type Part struct {
	name     string
	holder   uint64
	until    mono.Time // when all that is held ends
	bucket   tokenbucket.Bucket
	offered  uint64             // since it was last asked for
	released tokenbucket.Tokens // for the newest grant
	holdings *holder.Holdings
	lease    holder.Lease
}

// NewPart returns one that holds nothing. Requires: holder is above 0, and no other's.
func NewPart(name string, id uint64) *Part {
	p := &Part{name: name, holder: id, holdings: holder.New(), lease: holder.Lease{Strict: true}}
	p.holdings.Prepared(name)
	return p
}

// Holds reports whether what Take was given has not ended: what Admit said counts only if that is
// so when it is told.
func (p *Part) Holds(now mono.Time) bool { return now.Before(p.until) }

// Admit decides by what is held; held is false if that is nothing, or less than n at any
// time. Requires: as of tokenbucket.Bucket.Admit, and n at most 2^32-1.
func (p *Part) Admit(n int64, now mono.Time) (admit, held bool, retry time.Duration) {
	p.offered += uint64(n)
	if !p.Holds(now) || n > p.bucket.Share().Burst {
		return false, false, 0
	}
	admit, retry = p.bucket.Admit(n, now)
	return admit, true, retry
}

// Left returns the whole credits that are there.
func (p *Part) Left(now mono.Time) int64 {
	return int64(max(0, p.bucket.Tokens(now)) / tokenbucket.Token)
}

// Ask returns the question to the key's owner.
func (p *Part) Ask(now mono.Time) (h wire.Held, offered uint32) {
	p.lapse(now)
	offered = uint32(min(p.offered, 1<<32-1))
	p.offered = 0
	in := p.holdings.Of(p.name)
	return wire.Held{Holder: p.holder, Epoch: in.Epoch, Share: in.Share, Released: p.released}, offered
}

// Take puts the owner's answer in force, to a question of the time of asked. It reports
// whether the owner waits to hear of it. Requires: of two questions only the later one's
// answer is taken once that was asked.
func (p *Part) Take(asked, now mono.Time, g wire.Grant, length time.Duration) (again bool) {
	p.lapse(now) // before it is renewed: what is over does not come back
	grant := holder.Grant{Topic: p.name, Epoch: g.Epoch, Share: g.Share, Tokens: g.Tokens}
	if holder.Check(grant) == nil {
		if v, _ := p.holdings.Offer(grant); v == holder.InForce {
			p.released = p.bucket.Retune(now, g.Share, g.Tokens)
			p.holdings.Applied(grant)
			again = true
		}
	}
	p.lease.Renew(asked, length, length)
	_, p.until = p.lease.Ends()
	p.lapse(now)
	return again
}

func (p *Part) lapse(now mono.Time) {
	if _, all := p.lease.Over(now); all && p.holdings.LapseOne(p.name, true, true) {
		p.bucket.Retune(now, tokenbucket.Share{}, 0)
		p.released = 0
	}
}
