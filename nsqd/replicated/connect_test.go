package replicated

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A broker that is told to stop while it looks for NATS does not try again, though each attempt
// takes longer than the pause between two.
func TestConnectingEndsWithItsContext(t *testing.T) {
	for range 8 {
		ctx, stop := context.WithCancel(t.Context())
		ln := testkit.Listen(t)
		var attempts atomic.Int32
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				attempts.Add(1)
				stop()
				<-time.After(3 * minWait)
				_ = conn.Close()
			}
		}()
		if _, err := Connect(ctx, Config{URL: "nats://" + ln.Addr().String(), Part: "b", Replicas: 1, Log: slog.New(slog.DiscardHandler)}); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		_ = ln.Close()
		<-ended
		if n := attempts.Load(); n != 1 {
			t.Errorf("%d attempts", n)
		}
	}
}
