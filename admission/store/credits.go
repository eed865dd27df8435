package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/tokenbucket"
)

// rowsAtOnce is how many rows one statement writes.
const rowsAtOnce = 500

// SaveCredits writes what keys hold, all or none, for a server that knows the owners by
// their number: what it holds of a partition that it has handed over, without having
// heard so, is old. Errors: ErrFenced; ErrMoved.
func (s *Store) SaveCredits(ctx context.Context, me Member, owners uint64, credits []table.Credit) error {
	return s.transact(ctx, func(tx *sql.Tx) error {
		err := save(ctx, tx, me, credits)
		var is uint64 // after save's lock, which a hand-over has, too
		if err == nil {
			err = tx.QueryRowContext(ctx, `SELECT owners FROM admission`).Scan(&is)
		}
		if err == nil && is != owners {
			err = ErrMoved
		}
		return err
	})
}

// save holds a lock on the server's row to the end, so that a server whose partitions
// another one takes writes before that or not at all.
func save(ctx context.Context, tx *sql.Tx, me Member, credits []table.Credit) error {
	var at time.Duration
	for _, c := range credits {
		at = max(at, c.At)
	}
	err := one(tx.ExecContext(ctx, `UPDATE servers SET at_ms = CASE WHEN at_ms > $1 THEN at_ms ELSE $1 END WHERE address = $2 AND instance = $3`,
		at.Milliseconds(), me.Address, me.Instance))
	var query strings.Builder
	var args []any
	for len(credits) > 0 && err == nil {
		some := credits[:min(rowsAtOnce, len(credits))]
		credits = credits[len(some):]
		query.Reset()
		args = args[:0]
		query.WriteString(`INSERT INTO credits (key, credit_milli, at_ms) VALUES `)
		for i, c := range some {
			if i > 0 {
				query.WriteByte(',')
			}
			fmt.Fprintf(&query, "($%d,$%d,$%d)", 3*i+1, 3*i+2, 3*i+3)
			args = append(args, c.Key, int64(c.Credits), c.At.Milliseconds())
		}
		query.WriteString(` ON CONFLICT (key) DO UPDATE SET credit_milli = excluded.credit_milli, at_ms = excluded.at_ms`)
		_, err = tx.ExecContext(ctx, query.String(), args...)
	}
	return err
}

// Credit returns what a key held when that was last written, nil if it never was.
func (s *Store) Credit(ctx context.Context, key string) (*table.Credit, error) {
	var milli, at int64
	err := s.db.QueryRowContext(ctx, `SELECT credit_milli, at_ms FROM credits WHERE key = $1`, key).Scan(&milli, &at)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &table.Credit{Key: key, Credits: tokenbucket.Tokens(milli), At: time.Duration(at) * time.Millisecond}, nil
}
