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

// rowsAtOnce is the number of rows in one statement. SQLite compares each parameter of a statement with
// all earlier parameters: with 500 rows, a row costs five times as much.
const rowsAtOnce = 32

// SaveCredits writes credits for a server that has read the owner table with number owners. It writes
// all or none, and keeps newer stored credits. If the number has changed, a partition may have been
// handed over, so the server's credits may be old: SaveCredits returns ErrMoved. Errors: ErrFenced;
// ErrMoved.
func (s *Store) SaveCredits(ctx context.Context, me Member, owners uint64, credits []table.Credit) error {
	return s.transact(ctx, func(t *tx) {
		t.save(me, credits)
		if is := t.get(`SELECT owners FROM admission`); uint64(is) != owners { // after save's lock, which a hand-over takes, too
			t.fail(ErrMoved)
		}
	})
}

// millis rounds up, so that a key never earns more credits after it is read back.
func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// save writes a heartbeat first and holds its lock to the end. So a server writes its credits before another
// server takes its partitions, or not at all.
func (t *tx) save(me Member, credits []table.Credit) {
	var at time.Duration
	for _, c := range credits {
		at = max(at, c.At)
	}
	t.heartbeat(me, at)
	for batch := range slices.Chunk(credits, rowsAtOnce) {
		var rows strings.Builder
		var args []any
		for i, c := range batch {
			fmt.Fprintf(&rows, ",($%d,$%d,$%d)", 3*i+1, 3*i+2, 3*i+3)
			args = append(args, c.Key, int64(c.Credits), millis(c.At))
		}
		t.do(`INSERT INTO credits (key, credit_milli, at_ms) VALUES `+rows.String()[1:]+`
			ON CONFLICT (key) DO UPDATE SET credit_milli = excluded.credit_milli, at_ms = excluded.at_ms
			WHERE excluded.at_ms > credits.at_ms OR excluded.at_ms = credits.at_ms AND excluded.credit_milli < credits.credit_milli`, args...)
	}
}

// Credits returns the last checkpointed credit of each key. Keys without a checkpoint are absent from
// the map.
func (s *Store) Credits(ctx context.Context, keys []string) (map[string]table.Credit, error) {
	condition, args := in(keys)
	all, err := list(ctx, s.reads, func(row *sql.Rows) (c table.Credit, err error) {
		var at int64
		err = row.Scan(&c.Key, &c.Credits, &at)
		c.At = time.Duration(at) * time.Millisecond
		return c, err
	}, `SELECT key, credit_milli, at_ms FROM credits WHERE key IN `+condition, args...)
	credits := make(map[string]table.Credit, len(all))
	for _, c := range all {
		credits[c.Key] = c
	}
	return credits, err
}

// Saved is the last checkpointed credit of a key.
type Saved struct {
	table.Credit
	Own  bool // the key has a rule of its own
	Rule rule.Rule
}

// Saved returns up to n keys after the given key, in the store's order.
func (s *Store) Saved(ctx context.Context, after string, n int) ([]Saved, error) {
	return list(ctx, s.reads, func(row *sql.Rows) (k Saved, err error) {
		var at int64
		err = row.Scan(&k.Key, &k.Credits, &at, &k.Own, &k.Rule.Share.Rate, &k.Rule.Period, &k.Rule.Share.Burst, &k.Rule.Strict)
		k.At, k.Rule.Key = time.Duration(at)*time.Millisecond, k.Key
		return k, err
	}, `SELECT c.key, credit_milli, at_ms, r.key IS NOT NULL AND r.key NOT LIKE '%*', coalesce(rate_milli, 0), coalesce(period_s, 0), coalesce(capacity, 0), coalesce(strict, FALSE)
		FROM credits c LEFT JOIN rules r ON r.key = c.key AND deleted_ms IS NULL WHERE c.key > $1 ORDER BY c.key LIMIT $2`, after, n)
}

// Forget removes credits, unless they were written again meanwhile. A key without stored credits counts
// as full.
func (s *Store) Forget(ctx context.Context, credits []table.Credit) error {
	return s.transact(ctx, func(t *tx) {
		for batch := range slices.Chunk(credits, rowsAtOnce) {
			query, args := `DELETE FROM credits WHERE (key, credit_milli, at_ms) IN (VALUES `, []any{}
			for i, c := range batch {
				query += fmt.Sprintf("($%d,%d,%d),", i+1, int64(c.Credits), c.At.Milliseconds())
				args = append(args, c.Key)
			}
			t.do(query[:len(query)-1]+")", args...)
		}
	})
}
