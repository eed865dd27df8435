package diskqueue

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func TestTheLastRecordTellsHowFarAQueueHasCome(t *testing.T) {
	dir, err := OpenDir(t.TempDir(), OS())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	open := func() *Queue {
		q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 10})
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	q := open()
	last := func(want string) {
		t.Helper()
		got, err := q.Last()
		if err != nil || string(got) != want {
			t.Errorf("the last is %q, %v; want %q", got, err, want)
		}
	}
	checkpoint := func() {
		t.Helper()
		for range 2 { // the second finds it at rest
			if err := q.Checkpoint(); err != nil {
				t.Fatal(err)
			}
		}
	}
	last("")
	if !q.Checkpointed() {
		t.Error("an empty queue has something to read")
	}
	var end Position
	for i := range 50 { // several segments
		if end, err = q.Append(fmt.Appendf(nil, "%d %s", i, bytes.Repeat([]byte{'x'}, 60))); err != nil {
			t.Fatal(err)
		}
	}
	want := "49 " + string(bytes.Repeat([]byte{'x'}, 60))
	last(want)
	if q.Checkpointed() {
		t.Error("nothing was released")
	}

	q.KeepLast(true)
	q.Release(end)
	if q.Checkpointed() {
		t.Error("that is not durable yet")
	}
	for range 2 { // and when it is opened again, where no segment is active
		checkpoint()
		last(want)
		if !q.Checkpointed() || q.Stats().Segments != 1 {
			t.Errorf("%t with %d segments", q.Checkpointed(), q.Stats().Segments)
		}
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		q = open()
		q.KeepLast(true)
		if n, _ := q.Unread(); n != 0 {
			t.Errorf("%d to read", n)
		}
	}
	q.KeepLast(false)
	checkpoint()
	last("")
	if !q.Checkpointed() || q.Stats().Segments != 0 {
		t.Errorf("%t with %d segments", q.Checkpointed(), q.Stats().Segments)
	}

	// Of damage nothing can be told.
	if _, err := q.Append([]byte("intact"), []byte("to be damaged")); err != nil {
		t.Fatal(err)
	}
	last("to be damaged")
	files, err := filepath.Glob(filepath.Join(q.folder, "*"+segmentSuffix))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-3] ^= 1
	if err := os.WriteFile(files[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	last("")
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Last(); err != ErrClosed {
		t.Error(err)
	}
}
