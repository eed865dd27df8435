package loop

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxHistory bounds the changes that are remembered of each topic; the oldest
// go first. The log has them all.
const maxHistory = 512

// What happens to a broker's share.
const (
	eventGranted      = "granted"
	eventAcknowledged = "acknowledged"
	eventLapsed       = "lapsed"
	eventFreed        = "freed"
)

// Why grants are made.
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

// change is one thing that happened to a share.
type change struct {
	at            time.Time
	broker        string
	share, flex   tokenbucket.Share
	epoch         uint64
	tokens        tokenbucket.Tokens
	event, reason string
}

// history is the latest changes of one topic, a ring.
type history struct {
	changes []change
	next    int // of changes, once it is full
}

func (h *history) add(c change) {
	if len(h.changes) < maxHistory {
		h.changes = append(h.changes, c)
		return
	}
	h.changes[h.next] = c
	h.next = (h.next + 1) % maxHistory
}

// latest returns the n latest, oldest first.
func (h *history) latest(n uint32) []*srtmv1.ShareChange {
	if h == nil {
		return nil
	}
	all := append(append([]change(nil), h.changes[h.next:]...), h.changes[:h.next]...)
	var list []*srtmv1.ShareChange
	for _, c := range all[max(0, len(all)-int(min(n, maxHistory))):] {
		list = append(list, &srtmv1.ShareChange{
			Time: timestamppb.New(c.at), BrokerId: c.broker, Share: shareproto.To(c.share), Flex: shareproto.To(c.flex),
			Epoch: c.epoch, TokensMilli: int64(c.tokens), Event: c.event, Reason: c.reason,
		})
	}
	return list
}

// noteLocked requires mu held. Of a topic that was not set nothing is kept, so
// that brokers cannot fill the memory.
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

// noteLapseLocked notes what a broker may not use any more, without a word of
// its own. Requires: mu held.
func (s *Server) noteLapseLocked(lapse ledger.Lapse) {
	for _, name := range s.mu.machine.PlacedOn(lapse.Broker) {
		c := change{at: time.Now(), broker: lapse.Broker, event: eventLapsed, reason: reasonLease}
		if lapse.Base {
			c.event = eventFreed
		}
		view, _ := s.mu.machine.Topic(name)
		for _, m := range view.Members {
			if m.Broker == lapse.Broker {
				c.share, c.epoch = m.Reserved, m.AcknowledgedEpoch
			}
		}
		s.noteLocked(name, c)
	}
}
