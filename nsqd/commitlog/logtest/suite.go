// Package logtest has the tests for every implementation of commitlog.Log.
package logtest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// Subject is an empty log under test. Reopen ends its process and starts another.
type Subject struct {
	commitlog.Log
	Reopen func() commitlog.Log
}

// Suite tests an implementation against the guarantees of Log.
func Suite(t *testing.T, open func(t *testing.T) Subject) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, s Subject)
	}{
		{"what is appended is read, in order, as it was", testOrder},
		{"offsets grow and are never used twice", testOffsets},
		{"a read keeps to its limit", testLimit},
		{"trimmed records may be missing, the rest stays readable", testTrim},
		{"the last snapshot of cursors is loaded", testCursors},
		{"many use it at the same time", testConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

func record(n int) commitlog.Record {
	r := commitlog.Record{Timestamp: mono.Wall(n + 1), Arrival: mono.Wall(n + 2), Body: fmt.Appendf(nil, "body of %d", n)}
	copy(r.ID[:], fmt.Sprintf("%016x", n))
	switch n % 4 {
	case 1:
		r.Due, r.Source, r.Attempts = mono.Wall(n), stamp.Read, 3
	case 2:
		r.Channel, r.Access = []byte("c"), 7
	case 3:
		r.Body, r.Attribute = nil, []byte("an attribute")
	}
	return r
}

func same(a, b commitlog.Record) bool {
	channels, bodies := bytes.Equal(a.Channel, b.Channel), bytes.Equal(a.Body, b.Body)
	return channels && bodies && bytes.Equal(a.Attribute, b.Attribute) && a.ID == b.ID && a.Timestamp == b.Timestamp && a.Arrival == b.Arrival &&
		a.Source == b.Source && a.Attempts == b.Attempts && a.Due == b.Due && a.Access == b.Access
}

// Disk is the system's disk, with wrap around every created or opened file.
func Disk(wrap func(commitlog.File) commitlog.File) commitlog.Disk {
	d := commitlog.OS()
	around := func(open func(string) (commitlog.File, error)) func(string) (commitlog.File, error) {
		return func(path string) (commitlog.File, error) {
			f, err := open(path)
			if err != nil {
				return nil, err
			}
			return wrap(f), nil
		}
	}
	d.Create, d.Open = around(d.Create), around(d.Open)
	return d
}

// fill appends the records numbered from up to before to, and returns their offsets.
func fill(t *testing.T, l commitlog.Log, from, to int) (offsets []commitlog.Offset) {
	t.Helper()
	for from < to {
		n := min(1+from%5, to-from)
		var batch []commitlog.Record
		for i := range n {
			batch = append(batch, record(from+i))
		}
		first, err := l.Append(batch)
		testkit.Must(t, err)
		for i := range batch {
			if batch[i].Offset != first+commitlog.Offset(i) {
				t.Fatalf("offset %d is %d in a batch from %d", i, batch[i].Offset, first)
			}
			offsets = append(offsets, batch[i].Offset)
		}
		from += n
	}
	return offsets
}

// check reads all records from an offset on, and compares them with the numbered records.
func check(t *testing.T, l commitlog.Log, from commitlog.Offset, offsets []commitlog.Offset, first int) {
	t.Helper()
	var b commitlog.Batch
	n := 0
	for b.Next = from; ; {
		testkit.Must(t, l.Read(b.Next, commitlog.Limit{Records: 7, Bytes: 50}, &b))
		if len(b.Records) == 0 {
			break
		}
		for _, r := range b.Records {
			if n == len(offsets) || r.Offset != offsets[n] || !same(r, record(first+n)) {
				t.Fatalf("record %d is %+v", n, r)
			}
			n++
		}
	}
	if n != len(offsets) {
		t.Fatalf("%d records, want %d", n, len(offsets))
	}
}

func testOrder(t *testing.T, s Subject) {
	if at, err := s.Append(nil); err != nil || at != 0 {
		t.Fatalf("an empty log begins at %d, %v", at, err)
	}
	offsets := fill(t, s, 0, 300)
	check(t, s, 0, offsets, 0)
	check(t, s, offsets[123], offsets[123:], 123)
	l := s.Reopen()
	check(t, l, offsets[7], offsets[7:], 7)
	testkit.Must(t, l.Sync(offsets[299]+1))
	offsets = append(offsets, fill(t, l, 300, 310)...)
	check(t, l, 0, offsets, 0)
}

func testOffsets(t *testing.T, s Subject) {
	r := record(0)
	r.Offset = 50
	first, err := s.Append([]commitlog.Record{r, record(1)})
	if err != nil || first != 50 {
		t.Fatalf("asked for 50, got %d, %v", first, err)
	}
	check(t, s, 0, []commitlog.Offset{50, 51}, 0)
	testkit.Must(t, s.SaveCursors([]byte("all done")))
	testkit.Must(t, s.Trim(52))
	l := s.Reopen()
	if next, err := l.Append(nil); err != nil || next != 52 {
		t.Fatalf("after all was trimmed, next is %d, %v", next, err)
	}
	check(t, l, 52, fill(t, l, 2, 4), 2)
	if _, err := l.Append([]commitlog.Record{{Channel: make([]byte, commitlog.MaxChannel+1)}}); !errors.Is(err, commitlog.ErrRecord) {
		t.Errorf("a channel's name that is too long: %v", err)
	}
	if next, err := l.Append(nil); err != nil || next != 54 {
		t.Fatalf("next is %d, %v", next, err)
	}
}

func testLimit(t *testing.T, s Subject) {
	fill(t, s, 0, 30)
	var b commitlog.Batch
	for _, c := range []struct{ records, bytes, want int }{{1, 1000, 1}, {3, 1000, 3}, {0, 1000, 1}, {3, 0, 1}, {3, len("body of 0"), 1}, {3, 2 * len("body of 0"), 2}} {
		testkit.Must(t, s.Read(0, commitlog.Limit{Records: c.records, Bytes: c.bytes}, &b))
		if len(b.Records) != c.want || b.Next != commitlog.Offset(c.want) {
			t.Errorf("%+v: %d records, next is %d", c, len(b.Records), b.Next)
		}
	}
	testkit.Must(t, s.Read(30, commitlog.Limit{Records: 1, Bytes: 1}, &b))
	if len(b.Records) > 0 || b.Next != 30 {
		t.Errorf("at the end: %d records, next is %d", len(b.Records), b.Next)
	}
}

func testTrim(t *testing.T, s Subject) {
	offsets := fill(t, s, 0, 200)
	testkit.Must(t, s.Trim(offsets[100]))
	check(t, s, offsets[100], offsets[100:], 100)
	var b commitlog.Batch
	testkit.Must(t, s.Read(0, commitlog.Limit{Records: 1, Bytes: 1}, &b))
	if at := b.Records[0].Offset; at > offsets[100] {
		t.Errorf("trimmed to %d, it begins at %d", offsets[100], at)
	}
	l := s.Reopen()
	check(t, l, offsets[150], offsets[150:], 150)
	testkit.Must(t, l.Trim(1<<40))
	if at := fill(t, l, 200, 201); at[0] != offsets[199]+1 {
		t.Errorf("trimmed beyond the end, the log continues at %d", at[0])
	}
}

func testCursors(t *testing.T, s Subject) {
	l := s.Log
	if b, err := l.LoadCursors(); err != nil || b != nil {
		t.Fatalf("there are cursors: %q, %v", b, err)
	}
	for n, text := range []string{"one", "a longer one", "", "x"} {
		testkit.Must(t, l.SaveCursors([]byte(text)))
		if n%2 == 1 {
			l = s.Reopen()
		}
		if b, err := l.LoadCursors(); err != nil || string(b) != text {
			t.Fatalf("saved %q, loaded %q, %v", text, b, err)
		}
	}
}

func testConcurrent(t *testing.T, s Subject) {
	const writers, each = 4, 100
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for n := range each {
				r := record(0)
				r.Attempts, r.Due = uint16(w), mono.Wall(n+1)
				at, err := s.Append([]commitlog.Record{r})
				if err == nil && n%10 == 0 {
					err = s.Sync(at + 1)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			var b commitlog.Batch
			var seen [writers]mono.Wall
			for total := 0; total < writers*each && !t.Failed(); total += len(b.Records) {
				if err := s.Read(b.Next, commitlog.Limit{Records: 50, Bytes: 1000}, &b); err != nil {
					t.Error(err)
				}
				for _, r := range b.Records {
					if seen[r.Attempts]++; r.Due != seen[r.Attempts] {
						t.Errorf("record %d of writer %d comes as number %d", r.Due, r.Attempts, seen[r.Attempts])
					}
				}
			}
		})
	}
	wg.Go(func() {
		for n := range 20 {
			if err := s.SaveCursors([]byte{byte(n)}); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
}
