package store

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
)

// rowsAtOnce is how many rows one statement writes. SQLite looks for each of a
// statement's parameters among all before it: with 500 rows, one costs five times this.
const rowsAtOnce = 32

// SaveCredits writes what keys hold, unless something newer is there, all or none, for a server that knows the owners by
// their number: what it holds of a partition that it has handed over, without having
// heard so, is old. Errors: ErrFenced; ErrMoved.
func (s *Store) SaveCredits(ctx context.Context, me Member, owners uint64, credits []table.Credit) error {
	return s.transact(ctx, func(t *tx) {
		t.save(me, credits)
		if is := t.get(`SELECT owners FROM admission`); uint64(is) != owners { // after save's lock, which a hand-over has, too
			t.fail(ErrMoved)
		}
	})
}

// millis rounds up: a key that is read back has earned no more than it had.
func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// save begins with a beat, whose lock is held to the end: a server whose partitions another
// one takes writes before that or not at all.
func (t *tx) save(me Member, credits []table.Credit) {
	var at time.Duration
	for _, c := range credits {
		at = max(at, c.At)
	}
	t.beat(me, at)
	for some := range slices.Chunk(credits, rowsAtOnce) {
		var rows strings.Builder
		var args []any
		for i, c := range some {
			fmt.Fprintf(&rows, ",($%d,$%d,$%d)", 3*i+1, 3*i+2, 3*i+3)
			args = append(args, c.Key, int64(c.Credits), millis(c.At))
		}
		t.do(`INSERT INTO credits (key, credit_milli, at_ms) VALUES `+rows.String()[1:]+`
			ON CONFLICT (key) DO UPDATE SET credit_milli = excluded.credit_milli, at_ms = excluded.at_ms
			WHERE excluded.at_ms > credits.at_ms OR excluded.at_ms = credits.at_ms AND excluded.credit_milli < credits.credit_milli`, args...)
	}
}

// Credits returns what keys held when that was last written, by key: of one of which it
// never was there is nothing.
func (s *Store) Credits(ctx context.Context, keys []string) (map[string]table.Credit, error) {
	these, args := in(keys)
	all, err := list(ctx, s.db, func(row *sql.Rows) (c table.Credit, err error) {
		var at int64
		err = row.Scan(&c.Key, &c.Credits, &at)
		c.At = time.Duration(at) * time.Millisecond
		return c, err
	}, `SELECT key, credit_milli, at_ms FROM credits WHERE key IN `+these, args...)
	credits := make(map[string]table.Credit, len(all))
	for _, c := range all {
		credits[c.Key] = c
	}
	return credits, err
}

// Saved is what a key held when that was last written.
type Saved struct {
	table.Credit
	Own  bool // the key has a rule of its own
	Rule rule.Rule
}

// Saved returns n keys, or all that are left, after one in the store's order.
func (s *Store) Saved(ctx context.Context, after string, n int) ([]Saved, error) {
	return list(ctx, s.db, func(row *sql.Rows) (k Saved, err error) {
		var at int64
		err = row.Scan(&k.Key, &k.Credits, &at, &k.Own, &k.Rule.Share.Rate, &k.Rule.Period, &k.Rule.Share.Burst, &k.Rule.Strict)
		k.At, k.Rule.Key = time.Duration(at)*time.Millisecond, k.Key
		return k, err
	}, `SELECT c.key, credit_milli, at_ms, r.key IS NOT NULL AND r.key NOT LIKE '%*', coalesce(rate_milli, 0), coalesce(period_s, 0), coalesce(capacity, 0), coalesce(strict, FALSE)
		FROM credits c LEFT JOIN rules r ON r.key = c.key AND deleted_ms IS NULL WHERE c.key > $1 ORDER BY c.key LIMIT $2`, after, n)
}

// Forget removes what keys held, unless it was written again meanwhile: they count as
// full.
func (s *Store) Forget(ctx context.Context, credits []table.Credit) error {
	return s.transact(ctx, func(t *tx) {
		for some := range slices.Chunk(credits, rowsAtOnce) {
			query, args := `DELETE FROM credits WHERE (key, credit_milli, at_ms) IN (VALUES `, []any{}
			for i, c := range some {
				query += fmt.Sprintf("($%d,%d,%d),", i+1, int64(c.Credits), c.At.Milliseconds())
				args = append(args, c.Key)
			}
			t.do(query[:len(query)-1]+")", args...)
		}
	})
}
