package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/srtm-io/srtm/admission/table"
)

// Member is a server at work, or one that was killed. Its beat grows while it lives, by one with all
// that it writes: others judge that by their own clocks, so that no two clocks are compared. A store
// that has an earlier beat than the server knows of was put back to a copy of it: numbers of edits and of
// owners mean others there, and nothing is written.
type Member struct {
	Address        string
	Instance, Beat int64  // Instance: of the process; 0 where a server has stopped
	Replicate      string // address where it takes what others send as their follower; "": nowhere
	Follower       int64  // instance of its follower; 0 for none
}

const (
	// Lease is how long after its last renewal a server may be replaced by its follower, or
	// if it has none by any other: it knows so itself.
	Lease = 6 * time.Second
	// FollowerLease is for how long a follower must be silent, too, for any other server to
	// replace the owner: the two may live on behind a cut network, or the store be away for
	// all, and the owner decides by its follower's word. So it is longer than a database
	// takes to fail over.
	FollowerLease = time.Minute
)

// Partition says who owns a partition.
type Partition struct {
	Owner  string        // address; "" for none yet
	Target string        // where its owner is to move it; "" for nowhere
	Epoch  uint32        // grows with each change of the owner
	Lost   time.Duration // wall clock: what keys held before is not known exactly
}

var (
	// ErrFenced says that this process owns nothing any more: another took its place, or the
	// store was put back to what it was before.
	ErrFenced = errors.New("another server has taken over, or the store was put back")
	// ErrMoved says that the owners have changed since they were read.
	ErrMoved = errors.New("the owners have changed")
	// ErrNoServer says that no server has that address.
	ErrNoServer = errors.New("no such server")
)

// beat is of a server's write, of what it held up to a time.
func (t *tx) beat(me Member, at time.Duration) {
	t.must(ErrFenced, `UPDATE servers SET beat = beat + 1, at_ms = CASE WHEN at_ms > $1 THEN at_ms ELSE $1 END
		WHERE address = $2 AND instance = $3 AND beat >= $4`, millis(at), me.Address, me.Instance, me.Beat)
}

// own changes owners: one transaction at a time.
func (s *Store) own(ctx context.Context, f func(t *tx)) error {
	return s.transact(ctx, func(t *tx) {
		t.do(`UPDATE admission SET owners = owners + 1`)
		f(t)
	})
}

// latest returns a time after all that the store has, and not before wall: the
// store's time never goes back, whatever clocks do. It is ahead of them by a millisecond for
// each change of owners that takes less.
func (t *tx) latest(wall time.Duration) (at int64) {
	at = t.get(`SELECT max(at_ms) FROM (SELECT at_ms FROM admission UNION ALL SELECT at_ms FROM servers) AS t`)
	at = max(at+1, millis(wall))
	if t.do(`UPDATE admission SET at_ms = $1`, at); t.err != nil {
		return 0
	}
	return at
}

// lock is of a member's row, whichever server it is.
const lock = `UPDATE servers SET at_ms = at_ms WHERE address = $1`

const take = `UPDATE partitions SET server = $1, epoch = epoch + 1, target = '', lost_ms = CASE WHEN $2 > lost_ms THEN $2 ELSE lost_ms END WHERE server = $3`

// Join makes a server a member, which owns what it owned before, and what no server
// did. It returns the store's time, from which the server is to count on. Where the one
// before at that address did not Leave, what it had is lost, at the end of its lease: it
// may live on, cut off from the store. So wall is read after its last renewal. The lease is
// its follower's, unless that is the one that me names, which has ended its word.
func (s *Store) Join(ctx context.Context, me Member, wall func() time.Duration) (time.Duration, error) {
	var at int64
	err := s.own(ctx, func(t *tx) {
		before, lost := t.do(lock, me.Address), int64(0)
		at = t.latest(wall())
		if before > 0 {
			follower := t.get(`SELECT follower FROM servers WHERE address = $1`, me.Address)
			if lost = at + Lease.Milliseconds(); follower != 0 && follower != me.Follower {
				lost = at + FollowerLease.Milliseconds()
			}
		}
		t.do(`DELETE FROM servers WHERE address = $1`, me.Address)
		t.do(`INSERT INTO servers (address, instance, beat, at_ms, replicate, follower) VALUES ($1, $2, 1, $3, $4, 0)`, me.Address, me.Instance, at, me.Replicate)
		t.do(take, me.Address, lost, me.Address)
		t.do(take, me.Address, int64(0), "")
	})
	return time.Duration(at) * time.Millisecond, err
}

