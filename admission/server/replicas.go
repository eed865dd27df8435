package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	replicateDeadline = time.Second // per request
	// followerOver is how long a follower may promise not to take over, counted from its last read of
	// the members. Others wait longer (store.FollowerLease) because clocks differ, as with strictOver.
	followerOver = store.FollowerLease - (leaseOver - strictOver)
)

// replicas holds the credits that other owners sent to this server, and the connection to this server's
// own follower.
type replicas struct {
	mu       sync.Mutex
	me       int64              // instance of this server
	max      int                // keys in all replicas
	byOwner  map[int64]*replica // by instance of the owner
	read     mono.Time          // Boot clock: before the members were last read
	follower store.Member       // Instance 0: no follower may be relied on
	client   srtmv1.AdmissionReplicationClient
	hangUp   func() error

	certainUntil atomic.Int64 // Boot clock: until then the follower takes nothing over
}

// replica holds the credits that one owner process sent to this server. Each answer to the owner
// promises for how long no server takes over.
type replica struct {
	keys      table.Replica
	saved     time.Duration // wall clock: changes before it are in the store
	lastHeard mono.Time     // Boot clock: when the owner last sent
	heartbeat int64         // the owner's heartbeat in the store; 0 if this server does not follow the owner
	// replaced is the owner's heartbeat when this server tried to replace it. Once the store has a later
	// heartbeat, that attempt cannot succeed any more.
	replaced  int64
	recovered bool // the owner's successor has called Recover
}

// refusing reports that the owner is being replaced, so its credits are refused.
func (r *replica) refusing() bool { return r.recovered || r.replaced != 0 && r.heartbeat <= r.replaced }

// promise returns for how long this server promises not to take over.
func (r *replica) promise(read, now mono.Time) time.Duration {
	if r.recovered || r.heartbeat <= r.replaced {
		return 0
	}
	return max(0, min(strictOver, followerOver-now.Sub(read)))
}

// become discards all replicas and the follower: to other servers this is a new process.
func (l *replicas) become(instance int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.me, l.byOwner = instance, map[int64]*replica{}
	l.setFollower(store.Member{}, nil, nil)
}

// freeKeys returns how many more keys fit. Requires: mu held.
func (l *replicas) freeKeys() int {
	free := l.max
	for _, r := range l.byOwner { // order: a sum
		free -= len(r.keys)
	}
	return free
}

// setFollower changes the follower. Acknowledgements of the previous follower no longer count.
// Requires: mu held.
func (l *replicas) setFollower(follower store.Member, client srtmv1.AdmissionReplicationClient, hangUp func() error) {
	if l.hangUp != nil {
		l.hangUp()
	}
	l.follower, l.client, l.hangUp = follower, client, hangUp
	l.certainUntil.Store(0)
}

// process returns the replica of an owner, and creates it if needed. Requires: mu held.
func (l *replicas) process(instance int64) *replica {
	r := l.byOwner[instance]
	if r == nil {
		r = &replica{keys: table.Replica{}, lastHeard: math.MinInt64 / 2}
		l.byOwner[instance] = r
	}
	return r
}

// members updates the heartbeats of the owners that this server follows. read is a time before the store was
// read.
func (l *replicas) members(members []store.Member, read mono.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.read = read
	for _, r := range l.byOwner {
		r.heartbeat = 0
	}
	for _, m := range members {
		if m.Follower == l.me {
			l.process(m.Instance).heartbeat = m.Heartbeat
		}
	}
	maps.DeleteFunc(l.byOwner, func(_ int64, r *replica) bool { return r.heartbeat == 0 && read.Sub(r.lastHeard) > leaseOver })
}

// silent reports whether m has sent nothing for leaseOver. If so, silent marks m as being replaced:
// from then on this server promises m nothing and refuses its credits.
func (l *replicas) silent(m store.Member, now mono.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.byOwner[m.Instance]
	if r == nil {
		return true
	}
	if now.Sub(r.lastHeard) <= leaseOver {
		return false
	}
	r.replaced = m.Heartbeat
	return true
}

// unsaved returns up to n of the credits that a process sent.
func (l *replicas) unsaved(process int64, n int) (batch []table.Sent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.byOwner[process]; r != nil {
		for _, sent := range r.keys { // order: each by itself
			if batch = append(batch, sent); len(batch) == n {
				break
			}
		}
	}
	return batch
}

