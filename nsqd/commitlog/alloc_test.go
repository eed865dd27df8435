//go:build !race

package commitlog

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestNoAllocationForEachRecord(t *testing.T) {
	dir := testkit.Result(OpenDir(t.TempDir(), OS())).Must(t)
	l, err := Open(Config{Dir: dir, Name: "q"})
	testkit.Must(t, err)
	batch := make([]Record, 200)
	for i := range batch {
		batch[i].Body = make([]byte, 100)
	}
	var into Batch
	run := func() {
		for i := range batch {
			batch[i].Offset = 0
		}
		_, err := l.Append(batch)
		testkit.Must(t, err)
		for read := 0; read < len(batch); read += len(into.Records) {
			if err := l.Read(into.Next, Limit{Records: len(batch) - read, Bytes: 1 << 20}, &into); err != nil || len(into.Records) == 0 {
				t.Fatal(len(into.Records), err)
			}
		}
	}
	run()
	if n := testing.AllocsPerRun(100, run); n > 3 {
		t.Errorf("%v allocations for 200 records", n)
	}
	testkit.NoError(t, l.Remove())
	testkit.NoError(t, dir.Close())
}
