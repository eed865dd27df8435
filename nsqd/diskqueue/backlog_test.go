package diskqueue

import (
	"log/slog"
	"testing"
)

// A queue that is appended to three times as fast as it is read does as much to
// its disk for each step when it is long as when it is short.
func TestWorkDoesNotGrowWithTheBacklog(t *testing.T) {
	sim := newSimDisk(nil)
	dir, err := OpenDir("/data", sim.disk())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 64 << 10, MaxRecord: 1000, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	var batch [][]byte
	for range 90 {
		batch = append(batch, make([]byte, 100))
	}
	// work is what so many steps do: changes and fsyncs, and bytes read.
	work := func(steps int) (ops int, read int64) {
		ops, read = sim.ops, sim.readAt
		for i := range steps {
			if _, err := q.Append(batch...); err != nil {
				t.Fatal(err)
			}
			got, err := q.Read(30, 1<<20, nil)
			if err != nil || len(got) == 0 {
				t.Fatalf("%d records, %v", len(got), err)
			}
			q.Release(got[len(got)-1].End)
			if i%10 == 9 {
				if err := q.Checkpoint(); err != nil {
					t.Fatal(err)
				}
			}
		}
		return sim.ops - ops, sim.readAt - read
	}
	const steps = 200
	work(steps)
	ops, read := work(steps)
	work(10 * steps)
	laterOps, laterRead := work(steps)
	if n, _ := q.Unread(); n < 100_000 {
		t.Fatalf("a backlog of %d is none", n)
	}
	t.Logf("%d steps: %d operations and %d bytes read, with a long backlog %d and %d", steps, ops, read, laterOps, laterRead)
	// Segments begin and end at other steps than before.
	if laterOps > ops+ops/10+5 || laterRead > read+read/10 {
		t.Error("the work has grown")
	}
}
