package conn_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// halves is a pipe whose near end supports CloseWrite. The far end does not react.
type halves struct{ net.Conn }

func (halves) CloseWrite() error { return nil }

// At shutdown, an open client connection delays the broker only if the client's last command is so recent that the
// client may not have read the reply.
func TestIdleClientDoesNotDelayShutdown(t *testing.T) {
	for name, c := range map[string]struct {
		idle time.Duration
		want time.Duration
	}{
		"idle":                {time.Minute, 0},
		"active a moment ago": {100 * time.Millisecond, 900 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				log := slog.New(slog.DiscardHandler)
				sc := session.DefaultConfig()
				sc.HeartbeatInterval = 0
				b := testkit.Result(broker.New(broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true})).Must(t)
				stamps := testkit.Result(hook.Open(hook.Off, hook.Config{}, log)).Must(t)
				s := testkit.Result(conn.New(conn.Config{Session: &sc, WriteTimeout: time.Minute}, b, stamps, log)).Must(t)
				ln := testkit.NewPiped()
				ctx, cancel := context.WithCancel(t.Context())
				served := make(chan error, 1)
				go func() { served <- s.Serve(ctx, ln) }()
				near, far := net.Pipe()
				ln.Conns <- halves{near}
				go func() { _, _ = io.Copy(io.Discard, far) }()
				_, err := far.Write(append(wire.AppendMagic(nil), "PUB t\n\x00\x00\x00\x01x"...))
				testkit.Must(t, err)
				synctest.Wait()
				<-time.After(c.idle) // virtual time
				began := time.Now()
				cancel()
				testkit.Must(t, s.Shutdown(context.Background()))
				testkit.Equal(t, time.Since(began), c.want, "the end took")
				testkit.Must(t, <-served)
				far.Close()
				testkit.Must(t, b.Close())
				testkit.Must(t, stamps.Close())
			})
		})
	}
}
