package conn_test

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
)

// counted is the system's disk. It counts writes to files and fsyncs, and can delay an fsync.
type counted struct {
	commitlog.Disk
	writes, syncs atomic.Int32
	hold          atomic.Pointer[held]
}

// held is a delayed fsync.
type held struct{ entered, release chan struct{} }

type countedFile struct {
	commitlog.File
	disk *counted
}

func (f countedFile) WriteAt(p []byte, off int64) (int, error) {
	f.disk.writes.Add(1)
	return f.File.WriteAt(p, off)
}

func (f countedFile) Sync() error {
	if h := f.disk.hold.Swap(nil); h != nil {
		close(h.entered)
		<-h.release
	}
	f.disk.syncs.Add(1)
	return f.File.Sync()
}

func newCounted() *counted {
	d := new(counted)
	d.Disk = logtest.Disk(func(f commitlog.File) commitlog.File { return countedFile{f, d} })
	return d
}

// unread returns how many unread bytes the system holds for the connections accepted at the address.
func unread(t *testing.T, addr net.Addr) (bytes int) {
	t.Helper()
	text := testkit.Result(os.ReadFile("/proc/net/tcp")).Must(t)
	port := fmt.Sprintf(":%04X", addr.(*net.TCPAddr).Port)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 5 || !strings.HasSuffix(fields[1], port) {
			continue
		}
		var sent, received int
		testkit.Result(fmt.Sscanf(fields[4], "%X:%X", &sent, &received)).Must(t)
		bytes += received
	}
	return bytes
}

// durableNode is a broker with one loop whose topics are on stable storage.
func durableNode(t *testing.T, disk *counted) *benched {
	t.Helper()
	path := t.TempDir()
	st, err := broker.OpenStorage(broker.StorageConfig{
		Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, WriteThrough: true, Fsync: true,
		Log: slog.New(slog.DiscardHandler), Disk: &disk.Disk,
	})
	testkit.Must(t, err)
	b := benchNode(t, 1, false, func(c *broker.Config) { c.Storage = st })
	t.Cleanup(func() {
		b.close()
		testkit.NoError(t, st.Close())
	})
	return b
}

// connections returns publishers that have sent the protocol magic.
func connections(t *testing.T, b *benched, n int) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	for i := range conns {
		conns[i] = b.dial()
		t.Cleanup(func() { conns[i].Close() })
		testkit.Result(conns[i].Write(wire.AppendMagic(nil))).Must(t)
	}
	return conns
}

func publishes(t *testing.T, topic string, conns ...net.Conn) {
	t.Helper()
	for _, nc := range conns {
		testkit.Result(nc.Write(wire.AppendPub(nil, topic, []byte("x")))).Must(t)
	}
}

func answered(t *testing.T, conns ...net.Conn) {
	t.Helper()
	answer := make([]byte, wire.FrameOverhead+len(wire.OK))
	for _, nc := range conns {
		if _, err := io.ReadFull(nc, answer); err != nil || string(answer[wire.FrameOverhead:]) != wire.OK {
			t.Fatalf("%q, %v", answer, err)
		}
	}
}

// Messages published during an fsync are stored by one more write and one more fsync.
func TestPublishesShareAWriteAndAnFsync(t *testing.T) {
	const publishers = 64
	disk := newCounted()
	conns := connections(t, durableNode(t, disk), publishers)
	publishes(t, "t", conns...)
	answered(t, conns...) // the topic and its files exist
	h := &held{make(chan struct{}), make(chan struct{})}
	disk.hold.Store(h)
	publishes(t, "t", conns[0])
	<-h.entered
	writes, syncs := disk.writes.Load(), disk.syncs.Load()
	publishes(t, "t", conns[1:]...)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 10_000 {
		if unread(t, conns[0].RemoteAddr()) == 0 {
			break
		}
		<-tick.C
	}
	close(h.release)
	answered(t, conns...)
	// Two or three fsyncs: the delayed fsync, the fsync of all others, and the fsync of publishes that were read but not
	// handed on when the delayed fsync ended. Cursors are saved now and then.
	writes, syncs = disk.writes.Load()-writes, disk.syncs.Load()-syncs
	if writes > 8 || syncs > 8 {
		t.Errorf("%d writes and %d fsyncs for %d publishers", writes, syncs, publishers-1)
	}
	t.Logf("%d writes and %d fsyncs for %d publishers", writes, syncs, publishers-1)
}

// A topic that waits for its fsync occupies the loop's committer. Other topics do not wait for the committer.
func TestNoTopicWaitsForTheFsyncOfAnother(t *testing.T) {
	disk := newCounted()
	conns := connections(t, durableNode(t, disk), 2)
	for range 2 { // in the second round, the topics and the committer exist
		publishes(t, "t", conns[0])
		publishes(t, "u", conns[1])
		answered(t, conns...)
	}
	h := &held{make(chan struct{}), make(chan struct{})}
	disk.hold.Store(h)
	publishes(t, "t", conns[0])
	<-h.entered
	for range 3 {
		publishes(t, "u", conns[1])
		answered(t, conns[1])
	}
	close(h.release)
	answered(t, conns[0])
	publishes(t, "u", conns[1])
	answered(t, conns[1])
}
