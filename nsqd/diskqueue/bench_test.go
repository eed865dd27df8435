package diskqueue

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
)

func openFor(b *testing.B) (*Queue, func()) {
	b.Helper()
	dir, err := OpenDir(b.TempDir(), OS())
	if err != nil {
		b.Fatal(err)
	}
	q, err := Open(Config{Dir: dir, Name: "q"})
	if err != nil {
		b.Fatal(err)
	}
	return q, func() {
		if err := q.Remove(); err != nil {
			b.Error(err)
		}
		if err := dir.Close(); err != nil {
			b.Error(err)
		}
	}
}

func batchOf(n, size int) [][]byte {
	batch := make([][]byte, n)
	for i := range batch {
		batch[i] = make([]byte, size)
		for j := range batch[i] {
			batch[i][j] = byte(i * j)
		}
	}
	return batch
}

func rate(b *testing.B, records int) {
	b.ReportMetric(float64(records)/b.Elapsed().Seconds(), "records/s")
}

// Records of 100 B in batches of 200, as from MPUB, without fsync.
func BenchmarkAppend(b *testing.B) {
	q, end := openFor(b)
	defer end()
	batch := batchOf(200, 100)
	b.ReportAllocs()
	b.SetBytes(200 * 108)
	n := 0
	for b.Loop() {
		if _, err := q.Append(batch...); err != nil {
			b.Fatal(err)
		}
		if n += 200; n%1_000_000 == 0 { // a backlog that does not fill the disk
			b.StopTimer()
			if err := q.Empty(); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	}
	rate(b, n)
}

// The same, read, released and checkpointed as well, behind a backlog.
func BenchmarkAppendAndRead(b *testing.B) {
	for _, backlog := range []int{0, 1_000_000} {
		b.Run(fmt.Sprintf("backlog=%d", backlog), func(b *testing.B) {
			q, end := openFor(b)
			defer end()
			batch := batchOf(200, 100)
			for range backlog / len(batch) {
				if _, err := q.Append(batch...); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			b.SetBytes(200 * 108)
			n := 0
			var into []Record
			for b.Loop() {
				if _, err := q.Append(batch...); err != nil {
					b.Fatal(err)
				}
				for read := 0; read < len(batch); read = len(into) {
					var err error
					if into, err = q.Read(len(batch)-len(into), 1<<20, into); err != nil || len(into) == 0 {
						b.Fatal(len(into), err)
					}
				}
				q.Release(into[len(into)-1].End)
				into = into[:0]
				if n += 200; n%200_000 == 0 {
					if err := q.Checkpoint(); err != nil {
						b.Fatal(err)
					}
				}
			}
			rate(b, n)
		})
	}
}

// One record each, appended and durable before the next, by several at a time.
func BenchmarkAppendAndSync(b *testing.B) {
	for _, callers := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			q, end := openFor(b)
			defer end()
			record := batchOf(1, 100)
			var wg sync.WaitGroup
			each := max(1, b.N/callers)
			b.ResetTimer()
			for range callers {
				wg.Go(func() {
					for range each {
						at, err := q.Append(record...)
						if err == nil {
							err = q.SyncTo(at)
						}
						if err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			rate(b, each*callers)
			b.ReportMetric(float64(q.Stats().Fsyncs)/float64(each*callers), "fsyncs/record")
		})
	}
}

// A backlog of a million records, found again after the process has ended: in
// order, or by a kill, which leaves the last segment to be read.
func BenchmarkOpenMillion(b *testing.B) {
	for _, killed := range []bool{false, true} {
		b.Run(fmt.Sprintf("killed=%v", killed), func(b *testing.B) {
			disk := OS()
			dir, err := OpenDir(b.TempDir(), disk)
			if err != nil {
				b.Fatal(err)
			}
			q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 64 << 20})
			if err != nil {
				b.Fatal(err)
			}
			batch := batchOf(200, 100)
			for range 5000 {
				if _, err := q.Append(batch...); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				b.StopTimer()
				last := q.segments[len(q.segments)-1]
				if err := q.Close(); err != nil {
					b.Fatal(err)
				}
				if killed { // which leaves the last segment without a footer
					f, err := disk.Open(q.folder + "/" + last.name())
					if err != nil {
						b.Fatal(err)
					}
					if err := errors.Join(f.Truncate(last.end), f.Close()); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				if q, err = Open(Config{Dir: dir, Name: "q"}); err != nil {
					b.Fatal(err)
				}
				if n, _ := q.Held(); n != 1_000_000 {
					b.Fatalf("%d records", n)
				}
			}
			if err := q.Remove(); err != nil {
				b.Fatal(err)
			}
			if err := dir.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// What a queue that is open costs in memory: before its first record, and when
// it is drained and at rest.
func BenchmarkOpenQueues(b *testing.B) {
	sim := newSimDisk(nil)
	dir, err := OpenDir("/data", sim.disk())
	if err != nil {
		b.Fatal(err)
	}
	heap := func() float64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	var queues []*Queue
	before := heap()
	for b.Loop() {
		q, err := Open(Config{Dir: dir, Name: fmt.Sprint(len(queues))})
		if err != nil {
			b.Fatal(err)
		}
		queues = append(queues, q)
	}
	b.ReportMetric((heap()-before)/float64(len(queues)), "heap-B/queue")
	for _, q := range queues {
		if err := q.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
