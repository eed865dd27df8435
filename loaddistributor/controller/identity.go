package controller

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	lastMessage mono.Time // time of the process's last message, or the start of this controller
	refused     Refusal   // the last refusal of another process
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

// holderOf returns the holder of a broker from the catalog.
func holderOf(b catalog.Broker, now mono.Time) *holder {
	h := &holder{lastMessage: now}
	h.Take(identity.Process{
		Stamp: mono.Stamp{Process: b.Instance},
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
	silent := now.Sub(h.lastMessage)
	err := h.Check(s.broker, identity.Process{Stamp: s.hello, Place: s.place}, open != nil || silent <= lease, silent)
	if err != nil && !errors.Is(err, identity.ErrReplaced) {
		h.refused.add(s)
		if open != nil {
			// If the owner is alive, it answers. The refused process tries again, and
			// then the owner has answered in between.
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
	r.Place, r.Last, r.instance = s.place, now, s.hello.Process
	r.Count++
}

// takeOwnership makes a session's process the owner of the broker's id. Requires: claim allowed
// it.
func (b *brokers) takeOwnership(s *Session) {
	h := b.holders[s.broker]
	if h == nil {
		h = &holder{}
		b.holders[s.broker] = h
	}
	h.Take(identity.Process{Stamp: s.hello, Place: s.place})
	h.lastMessage = clock.Mono()
}

// markAlive records that the session's process is alive. Requires: the session is its broker's
// session.
func (b *brokers) markAlive(s *Session) {
	if h := b.holders[s.broker]; h != nil {
		h.lastMessage = clock.Mono()
	}
}

// Refused returns the last process that was refused the broker's id, if the refusal is
// recent.
func (r *View) Refused(id string) (refusal Refusal, found bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.brokers.holders[id]
	if h == nil || h.refused.Count == 0 || time.Since(h.refused.Last) > refusalShown {
		return Refusal{}, false
	}
	return h.refused, true
}

// logRefusal logs the first refusal of each process.
func (c *Controller) logRefusal(s *Session, err error, previous string) {
	var used *identity.InUse
	var lostErr *identity.Lost
	if (errors.As(err, &used) || errors.As(err, &lostErr)) && previous != s.hello.Process {
		c.metrics.refusedIDs.Inc()
		c.cfg.Log.Error("broker refused: its id belongs to another process; give it a --broker-id of its own, or stop the other one",
			obs.KeyBroker, s.broker, obs.KeyInstance, s.hello.Process, obs.KeyError, err)
	}
}

// The end of a session proves little: the process or the network may have failed. A
// process has ended if its own address refuses connections at both its ports, after both
// have accepted connections in the same session. A host that is cut off, frozen or gone
// does not answer, and the ports of a frozen process accept. docs/high-availability.md lists
// possible confusions.

// Probe reports whether an address accepts or refuses connections now. If neither, the
// address does not answer.
type Probe func(ctx context.Context, address string) (accepts, refuses bool)

// How often, and how many times, a broker's ports are probed: until both have accepted,
// and until both have refused twice in a row.
const (
	vouchPause, vouchTries = time.Second, 10
	endPause, endTries     = 100 * time.Millisecond, 30
	probeTimeout           = 300 * time.Millisecond
)

// Dial is a Probe that dials. A host name refuses if all its addresses refuse.
func Dial(ctx context.Context, address string) (accepts, refuses bool) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false, false
	}
	ips, _ := net.DefaultResolver.LookupHost(ctx, host) // no address: neither
	for _, ip := range ips {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(ip, port))
		if err == nil {
			conn.Close()
			return true, false
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return false, false
		}
	}
	return false, len(ips) > 0
}

// witness finds out whether brokers' processes have ended.
type witness struct {
	// Set once.
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	life    *lifetime
	adaptor grants
	wake    chan<- struct{} // wakes the controller's mover
}

// vouch finds out whether the broker's ports can be reached from here. Requires: the lock held,
// and not closing.
func (w *witness) vouch(s *Session, tcp, web string) {
	if w.cfg.Probe == nil {
		return
	}
	w.life.work.Go(func() {
		for range vouchTries {
			a, _ := w.cfg.Probe(context.Background(), tcp)
			b, _ := w.cfg.Probe(context.Background(), web)
			w.mu.Lock()
			replaced := w.brokers.sessions[s.broker] != s
			s.reachable = a && b && !replaced
			w.mu.Unlock()
			if a && b && !replaced {
				w.cfg.Log.Info("the broker's ports accept connections", obs.KeyBroker, s.broker)
			}
			if a && b || replaced || !w.life.pause(vouchPause) {
				return
			}
		}
	})
}

// examine looks for evidence that the process of an ended session has ended. With
// evidence it frees the broker's shares and moves its publishers at once. Requires: mu
// held.
func (w *witness) examine(s *Session) {
	b, _ := w.cat.next.Broker(s.broker)
	if !s.reachable || w.life.closing || b.Instance != s.hello.Process {
		return
	}
	w.life.work.Go(func() {
		refused := 0
		for range endTries {
			refused++
			for _, address := range []string{b.TCPAddress, b.HTTPAddress} {
				if _, refuses := w.cfg.Probe(context.Background(), address); !refuses {
					refused = 0 // the process may be ending, a new process has started, or the answer is late
					break
				}
			}
			if refused == 2 {
				w.ended(s)
				return
			}
			w.mu.Lock()
			reconnected := w.brokers.sessions[s.broker] != nil
			w.mu.Unlock()
			if reconnected || !w.life.pause(endPause) {
				return
			}
		}
	})
}

// ended handles the end of a session's process.
func (w *witness) ended(s *Session) {
	w.mu.Lock()
	if h := w.brokers.holders[s.broker]; h != nil {
		h.End(s.hello.Process)
	}
	w.mu.Unlock()
	w.cfg.Log.Warn("the broker's process has ended: its ports refuse", obs.KeyBroker, s.broker, obs.KeyInstance, s.hello.Process)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for {
		_, err := w.adaptor.End(ctx, s.broker, s.hello.Process)
		if err == nil {
			break
		}
		// The adaptor may see the end of its own session later.
		if code := status.Code(err); code != codes.FailedPrecondition && code != codes.Unavailable || ctx.Err() != nil || !w.life.pause(endPause) {
			w.cfg.Log.Warn("its shares stay reserved for it", obs.KeyBroker, s.broker, obs.KeyError, err)
			break
		}
	}
	w.mu.Lock()
	if w.brokers.sessions[s.broker] == nil {
		w.brokers.disconnectedSince[s.broker] = time.Now().Add(-w.cfg.EvacuateAfter)
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default: // a look is already due
	}
}

// pause waits, and reports whether the controller is still running. Requires: the lock is
// not held.
func (l *lifetime) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ending:
		return false
	}
}
