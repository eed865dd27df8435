package diskqueue

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// payload makes the record with that id: the rest of it follows from the id,
// so that a record which is not intact is seen.
func payload(id uint64) []byte {
	rng := rand.New(rand.NewPCG(id, 1))
	n := rng.IntN(60)
	if rng.IntN(20) == 0 {
		n = rng.IntN(3000)
	}
	b := binary.BigEndian.AppendUint64(nil, id)
	for range n {
		b = append(b, byte(rng.Uint32N(3))) // zeros and small lengths
	}
	return b
}

// idOf is the inverse of payload.
func idOf(data []byte) (uint64, error) {
	if len(data) < 8 {
		return 0, fmt.Errorf("record %x was never appended", data)
	}
	id := binary.BigEndian.Uint64(data)
	if id == 0 || id > 1<<32 || !bytes.Equal(data, payload(id)) {
		return 0, fmt.Errorf("record %x was never appended", data)
	}
	return id, nil
}

// user uses one queue in random ways, and knows what was promised to it. Ids
// of records count up in the order of their Appends.
type user struct {
	t   testing.TB
	rng *rand.Rand
	sim *simDisk
	dir *Dir
	q   *Queue
	log []string // what it did, for when the test fails

	faults bool // of other kinds happen before the power is lost

	last     uint64              // id that was used last
	live     []uint64            // in the queue, in order, as far as this process knows
	ends     map[uint64]Position // of records in the queue
	read     int                 // how many of live have been read
	durable  map[uint64]bool     // promised
	doubtful map[uint64]bool     // segments of which an fsync failed in an earlier process
	released uint64              // up to this id: done with
	optional uint64              // up to this id: need not be there after the queue is opened again
	kept     uint64              // up to this id: must not be there any more
}

func (u *user) fatalf(format string, args ...any) {
	u.t.Helper()
	for _, line := range u.log[max(0, len(u.log)-200):] {
		u.t.Log(line)
	}
	u.t.Fatalf(format, args...)
}

func (u *user) note(format string, args ...any) { u.log = append(u.log, fmt.Sprintf(format, args...)) }

func newUser(t testing.TB, seed uint64) *user {
	rng := rand.New(rand.NewPCG(seed, 2))
	return &user{t: t, rng: rng, sim: newSimDisk(rand.New(rand.NewPCG(seed, 3))),
		ends: map[uint64]Position{}, durable: map[uint64]bool{}, doubtful: map[uint64]bool{}}
}

// opens opens the queue; false if the power is gone or a fault prevents it.
func (u *user) opens() bool {
	dir, err := OpenDir("/data", u.sim.disk())
	if err == nil {
		dir.salt = u.rng.Uint64
		u.dir = dir
		u.q, err = Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 10, MaxRecord: 1 << 12})
	}
	u.note("open: %v", err)
	if err != nil {
		u.excuse(err)
		if dir != nil {
			_ = dir.Close() // its queue did not open
		}
		return false
	}
	return true
}

// excuse fails the test at an error that has no cause.
func (u *user) excuse(err error) {
	u.t.Helper()
	for _, cause := range []error{errPower, errIO, errShort, ErrNoSpace, syscall.ENOSPC, syscall.EMFILE} {
		if errors.Is(err, cause) {
			return
		}
	}
	if u.sim.forgot && errors.Is(err, errDamaged) {
		return
	}
	if u.sim.fault != nil && errors.Is(err, io.ErrShortWrite) {
		return
	}
	u.fatalf("error without a cause: %v", err)
}

// doubts notes the segments of which an fsync failed.
func (u *user) doubts(segments []*segment) {
	for _, s := range segments {
		if s.fault != nil {
			u.doubtful[s.number] = true
		}
	}
}

// step does something; false when the queue is not open after it.
func (u *user) step() bool {
	u.doubts(u.q.segments)
	switch n := u.rng.IntN(100); {
	case n < 35:
		u.append()
	case n < 50:
		u.sync()
	case n < 75:
		u.reads(1 + u.rng.IntN(8))
	case n < 83:
		u.release()
	case n < 90:
		u.checkpoint()
	case n < 92:
		u.note("rewind")
		u.q.Rewind()
		u.read = u.index(u.released)
	case n < 93:
		u.empty()
	case n < 96:
		return u.reopens(true)
	case n < 98:
		return u.reopens(false)
	default:
		return u.reopens(true)
	}
	return true
}

func (u *user) append() {
	var records [][]byte
	from := u.last + 1
	for range 1 + u.rng.IntN(6) {
		u.last++
		records = append(records, payload(u.last))
	}
	end, err := u.q.Append(records...)
	u.note("append %d-%d: %v %v", from, u.last, end, err)
	if err != nil {
		u.excuse(err)
		return
	}
	for id := from; id <= u.last; id++ {
		u.live = append(u.live, id)
		u.ends[id] = end // of its batch
	}
}

