package agent_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/srtm/agent"
)

// After the agent has ended, nothing waits for its drain timeout.
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
		_, err := nc.Read(make([]byte, 6)) // the agent serves the connection
		testkit.Must(t, err)
		cancel()
		_, err = io.Copy(io.Discard, nc) // until the agent sends the end
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

// The health reports that the loaddistributor does not answer, from the start of the agent, and ends when
// the loaddistributor answers. The agent stays healthy: a restart would not help.
func TestTheHealthSaysThatTheLoaddistributorDoesNotAnswer(t *testing.T) {
	cfg := agent.DefaultConfig()
	cfg.Loaddistributor = testkit.Address(t)
	a := testkit.Result(agent.New(cfg)).Must(t)
	ln := testkit.Listen(t)
	testkit.Run(t, func(ctx context.Context) error { return a.Run(ctx, ln) })
	testkit.WaitFor(t, "the health of an agent without a loaddistributor", func() bool {
		err := a.Health()
		_, well := errors.AsType[obs.Notice](err)
		return well && strings.HasPrefix(err.Error(), "the loaddistributor does not answer at "+cfg.Loaddistributor+": ")
	})
	web := testkit.Result(net.Listen("tcp", cfg.Loaddistributor)).Must(t)
	server := grpc.NewServer()
	done := make(chan error, 1)
	go func() { done <- server.Serve(web) }()
	defer func() { server.Stop(); <-done }()
	testkit.WaitFor(t, "the health of an agent with its loaddistributor", func() bool { return a.Health() == nil })
}

// Incomplete commands take no more than the available room, and not forever: a command that waits for room gets room.
func TestCommandsThatDoNotComeWhole(t *testing.T) {
	const body, messages = 1 << 20, 1 << 18
	pub := append([]byte("  V2PUB t\n"), binary.BigEndian.AppendUint32(nil, body)...)
	mpub := append([]byte("  V2MPUB t\n"), binary.BigEndian.AppendUint32(nil, 4+5*messages)...)
	mpub = append(binary.BigEndian.AppendUint32(mpub, messages), bytes.Repeat([]byte("\x00\x00\x00\x01x"), messages-1)...)
	for name, command := range map[string][]byte{"PUB": append(pub, make([]byte, body-1)...), "MPUB": mpub} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				cfg := agent.DefaultConfig()
				cfg.Loaddistributor, cfg.MaxBuffer = "127.0.0.1:1", 6<<20
				a := testkit.Result(agent.New(cfg)).Must(t)
				ctx, cancel := context.WithCancel(t.Context())
				ln := testkit.NewPiped()
				over := make(chan error, 1)
				go func() { over <- a.Run(ctx, ln) }()
				const producers = 20
				var read atomic.Int64
				var refused atomic.Int32
				for range producers {
					mine, theirs := net.Pipe()
					ln.Conns <- counted{theirs, &read}
					go func() { _, _ = mine.Write(command) }() // as far as the agent reads the command
					go func() {
						answer, _ := io.ReadAll(mine)
						if bytes.Contains(answer, []byte("E_PUB_FAILED")) {
							refused.Add(1)
						}
					}()
					defer mine.Close()
				}
				synctest.Wait()
				if n := read.Load(); n > cfg.MaxBuffer {
					t.Errorf("%d KiB were read", n>>10)
				}
				<-time.After(2 * producers * cfg.PublishTimeout)
				testkit.Equal(t, refused.Load(), producers, "producers that got an answer")
				cancel()
				testkit.Must(t, <-over)
			})
		})
	}
}

// counted counts the bytes read from a connection.
type counted struct {
	net.Conn
	read *atomic.Int64
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read.Add(int64(n))
	return n, err
}
