package store

import (
	"context"
	"time"
)

// Hold keeps a write in progress, as on a slow disk, until release.
func (s *Store) Hold(ctx context.Context) (release func() error) {
	begun, end, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- s.transact(ctx, func(t *tx) {
			t.do(`UPDATE rules SET deleted_ms = deleted_ms`)
			close(begun)
			<-end
		})
	}()
	<-begun
	return func() error { close(end); return <-done }
}

// Age makes the deletion of deleted rules older.
func (s *Store) Age(ctx context.Context, by time.Duration) error {
	_, err := s.db.ExecContext(ctx, `UPDATE rules SET deleted_ms = deleted_ms - $1`, by.Milliseconds())
	return err
}