func (u *user) sync() {
	if u.rng.IntN(2) == 0 || len(u.live) == 0 {
		err := u.q.Sync()
		u.note("sync: %v", err)
		if err != nil {
			u.excuse(err)
			return
		}
		u.promised(func(uint64) bool { return true })
		return
	}
	id := u.live[u.rng.IntN(len(u.live))]
	err := u.q.SyncTo(u.ends[id])
	u.note("sync to %d: %v", id, err)
	if err != nil {
		u.excuse(err)
		return
	}
	u.promised(func(other uint64) bool { return u.ends[other] == u.ends[id] })
}

// promised notes what is durable from now on.
func (u *user) promised(which func(id uint64) bool) {
	for _, id := range u.live {
		if id > u.released && which(id) && !u.doubtful[u.ends[id].segment] {
			u.durable[id] = true
		}
	}
}

func (u *user) reads(n int) (got int) {
	records, err := u.q.Read(n, 1+u.rng.IntN(1000), nil)
	u.note("read %d: %d %v", n, len(records), err)
	if err != nil {
		u.excuse(err)
		return 0
	}
	for _, r := range records {
		id, err := idOf(r.Data)
		if err != nil {
			u.fatalf("%v", err)
		}
		u.skips(id)
		if u.read == len(u.live) || u.live[u.read] != id {
			u.fatalf("read record %d, expected %v", id, u.live[u.read:min(len(u.live), u.read+3)])
		}
		if u.ends[id].Before(r.End) {
			u.fatalf("record %d ends at %v, after its batch at %v", id, r.End, u.ends[id])
		}
		u.ends[id] = r.End
		u.read++
	}
	if len(records) == 0 {
		u.skips(u.last + 1)
		if records, bytes := u.q.Unread(); records != 0 || bytes != 0 {
			u.fatalf("nothing to read, but %d records, %d bytes unread", records, bytes)
		}
	}
	return len(records)
}

// skips drops records before id that were to be read first, if that can be
// excused: an fsync failed, and the system forgot what it was for.
func (u *user) skips(id uint64) {
	for u.read < len(u.live) && u.live[u.read] < id {
		lost := u.live[u.read]
		if u.durable[lost] || !u.sim.forgot {
			u.fatalf("record %d (durable: %v) was not read", lost, u.durable[lost])
		}
		u.live = append(u.live[:u.read], u.live[u.read+1:]...)
	}
}

func (u *user) release() {
	if u.read == 0 {
		return
	}
	id := u.live[u.rng.IntN(u.read)]
	if u.rng.IntN(3) == 0 {
		id = u.live[u.read-1]
	}
	u.note("release %d", id)
	if u.ends[id].Before(u.q.released) {
		return
	}
	u.q.Release(u.ends[id])
	u.released = max(u.released, id)
}

// index is how many of live are not after id.
func (u *user) index(id uint64) int {
	n := 0
	for n < len(u.live) && u.live[n] <= id {
		n++
	}
	return n
}

func (u *user) checkpoint() {
	err := u.q.Checkpoint()
	u.note("checkpoint: %v", err)
	if err != nil {
		u.excuse(err)
		return
	}
	u.kept = max(u.kept, u.released)
}

func (u *user) empty() {
	err := u.q.Empty()
	u.note("empty: %v", err)
	if err != nil {
		u.excuse(err)
		if records, _ := u.q.Held(); records > 0 {
			u.optional = u.last
			return
		}
	} else {
		u.kept = u.last
	}
	u.released = u.last
	u.live, u.read = nil, 0
}

// reopens closes the queue or kills the process, and opens it again.
func (u *user) reopens(close bool) bool {
	segments := slices.Clone(u.q.segments)
	if close {
		released := u.released
		err := u.q.Close()
		u.note("close: %v", err)
		if err != nil {
			u.excuse(err)
		} else {
			u.kept = max(u.kept, released)
			u.promised(func(uint64) bool { return true })
		}
		if u.sim.open != 0 {
			u.fatalf("%d files open after Close", u.sim.open)
		}
		if err := u.dir.Close(); err != nil {
			u.fatalf("close folder: %v", err)
		}
	} else {
		u.note("kill")
		u.sim.kill()
	}
	u.doubts(segments)
	for range 5 {
		if u.opens() {
			u.take(false)
			return !u.sim.dead
		}
		u.sim.kill()
	}
	return false
}

// take reads all that is in the queue just after it was opened, and holds it
// against what was promised.
func (u *user) take(powerLost bool) {
	there := map[uint64]bool{}
	var live []uint64
	before := uint64(0)
	for {
		records, err := u.q.Read(1+u.rng.IntN(10), 1+u.rng.IntN(1000), nil)
		if err != nil {
			u.excuse(err)
			if u.sim.dead {
				return
			}
			continue // other faults of reading end sometime
		}
		if len(records) == 0 {
			break
		}
		for _, r := range records {
			id, err := idOf(r.Data)
			switch {
			case err != nil:
				u.fatalf("%v", err)
			case id <= before:
				u.fatalf("record %d after %d", id, before)
			case id <= u.kept:
				u.fatalf("record %d is back, though released up to %d at a checkpoint", id, u.kept)
			case id > u.last:
				u.fatalf("record %d was never appended", id)
			}
			before = id
			there[id] = true
			live = append(live, id)
			u.ends[id] = r.End
		}
	}
	u.note("there are %v", live)
	for _, id := range u.live {
		promised := u.durable[id] || !powerLost && !u.sim.forgot
		if promised && id > max(u.released, u.optional) && !there[id] {
			u.fatalf("record %d (durable: %v) is lost; released up to %d", id, u.durable[id], u.released)
		}
	}
	if n, _ := u.q.Held(); n != int64(len(live)) {
		u.fatalf("holds %d records, read %d", n, len(live))
	}
	u.q.Rewind()
	u.live, u.read = live, 0
	u.released = u.kept // what is there again is not released
}

