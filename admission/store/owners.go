package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/srtm-io/srtm/admission/table"
)

// Member is a running server, or a server that was killed. Its heartbeat grows by one with each write of
// the server. Other servers watch the heartbeat with their own clocks, so no two clocks are compared. If
// the store's heartbeat is lower than the server's, the store was restored from a copy: its numbers of edits
// and owners have other meanings, and the server writes nothing.
type Member struct {
	Address             string
	Instance, Heartbeat int64  // Instance: of the process; 0 if the server has stopped
	Replicate           string // address where the member, as a follower, receives credits; "": none
	Follower            int64  // instance of the member's follower; 0: none
}

const (
	// Lease is the time after an owner's last renewal when its follower (or any server, if there is no
	// follower) may replace the owner. The owner stops by then.
	Lease = 6 * time.Second
	// FollowerLease is the silence of a follower after which any other server may replace the owner.
	// Until then the owner and its follower may both live behind a cut network, or the store may be
	// unreachable for all, and the owner decides with the follower's promises. So FollowerLease is
	// longer than a database failover.
	FollowerLease = time.Minute
)

// Partition is the ownership of a partition.
type Partition struct {
	Owner  string        // address; "": no owner yet
	Target string        // address of the server that the owner is to hand over to; "": none
	Epoch  uint32        // grows with each change of the owner
	Lost   time.Duration // wall clock: credits from before are not known exactly
}

var (
	// ErrFenced means that this process owns nothing any more: another process took its place, or the
	// store was restored to an earlier state.
	ErrFenced = errors.New("another server has taken over, or the store was put back")
	// ErrMoved means that the owners have changed since the last read.
	ErrMoved = errors.New("the owners have changed")
	// ErrNoServer means that no server has the address.
	ErrNoServer = errors.New("no such server")
)

// heartbeat raises a server's heartbeat, and records the time of the credits that it writes.
func (t *tx) heartbeat(me Member, at time.Duration) {
	t.expectRow(ErrFenced, `UPDATE servers SET heartbeat = heartbeat + 1, at_ms = CASE WHEN at_ms > $1 THEN at_ms ELSE $1 END
		WHERE address = $2 AND instance = $3 AND heartbeat >= $4`, millis(at), me.Address, me.Instance, me.Heartbeat)
}

// inOwnTx changes owners, one transaction at a time.
func (s *Store) inOwnTx(ctx context.Context, f func(t *tx)) error {
	return s.transact(ctx, func(t *tx) {
		t.do(`UPDATE admission SET owners = owners + 1`)
		f(t)
	})
}

// latest returns a time after all times in the store, and not before wall. So the store's time never
// goes back, even if a clock does. A change of owners moves it by at least a millisecond.
func (t *tx) latest(wall time.Duration) (at int64) {
	at = t.get(`SELECT max(at_ms) FROM (SELECT at_ms FROM admission UNION ALL SELECT at_ms FROM servers) AS t`)
	at = max(at+1, millis(wall))
	if t.do(`UPDATE admission SET at_ms = $1`, at); t.err != nil {
		return 0
	}
	return at
}

// lock locks the row of a member, whatever its instance.
const lock = `UPDATE servers SET at_ms = at_ms WHERE address = $1`

const takeSQL = `UPDATE partitions SET server = $1, epoch = epoch + 1, target = '', lost_ms = CASE WHEN $2 > lost_ms THEN $2 ELSE lost_ms END WHERE server = $3`

// Join makes a server a member. The server owns the partitions that its address owned before, and the
// partitions without an owner. Join returns the store's time, from which the server must continue
// counting.
//
// If the previous server at this address did not call Leave, the credits of its keys are unknown up to
// the end of its lease (Partition.Lost): the previous server may still be running, without a connection
// to the store. So wall is read after the previous server's last renewal. The lease is FollowerLease if
// the previous server had a follower, except the follower that me names, which has withdrawn its
// promise.
func (s *Store) Join(ctx context.Context, me Member, wall func() time.Duration) (time.Duration, error) {
	var at int64
	err := s.inOwnTx(ctx, func(t *tx) {
		before, lost := t.do(lock, me.Address), int64(0)
		at = t.latest(wall())
		if before > 0 {
			follower := t.get(`SELECT follower FROM servers WHERE address = $1`, me.Address)
			if lost = at + Lease.Milliseconds(); follower != 0 && follower != me.Follower {
				lost = at + FollowerLease.Milliseconds()
			}
		}
		t.do(`DELETE FROM servers WHERE address = $1`, me.Address)
		t.do(`INSERT INTO servers (address, instance, heartbeat, at_ms, replicate, follower) VALUES ($1, $2, 1, $3, $4, 0)`, me.Address, me.Instance, at, me.Replicate)
		t.do(takeSQL, me.Address, lost, me.Address)
		t.do(takeSQL, me.Address, int64(0), "")
	})
	return time.Duration(at) * time.Millisecond, err
}

