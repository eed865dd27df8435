package store

import (
	"context"
	"time"
)

// Age has rules that are deleted be so for longer.
func (s *Store) Age(ctx context.Context, by time.Duration) error {
	_, err := s.db.ExecContext(ctx, `UPDATE rules SET deleted_ms = deleted_ms - $1`, by.Milliseconds())
	return err
}
