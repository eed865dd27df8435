package server

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

const (
	// leaseOver is the silence after which an owner may be replaced. An owner stops deciding for strict
	// keys strictOver after its last renewal, a second earlier. Clocks drift apart far less than that
	// in this time.
	leaseOver  = store.Lease
	strictOver = 5 * time.Second
	// movedAtOnce is the most partitions in one hand-over. Each failed hand-over halves the number,
	// because these partitions are stopped and the lease is not renewed during a hand-over.
	movedAtOnce = 1024
	// renewAgain is the pause after a renewal that failed at once.
	renewAgain = 200 * time.Millisecond
)

// owners is an immutable table of the owner of each partition.
type owners struct {
	instance int64  // of the process that read the table; keys of another instance are void
	number   uint64 // version of the store's table
	all      []store.Partition
	owned    [rule.Partitions]bool // partitions that this server decides
}

// now returns the time. Its wall clock is the store's clock: it never goes back, nor behind the times
// of the credits that previous owners wrote.
func (s *Server) now() table.Now {
	now := s.cfg.Now()
	now.Wall += time.Duration(s.storeOffset.Load())
	return now
}

func (s *Server) advance(floor time.Duration) {
	shift := int64(floor - s.cfg.Now().Wall)
	for old := s.storeOffset.Load(); old < shift && !s.storeOffset.CompareAndSwap(old, shift); old = s.storeOffset.Load() {
	}
}

func newInstance() int64 { return 1 + rand.Int64N(math.MaxInt64) }

// join makes the server a member with the partitions it owned before, and reads the rules.
func (s *Server) join(ctx context.Context) error {
	s.replicas.become(s.me.Instance)
	if s.cfg.Dial != nil {
		follower, err := s.recoverFrom(ctx)
		if err != nil {
			s.cfg.Log.Warn("cannot recover the replicated credits of this server; continuing with its last checkpoint", "err", err)
		}
		s.me.Follower = follower
	}
	boot := s.cfg.Boot()
	floor, err := s.cfg.Store.Join(ctx, s.me, func() time.Duration { return s.now().Wall })
	if err != nil {
		return err
	}
	s.me.Heartbeat = 1
	s.advance(floor)
	s.certainUntilNs.Store(int64(boot.Add(strictOver)))
	if err := s.rules.read(ctx); err != nil {
		return err
	}
	return s.readOwners(ctx)
}

// reconcile renews the lease, takes over the partitions of silent members, and hands over partitions
// that are to move. After a failure it retries soon, while the lease may still be valid.
func (s *Server) reconcile(ctx context.Context) {
	err := s.reconcileOnce(ctx)
	if ctx.Err() != nil {
		return
	}
	s.outages.renewals.Note(err)
	before := s.unrenewed.Load()
	if err == nil {
		s.unrenewed.Store(nil)
	} else {
		s.metrics.leaseErrors.Inc()
		u := &unrenewed{start: s.cfg.Boot(), err: err}
		if before != nil {
			u.start = before.start
		}
		s.unrenewed.Store(u)
	}
	switch certain := s.alone(); {
	case certain && s.uncertain:
		s.cfg.Log.Info("strict keys are decided again")
		s.uncertain = false
	case !certain && !s.uncertain:
		s.cfg.Log.Error("strict keys are denied until the lease on the partitions is renewed", "certain_until", s.cfg.wallAt(s.certainUntil()), obs.KeyError, err)
		s.uncertain = true
	}
	if err != nil && (errors.Is(err, context.DeadlineExceeded) || clock.Sleep(ctx, renewAgain)) {
		s.wakeUp()
	}
}

func (s *Server) reconcileOnce(ctx context.Context) error {
	s.saving.Lock()
	defer s.saving.Unlock()
	err := s.renew(ctx)
	if errors.Is(err, store.ErrFenced) {
		s.cfg.Log.Warn("starting again", "err", err)
		err = s.rejoin(ctx)
	}
	return err
}

// rejoin makes the server a new member under a new instance. All keys in memory become void. Until the
// store has answered, the server is no member and writes nothing.
func (s *Server) rejoin(ctx context.Context) error {
	before := s.owners.Load()
	s.owners.Store(&owners{instance: before.instance, all: before.all})
	s.me.Instance = newInstance()
	ctx, cancel := context.WithTimeout(ctx, storeDeadline)
	defer cancel()
	err := s.join(ctx)
	if err != nil {
		s.me.Instance = 0
	}
	return err
}

