// Package shareproto converts shares and enumerations to messages, for brokers and the
// control plane.
package shareproto

import (
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/tokenbucket"
)

// To returns the message of a share.
func To(s tokenbucket.Share) *srtmv1.Share {
	return &srtmv1.Share{RateMilli: int64(s.Rate), Burst: s.Burst}
}

// Holder is a message with a share's fields: srtmv1.Share or srtmv1.Contract.
type Holder interface {
	GetRateMilli() int64
	GetBurst() int64
}

// From returns the share of a message; zero for nil.
func From(p Holder) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(p.GetRateMilli()), Burst: p.GetBurst()}
}
