package agent_test

import (
	"context"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/srtm/agent"
)

// Nothing of an agent that has ended waits for its drain timeout.
func TestNothingIsLeft(t *testing.T) {
	cfg := agent.DefaultConfig()
	cfg.Loaddistributor, cfg.DrainTimeout = "127.0.0.1:1", time.Hour
	a := testkit.Result(agent.New(cfg)).Must(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	freed := make(chan struct{})
	func() {
		type key struct{}
		held := new([1 << 10]byte)
		runtime.AddCleanup(held, func(freed chan struct{}) { close(freed) }, freed)
		ctx, cancel := context.WithCancel(context.WithValue(context.Background(), key{}, held))
		over := make(chan error, 1)
		go func() { over <- a.Run(ctx, ln) }()
		nc := testkit.Result(net.Dial("tcp", ln.Addr().String())).Must(t)
		testkit.Result(nc.Write([]byte("  V2IDENTIFY\n\x00\x00\x00\x02{}"))).Must(t)
		_, err := nc.Read(make([]byte, 6)) // it is being served
		testkit.Must(t, err)
		cancel()
		_, err = io.Copy(io.Discard, nc) // until it is told that this is the end
		testkit.Must(t, err)
		nc.Close()
		testkit.Must(t, <-over)
	}()
	for until := time.Now().Add(testkit.Hang); ; {
		runtime.GC()
		select {
		case <-freed:
			return
		default:
			if time.Now().After(until) {
				t.Fatal("the context of Run is still in use")
			}
			runtime.Gosched()
		}
	}
}