// renew renews the lease and acts on the members that the store returns. Requires: saving held.
func (s *Server) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*storeDeadline)
	defer cancel()
	follower := s.choose()
	now, boot := s.now(), s.cfg.Boot()
	limited, done := context.WithTimeout(ctx, storeDeadline)
	members, number, err := s.cfg.Store.Renew(limited, s.me)
	done()
	if err != nil {
		return err
	}
	s.certainUntilNs.Store(int64(boot.Add(strictOver)))
	s.me.Heartbeat = member(members, s.me.Instance).Heartbeat
	s.replicas.members(members, boot)
	s.chosen(follower)
	t := s.owners.Load()
	unheard := func(m store.Member) bool { return s.replicas.silent(m, s.cfg.Boot()) }
	claimed, err := s.claim(ctx, s.watched.silent(s.me, members, t, now.Mono, s.now().Mono, unheard), now)
	if err != nil {
		return err
	}
	if claimed || number != t.number || s.frozen {
		if err := s.readOwners(ctx); err != nil {
			return err
		}
	}
	return s.handOver(ctx, members)
}

// replaced is a silent owner, and its follower if the follower must be silent too.
type replaced struct{ owner, follower store.Member }

// watched tracks how long each member has been unchanged.
type watched struct {
	silentSince map[store.Member]mono.Time
	looked      mono.Time // when members was last read
	members     []store.Member
}

// watch updates since. A follower or an owner that is not a member is tracked too, as a Member with
// only an instance or only an address.
func (w *watched) watch(members []store.Member, t *owners, read mono.Time) {
	is := map[store.Member]bool{}
	addresses := map[string]bool{}
	for _, m := range members {
		is[m], addresses[m.Address] = true, true
		if m.Follower != 0 && member(members, m.Follower).Instance == 0 {
			is[store.Member{Instance: m.Follower}] = true
		}
	}
	for i := range t.all {
		if owner := t.all[i].Owner; !addresses[owner] {
			is[store.Member{Address: owner}] = true
		}
	}
	maps.DeleteFunc(w.silentSince, func(m store.Member, _ mono.Time) bool { return !is[m] })
	for m := range is { // order: each by itself
		if _, known := w.silentSince[m]; !known {
			w.silentSince[m] = read
		}
	}
	w.looked, w.members = read, members
}

// silent returns the owners that me may replace, ordered by address. now and read are the times before
// and after members were read. An owner may be replaced if all of these hold:
//   - its member row has not changed for leaseOver
//   - unheard reports that me has received nothing from it
//   - me is its follower, or it has no follower, or its follower has been silent for
//     store.FollowerLease
//
// If several servers may replace an owner, the first claim in the store wins.
func (w *watched) silent(me store.Member, members []store.Member, t *owners, now, read mono.Time, unheard func(owner store.Member) bool) (limit []replaced) {
	if now.Sub(w.looked) > strictOver { // this server was not reading, so it cannot know who was silent
		clear(w.silentSince)
	}
	w.watch(members, t, read)
	for m, since := range w.silentSince { // order: sorted below
		if m.Address == "" || m.Address == me.Address || now.Sub(since) <= leaseOver {
			continue
		}
		var follower store.Member
		if m.Follower != 0 && m.Follower != me.Instance {
			follower = member(members, m.Follower)
			known := follower
			known.Instance = m.Follower // also if the follower is gone: watch tracks it by its instance
			if now.Sub(w.silentSince[known]) <= store.FollowerLease {
				continue
			}
		}
		if unheard(m) {
			limit = append(limit, replaced{m, follower})
		}
	}
	slices.SortFunc(limit, func(a, b replaced) int { return cmp.Compare(a.owner.Address, b.owner.Address) })
	return limit
}

func (s *Server) claim(ctx context.Context, silent []replaced, now table.Now) (claimed bool, err error) {
	for _, r := range silent {
		if err := s.surrender(ctx, r.owner.Instance); err != nil {
			return claimed, err
		}
		floor, err := s.cfg.Store.Claim(ctx, s.me, r.owner, r.follower, now.Wall)
		if errors.Is(err, store.ErrMoved) {
			continue
		}
		if err != nil {
			return claimed, err
		}
		s.me.Heartbeat++
		s.advance(floor)
		s.cfg.Log.Warn("took over the partitions of a silent server", "server", r.owner.Address, "left", r.owner.Instance == 0)
		claimed = true
	}
	return claimed, nil
}

