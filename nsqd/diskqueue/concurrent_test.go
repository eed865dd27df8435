package diskqueue

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Producers, a consumer, and others who sync, checkpoint and look, all at the
// same time: each record is read once, those of a producer in its order.
func TestConcurrentUse(t *testing.T) {
	const producers, each = 4, 600
	dir, err := OpenDir(t.TempDir(), OS())
	if err != nil {
		t.Fatal(err)
	}
	q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 4 << 10})
	if err != nil {
		t.Fatal(err)
	}
	var wg, others sync.WaitGroup
	var consumed atomic.Bool
	appended := make(chan struct{}, 1) // something was, since the consumer looked
	for p := range producers {
		wg.Go(func() {
			for n := 0; n < each; n += 2 {
				var batch [2][]byte
				for i := range batch {
					batch[i] = binary.BigEndian.AppendUint32(nil, uint32(p))
					batch[i] = binary.BigEndian.AppendUint32(batch[i], uint32(n+i))
				}
				end, err := q.Append(batch[:]...)
				if err == nil && n%100 == 0 {
					err = q.SyncTo(end)
				}
				if err != nil {
					t.Error(err)
					return
				}
				select {
				case appended <- struct{}{}:
				default:
				}
			}
		})
	}
	wg.Go(func() {
		defer consumed.Store(true)
		var next [producers]uint32
		var into []Record
		for n := 0; n < producers*each; {
			records, err := q.Read(50, 1000, into[:0])
			if err != nil {
				t.Error(err)
				return
			}
			if len(records) == 0 {
				<-appended
				continue
			}
			for _, r := range records {
				p, i := binary.BigEndian.Uint32(r.Data), binary.BigEndian.Uint32(r.Data[4:])
				if i != next[p] {
					t.Errorf("record %d of producer %d, want %d", i, p, next[p])
					return
				}
				next[p]++
			}
			n += len(records)
			q.Release(records[len(records)-1].End)
			into = records
		}
	})
	for _, f := range []func() error{
		q.Checkpoint,
		q.Sync,
		func() error {
			unread, _ := q.Unread()
			held, _ := q.Held()
			stats := q.Stats()
			if unread < 0 || held < 0 || stats.Read > stats.Appended {
				return errors.New("figures that cannot be")
			}
			return nil
		},
	} {
		others.Go(func() {
			for !consumed.Load() {
				if err := f(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	others.Wait()
	if unread, _ := q.Unread(); unread != 0 {
		t.Errorf("%d records unread", unread)
	}
	if held, _ := q.Held(); held != 0 {
		t.Errorf("%d records held", held)
	}
	if err := errors.Join(q.Close(), dir.Close()); err != nil {
		t.Error(err)
	}
}

// Everybody does everything, on a disk with faults, until one closes it: no
// deadlock, no record that was not appended, no file left open.
func TestConcurrentChaos(t *testing.T) {
	rng := testkit.Rand(t)
	for range 10 {
		sim := newSimDisk(rand.New(rand.NewPCG(rng.Uint64(), 1)))
		sim.mindful = true
		dir, err := OpenDir("/data", sim.disk())
		if err != nil {
			t.Fatal(err)
		}
		q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 10, MaxRecord: 1 << 12})
		if err != nil {
			t.Fatal(err)
		}
		faults := rand.New(rand.NewPCG(rng.Uint64(), 2))
		sim.fault = func(string, string) error {
			if faults.IntN(50) == 0 {
				return errIO
			}
			return nil
		}
		var wg sync.WaitGroup
		var id atomic.Uint64
		for range 8 {
			rng := rand.New(rand.NewPCG(rng.Uint64(), 3))
			wg.Go(func() {
				for range 300 {
					err := error(nil)
					switch rng.IntN(12) {
					case 0, 1, 2, 3:
						var end Position
						end, err = q.Append(payload(id.Add(1)))
						if err == nil && rng.IntN(2) == 0 {
							err = q.SyncTo(end)
						}
					case 4, 5, 6:
						var records []Record
						records, err = q.Read(1+rng.IntN(10), 500, nil)
						for _, r := range records {
							if _, err := idOf(r.Data); err != nil {
								t.Error(err)
							}
							q.Release(r.End)
						}
					case 7:
						err = q.Checkpoint()
					case 8:
						q.Rewind()
					case 9:
						if rng.IntN(4) == 0 {
							err = q.Empty()
						}
					case 10:
						err = q.Sync()
					case 11:
						if rng.IntN(20) == 0 {
							_, err = q.Skip()
						}
						q.Held()
						q.Stats()
					}
					if err != nil && !errors.Is(err, errIO) && !errors.Is(err, errDamaged) && !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
				}
			})
		}
		if rng.IntN(2) == 0 {
			wg.Go(func() {
				for id.Load() < 500 && !t.Failed() {
					if _, err := q.Append(payload(id.Add(1))); errors.Is(err, ErrClosed) {
						return
					}
				}
				_ = q.Remove() // may fail on such a disk, and is closed all the same
			})
			wg.Wait()
		} else {
			wg.Wait()
			_ = q.Close()
		}
		sim.fault = nil
		if _, err := q.Append(payload(1)); !errors.Is(err, ErrClosed) {
			t.Errorf("append after the end: %v", err)
		}
		if sim.open != 0 {
			t.Errorf("%d files left open", sim.open)
		}
		if err := dir.Close(); err != nil {
			t.Error(err)
		}
	}
}
