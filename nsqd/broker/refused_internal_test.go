package broker

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
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
	testkit.Must(t, b.Restore())
	topic := testkit.Result(b.CreateTopic("t")).Must(t)
	retained := &metadata.Retention{Age: time.Hour}
	for range 200 {
		b.shared.recorded("t") // the last attempt may have failed
		testkit.Must(t, b.Recorded())
		obstacle := file + ".new"
		testkit.Must(t, os.RemoveAll(obstacle))
		testkit.Must(t, os.MkdirAll(filepath.Join(obstacle, "x"), 0o700))
		attempts, recover := 0, sync.OnceFunc(func() {
			for os.RemoveAll(obstacle) != nil { // the writer uses the path, too
			}
		})
		err := topic.orders.ordered(func(m *metadata.Topic) bool {
			if attempts++; attempts > 2 { // the first attempt asks twice, for a line and for the whole file
				recover()
			}
			m.Retain = retained
			return true
		}, func(mono.Time, *step) error { return nil })
		recover()
		if err == nil { // the disk recovered before the first attempt ended
			continue
		}
		if !errors.Is(err, ErrStorage) {
			t.Fatal(err)
		}
		state := testkit.Result(metadata.Read(file)).Must(t)
		if len(state.Topics) != 1 || state.Topics[0].Retain != nil {
			t.Fatalf("the file has %+v after the order was refused", state)
		}
	}
}
