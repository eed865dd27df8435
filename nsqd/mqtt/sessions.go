package mqtt

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

const (
	// maxSessions is the maximum number of kept sessions.
	maxSessions = 100_000
	// maxWill is the maximum size of a will's payload, and maxWills the maximum of all wills, in bytes.
	maxWill  = 64 << 10
	maxWills = 64 << 20
	// retryExpiry is the pause before a session whose channels cannot be deleted is ended again.
	retryExpiry = 10 * time.Minute
	// reportedWithin is the time within which all brokers have reported that the consumers of a client are gone.
	reportedWithin = 10 * time.Second
	// publishTimeout bounds an attempt to publish a will, and the time of all attempts after the first.
	publishTimeout = 10 * time.Second
	// maxPublishing is the maximum number of wills that are published at once.
	maxPublishing = 16
	// maxRequests is the maximum number of requests about channels at once. The control plane's session has a
	// queue, and thousands of sessions may come or end at once. requestTimeout bounds a request, with its wait.
	maxRequests    = 64
	requestTimeout = 10 * time.Second
)

// ErrInUse reports that a channel has consumers, or a session at another broker, so the channel is not
// deleted.
var ErrInUse = errors.New("the channel has consumers, or a session at another broker")

// sessions has the sessions by client id: of connected clients, and kept.
type sessions struct {
	// Set once.
	store   store
	metrics *metrics
	ctx     context.Context // ends when the server stops
	cancel  context.CancelFunc

	wake       chan struct{} // capacity 1: a deadline may be earlier than before
	publishing chan struct{} // capacity maxPublishing: wills that are being published
	requesting chan struct{} // capacity maxRequests: requests about channels
	wg         sync.WaitGroup
	wills      atomic.Int64 // bytes of all wills

	mu struct {
		sync.Mutex
		closed bool
		byID   map[string]*entry
		// deadlines has each entry without a holder that has a deadline, at this deadline or before. So
		// the work of Run does not grow with the number of sessions.
		deadlines container.Heap[deadline]
		kept      int // entries with a file
		redirected
	}
}

// deadline says that the entry of a session may be due at a time.
type deadline struct {
	at mono.Time
	e  *entry
}

// Before implements container.Heap.
func (d deadline) Before(o deadline) bool { return d.at < o.at }

// entry is a session. While busy is set, its holder alone uses the session's file.
type entry struct {
	// Set once.
	id string

	// Guarded by sessions.mu. The holder alone writes left, will, expires and willAt, and reads the four without mu.
	owner   string        // authenticated identity of the session; "": none
	client  *Client       // nil: not connected
	busy    chan struct{} // closed when the holder has left; nil: no holder
	stored  bool          // the session has a file
	left    mono.Time     // when the last client left, or the start of the broker
	expires mono.Time     // end of the session, without a holder
	will    *nsq.Will     // to publish at willAt, without a holder; nil: none
	willAt  mono.Time
	queued  mono.Time // earliest deadline of the entry in sessions.mu.deadlines; mono.Never: none
}

// due returns when the session needs work. Requires: sessions.mu held, no holder.
func (e *entry) due() mono.Time {
	at := mono.Never
	if e.will != nil {
		at = e.willAt
	}
	if e.stored {
		at = min(at, e.expires)
	}
	return at
}

