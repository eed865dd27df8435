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
	// A member that has not renewed its lease for so long may be replaced, and stops strict
	// rules a second before that. A tenth of a second is more than clocks come apart in it.
	leaseOver  = store.Lease
	strictOver = 5 * time.Second
	// movedAtOnce is how many partitions are handed over together, and half as many after
	// each time that this took too long: meanwhile they stop, and the lease is not renewed.
	movedAtOnce = 1024
	// renewAgain is how long a server waits after a renewal that failed at once.
	renewAgain = 200 * time.Millisecond
)

// owners is a table of who owns what. Never changed: each version is a new one.
type owners struct {
	instance int64  // of this process, that read it: what another one had is void
	number   uint64 // of the store
	all      []store.Partition
	mine     [rule.Partitions]bool // decided here
}

// now is the time, whose wall clock is the store's: it never goes back, nor behind what
// the owners before wrote of keys that are here.
func (s *Server) now() table.Now {
	now := s.cfg.Now()
	now.Wall += time.Duration(s.ahead.Load())
	return now
}

func (s *Server) advance(floor time.Duration) {
	by := int64(floor - s.cfg.Now().Wall)
	for was := s.ahead.Load(); was < by && !s.ahead.CompareAndSwap(was, by); was = s.ahead.Load() {
	}
}

func newInstance() int64 { return 1 + rand.Int64N(math.MaxInt64) }

// join has the server own what it owned before, and reads the rules.
func (s *Server) join(ctx context.Context) error {
	s.replicas.become(s.me.Instance)
	if s.cfg.Dial != nil {
		follower, err := s.recoverFrom(ctx)
		if err != nil {
			s.cfg.Log.Warn("what the server of this name had replicated is not known: going on with its last check-point", "err", err)
		}
		s.me.Follower = follower
	}
	boot := s.cfg.Boot()
	floor, err := s.cfg.Store.Join(ctx, s.me, func() time.Duration { return s.now().Wall })
	if err != nil {
		return err
	}
	s.me.Beat = 1
	s.advance(floor)
	s.sure.Store(int64(boot.Add(strictOver)))
	if err := s.rules.read(ctx); err != nil {
		return err
	}
	return s.readOwners(ctx)
}

// reconcile renews the lease, takes what silent members owned, and hands over what is to
// move. After a failure it tries again soon: what is left of the lease may be enough.
func (s *Server) reconcile(ctx context.Context) {
	err := s.tendOnce(ctx)
	if ctx.Err() != nil {
		return
	}
	s.outages.renewals.Note(err)
	before := s.unrenewed.Load()
	if err == nil {
		s.unrenewed.Store(nil)
	} else {
		s.metrics.leaseErrors.Inc()
		u := &unrenewed{since: s.cfg.Boot(), err: err}
		if before != nil {
			u.since = before.since
		}
		s.unrenewed.Store(u)
	}
	switch certain := s.alone(); {
	case certain && s.uncertain:
		s.cfg.Log.Info("strict keys are decided again")
		s.uncertain = false
	case !certain && !s.uncertain:
		s.cfg.Log.Error("strict keys are denied until the lease on the partitions is renewed", "certain_until", s.wallAt(s.certainUntil()), obs.KeyError, err)
		s.uncertain = true
	}
	if err != nil && (errors.Is(err, context.DeadlineExceeded) || clock.Sleep(ctx, renewAgain)) {
		s.wakeUp()
	}
}

func (s *Server) tendOnce(ctx context.Context) error {
	s.saving.Lock()
	defer s.saving.Unlock()
	err := s.renew(ctx)
	if errors.Is(err, store.ErrFenced) {
		s.cfg.Log.Warn("starting again", "err", err)
		err = s.rejoin(ctx)
	}
	return err
}

// rejoin begins anew. What this process holds is void: until the store's answers have
// come it is no member, and writes nothing.
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

// renew requires saving held.
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
	s.sure.Store(int64(boot.Add(strictOver)))
	s.me.Beat = member(members, s.me.Instance).Beat
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

// replaced is an owner that is silent, and its follower, where that must be so, too.
type replaced struct{ owner, follower store.Member }

// watched are members, and since when each is as it is.
type watched struct {
	since   map[store.Member]mono.Time
	looked  mono.Time      // when members were last read
	members []store.Member // as of then
}

// watch keeps since when each member has been as it is, and each owner and follower that is
// none, which has nothing but its address or its instance.
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
	maps.DeleteFunc(w.since, func(m store.Member, _ mono.Time) bool { return !is[m] })
	for m := range is { // order: each by itself
		if _, known := w.since[m]; !known {
			w.since[m] = read
		}
	}
	w.looked, w.members = read, members
}

