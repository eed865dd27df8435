package service

import (
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/tokenbucket"
)

// ShareProto returns the message of a share.
func ShareProto(s tokenbucket.Share) *srtmv1.Share {
	return &srtmv1.Share{RateMilli: int64(s.Rate), Burst: s.Burst}
}

// ShareHolder is a message with a share's fields: srtmv1.Share or srtmv1.Contract.
type ShareHolder interface {
	GetRateMilli() int64
	GetBurst() int64
}

// ShareOf returns the share of a message; zero for nil.
func ShareOf(p ShareHolder) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(p.GetRateMilli()), Burst: p.GetBurst()}
}