// hold returns the session of a client id, for which the caller is the holder. If a client has the
// session, hold ends its connection and waits until the client has released its subscriptions.
func (ss *sessions) hold(ctx context.Context, id, owner string, c *Client) (*entry, error) {
	for {
		ss.mu.Lock()
		e := ss.mu.byID[id]
		switch {
		case ss.mu.closed:
			ss.mu.Unlock()
			return nil, &session.Error{Reason: session.ShuttingDown, Text: "the broker stops"}
		case e == nil:
			e = &entry{id: id, owner: owner, queued: mono.Never}
			ss.mu.byID[id] = e
		case e.owner != "" && e.owner != owner:
			ss.mu.Unlock()
			return nil, &session.Error{Reason: session.NotAuthorized, Text: "the client id belongs to another user"}
		}
		if e.busy == nil {
			e.busy, e.client, e.owner = make(chan struct{}), c, owner
			ss.mu.Unlock()
			return e, nil
		}
		busy, other := e.busy, e.client
		ss.mu.Unlock()
		if other != nil {
			other.end(&session.Error{Reason: session.TakenOver, Text: "another connection has the same client id"})
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// leave ends the hold of a session. The session ends at expires, mono.Never: the session is not kept.
func (ss *sessions) leave(e *entry, expires mono.Time, will *nsq.Will, willAt mono.Time) {
	ss.mu.Lock()
	e.client, e.expires, e.will, e.willAt = nil, expires, will, willAt
	if !e.stored && will == nil {
		delete(ss.mu.byID, e.id)
	}
	close(e.busy)
	e.busy = nil
	first := ss.queue(e)
	ss.mu.Unlock()
	if !first {
		return
	}
	select {
	case ss.wake <- struct{}{}:
	default:
	}
}

// queue adds an entry's deadline, unless an earlier deadline of the entry is there. It reports whether the
// deadline is the first of all. Requires: mu held.
func (ss *sessions) queue(e *entry) (first bool) {
	at := e.due()
	if at >= e.queued {
		return false
	}
	e.queued = at
	ss.mu.deadlines.Push(deadline{at, e})
	return ss.mu.deadlines[0].e == e
}

// save makes a session durable. Requires: the caller holds e.
func (ss *sessions) save(e *entry, r *record) error {
	ss.mu.Lock()
	if !e.stored && ss.mu.kept >= maxSessions {
		ss.mu.Unlock()
		ss.metrics.refused.WithLabelValues("session").Inc()
		return &session.Error{Reason: session.QuotaExceeded, Text: "there are as many kept sessions as there may be"}
	}
	if !e.stored {
		e.stored = true
		ss.mu.kept++
	}
	ss.mu.Unlock()
	if err := ss.store.save(r); err != nil {
		return &session.Error{Reason: session.Unspecified, Text: "the session cannot be stored now", Cause: err}
	}
	return nil
}

// forget removes a session's file. Requires: the caller holds e.
func (ss *sessions) forget(e *entry) error {
	err := ss.store.remove(e.id)
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if err == nil && e.stored {
		e.stored = false
		ss.mu.kept--
	}
	return err
}

// reserveWill counts the bytes of a will, or refuses it.
func (ss *sessions) reserveWill(w *nsq.Will) error {
	if len(w.Body) > maxWill {
		ss.metrics.refused.WithLabelValues("will").Inc()
		return &session.Error{Reason: session.QuotaExceeded, Text: "the will is too large"}
	}
	if ss.wills.Add(int64(len(w.Body))) > maxWills {
		ss.releaseWill(w)
		ss.metrics.refused.WithLabelValues("will").Inc()
		return &session.Error{Reason: session.QuotaExceeded, Text: "the wills of all clients are too large"}
	}
	return nil
}

func (ss *sessions) releaseWill(w *nsq.Will) {
	if w != nil {
		ss.wills.Add(-int64(len(w.Body)))
	}
}

// spawn runs do on a goroutine, unless the server stops.
func (ss *sessions) spawn(do func()) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if !ss.mu.closed {
		ss.wg.Go(do)
	}
}

// refreshAll makes each client compare its sources with its filters.
func (ss *sessions) refreshAll() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	for _, e := range ss.mu.byID {
		if e.client != nil {
			e.client.refresh()
		}
	}
}

// restore reads the kept sessions. A session's time begins again: the broker does not store when a client leaves.
// MaxSessionExpiry may be shorter than before.
func (s *Server) restore() error {
	records, faults := s.sessions.store.all()
	now := s.now()
	s.sessions.mu.Lock()
	defer s.sessions.mu.Unlock()
	for _, r := range records {
		e := &entry{id: r.ClientID, owner: r.Owner, stored: true, left: now, expires: now.Add(min(r.Expiry, s.cfg.Session.MaxSessionExpiry)), will: r.Will, queued: mono.Never}
		if r.Will != nil {
			s.sessions.wills.Add(int64(len(r.Will.Body)))
			e.willAt = now.Add(min(r.Will.Delay, r.Expiry))
		}
		s.sessions.mu.byID[r.ClientID] = e
		s.sessions.queue(e)
	}
	s.sessions.mu.kept = len(s.sessions.mu.byID)
	return faults
}

// Run ends expired sessions and publishes delayed wills until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	for {
		next := s.due(s.now())
		timer := time.NewTimer(min(next.Sub(s.now()), time.Hour))
		select {
		case <-timer.C:
		case <-s.sessions.wake:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		timer.Stop()
	}
}

// due starts what is due at now, and returns the next deadline.
func (s *Server) due(now mono.Time) (next mono.Time) {
	ss := &s.sessions
	var expired []*entry
	ss.mu.Lock()
	for len(ss.mu.deadlines) > 0 && !now.Before(ss.mu.deadlines[0].at) {
		e := ss.mu.deadlines.Pop().e
		e.queued = mono.Never
		switch {
		case e.busy != nil: // the holder queues the entry when it leaves
		case now.Before(e.due()):
			ss.queue(e)
		default:
			e.busy = make(chan struct{})
			expired = append(expired, e)
		}
	}
	next = now.Add(time.Hour)
	if len(ss.mu.deadlines) > 0 {
		next = min(next, ss.mu.deadlines[0].at)
	}
	ss.mu.Unlock()
	for _, e := range expired {
		ss.spawn(func() { s.expire(e, now) })
	}
	return next
}

// expire publishes the will of a session, or ends the session. Requires: the caller holds e.
func (s *Server) expire(e *entry, now mono.Time) {
	will, expires := e.will, e.expires
	if will != nil {
		s.publishWill(s.sessions.ctx, e.id, e.owner, will)
		if e.stored && now.Before(expires) {
			s.update(e, func(r *record) { r.Will = nil })
		}
	}
	if e.stored && !now.Before(expires) {
		expires = s.now().Add(s.endSession(e, false))
	}
	s.sessions.leave(e, expires, nil, 0)
}

