package commitlog

import (
	"fmt"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func openFor(b *testing.B) (*Files, func()) {
	b.Helper()
	dir := testkit.Result(OpenDir(b.TempDir(), OS())).Must(b)
	l := testkit.Result(Open(Config{Dir: dir, Name: "q"})).Must(b)
	return l, func() {
		testkit.NoError(b, l.Remove())
		testkit.NoError(b, dir.Close())
	}
}

func batchOf(n, size int) []Record {
	batch := make([]Record, n)
	for i := range batch {
		batch[i].Body = make([]byte, size)
		for j := range batch[i].Body {
			batch[i].Body[j] = byte(i * j)
		}
	}
	return batch
}

// again prepares the batch to be appended at the end once more.
func again(batch []Record) []Record {
	for i := range batch {
		batch[i].Offset = 0
	}
	return batch
}

func rate(b *testing.B, records int) {
	b.ReportMetric(float64(records)/b.Elapsed().Seconds(), "records/s")
}

// BenchmarkAppend appends records of 100 B in batches of 200, as from MPUB, without fsync.
func BenchmarkAppend(b *testing.B) {
	l, end := openFor(b)
	defer end()
	batch := batchOf(200, 100)
	b.ReportAllocs()
	b.SetBytes(200 * 148)
	n := 0
	for b.Loop() {
		at := testkit.Result(l.Append(again(batch))).Must(b)
		if n += 200; n%1_000_000 == 0 { // keeps the backlog from filling the disk
			b.StopTimer()
			testkit.Must(b, l.Trim(at))
			b.StartTimer()
		}
	}
	rate(b, n)
}

// BenchmarkAppendAndRead also reads and trims the records, behind a backlog.
func BenchmarkAppendAndRead(b *testing.B) {
	for _, backlog := range []int{0, 1_000_000} {
		b.Run(fmt.Sprintf("backlog=%d", backlog), func(b *testing.B) {
			l, end := openFor(b)
			defer end()
			batch := batchOf(200, 100)
			for range backlog / len(batch) {
				testkit.Result(l.Append(again(batch))).Must(b)
			}
			b.ReportAllocs()
			b.SetBytes(200 * 148)
			n := 0
			var into Batch
			for b.Loop() {
				_, err := l.Append(again(batch))
				testkit.Must(b, err)
				for read := 0; read < len(batch); read += len(into.Records) {
					if err := l.Read(into.Next, Limit{len(batch) - read, 1 << 20}, &into); err != nil || len(into.Records) == 0 {
						b.Fatal(len(into.Records), err)
					}
				}
				if n += 200; n%200_000 == 0 {
					testkit.Must(b, l.Trim(into.Next))
				}
			}
			rate(b, n)
		})
	}
}

// BenchmarkAppendAndSync has several callers append one record each and wait for its fsync before the next.
func BenchmarkAppendAndSync(b *testing.B) {
	for _, callers := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			l, end := openFor(b)
			defer end()
			var wg sync.WaitGroup
			each := max(1, b.N/callers)
			b.ResetTimer()
			for range callers {
				wg.Go(func() {
					record := batchOf(1, 100)
					for range each {
						at, err := l.Append(again(record))
						if err == nil {
							err = l.Sync(at + 1)
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
			b.ReportMetric(float64(l.Stats().Fsyncs)/float64(each*callers), "fsyncs/record")
		})
	}
}