// losesPower goes on with what the disk is after a loss of power.
func (u *user) losesPower() {
	u.note("power lost")
	u.sim = u.sim.crash()
	if !u.opens() {
		u.fatalf("the queue does not open")
	}
	if n := u.q.Stats().Missing; n > 0 && !u.faults {
		u.fatalf("%d segments are missing", n)
	}
	u.take(true)
}

// run does so many steps, or fewer if the power goes.
func (u *user) run(steps int) {
	if !u.opens() {
		return
	}
	for range steps {
		if !u.step() || u.sim.dead {
			return
		}
	}
}

// The same run again and again, with the power lost at each of its operations
// in turn; then it goes on, and the power is lost once more.
func TestPowerLossAtEachOperation(t *testing.T) {
	seed := testkit.Seed(t)
	for i := range uint64(3) {
		whole := newUser(t, seed+i)
		whole.run(50)
		for at := 1; at <= whole.sim.ops; at++ {
			u := newUser(t, seed+i)
			u.note("seed %d, power lost at operation %d", seed+i, at)
			u.sim.dieAt = at
			u.run(50)
			u.losesPower()
			u.sim.dieAt = u.sim.ops + 1 + u.rng.IntN(40)
			for range 20 {
				if !u.step() || u.sim.dead {
					break
				}
			}
			u.losesPower()
		}
	}
}

// A disk that is full at times, on which fsyncs fail at times and other
// operations too, and which loses power.
func TestFaultsOfAllKinds(t *testing.T) {
	seed := testkit.Seed(t)
	for i := range uint64(60) {
		u := newUser(t, seed+i)
		u.faults = true
		u.note("seed %d", seed+i)
		faulty := rand.New(rand.NewPCG(seed+i, 4))
		rate := []float64{0.3, 0.1, 0.03}[i%3]
		fault := func(op, name string) error {
			if faulty.Float64() >= rate {
				return nil
			}
			if op == "write" {
				return []error{errIO, syscall.ENOSPC, errShort}[faulty.IntN(3)]
			}
			if op == "open" || op == "create" {
				return syscall.EMFILE
			}
			return errIO
		}
		for range 4 {
			u.sim.fault = nil
			if u.q == nil && !u.opens() {
				u.fatalf("the queue does not open")
			}
			for range 40 {
				u.sim.fault = nil
				if u.rng.IntN(2) == 0 {
					u.sim.fault = fault
				}
				u.sim.capacity = 1 << 40
				if u.rng.IntN(8) == 0 {
					u.sim.capacity = u.sim.used() + int64(u.rng.IntN(100))
				}
				if !u.step() {
					break
				}
			}
			u.sim.fault, u.sim.capacity = nil, 1<<40
			u.losesPower()
		}
	}
}

// Many append and sync at the same time when the power goes.
func TestPowerLossUnderConcurrentSyncs(t *testing.T) {
	rng := testkit.Rand(t)
	for range 60 {
		sim := newSimDisk(rand.New(rand.NewPCG(rng.Uint64(), 5)))
		dir, err := OpenDir("/data", sim.disk())
		if err != nil {
			t.Fatal(err)
		}
		q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 11, MaxRecord: 1 << 12})
		if err != nil {
			t.Fatal(err)
		}
		sim.dieAt = sim.ops + 1 + rng.IntN(300)
		var wg sync.WaitGroup
		promised := make([][]uint64, 8)
		for w := range promised {
			wg.Go(func() {
				for id := uint64(w + 1); id < 2000; id += uint64(len(promised)) {
					end, err := q.Append(payload(id))
					if err == nil {
						err = q.SyncTo(end)
					}
					if err != nil {
						return
					}
					promised[w] = append(promised[w], id)
				}
			})
		}
		wg.Wait()
		after := sim.crash()
		if dir, err = OpenDir("/data", after.disk()); err != nil {
			t.Fatal(err)
		}
		if q, err = Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 11, MaxRecord: 1 << 12}); err != nil {
			t.Fatal(err)
		}
		there := map[uint64]int{}
		for {
			records, err := q.Read(100, 1<<20, nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(records) == 0 {
				break
			}
			for _, r := range records {
				id, err := idOf(r.Data)
				if err != nil {
					t.Fatal(err)
				}
				there[id]++
			}
		}
		for w, ids := range promised {
			for i, id := range ids {
				if there[id] != 1 {
					t.Fatalf("worker %d: record %d, %d of %d promised to it, is there %d times", w, id, i, len(ids), there[id])
				}
			}
		}
	}
}
