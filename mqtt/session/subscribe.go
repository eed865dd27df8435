package session

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/packet"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// subscribe decodes a SUBSCRIBE or an UNSUBSCRIBE.
func (s *Session) subscribe(k packet.Kind, r *packet.Reader, op *nsq.Op) *Error {
	if op.Packet = r.Uint16(); op.Packet == 0 && !r.Failed {
		return violation("%v with the packet identifier 0", k)
	}
	var p properties
	if s.version == packet.V5 {
		if err := readProperties(r, k, &p); err != nil {
			return err
		}
	}
	var filters []nsq.Filter
	count, room, refusal := len(s.filters), s.cfg.MaxSources-s.filters.sources(), ""
	for len(r.Rest) > 0 {
		if len(filters) == s.cfg.MaxFilters {
			return &Error{Reason: QuotaExceeded, Text: "more filters than a session may have"}
		}
		f := nsq.Filter{Filter: string(r.Text()), ID: p.values[packet.SubscriptionID]}
		if k == packet.Subscribe {
			if err := parseOptions(r.Byte(), s.version, &f); err != nil {
				return err
			}
		}
		if r.Failed {
			break
		}
		shared := false
		if rest, found := strings.CutPrefix(f.Filter, "$share/"); found {
			shared = true
			f.Share, f.Filter, _ = strings.Cut(rest, "/")
		}
		at := s.filters.find(&f)
		switch {
		case shared && f.NoLocal:
			return violation("a shared subscription with No Local")
		case shared && !wire.ValidChannelName(f.Share), names.CheckFilter(f.Filter) != nil:
			f.Reason = byte(BadFilter)
		case k == packet.Unsubscribe && at < 0:
			f.Reason = byte(NoSubscription)
		case k == packet.Unsubscribe:
		case at >= 0 && len(s.filters[at].Topics) > 0:
			f.Topics, f.Channel = s.filters[at].Topics, s.filters[at].Channel
		case count == s.cfg.MaxFilters:
			f.Reason = byte(QuotaExceeded)
		default:
			if err := s.resolve(&f, room); err != nil {
				refusal = err.Error()
			} else {
				count, room = count+1, room-len(f.Topics)
			}
		}
		filters = append(filters, f)
	}
	switch {
	case r.Failed:
		return misfit(k)
	case len(filters) == 0:
		return violation("%v without a filter", k)
	}
	s.extra.Filters, s.extra.Refusal = filters, refusal
	op.Kind, op.MQTT = nsq.OpSubscribe, &s.extra
	if k == packet.Unsubscribe {
		op.Kind = nsq.OpUnsubscribe
	}
	return nil
}

// parseOptions decodes the options of a filter.
func parseOptions(options, version byte, f *nsq.Filter) *Error {
	f.QoS = options & 3
	reserved := byte(0xfc)
	if version == packet.V5 {
		f.NoLocal = options&4 != 0
		reserved = 0xc0
	}
	if f.QoS == 3 || options&reserved != 0 || version == packet.V5 && options&0x30 == 0x30 {
		return malformed("a filter with the invalid options 0x%02X", options)
	}
	f.QoS = min(f.QoS, 1)
	return nil
}

// resolve sets the topics and the channel of a filter, which may have room topics.
func (s *Session) resolve(f *nsq.Filter, room int) (err error) {
	f.Topics, err = s.rules.Topics(f.Filter, room)
	switch {
	case errors.Is(err, names.ErrTooMany):
		f.Reason = byte(QuotaExceeded)
	case err != nil:
		f.Reason = byte(BadFilter)
	case f.Share != "":
		f.Channel = s.rules.SharedChannel(f.Share, f.Filter, f.Topics)
	case f.Channel == "": // a kept filter keeps its channel
		f.Channel = s.channel
	}
	return err
}

// filterSet has a session's filters. No two have the same text.
type filterSet []nsq.Filter

// sources returns the number of topics of all filters together.
func (set filterSet) sources() (sum int) {
	for i := range set {
		sum += len(set[i].Topics)
	}
	return sum
}

// find returns the index of the filter with the same text, or -1.
func (set filterSet) find(f *nsq.Filter) int {
	return slices.IndexFunc(set, func(other nsq.Filter) bool {
		return other.Filter == f.Filter && other.Share == f.Share
	})
}

// After returns the filters of the session after the operation: an accepted filter of SUBSCRIBE replaces the
// filter with the same text.
func (s *Session) After(op *nsq.Op) []nsq.Filter {
	set := slices.Clone(s.filters)
	for _, f := range op.MQTT.Filters {
		at := set.find(&f)
		switch {
		case op.Kind == nsq.OpUnsubscribe && at >= 0:
			set = slices.Delete(set, at, at+1)
		case op.Kind == nsq.OpUnsubscribe || f.Reason >= byte(Unspecified):
		case at >= 0:
			set[at] = f
		default:
			set = append(set, f)
		}
	}
	return set
}

// answerFilters applies a SUBSCRIBE or UNSUBSCRIBE that the driver has carried out, and answers the packet.
func (s *Session) answerFilters(k packet.Kind, op *nsq.Op, err error) {
	for i := range op.MQTT.Filters {
		if f := &op.MQTT.Filters[i]; k == packet.Suback && err != nil && f.Reason < byte(Unspecified) {
			f.Reason = byte(ReasonOf(err))
		}
	}
	s.filters, s.origin = s.After(op), 0
	if slices.ContainsFunc(s.filters, func(f nsq.Filter) bool { return f.NoLocal }) {
		s.origin = names.OriginOf(s.clientID)
	}
	s.out = appendPacket(s.out, k, func(dst []byte) []byte {
		dst = binary.BigEndian.AppendUint16(dst, op.Packet)
		if s.version == packet.V5 {
			dst = s.appendReason(dst, cmp.Or(textOf(err), op.MQTT.Refusal), "")
		} else if k == packet.Unsuback {
			return dst
		}
		for _, f := range op.MQTT.Filters {
			reason := Reason(f.Reason).valid(k)
			if k == packet.Suback && reason < Unspecified {
				reason = Reason(f.QoS)
			}
			if s.version == packet.V311 && reason >= Unspecified {
				reason = Unspecified
			}
			dst = append(dst, byte(reason))
		}
		return dst
	})
}

// UseRules replaces the rules, and the topics and channels of Subscriptions. A filter that no rule maps
// any more keeps no topic.
func (s *Session) UseRules(r *names.Rules) {
	s.rules = r
	s.resolveAll()
}

// resolveAll sets the topics and the channels of the session's filters. Filters above the limit of sources
// get no topic.
func (s *Session) resolveAll() {
	room := s.cfg.MaxSources
	for i := range s.filters {
		_ = s.resolve(&s.filters[i], room) // then the filter has no topic
		room -= len(s.filters[i].Topics)
	}
}

// Subscriptions returns the session's filters, to keep them or to compare them with the sources. The
// caller must not change the filters.
func (s *Session) Subscriptions() []nsq.Filter { return s.filters }

// Restore gives the session the filters of the kept session. Requires: OpConnect is not answered.
func (s *Session) Restore(kept []nsq.Filter) {
	s.filters = slices.Clone(kept)
}
