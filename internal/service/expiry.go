package service

import (
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
)

// ExpiryProto returns the message of settings; nil if nothing is set.
func ExpiryProto(e expiry.Settings) *srtmv1.Expiry {
	if !e.On() {
		return nil
	}
	p := &srtmv1.Expiry{MaxAttempts: uint32(e.MaxAttempts), DeadLetterTopic: e.DeadLetter}
	if e.TTL > 0 {
		p.Ttl = durationpb.New(e.TTL)
	}
	return p
}

// ChannelExpiryProto returns the message of channels' settings.
func ChannelExpiryProto(all map[string]expiry.Settings) map[string]*srtmv1.Expiry {
	if len(all) == 0 {
		return nil
	}
	p := make(map[string]*srtmv1.Expiry, len(all))
	for channel, e := range all { // order: a map again
		p[channel] = ExpiryProto(e)
	}
	return p
}

// ExpiryOf returns the settings of a message, which may be nil.
func ExpiryOf(p *srtmv1.Expiry) expiry.Settings {
	return expiry.Settings{TTL: p.GetTtl().AsDuration(), MaxAttempts: int(p.GetMaxAttempts()), DeadLetter: p.GetDeadLetterTopic()}
}

// ChannelExpiryOf returns the settings of channels.
func ChannelExpiryOf(p map[string]*srtmv1.Expiry) map[string]expiry.Settings {
	if len(p) == 0 {
		return nil
	}
	all := make(map[string]expiry.Settings, len(p))
	for channel, e := range p { // order: a map again
		all[channel] = ExpiryOf(e)
	}
	return all
}