// saved removes the credits that some returned.
func (l *replicas) saved(process int64, batch []table.Sent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.byOwner[process]; r != nil {
		for _, sent := range batch {
			delete(r.keys, sent.Key)
		}
	}
}

func (l *replicas) meant(instance int64) error {
	if instance != l.me || instance == 0 {
		return status.Error(codes.FailedPrecondition, "this is another process")
	}
	return nil
}

// Replicate implements AdmissionReplication on the follower.
func (s *Server) Replicate(_ context.Context, q *srtmv1.ReplicateRequest) (*srtmv1.ReplicateResponse, error) {
	l := &s.replicas
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.meant(q.GetFollower()); err != nil {
		return nil, err
	}
	r := l.process(q.GetOwner())
	if r.refusing() {
		return nil, status.Error(codes.FailedPrecondition, "it is being replaced")
	}
	a := &srtmv1.ReplicateResponse{}
	limit := len(r.keys) + l.freeKeys()
	for _, c := range q.GetCredits() {
		if len(r.keys) >= limit || !r.keys.Put(sentOf(c)) {
			a.Refused++
		}
	}
	if saved := time.Duration(q.GetSavedMs()) * time.Millisecond; saved > r.saved {
		r.saved = saved
		r.keys.Saved(saved)
	}
	r.lastHeard = s.cfg.Boot()
	a.LeaseMs = r.promise(l.read, r.lastHeard).Milliseconds()
	return a, nil
}

