package agent

import (
	"bytes"
	"encoding/binary"
	"net"
	"runtime"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/session"
)

// Messages of one byte take many times their size if each is stored separately. A producer that waits for room stores
// only its bytes.
func TestABatchOfBytes(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Loaddistributor = "127.0.0.1:1"
	a := testkit.Result(New(cfg)).Must(t)
	defer func() { testkit.Must(t, a.publishers.Close(t.Context())) }()
	defer a.endLog()
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	c := newConn(a, theirs)
	const n = 1_000_000
	one := append(binary.BigEndian.AppendUint32(nil, 1), 'x')
	buf := []byte("  V2MPUB t\n")
	buf = binary.BigEndian.AppendUint32(buf, uint32(4+n*len(one)))
	buf = binary.BigEndian.AppendUint32(buf, n)
	buf = append(buf, bytes.Repeat(one, n)...)
	var before, after runtime.MemStats
	for {
		runtime.ReadMemStats(&before)
		taken, o, over := c.step(buf)
		runtime.ReadMemStats(&after)
		if over || taken == 0 {
			t.Fatalf("%d, %v", taken, over)
		}
		if buf = buf[taken:]; o == nil {
			continue
		}
		if o.op.Kind != session.OpMpub || o.op.Batch.Len() != n {
			t.Errorf("%v of %d messages", o.op.Kind, o.op.Batch.Len())
		}
		break
	}
	if made := after.TotalAlloc - before.TotalAlloc; made > 1<<20 {
		t.Errorf("%d MiB for it", made>>20)
	}
}