// Renew says that a server lives and who follows it, and returns who is a member and
// a number that changes with the owners. Error: ErrFenced.
func (s *Store) Renew(ctx context.Context, me Member) (members []Member, owners uint64, err error) {
	result, err := s.db.ExecContext(ctx, `UPDATE servers SET beat = beat + 1, follower = $1 WHERE address = $2 AND instance = $3 AND beat >= $4`, me.Follower, me.Address, me.Instance, me.Beat)
	if err != nil {
		return nil, 0, err
	}
	if n, err := result.RowsAffected(); err != nil || n == 0 {
		return nil, 0, cmp.Or(err, ErrFenced)
	}
	if members, err = s.Members(ctx); err == nil {
		err = s.db.QueryRowContext(ctx, `SELECT owners FROM admission`).Scan(&owners)
	}
	return members, owners, err
}

// Members returns all members in the order of their addresses.
func (s *Store) Members(ctx context.Context) ([]Member, error) {
	return list(ctx, s.db, func(row *sql.Rows) (m Member, err error) {
		err = row.Scan(&m.Address, &m.Instance, &m.Beat, &m.Replicate, &m.Follower)
		return m, err
	}, `SELECT address, instance, beat, replicate, follower FROM servers ORDER BY address`)
}

// Leave ends a membership after a last check-point: nothing is lost.
func (s *Store) Leave(ctx context.Context, me Member) error {
	return s.own(ctx, func(t *tx) {
		t.latest(0)
		t.beat(me, 0)
		t.do(`DELETE FROM servers WHERE address = $1`, me.Address)
	})
}

// Claim takes all partitions of a server that was last seen so and has been silent
// since; with Instance 0 of one that has left. It returns the store's time as Join does.
// Errors: ErrFenced; ErrMoved if the server, or its follower where that has an instance, was
// heard of again, or another has taken them.
func (s *Store) Claim(ctx context.Context, me, from, follower Member, wall time.Duration) (time.Duration, error) {
	var at int64
	err := s.own(ctx, func(t *tx) {
		t.beat(me, 0)
		at = t.latest(wall)
		if follower.Instance != 0 { // which renews before this or sees it
			t.must(ErrMoved, `UPDATE servers SET at_ms = at_ms WHERE instance = $1 AND beat = $2`, follower.Instance, follower.Beat)
		}
		lost := at
		if from.Instance == 0 {
			lost = 0
			t.must(ErrMoved, `UPDATE admission SET change = change
				WHERE NOT EXISTS (SELECT 1 FROM servers WHERE address = $1) AND EXISTS (SELECT 1 FROM partitions WHERE server = $1)`, from.Address)
		} else {
			t.must(ErrMoved, `DELETE FROM servers WHERE address = $1 AND instance = $2 AND beat = $3`, from.Address, from.Instance, from.Beat)
		}
		t.do(take, me.Address, lost, from.Address)
	})
	return time.Duration(at) * time.Millisecond, err
}

// Owners returns all partitions, and the number that changes with them.
func (s *Store) Owners(ctx context.Context) (all []Partition, owners uint64, err error) {
	ctx, done := patient(ctx)
	defer done(&err)
	// The number first: a change that comes between is read, and read again.
	if err := s.db.QueryRowContext(ctx, `SELECT owners FROM admission`).Scan(&owners); err != nil {
		return nil, 0, err
	}
	all, err = list(ctx, s.db, func(row *sql.Rows) (p Partition, err error) {
		var lost int64
		err = row.Scan(&p.Owner, &p.Target, &p.Epoch, &lost)
		p.Lost = time.Duration(lost) * time.Millisecond
		return p, err
	}, `SELECT server, target, epoch, lost_ms FROM partitions ORDER BY p`)
	return all, owners, err
}

// Move asks the owners of the partitions first to last to move them to a server.
// Error: ErrNoServer.
func (s *Store) Move(ctx context.Context, first, last int, to string) error {
	return s.own(ctx, func(t *tx) {
		t.must(ErrNoServer, lock, to)
		t.do(`UPDATE partitions SET target = CASE WHEN server = $1 THEN '' ELSE $1 END WHERE p BETWEEN $2 AND $3`, to, first, last)
	})
}

// HandOver gives partitions, and what their keys hold, to another server, all or
// none. Errors: ErrFenced; ErrNoServer.
func (s *Store) HandOver(ctx context.Context, me Member, to string, partitions []int, credits []table.Credit) error {
	return s.own(ctx, func(t *tx) {
		t.save(me, credits)
		t.must(ErrNoServer, lock, to)
		for _, p := range partitions {
			t.do(`UPDATE partitions SET server = $1, epoch = epoch + 1, target = '' WHERE p = $2 AND server = $3`, to, p, me.Address)
		}
	})
}
