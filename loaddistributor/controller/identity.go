package controller

import (
	"errors"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// DefaultIDLease is how long a broker's id belongs to a silent process that may be alive.
const DefaultIDLease = 3200 * time.Millisecond

const refusalShown = 10 * time.Minute

// holder is the process that owns a broker's id.
type holder struct {
	identity.Owner
	heard   mono.Time // time of the process's last message, or the start of this controller
	refused Refusal   // the last refusal of another process
}

// Refusal is the latest process that was refused a broker's id. The zero Refusal means
// none.
type Refusal struct {
	Place    identity.Place
	Last     time.Time
	Count    uint64 // hellos, at most refusalShown apart
	instance string
}

// PlaceOf returns the place of the process that sent a hello.
func PlaceOf(h *srtmv1.BrokerHello) identity.Place {
	return identity.Place{Address: h.TcpAddress, Host: h.Hostname, Folder: h.DataPath, Lock: h.Lock}
}

// holds returns the holder of a broker from the catalog.
func holds(b catalog.Broker, now mono.Time) *holder {
	h := &holder{heard: now}
	h.Take(identity.Process{
		Said:  mono.Said{Process: b.Instance},
		Place: identity.Place{Address: b.TCPAddress, Host: b.Hostname, Folder: b.Folder, Lock: b.Lock},
	})
	return h
}

// claim checks whether a session's process may own the broker's id. Errors:
// identity.ErrReplaced, *identity.InUse, *identity.Lost.
func (b *brokers) claim(s *Session, lease time.Duration) error {
	h := b.holders[s.broker]
	if h == nil {
		return nil
	}
	now, open := clock.Mono(), b.sessions[s.broker]
	silent := now.Sub(h.heard)
	err := h.Check(s.broker, identity.Process{Said: s.said, Place: s.place}, open != nil || silent <= lease, silent)
	if err != nil && !errors.Is(err, identity.ErrReplaced) {
		h.refused.add(s)
		if open != nil {
			// If the owner is alive, it answers. The refused process tries again, and
			// then the owner has been heard in between.
			open.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Recall{Recall: &srtmv1.RecallTopics{}}})
		}
	}
	return err
}

func (r *Refusal) add(s *Session) {
	now := time.Now()
	if now.Sub(r.Last) > refusalShown {
		r.Count = 0
	}
	r.Place, r.Last, r.instance = s.place, now, s.said.Process
	r.Count++
}

// take makes a session's process the owner of the broker's id. Requires: claim allowed
// it.
func (b *brokers) take(s *Session) {
	h := b.holders[s.broker]
	if h == nil {
		h = &holder{}
		b.holders[s.broker] = h
	}
	h.Take(identity.Process{Said: s.said, Place: s.place})
	h.heard = clock.Mono()
}

// hear records that the session's process is alive. Requires: the session is its broker's
// session.
func (b *brokers) hear(s *Session) {
	if h := b.holders[s.broker]; h != nil {
		h.heard = clock.Mono()
	}
}

// Refused returns the last process that was refused the broker's id, if the refusal is
// recent.
func (r *View) Refused(id string) (of Refusal, some bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.brokers.holders[id]
	if h == nil || h.refused.Count == 0 || time.Since(h.refused.Last) > refusalShown {
		return Refusal{}, false
	}
	return h.refused, true
}

// logRefusal logs the first refusal of each process.
func (c *Controller) logRefusal(s *Session, err error, before string) {
	var used *identity.InUse
	var lost *identity.Lost
	if (errors.As(err, &used) || errors.As(err, &lost)) && before != s.said.Process {
		c.metrics.strangers.Inc()
		c.cfg.Log.Error("broker refused: its id belongs to another process; give it a --broker-id of its own, or stop the other one",
			obs.KeyBroker, s.broker, obs.KeyInstance, s.said.Process, obs.KeyError, err)
	}
}
