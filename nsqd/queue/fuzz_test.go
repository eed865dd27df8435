package queue

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
)

// A snapshot of cursors may have any content. A refused snapshot has no effect.
func FuzzRestore(f *testing.F) {
	for _, first := range []uint64{0, 4} {
		f.Add([]byte{snapshotVersion, 9, 9, 7, // end, written, front
			7, 2, 0, 1, 0, 4, // 7 and 8 wait
			1, 1, 1, // 1 was emptied
			1, 1, 'c', 2, 5, 0, 2, 0, 4, 1, 1, 3, 100, 1, 1, 1, 2, 50, // c has not finished 2, 3, 5 and 8
		}, first)
	}
	f.Add(FirstSnapshot(3, 5, []string{"a", "b"}), uint64(0))
	f.Add([]byte{}, uint64(1))
	f.Add([]byte{snapshotVersion + 1}, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, first uint64) {
		for at := range b { // a window may take so much memory, because its writer had the memory
			if n, _ := binary.Uvarint(b[at:]); n > 1<<16 && n <= 1<<29 {
				return
			}
		}
		var fx Effects
		top := withDisk(3, 3)
		mono := func(w mono.Wall) mono.Time { return mono.Time(w) }
		r, err := top.Disk().Restore(0, b, Offset(first), mono, func(string) bool { return true }, &fx)
		switch {
		case err == nil && r.Needed > Offset(first):
			t.Errorf("needed from %d, the log begins with %d", r.Needed, first)
		case err != nil && (!errors.Is(err, ErrSnapshot) || len(top.Channels()) > 0 || top.log.End() > 0 || r.From > 0):
			t.Errorf("%v, and %d channels, an end of %d, from %d", err, len(top.Channels()), top.log.End(), r.From)
		}
	})
}
