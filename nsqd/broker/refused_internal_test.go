package broker

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// The disk recovers while an order is refused, so the next attempt to write the metadata file, which may have begun
// with the order, succeeds.
func TestARefusedOrderIsNotInTheFileWhenItReturns(t *testing.T) {
	path := t.TempDir()
	file := filepath.Join(path, "metadata.json")
	st := testkit.Result(OpenStorage(StorageConfig{Path: path, Metadata: file, SegmentBytes: 64 << 10, MaxRecord: 1 << 20, Overflow: 100, Log: slog.New(slog.DiscardHandler)})).Must(t)
	b := testkit.Result(New(Config{Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st})).Must(t)
	defer func() {
		testkit.Must(t, b.Close())
		testkit.Must(t, st.Close())
	}()
	obstacle := file + ".new"
	var attempts atomic.Int32
	recover := func() {
		for os.RemoveAll(obstacle) != nil { // the writer uses the path, too
		}
	}
	writer := b.shared.metadataWriter
	state := writer.state
	writer.state = func() metadata.State { // each attempt calls it
		s := state()
		if attempts.Add(1) == 2 {
			recover()
		}
		return s
	}
	testkit.Must(t, b.Restore())
	testkit.Result(b.CreateTopic("t")).Must(t)
	retain := func(age time.Duration) func() error {
		return func() error {
			topic := testkit.Result(b.CreateTopic("t")).Must(t)
			return topic.Retain(&metadata.Retention{Age: age})
		}
	}
	create := func(name string) func() error {
		return func() error {
			_, err := b.OrderTopic(name)
			return err
		}
	}
	remove := func(name string) func() error { return func() error { return b.DeleteTopic(name) } }
	testkit.Must(t, retain(time.Minute)())
	for name, order := range map[string]struct{ do, undo func() error }{
		"retention": {retain(time.Hour), retain(time.Minute)},
		"deletion":  {remove("t"), retain(time.Minute)},
		"creation":  {create("u"), remove("u")},
	} {
		refused := 0
		for range 100 {
			b.shared.recorded("t") // the last attempt may have failed
			testkit.Must(t, b.Recorded())
			was := testkit.Result(metadata.Read(file)).Must(t)
			testkit.Must(t, os.RemoveAll(obstacle))
			testkit.Must(t, os.MkdirAll(filepath.Join(obstacle, "x"), 0o700))
			attempts.Store(0)
			err := order.do()
			recover()
			switch {
			case err == nil: // the second attempt ended before the order looked at the first
				testkit.Must(t, order.undo())
			case !errors.Is(err, ErrStorage):
				t.Fatal(name, err)
			default:
				refused++
				is := testkit.Result(metadata.Read(file)).Must(t)
				if !reflect.DeepEqual(is, was) {
					t.Fatalf("after the refused %s the file has\n%+v, want\n%+v", name, is, was)
				}
			}
		}
		if refused == 0 {
			t.Errorf("no %s was refused", name)
		}
	}
}
