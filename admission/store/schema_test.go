package store

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"
)

// A transaction that ends with its context reports the context's error, and not the end of the
// transaction. A process has not failed if it is stopped while it opens its store.
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
		for t.err == nil { // until the transaction notices
			t.do(`SELECT 1`)
		}
	})
	if !errors.Is(err, context.Canceled) || errors.Is(err, sql.ErrTxDone) {
		t.Error(err)
	}
}
