// Package shareproto has a share of a contract, and the values of enumerations, as they
// travel, for brokers and the control plane alike.
package shareproto

import (
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/tokenbucket"
)

// To returns a share as it travels.
func To(s tokenbucket.Share) *srtmv1.Share {
	return &srtmv1.Share{RateMilli: int64(s.Rate), Burst: s.Burst}
}

// Holder is a message with a share's fields: srtmv1.Share or srtmv1.Contract.
type Holder interface {
	GetRateMilli() int64
	GetBurst() int64
}

// From returns the share that came; zero for none.
func From(p Holder) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(p.GetRateMilli()), Burst: p.GetBurst()}
}
