package loop

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxHistory bounds the changes kept for each topic; the oldest are dropped first. The log has all
// changes.
const maxHistory = 512

// Events of a broker's share.
const (
	eventGranted      = "granted"
	eventAcknowledged = "acknowledged"
	eventLapsed       = "lapsed"
	eventFreed        = "freed"
)

// Reasons for grants.
const (
	reasonContract  = "contract"
	reasonRule      = "rule"
	reasonRest      = "rest"
	reasonHello     = "hello"
	reasonLease     = "lease"
	reasonForgotten = "forgotten"
	reasonRemoved   = "removed"
	reasonEnded     = "ended"
)

// change is an event of a share.
type change struct {
	time          time.Time
	broker        string
	share, flex   tokenbucket.Share
	epoch         uint64
	tokens        tokenbucket.Tokens
	event, reason string
}

// history is a ring of the latest changes of one topic.
type history struct {
	changes []change
	next    int // index of the oldest change, once the ring is full
}

func (h *history) add(c change) {
	if len(h.changes) < maxHistory {
		h.changes = append(h.changes, c)
		return
	}
	h.changes[h.next] = c
	h.next = (h.next + 1) % maxHistory
}

// latest returns the latest n changes, oldest first.
func (h *history) latest(n uint32) []*srtmv1.ShareChange {
	if h == nil {
		return nil
	}
	ordered := append(append([]change(nil), h.changes[h.next:]...), h.changes[:h.next]...)
	var list []*srtmv1.ShareChange
	for _, c := range ordered[max(0, len(ordered)-int(min(n, maxHistory))):] {
		list = append(list, &srtmv1.ShareChange{
			Time: timestamppb.New(c.time), BrokerId: c.broker, Share: service.ShareProto(c.share), Flex: service.ShareProto(c.flex),
			Epoch: c.epoch, TokensMilli: int64(c.tokens), Event: c.event, Reason: c.reason,
		})
	}
	return list
}

// noteLocked records a change. It ignores topics without a contract, so that brokers cannot fill the
// memory. Requires: mu held.
func (s *Server) noteLocked(topic string, c change) {
	if s.mu.machine.Contract(topic) == nil {
		return
	}
	h := s.mu.histories[topic]
	if h == nil {
		h = &history{}
		s.mu.histories[topic] = h
	}
	h.add(c)
}

// noteLapseLocked records the shares that a broker has lost without acknowledging the loss. Requires:
// mu held.
func (s *Server) noteLapseLocked(lapse ledger.Lapse) {
	for _, name := range s.mu.machine.PlacedOn(lapse.Broker) {
		c := change{time: time.Now(), broker: lapse.Broker, event: eventLapsed, reason: reasonLease}
		if lapse.Base {
			c.event = eventFreed
		}
		view, _ := s.mu.machine.Ledger.Topic(name)
		for _, m := range view.Members {
			if m.Broker == lapse.Broker {
				c.share, c.epoch = m.Reserved, m.AcknowledgedEpoch
			}
		}
		s.noteLocked(name, c)
	}
}
