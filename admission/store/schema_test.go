package store

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"
)

// A transaction that ends with its context says so, and not that it was over: a process that is
// told to stop while it opens its store has not failed.
func TestATransactionEndsWithItsContext(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "admission.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	err = s.transact(ctx, func(t *tx) {
		cancel()
		t.ctx = context.WithoutCancel(ctx)
		for t.err == nil { // until it is noticed
			t.do(`SELECT 1`)
		}
	})
	if !errors.Is(err, context.Canceled) || errors.Is(err, sql.ErrTxDone) {
		t.Error(err)
	}
}