// silent takes the time before and after members were read, and returns the owners that me
// may replace: those that it has not heard, and that were seen without a sign of life for as long as a lease
// takes, and that this one follows, or another that is silent for that one's lease, or none.
// Of several servers that may the first one does.
func (w *watched) silent(me store.Member, members []store.Member, t *owners, now, read mono.Time, unheard func(owner store.Member) bool) (over []replaced) {
	if now.Sub(w.looked) > strictOver { // who could not be heard was not silent
		clear(w.since)
	}
	w.watch(members, t, read)
	for m, since := range w.since { // order: sorted below
		if m.Address == "" || m.Address == me.Address || now.Sub(since) <= leaseOver {
			continue
		}
		var follower store.Member
		if m.Follower != 0 && m.Follower != me.Instance {
			follower = member(members, m.Follower)
			known := follower
			known.Instance = m.Follower // of one that is gone, too
			if now.Sub(w.since[known]) <= store.FollowerLease {
				continue
			}
		}
		if unheard(m) {
			over = append(over, replaced{m, follower})
		}
	}
	slices.SortFunc(over, func(a, b replaced) int { return cmp.Compare(a.owner.Address, b.owner.Address) })
	return over
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
		s.me.Beat++
		s.advance(floor)
		s.cfg.Log.Warn("took over the partitions of a silent server", "server", r.owner.Address, "left", r.owner.Instance == 0)
		claimed = true
	}
	return claimed, nil
}

// readOwners follows the store's table. It drops the keys of all partitions that had
// another owner meanwhile before it decides for them.
func (s *Server) readOwners(ctx context.Context) error {
	all, number, err := s.cfg.Store.Owners(ctx)
	if err != nil {
		return err
	}
	old, next := s.owners.Load(), &owners{instance: s.me.Instance, number: number, all: all}
	var kept [rule.Partitions]bool
	var drop [shardCount]bool
	held := 0
	for i, p := range all {
		next.mine[i] = p.Owner == s.me.Address
		had := len(old.all) > 0 && old.all[i].Owner == s.me.Address
		kept[i] = next.mine[i] && had && old.all[i].Epoch == p.Epoch && old.instance == next.instance
		drop[i%shardCount] = drop[i%shardCount] || had && !kept[i]
		if next.mine[i] {
			held++
		}
	}
	none := *next
	none.mine = kept
	for i := range none.mine { // what is frozen stays so, until what it held is dropped
		none.mine[i] = kept[i] && old.mine[i]
	}
	s.owners.Store(&none)
	for i := range s.shards {
		if drop[i] {
			s.shards.inTurns(i, func(keys *table.Shard, from int32) int32 {
				return keys.Drop(func(p int) bool { return !kept[p] }, from, slotsAtOnce)
			})
		}
	}
	s.owners.Store(next)
	s.held.Store(int64(held))
	s.frozen = false
	return nil
}

// handOver moves the partitions that are to be another member's: it stops them, and
// writes what changed and the new owner in one transaction. Whatever comes of it, the
// store's table then says whose they are.
func (s *Server) handOver(ctx context.Context, members []store.Member) error {
	t := s.owners.Load()
	moving, to := map[int]bool{}, ""
	for p, is := range t.all {
		alive := func(m store.Member) bool { return m.Address == is.Target }
		if t.mine[p] && is.Target != "" && (to == "" || to == is.Target) && len(moving) < s.atOnce && slices.ContainsFunc(members, alive) {
			moving[p], to = true, is.Target
		}
	}
	if len(moving) == 0 {
		return nil
	}
	of := func(p int) bool { return moving[p] }
	frozen := *t
	for p := range moving {
		frozen.mine[p] = false
	}
	s.owners.Store(&frozen)
	s.frozen = true
	var credits []table.Credit // since the last check-point
	s.shards.allInTurns(func(keys *table.Shard, from int32) (next int32) {
		credits, next = keys.Changed(table.Saver, credits, of, from, slotsAtOnce, s.now())
		return next
	})
	if err := s.cfg.Store.HandOver(ctx, s.me, to, slices.Sorted(maps.Keys(moving)), credits); err != nil {
		s.shards.unread(table.Saver, credits)
		s.atOnce = max(1, s.atOnce/2)
		return err // with the next renewal the store says whose they are
	}
	s.me.Beat++
	s.atOnce = min(movedAtOnce, 2*s.atOnce)
	s.cfg.Log.Info("partitions moved", "to", to, "partitions", len(moving), "keys", len(credits))
	s.wakeUp() // there may be more
	return s.readOwners(ctx)
}

func (s *Server) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// elsewhere is the answer to a question about a key that this server does not own, or
// is handing over.
func (s *Server) elsewhere(key []byte, a wire.Answer) wire.Answer {
	p := rule.Partition(key, rule.Partitions)
	t := s.owners.Load()
	a.Kind, a.Value, a.Epoch = wire.Moved, wire.HashOf(t.all[p].Owner), t.all[p].Epoch
	if t.all[p].Owner == s.me.Address {
		a.Kind = wire.Busy
	}
	if now := s.cfg.Now().Mono; now.Sub(mono.Time(s.woken.Load())) > 100*time.Millisecond { // it may have come since
		s.woken.Store(int64(now))
		s.wakeUp()
	}
	return a
}
