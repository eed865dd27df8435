package diskqueue

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"

	"pgregory.net/rapid"
)

// fifo is what a queue is to its user, in memory.
type fifo struct {
	records [][]byte   // held
	read    int        // of them
	ends    []Position // of records, where they were read
	backlog [][]byte   // released since the last checkpoint
}

// The queue against a slow, obvious one, on a simulated disk and on a real one.
func TestQueueIsAFIFO(t *testing.T) {
	t.Run("simulated disk", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			sim := newSimDisk(rand.New(rand.NewPCG(1, 1)))
			checkFIFO(t, "/data", sim.disk(), sim.kill)
		})
	})
	t.Run("real disk", func(t *testing.T) {
		runs := 0
		rapid.Check(t, func(t *rapid.T) {
			if runs++; runs > 20 {
				return // the same again, but slower
			}
			dir, err := os.MkdirTemp("", "diskqueue")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			checkFIFO(t, dir, OS(), nil)
		})
	})
}

// checkFIFO uses a queue in random ways; kill, if not nil, lets go of the folder
// as the end of a process does.
func checkFIFO(t *rapid.T, path string, disk Disk, kill func()) {
	cfg := Config{
		Name:         "q",
		SegmentBytes: rapid.Int64Range(1<<10, 1<<13).Draw(t, "segment"),
		MaxRecord:    3000,
	}
	var dir *Dir
	var q *Queue
	var m fifo
	open := func() {
		var err error
		if dir, err = OpenDir(path, disk); err != nil {
			t.Fatal(err)
		}
		cfg.Dir = dir
		if q, err = Open(cfg); err != nil {
			t.Fatal(err)
		}
	}
	// release drops the first n of the model.
	release := func(n int) {
		m.records, m.ends, m.read = m.records[n:], m.ends[n:], max(0, m.read-n)
	}
	check := func(err error) {
		if err != nil {
			t.Fatalf("%v", err)
		}
	}
	open()
	t.Repeat(map[string]func(*rapid.T){
		"append": func(t *rapid.T) {
			batch := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 300), 0, 8).Draw(t, "batch")
			if rapid.IntRange(0, 9).Draw(t, "long") == 0 {
				batch = append(batch, bytes.Repeat([]byte{7}, rapid.IntRange(1, 3000).Draw(t, "size")))
			}
			_, err := q.Append(batch...)
			check(err)
			for _, r := range batch {
				m.records = append(m.records, r)
				m.ends = append(m.ends, Position{})
			}
		},
		"read": func(t *rapid.T) {
			n, size := rapid.IntRange(0, 20).Draw(t, "records"), rapid.IntRange(0, 2000).Draw(t, "bytes")
			got, err := q.Read(n, size, nil)
			check(err)
			if len(got) > n || len(got) == 0 && n > 0 && m.read < len(m.records) {
				t.Fatalf("read %d records of at most %d, %d are unread", len(got), n, len(m.records)-m.read)
			}
			total := 0
			for i, r := range got {
				if !bytes.Equal(r.Data, m.records[m.read]) {
					t.Fatalf("read %x, want %x", r.Data, m.records[m.read])
				}
				if total += len(r.Data); i > 0 && total > size {
					t.Fatalf("read %d bytes in %d records, want at most %d", total, i+1, size)
				}
				m.ends[m.read] = r.End
				m.read++
			}
		},
		"release": func(t *rapid.T) {
			if m.read == 0 {
				return
			}
			n := rapid.IntRange(1, m.read).Draw(t, "n")
			q.Release(m.ends[n-1])
			m.backlog = append(m.backlog, m.records[:n]...)
			release(n)
		},
		"rewind": func(*rapid.T) {
			q.Rewind()
			m.read = 0
		},
		"sync": func(*rapid.T) { check(q.Sync()) },
		"checkpoint": func(*rapid.T) {
			check(q.Checkpoint())
			m.backlog = nil
		},
		"empty": func(t *rapid.T) {
			if rapid.IntRange(0, 3).Draw(t, "really") == 0 {
				check(q.Empty())
				release(len(m.records))
				m.backlog = nil
			}
		},
		"close": func(*rapid.T) {
			check(q.Close())
			check(dir.Close())
			m.backlog, m.read = nil, 0
			open()
		},
		"kill": func(*rapid.T) {
			if kill == nil {
				return
			}
			kill()
			m.records = append(m.backlog, m.records...)
			m.ends = make([]Position, len(m.records))
			m.backlog, m.read = nil, 0
			open()
		},
		"": func(t *rapid.T) {
			unread, bytesUnread := q.Unread()
			held, bytesHeld := q.Held()
			if unread != int64(len(m.records)-m.read) || held != int64(len(m.records)) {
				t.Fatalf("%d unread, %d held; want %d, %d", unread, held, len(m.records)-m.read, len(m.records))
			}
			if s := q.Stats(); s.Torn+s.Quarantined+s.Missing+s.KeepErrors+s.SyncErrors > 0 {
				t.Fatalf("faults where there are none: %+v", s)
			}
			size := func(records [][]byte) (sum int64) {
				for _, r := range records {
					sum += recordExtra + int64(len(r))
				}
				return sum
			}
			if want := size(m.records[m.read:]); bytesUnread != want {
				t.Fatalf("%d bytes unread, want %d", bytesUnread, want)
			}
			if want := size(m.records); bytesHeld != want {
				t.Fatalf("%d bytes held, want %d", bytesHeld, want)
			}
		},
	})
	check(q.Close())
	check(dir.Close())
}