// readOwners reads the store's table. If a partition had another owner meanwhile, readOwners drops the
// keys of the partition before the server decides for the partition again.
func (s *Server) readOwners(ctx context.Context) error {
	all, number, err := s.cfg.Store.Owners(ctx)
	if err != nil {
		return err
	}
	old, next := s.owners.Load(), &owners{instance: s.me.Instance, number: number, all: all}
	var keep [rule.Partitions]bool
	var drop [shardCount]bool
	held := 0
	for i, p := range all {
		next.owned[i] = p.Owner == s.me.Address
		owned := len(old.all) > 0 && old.all[i].Owner == s.me.Address
		keep[i] = next.owned[i] && owned && old.all[i].Epoch == p.Epoch && old.instance == next.instance
		drop[i%shardCount] = drop[i%shardCount] || owned && !keep[i]
		if next.owned[i] {
			held++
		}
	}
	none := *next
	none.owned = keep
	for i := range none.owned { // a frozen partition stays frozen until its keys are dropped
		none.owned[i] = keep[i] && old.owned[i]
	}
	s.owners.Store(&none)
	for i := range s.shards {
		if drop[i] {
			s.shards.inTurns(i, func(keys *table.Shard, from int32) int32 {
				return keys.Drop(func(p int) bool { return !keep[p] }, from, slotsAtOnce)
			})
		}
	}
	s.owners.Store(next)
	s.ownedPartitions.Store(int64(held))
	s.frozen = false
	return nil
}

// handOver moves partitions to the member that the store names as their target. It stops deciding for
// these partitions, then writes the changed credits and the new owner in one transaction. If the result
// is unknown, the next read of the store's table shows who owns the partitions.
func (s *Server) handOver(ctx context.Context, members []store.Member) error {
	t := s.owners.Load()
	moving, to := map[int]bool{}, ""
	for p, is := range t.all {
		isTarget := func(m store.Member) bool { return m.Address == is.Target }
		if t.owned[p] && is.Target != "" && (to == "" || to == is.Target) && len(moving) < s.atOnce && slices.ContainsFunc(members, isTarget) {
			moving[p], to = true, is.Target
		}
	}
	if len(moving) == 0 {
		return nil
	}
	isMoving := func(p int) bool { return moving[p] }
	frozen := *t
	for p := range moving {
		frozen.owned[p] = false
	}
	s.owners.Store(&frozen)
	s.frozen = true
	var credits []table.Credit // changed since the last check-point
	s.shards.allInTurns(func(keys *table.Shard, from int32) (next int32) {
		credits, next = keys.Changed(table.Saver, credits, isMoving, from, slotsAtOnce, s.now())
		return next
	})
	if err := s.cfg.Store.HandOver(ctx, s.me, to, slices.Sorted(maps.Keys(moving)), credits); err != nil {
		s.shards.unread(table.Saver, credits)
		s.atOnce = max(1, s.atOnce/2)
		return err // the next renewal reads the owners from the store
	}
	s.me.Heartbeat++
	s.atOnce = min(movedAtOnce, 2*s.atOnce)
	s.cfg.Log.Info("partitions moved", "to", to, "partitions", len(moving), "keys", len(credits))
	s.wakeUp() // more partitions may have to move
	return s.readOwners(ctx)
}

func (s *Server) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// elsewhere returns the answer for a key that this server does not own or is handing over.
func (s *Server) elsewhere(key []byte, a wire.Answer) wire.Answer {
	p := rule.Partition(key, rule.Partitions)
	t := s.owners.Load()
	a.Kind, a.Value, a.Epoch = wire.Moved, wire.HashOf(t.all[p].Owner), t.all[p].Epoch
	if t.all[p].Owner == s.me.Address {
		a.Kind = wire.Busy
	}
	if now := s.cfg.Now().Mono; now.Sub(mono.Time(s.woken.Load())) > 100*time.Millisecond { // the key may have come to this server since the last read
		s.woken.Store(int64(now))
		s.wakeUp()
	}
	return a
}
