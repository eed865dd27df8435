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

// SaveCredits writes what keys hold, all or none.
func (s *Store) SaveCredits(ctx context.Context, credits []table.Credit) error {
	return s.transact(ctx, func(tx *sql.Tx) error {
		var query strings.Builder
		var args []any
		for len(credits) > 0 {
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
			if _, err := tx.ExecContext(ctx, query.String(), args...); err != nil {
				return err
			}
		}
		return nil
	})
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

// Begin says that a server starts, and returns when one last started after another
// that had not come to its End; the zero Time if none ever did. What keys held before
// is not known exactly.
func (s *Store) Begin(ctx context.Context, now time.Time) (unknown time.Time, err error) {
	err = s.transact(ctx, func(tx *sql.Tx) error {
		var running bool
		var ms int64
		if err := tx.QueryRowContext(ctx, `SELECT running, crashed_ms FROM admission`).Scan(&running, &ms); err != nil {
			return err
		}
		if running {
			ms = now.UnixMilli()
		}
		if ms != 0 {
			unknown = time.UnixMilli(ms)
		}
		_, err := tx.ExecContext(ctx, `UPDATE admission SET running = TRUE, crashed_ms = $1`, ms)
		return err
	})
	return unknown, err
}

// End says that what all keys held when the server stopped has been saved.
func (s *Store) End(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, `UPDATE admission SET running = FALSE`)
	return err
}