// update changes the file of a session. Requires: the caller holds e.
func (s *Server) update(e *entry, change func(*record)) {
	r, err := s.sessions.store.load(e.id)
	if err == nil && r != nil {
		change(r)
		err = s.sessions.store.save(r)
	}
	if err != nil {
		s.log.Warn("cannot store an MQTT session", "client_id", e.id, obs.KeyError, err)
	}
}

// endSession deletes the session's channels and its file. Without used, a channel that is in use stays: the
// client has a session at another broker. But the control plane may not know yet that the client has left. If
// again is positive, endSession has failed and must be repeated after this time. Requires: the caller holds e.
func (s *Server) endSession(e *entry, used bool) (again time.Duration) {
	inUse := false
	r, err := s.sessions.store.load(e.id)
	if err == nil && r != nil {
		for _, f := range r.Filters {
			if f.Share != "" || wire.Ephemeral(f.Channel) {
				continue
			}
			for _, topic := range f.Topics {
				failure := s.sessions.request(func(ctx context.Context) error { return s.cfg.DeleteChannel(ctx, topic, f.Channel, used) })
				if errors.Is(failure, ErrInUse) {
					inUse, failure = true, nil
				}
				err = errors.Join(err, failure)
			}
		}
	}
	if err == nil && inUse && s.now().Sub(e.left) < reportedWithin {
		return reportedWithin
	}
	if err == nil {
		err = s.sessions.forget(e)
	}
	if err != nil {
		s.log.Warn("cannot end an MQTT session; retrying", "client_id", e.id, obs.KeyDuration, retryExpiry, obs.KeyError, err)
		return retryExpiry
	}
	return 0
}

// request carries out a request about a channel. It waits until fewer than maxRequests requests are under way.
func (ss *sessions) request(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ss.ctx, requestTimeout)
	defer cancel()
	return limited(ctx, ss.requesting, do)
}

// limited runs do as soon as slots has room, unless ctx ends.
func limited(ctx context.Context, slots chan struct{}, do func(context.Context) error) error {
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
		return do(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// publishWill publishes a will. It repeats a refused publish until publishTimeout, unless the wills use half of
// their memory: then a connected client's will is worth more.
func (s *Server) publishWill(ctx context.Context, id, owner string, w *nsq.Will) {
	defer s.sessions.releaseWill(w)
	err := s.tryWill(ctx, id, owner, w)
	limit, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	for ; err != nil; err = s.tryWill(limit, id, owner, w) {
		if w.QoS == 0 || !IsTemporary(err) || s.sessions.wills.Load() > maxWills/2 || !clock.Sleep(limit, time.Second) {
			s.metrics.lostWills.Inc()
			s.log.Warn("the will of an MQTT client is lost", "client_id", id, obs.KeyTopic, w.Topic, obs.KeyError, err)
			return
		}
	}
}

// tryWill publishes a will once. It waits until fewer than maxPublishing wills are being published, so that
// clients that are connected have their share of the broker when thousands of connections end at once.
func (s *Server) tryWill(ctx context.Context, id, owner string, w *nsq.Will) error {
	return limited(ctx, s.sessions.publishing, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, publishTimeout)
		defer cancel()
		return s.cfg.Publish(ctx, id, owner, w)
	})
}

// PublishWills publishes the wills of all clients until ctx ends, because the broker stops. The caller
// closes the broker afterwards.
func (s *Server) PublishWills(ctx context.Context) {
	s.sessions.mu.Lock()
	s.sessions.mu.closed = true
	var all []*entry
	for _, e := range s.sessions.mu.byID {
		all = append(all, e)
	}
	s.sessions.mu.Unlock()
	var publishing errgroup.Group
	publishing.SetLimit(maxPublishing)
	for _, e := range all {
		s.sessions.mu.Lock()
		owner, stored, will := e.owner, e.stored, (*nsq.Will)(nil)
		switch {
		case e.client != nil:
			will = e.client.will.Swap(nil)
		case e.busy == nil: // otherwise expire publishes the will
			will, e.will = e.will, nil
		}
		s.sessions.mu.Unlock()
		if will == nil {
			continue
		}
		publishing.Go(func() error {
			s.publishWill(ctx, e.id, owner, will)
			if stored {
				s.update(e, func(r *record) { r.Will = nil })
			}
			return nil
		})
	}
	_ = publishing.Wait() // publishWill logs errors
	defer context.AfterFunc(ctx, s.sessions.cancel)()
	s.sessions.wg.Wait() // for expire
}

// Close ends the work of the server. Requires: all connections have ended.
func (s *Server) Close() {
	s.sessions.mu.Lock()
	s.sessions.mu.closed = true
	s.sessions.mu.Unlock()
	s.sessions.cancel()
	s.sessions.wg.Wait()
}
