package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
)

// ErrNoRule means that a key has no rule of its own.
var ErrNoRule = errors.New("no such rule")

// Remembered is the time that a deleted rule is kept, by the database's clock, so that servers learn of
// the deletion. A server that did not reach the store for longer must restart.
const Remembered = 30 * 24 * time.Hour

const columns = `key, rate_milli, period_s, capacity, strict, shadow, fail_open, change`

func scan(row *sql.Rows, more ...any) (r rule.Rule, err error) {
	err = row.Scan(append([]any{&r.Key, &r.Share.Rate, &r.Period, &r.Share.Burst, &r.Strict, &r.Shadow, &r.FailOpen, &r.Change}, more...)...)
	return r, err
}

// SetRules adds or replaces rules, all or none, and returns the number of the last edit. It ignores the
// rules' Change. Error: see rule.Rule.Validate.
func (s *Store) SetRules(ctx context.Context, rules []rule.Rule) (change uint64, err error) {
	for i := range rules {
		if err := rules[i].Validate(); err != nil {
			return 0, err
		}
	}
	err = s.edit(ctx, func(t *tx) {
		for i := range rules {
			r := &rules[i]
			change = t.next()
			t.do(`INSERT INTO rules (`+columns+`, deleted_ms) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, NULL)
				ON CONFLICT (key) DO UPDATE SET rate_milli = excluded.rate_milli, period_s = excluded.period_s, capacity = excluded.capacity,
				strict = excluded.strict, shadow = excluded.shadow, fail_open = excluded.fail_open, change = excluded.change, deleted_ms = NULL`,
				r.Key, int64(r.Share.Rate), r.Period, r.Share.Burst, r.Strict, r.Shadow, r.FailOpen, int64(change))
		}
	})
	return change, err
}

// DeleteRule deletes a rule. The key falls back to the defaults and keeps its credits, up to the new
// capacity. Error: ErrNoRule.
func (s *Store) DeleteRule(ctx context.Context, key string) (change uint64, err error) {
	now := `unixepoch() * 1000`
	if s.postgres {
		now = `CAST(extract(epoch FROM now()) * 1000 AS BIGINT)`
	}
	err = s.edit(ctx, func(t *tx) {
		change = t.next()
		t.expectRow(ErrNoRule, `UPDATE rules SET change = $1, deleted_ms = `+now+` WHERE key = $2 AND deleted_ms IS NULL`, int64(change), key)
		t.do(`DELETE FROM rules WHERE deleted_ms < `+now+` - $1`, Remembered.Milliseconds())
	})
	return change, err
}

func (s *Store) edit(ctx context.Context, f func(t *tx)) (err error) {
	ctx, done := patient(ctx)
	defer done(&err)
	select {
	case s.editing <- struct{}{}:
		defer func() { <-s.editing }()
		return s.transact(ctx, f)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *tx) next() uint64 {
	return uint64(t.get(`UPDATE admission SET change = change + 1 RETURNING change`))
}

// Rule returns the rule of key. Error: ErrNoRule.
func (s *Store) Rule(ctx context.Context, key string) (rule.Rule, error) {
	rules, err := s.RulesOf(ctx, []string{key})
	if err == nil && len(rules) == 0 {
		return rule.Rule{}, ErrNoRule
	}
	return rules[key], err
}

// RulesOf returns the rules of keys, by key. Keys without a rule are absent from the map.
func (s *Store) RulesOf(ctx context.Context, keys []string) (map[string]rule.Rule, error) {
	list, args := in(keys)
	rules, err := s.rules(ctx, `key IN `+list, args...)
	byKey := make(map[string]rule.Rule, len(rules))
	for _, r := range rules {
		byKey[r.Key] = r
	}
	return byKey, err
}

// in returns the list and the parameters of an IN clause. Requires: len(keys) > 0.
func in(keys []string) (list string, args []any) {
	for i, key := range keys {
		list += fmt.Sprintf(",$%d", i+1)
		args = append(args, key)
	}
	return "(" + strings.TrimPrefix(list, ",") + ")", args
}

// Rules returns up to n rules in the order of their keys: the keys with the given prefix that come
// after the key after.
func (s *Store) Rules(ctx context.Context, prefix, after string, n int) ([]rule.Rule, error) {
	where := `key > $1 AND substr(key, 1, length($2)) = $2 ORDER BY key LIMIT $3`
	if s.postgres { // compare bytes, as SQLite does
		where = `key COLLATE "C" > $1 AND starts_with(key, $2) ORDER BY key COLLATE "C" LIMIT $3`
	}
	return s.rules(ctx, where, after, prefix, n)
}

// Defaults returns all default rules.
func (s *Store) Defaults(ctx context.Context) ([]rule.Rule, error) {
	return s.rules(ctx, `key LIKE '%*'`)
}

// Change is an edit of a rule.
type Change struct {
	Rule    rule.Rule
	Deleted bool
}

// Changes returns up to n edits with numbers above after, in order. If a rule has several edits,
// Changes returns only the last edit.
func (s *Store) Changes(ctx context.Context, after uint64, n int) ([]Change, error) {
	return list(ctx, s.reads, func(row *sql.Rows) (Change, error) {
		var deleted sql.NullInt64
		r, err := scan(row, &deleted)
		return Change{r, deleted.Valid}, err
	}, `SELECT `+columns+`, deleted_ms FROM rules WHERE change > $1 ORDER BY change LIMIT $2`, int64(after), n)
}

// LastChange returns the number of the last edit.
func (s *Store) LastChange(ctx context.Context) (n uint64, err error) {
	err = s.reads.QueryRowContext(ctx, `SELECT change FROM admission`).Scan(&n)
	return n, err
}

func (s *Store) rules(ctx context.Context, where string, args ...any) ([]rule.Rule, error) {
	return list(ctx, s.reads, func(row *sql.Rows) (rule.Rule, error) { return scan(row) }, `SELECT `+columns+` FROM rules WHERE deleted_ms IS NULL AND `+where, args...)
}

// list converts each row with one.
func list[A any](ctx context.Context, db *sql.DB, scan func(*sql.Rows) (A, error), query string, args ...any) (all []A, err error) {
	ctx, done := patient(ctx)
	defer done(&err)
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		a, err := scan(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return all, rows.Err()
}