// Recover implements AdmissionReplication on the follower.
func (s *Server) Recover(q *srtmv1.RecoverRequest, to srtmv1.AdmissionReplication_RecoverServer) error {
	l := &s.replicas
	l.mu.Lock()
	err := l.meant(q.GetFollower())
	if err == nil {
		r := l.process(q.GetOwner())
		r.recovered, r.lastHeard = true, s.cfg.Boot()
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	s.saving.Lock()
	defer s.saving.Unlock()
	ctx, cancel := context.WithTimeout(to.Context(), 2*storeDeadline)
	defer cancel()
	if err := s.surrender(ctx, q.GetOwner()); err != nil {
		return status.Errorf(codes.Unavailable, "save what it sent: %v", err)
	}
	return to.Send(&srtmv1.RecoverResponse{})
}

// surrender saves the credits that a process sent, before this server or the process's successor
// replaces it. If a credit has a later epoch than this server knows, surrender reads the owners first.
// Requires: saving held.
func (s *Server) surrender(ctx context.Context, process int64) error {
	read := false
	for {
		batch := s.replicas.unsaved(process, s.batch)
		if len(batch) == 0 {
			return nil
		}
		var credits []table.Credit
		t := s.owners.Load()
		behind := false
		for _, sent := range batch { // skip credits of an earlier epoch: the partition has had another owner since
			epoch := t.all[rule.Partition(sent.Key, rule.Partitions)].Epoch
			if epoch == sent.Epoch {
				credits = append(credits, sent.Credit)
			}
			behind = behind || epoch < sent.Epoch
		}
		if behind && !read { // still behind after a read: the store was replaced by an older copy
			if err := s.readOwners(ctx); err != nil {
				return err
			}
			read = true
			continue
		}
		switch err := s.save(ctx, t, credits); {
		case err == nil:
			s.replicas.saved(process, batch)
		case !errors.Is(err, store.ErrMoved):
			return err
		}
	}
}

func creditProto(c *table.Credit, epoch uint32) *srtmv1.AdmissionCredit {
	roundedUp := c.At + time.Millisecond - 1 // rounded up, as the store does
	return &srtmv1.AdmissionCredit{Key: c.Key, CreditMilli: int64(c.Credits), AtMs: roundedUp.Milliseconds(), Epoch: epoch}
}

func sentOf(c *srtmv1.AdmissionCredit) table.Sent {
	return table.Sent{Epoch: c.GetEpoch(), Credit: table.Credit{
		Key: c.GetKey(), Credits: tokenbucket.Tokens(c.GetCreditMilli()), At: time.Duration(c.GetAtMs()) * time.Millisecond,
	}}
}

// recoverFrom requests that the follower of this server's previous process saves its credits. It
// returns the follower's instance, or 0 if the previous process left in order or had no follower.
func (s *Server) recoverFrom(ctx context.Context) (follower int64, err error) {
	members, err := s.cfg.Store.Members(ctx)
	if err != nil {
		return 0, err
	}
	at := slices.IndexFunc(members, func(m store.Member) bool { return m.Address == s.me.Address })
	if at < 0 || members[at].Follower == 0 {
		return 0, nil
	}
	target := member(members, members[at].Follower)
	if target.Instance == 0 {
		return 0, errors.New("the follower is gone")
	}
	ctx, cancel := context.WithTimeout(ctx, lastDeadline)
	defer cancel()
	client, hangUp, err := s.cfg.Dial(target.Replicate)
	if err != nil {
		return 0, err
	}
	defer hangUp()
	stream, err := client.Recover(ctx, &srtmv1.RecoverRequest{Owner: members[at].Instance, Follower: target.Instance})
	if err == nil {
		_, err = stream.Recv() // answered once the credits are saved
	}
	if err != nil {
		return 0, err
	}
	return target.Instance, nil
}

// member returns the member with the given instance, or the zero Member.
func member(members []store.Member, instance int64) store.Member {
	for _, m := range members {
		if m.Instance == instance {
			return m
		}
	}
	return store.Member{}
}

// choose picks the follower: the next live member in the order of addresses. Until the store has
// recorded a new follower, the server has none.
func (s *Server) choose() (next store.Member) {
	if s.cfg.Dial == nil {
		return next
	}
	l := &s.replicas
	w := &s.watched
	for i := range w.members {
		m := &w.members[i]
		if m.Instance != s.me.Instance && m.Replicate != "" && w.looked.Sub(w.silentSince[*m]) <= leaseOver &&
			(next.Instance == 0 || next.Address < s.me.Address && m.Address > s.me.Address) {
			next = *m // members are ordered: take the first, or the first after this server
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if next.Instance != l.follower.Instance {
		l.setFollower(store.Member{}, nil, nil)
	}
	s.me.Follower = next.Instance
	return next
}

// chosen connects to the follower after the store has recorded it.
func (s *Server) chosen(next store.Member) {
	l := &s.replicas
	if l.mu.Lock(); next.Instance == l.follower.Instance {
		l.mu.Unlock()
		return
	}
	client, hangUp, err := s.cfg.Dial(next.Replicate)
	if err == nil {
		l.setFollower(next, client, hangUp)
	}
	l.mu.Unlock()
	if s.outages.follower.Note(err); err != nil {
		return
	}
	s.cfg.Log.Info("another server follows this one", "server", next.Address)
	for i := range s.shards {
		s.shards.each(i, (*table.Shard).Restart)
	}
}

func (s *Server) replicate(ctx context.Context) {
	if err := s.replicateOnce(ctx); err != nil && ctx.Err() == nil {
		s.metrics.sendErrors.Inc()
		s.cfg.Log.Debug("trying again", "err", err)
	}
}

// replicateOnce sends all changed credits to the follower. It sends at least one message, as a sign of
// life.
func (s *Server) replicateOnce(ctx context.Context) error {
	l := &s.replicas
	l.mu.Lock()
	me, follower, client := l.me, l.follower, l.client
	l.mu.Unlock()
	start := int64(s.cfg.Now().Mono)
	if follower.Instance == 0 {
		s.replicated.Store(start)
		return nil
	}
	send := func(t *owners, credits []table.Credit) error {
		q := &srtmv1.ReplicateRequest{Owner: me, Follower: follower.Instance, SavedMs: s.savedTo.Load()}
		for i := range credits {
			if p := rule.Partition(credits[i].Key, rule.Partitions); t.owned[p] {
				q.Credits = append(q.Credits, creditProto(&credits[i], t.all[p].Epoch))
			}
		}
		limited, cancel := context.WithTimeout(ctx, replicateDeadline)
		defer cancel()
		boot := s.cfg.Boot()
		a, err := client.Replicate(limited, q)
		if err != nil {
			return fmt.Errorf("replicate to %s: %w", follower.Address, err)
		}
		s.metrics.sent.Add(float64(len(q.Credits)))
		s.metrics.refused.Add(float64(a.GetRefused()))
		promised := boot.Add(min(strictOver, time.Duration(a.GetLeaseMs())*time.Millisecond))
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.follower.Instance == follower.Instance && promised > boot {
			l.certainUntil.Store(max(l.certainUntil.Load(), int64(promised)))
		}
		return nil
	}
	for at := (cursor{}); at.shard < shardCount; {
		if err := s.sendChanges(table.Sender, creditsAtOnce, &at, send); err != nil {
			return err
		}
	}
	s.replicated.Store(start)
	return nil
}
