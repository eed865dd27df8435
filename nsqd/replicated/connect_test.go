package replicated

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A broker that is stopped while looking for NATS waits for no server, tries no other server, and reports only the stop.
func TestConnectingEndsWithItsContext(t *testing.T) {
	for range 8 {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var urls []string
		var attempts atomic.Int32
		var silent sync.WaitGroup
		t.Cleanup(silent.Wait) // after the listeners have closed
		ended := make(chan struct{})
		for range 3 {
			ln := testkit.Listen(t)
			urls = append(urls, "nats://"+ln.Addr().String())
			silent.Go(func() {
				for {
					conn, err := ln.Accept()
					if err != nil {
						return
					}
					attempts.Add(1)
					stop()
					silent.Go(func() {
						<-ended
						_ = conn.Close()
					})
				}
			})
		}
		_, err := Connect(ctx, Config{URL: strings.Join(urls, ","), BrokerID: "b", Replicas: 1, Log: slog.New(slog.DiscardHandler)})
		if err != context.Canceled {
			t.Error(err)
		}
		testkit.Equal(t, attempts.Load(), 1, "attempts")
		close(ended)
	}
}