// Renew renews the lease of me and records its follower. It returns all members, and a number that
// changes with the owners. Error: ErrFenced.
func (s *Store) Renew(ctx context.Context, me Member) (members []Member, owners uint64, err error) {
	result, err := s.db.ExecContext(ctx, `UPDATE servers SET heartbeat = heartbeat + 1, follower = $1 WHERE address = $2 AND instance = $3 AND heartbeat >= $4`, me.Follower, me.Address, me.Instance, me.Heartbeat)
	if err != nil {
		return nil, 0, err
	}
	if n, err := result.RowsAffected(); err != nil || n == 0 {
		return nil, 0, cmp.Or(err, ErrFenced)
	}
	if members, err = s.Members(ctx); err == nil {
		err = s.reads.QueryRowContext(ctx, `SELECT owners FROM admission`).Scan(&owners)
	}
	return members, owners, err
}

// Members returns all members, ordered by address.
func (s *Store) Members(ctx context.Context) ([]Member, error) {
	return list(ctx, s.reads, func(row *sql.Rows) (m Member, err error) {
		err = row.Scan(&m.Address, &m.Instance, &m.Heartbeat, &m.Replicate, &m.Follower)
		return m, err
	}, `SELECT address, instance, heartbeat, replicate, follower FROM servers ORDER BY address`)
}

// Leave ends a membership after a last check-point, so no credits are lost.
func (s *Store) Leave(ctx context.Context, me Member) error {
	return s.inOwnTx(ctx, func(t *tx) {
		t.latest(0)
		t.heartbeat(me, 0)
		t.do(`DELETE FROM servers WHERE address = $1`, me.Address)
	})
}

// Claim takes over all partitions of the silent member from. If from.Instance is 0, from has left the
// store. Claim returns the store's time, as Join does. Errors: ErrFenced; ErrMoved if the heartbeat of
// from, or of a follower with an instance, has changed, or another server has taken the partitions.
func (s *Store) Claim(ctx context.Context, me, from, follower Member, wall time.Duration) (time.Duration, error) {
	var at int64
	err := s.inOwnTx(ctx, func(t *tx) {
		t.heartbeat(me, 0)
		at = t.latest(wall)
		if follower.Instance != 0 { // locks the row: a renewal comes before, or sees this claim
			t.expectRow(ErrMoved, `UPDATE servers SET at_ms = at_ms WHERE instance = $1 AND heartbeat = $2`, follower.Instance, follower.Heartbeat)
		}
		lost := at
		if from.Instance == 0 {
			lost = 0
			t.expectRow(ErrMoved, `UPDATE admission SET change = change
				WHERE NOT EXISTS (SELECT 1 FROM servers WHERE address = $1) AND EXISTS (SELECT 1 FROM partitions WHERE server = $1)`, from.Address)
		} else {
			t.expectRow(ErrMoved, `DELETE FROM servers WHERE address = $1 AND instance = $2 AND heartbeat = $3`, from.Address, from.Instance, from.Heartbeat)
		}
		t.do(takeSQL, me.Address, lost, from.Address)
	})
	return time.Duration(at) * time.Millisecond, err
}

// Owners returns all partitions, and the number that changes with their owners.
func (s *Store) Owners(ctx context.Context) (all []Partition, owners uint64, err error) {
	ctx, done := patient(ctx)
	defer done(&err)
	// Read the number first: a change between the two reads is then read again, not missed.
	if err := s.reads.QueryRowContext(ctx, `SELECT owners FROM admission`).Scan(&owners); err != nil {
		return nil, 0, err
	}
	all, err = list(ctx, s.reads, func(row *sql.Rows) (p Partition, err error) {
		var lost int64
		err = row.Scan(&p.Owner, &p.Target, &p.Epoch, &lost)
		p.Lost = time.Duration(lost) * time.Millisecond
		return p, err
	}, `SELECT server, target, epoch, lost_ms FROM partitions ORDER BY p`)
	return all, owners, err
}

// Move requests that the owners of partitions first to last hand them over to a server. Error: ErrNoServer.
func (s *Store) Move(ctx context.Context, first, last int, to string) error {
	return s.inOwnTx(ctx, func(t *tx) {
		t.expectRow(ErrNoServer, lock, to)
		t.do(`UPDATE partitions SET target = CASE WHEN server = $1 THEN '' ELSE $1 END WHERE p BETWEEN $2 AND $3`, to, first, last)
	})
}

// HandOver gives partitions and the credits of their keys to another server, all or none. Errors:
// ErrFenced; ErrNoServer.
func (s *Store) HandOver(ctx context.Context, me Member, to string, partitions []int, credits []table.Credit) error {
	return s.inOwnTx(ctx, func(t *tx) {
		t.save(me, credits)
		t.expectRow(ErrNoServer, lock, to)
		for _, p := range partitions {
			t.do(`UPDATE partitions SET server = $1, epoch = epoch + 1, target = '' WHERE p = $2 AND server = $3`, to, p, me.Address)
		}
	})
}
