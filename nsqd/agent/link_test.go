package agent

import (
	"context"
	"errors"
	"testing"
)

// A side that does not read loses reports first, and the session when there is
// no room for a reply.
func TestALinkThatNobodyReads(t *testing.T) {
	ctx, cut := context.WithCancelCause(t.Context())
	l := &link[int]{out: make(chan *int, linkQueue), cut: cut}
	sent := 0
	for l.report(new(int)) {
		sent++
	}
	if sent != reportsQueue {
		t.Errorf("%d reports were queued, want %d", sent, reportsQueue)
	}
	for range linkQueue - reportsQueue {
		l.reply(new(int))
	}
	if ctx.Err() != nil {
		t.Fatal("cut although there was room")
	}
	l.reply(new(int))
	if !errors.Is(context.Cause(ctx), errSlow) {
		t.Errorf("not cut: %v", context.Cause(ctx))
	}
}
