package store

import (
	"context"
	"time"
)

// Age makes the deletion of deleted rules older.
func (s *Store) Age(ctx context.Context, by time.Duration) error {
	_, err := s.db.ExecContext(ctx, `UPDATE rules SET deleted_ms = deleted_ms - $1`, by.Milliseconds())
	return err
}
