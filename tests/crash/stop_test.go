package crash

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/wire"
)

// fill publishes the numbers from from to before to to topic t, each in a message of 200 bytes, and
// returns when all are acknowledged.
func fill(t *testing.T, d *local.Process, from, to int) {
	t.Helper()
	nc, err := dial(d.TCP)
	testkit.Must(t, err)
	defer nc.Close()
	r := bufio.NewReader(nc)
	for from < to {
		testkit.Must(t, nc.SetDeadline(time.Now().Add(forever)))
		var bodies [][]byte
		for len(bodies) < 500 && from < to {
			b := make([]byte, 200)
			binary.BigEndian.PutUint32(b, uint32(from))
			bodies = append(bodies, b)
			from++
		}
		testkit.Result(nc.Write(wire.AppendMpub(nil, "t", bodies))).Must(t)
		testkit.Result(reply(nc, r)).MustEqual(t, "OK")
	}
}

// withChannel starts an nsqd with the channel c of topic t.
func withChannel(t *testing.T, dir string, flags ...string) *local.Process {
	t.Helper()
	d := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, append([]string{"--data-path=" + dir}, flags...)...)).Must(t)
	ask(t, "http://"+d.HTTP+"/topic/create?topic=t", "x")
	ask(t, "http://"+d.HTTP+"/channel/create?topic=t&channel=c", "x")
	return d
}

// obstruct opens connections that could delay a stop: a subscriber that reads nothing, a publisher in
// the middle of a message, another in the middle of a batch over HTTP, and a silent connection.
func obstruct(t *testing.T, d *local.Process) {
	t.Helper()
	for address, says := range map[string]string{
		d.TCP:  "  V2PUB t\n\x00\x00\x10\x00half",
		d.HTTP: "POST /mpub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf",
	} {
		for _, what := range []string{says, ""} {
			nc := testkit.Result(net.Dial("tcp", address)).Must(t)
			t.Cleanup(func() { nc.Close() })
			testkit.Result(io.WriteString(nc, what)).Must(t)
		}
	}
	stuck := subscribe(t, d.TCP, 2500)
	t.Cleanup(func() { stuck.Close() })
	testkit.Must(t, stuck.(*net.TCPConn).SetReadBuffer(4<<10))
}

// A container is killed soon after SIGTERM. A stopping broker stores all acknowledged messages before
// it waits for anything. A kill at the moment when the broker reports this loses nothing, whichever
// peer is stuck.
func TestStoredBeforeAnythingIsWaitedFor(t *testing.T) {
	messages := size(t, "SRTM_CRASH_STOP", 50_000)
	silent := testkit.Listen(t).Addr().String() // accepts connections, and does nothing else
	for name, flag := range map[string]string{"": "--drain-timeout=0s", "lookupd": "--lookupd-tcp-address=" + silent} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			d := withChannel(t, dir, "--mem-queue-size=1000000", flag)
			fill(t, d, 0, messages)
			obstruct(t, d)
			signal(t, d, syscall.SIGTERM)
			testkit.WaitFor(t, "stored", func() bool {
				select {
				case <-d.Done():
					return true // the broker has ended already
				default:
					return strings.Contains(d.Output(), "all messages are stored")
				}
			})
			kill(t, d)
			for range 2 { // a start removes no unfinished message from the disk
				d = withChannel(t, dir)
				testkit.WaitFor(t, "all there", func() bool { return channel(t, d).Depth == messages })
				kill(t, d)
			}
		})
	}
}

func signal(t *testing.T, d *local.Process, s syscall.Signal) {
	t.Helper()
	testkit.Must(t, d.Signal(s))
}

func kill(t *testing.T, d *local.Process) {
	t.Helper()
	testkit.Must(t, d.Kill())
}

// A closing terminal, or a supervisor's reload, does not end a broker.
func TestHangupKeepsWhatIsInMemory(t *testing.T) {
	const messages = 100
	dir := t.TempDir()
	d := withChannel(t, dir, "--mem-queue-size=1000")
	fill(t, d, 0, messages)
	signal(t, d, syscall.SIGHUP)
	testkit.WaitFor(t, "a line about the signal", func() bool { return strings.Contains(d.Output(), "SIGHUP") })
	testkit.Equal(t, channel(t, d).unfinished, messages, "messages after SIGHUP")
	signal(t, d, syscall.SIGTERM)
	<-d.Done()
	d = withChannel(t, dir)
	testkit.Equal(t, channel(t, d).unfinished, messages, "messages after SIGHUP and SIGTERM")
	kill(t, d)
}
