package commitlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// numbered makes the record with number id. The number determines all fields but the offset, so that a damaged record is
// detected.
func numbered(id uint64) Record {
	rng := rand.New(rand.NewPCG(id, 1))
	n := rng.IntN(60)
	if rng.IntN(20) == 0 {
		n = rng.IntN(3000)
	}
	r := Record{Timestamp: mono.Wall(id * 10), Arrival: mono.Wall(rng.Uint64()), Source: stamp.Source(rng.IntN(stamp.Sources)),
		Attempts: uint16(rng.Uint32())}
	copy(r.ID[:], fmt.Sprintf("%016x", id))
	if rng.IntN(4) == 0 {
		r.Due = mono.Wall(rng.Uint64() | 1)
	}
	if rng.IntN(4) == 0 {
		r.Access = time.Duration(rng.Uint64() | 1)
	}
	if rng.IntN(4) == 0 {
		r.Channel = bytes.Repeat([]byte("c"), 1+rng.IntN(40))
	}
	if rng.IntN(8) == 0 {
		r.Attribute = bytes.Repeat([]byte("a"), 1+rng.IntN(wire.MaxAttribute))
	}
	for range n {
		r.Body = append(r.Body, byte(rng.Uint32N(3))) // zeros and small lengths
	}
	return r
}

// numberOf is the inverse of numbered.
func numberOf(r Record) (id uint64, err error) {
	if _, err := fmt.Sscanf(r.ID.String(), "%x", &id); err != nil {
		return 0, fmt.Errorf("record %+v was never appended", r)
	}
	want := numbered(id)
	want.Offset = r.Offset
	if !same(r, want) {
		return 0, fmt.Errorf("record %+v was never appended; %+v was", r, want)
	}
	return id, nil
}

func same(a, b Record) bool {
	return a.Offset == b.Offset && a.ID == b.ID && a.Timestamp == b.Timestamp && a.Arrival == b.Arrival && a.Source == b.Source &&
		a.Attempts == b.Attempts && a.Due == b.Due && a.Access == b.Access && bytes.Equal(a.Channel, b.Channel) && bytes.Equal(a.Attribute, b.Attribute) && bytes.Equal(a.Body, b.Body)
}

// user uses one log in random ways and keeps a model of the acknowledged operations.
type user struct {
	t   testing.TB
	rng *rand.Rand
	sim *simDisk
	dir *Dir
	l   *Files
	log []string // operations, printed if the test fails

	last     uint64            // number of the last record
	at       map[Offset]uint64 // number of the record at each offset, as far as this process knows
	durable  map[Offset]bool   // acknowledged
	doubtful map[Offset]bool   // appended to segments in which an fsync failed
	trimmed  Offset            // records before this offset need not exist
	next     Offset            // lower bound of the next offset
	saved    uint64            // number of the last snapshot
	allowed  map[uint64]bool   // numbers of snapshots that a load may return
	floors   map[uint64]Offset // next when a snapshot was saved
	b        Batch
	from     Offset // where the next read starts
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
	return &user{t: t, rng: rng, sim: newSimDisk(rand.New(rand.NewPCG(seed, 3))), at: map[Offset]uint64{},
		durable: map[Offset]bool{}, doubtful: map[Offset]bool{}, allowed: map[uint64]bool{0: true}, floors: map[uint64]Offset{}}
}

// opens opens the log, and returns false if the power is gone or a fault prevents the opening.
func (u *user) opens() bool {
	dir, err := OpenDir("/data", u.sim.disk())
	if err == nil {
		dir.salt = u.rng.Uint64
		u.dir = dir
		u.l, err = Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 10, MaxBody: 1 << 12, Durable: true})
	}
	u.note("open: %v", err)
	if err != nil {
		u.excuse(err)
		if dir != nil {
			_ = dir.Close() // its log did not open
		}
		return false
	}
	return true
}

// excuse fails the test if an error has no cause.
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

// doubts adds the records of segments in which an fsync failed to doubtful.
func (u *user) doubts() {
	for _, s := range u.l.segments.all {
		if s.fault != nil {
			for o := range u.at {
				if o >= s.base && o < s.next && !u.durable[o] {
					u.doubtful[o] = true
				}
			}
		}
	}
}

// step does one random operation. It returns false if the log is not open afterwards.
func (u *user) step() bool {
	u.doubts()
	switch n := u.rng.IntN(100); {
	case n < 35:
		u.append()
	case n < 50:
		u.sync()
	case n < 72:
		u.reads()
	case n < 82:
		u.trim()
	case n < 90:
		u.save()
	case n < 93:
		err := u.l.Rest()
		u.note("rest: %v", err)
		if err != nil {
			u.excuse(err)
		}
	case n < 96:
		return u.reopens(true)
	default:
		return u.reopens(false)
	}
	return true
}

func (u *user) append() {
	var batch []Record
	from := u.last + 1
	skip := Offset(0)
	if u.rng.IntN(5) == 0 { // a record that was never written
		skip = Offset(u.rng.IntN(20))
	}
	for range 1 + u.rng.IntN(6) {
		u.last++
		r := numbered(u.last)
		if skip > 0 {
			r.Offset = u.l.next + skip
			skip += Offset(1 + u.rng.IntN(2))
		}
		batch = append(batch, r)
	}
	want := slices.Clone(batch)
	first, err := u.l.Append(batch)
	u.note("append %d-%d: %d %v", from, u.last, first, err)
	if err != nil {
		u.excuse(err)
		return
	}
	if first != batch[0].Offset || first < u.next {
		u.fatalf("appended at %d, the record says %d, the next was %d", first, batch[0].Offset, u.next)
	}
	for i, r := range batch {
		if want[i].Offset != 0 && want[i].Offset != r.Offset || i > 0 && r.Offset <= batch[i-1].Offset {
			u.fatalf("offsets of a batch: %d of %d, asked for %d", r.Offset, i, want[i].Offset)
		}
		u.at[r.Offset] = from + uint64(i)
		delete(u.doubtful, r.Offset)
		u.next = r.Offset + 1
	}
}

func (u *user) sync() {
	upTo := u.l.next
	if u.rng.IntN(2) == 0 {
		upTo = u.trimmed + Offset(u.rng.Uint64N(uint64(max(1, upTo-min(upTo, u.trimmed)+3))))
	}
	err := u.l.Sync(upTo)
	u.note("sync to %d: %v", upTo, err)
	u.doubts()
	if err != nil {
		u.excuse(err)
		return
	}
	u.acknowledged(upTo)
}

// acknowledged marks the records before upTo as durable.
func (u *user) acknowledged(upTo Offset) {
	for o := range u.at {
		if o < upTo && !u.doubtful[o] {
			u.durable[o] = true
		}
	}
}

func (u *user) reads() {
	if u.rng.IntN(3) == 0 {
		u.from = u.trimmed + Offset(u.rng.IntN(30))
	}
	limit := Limit{Records: u.rng.IntN(9), Bytes: u.rng.IntN(1000)}
	u.read(limit)
}

// read reads once, and reports whether there was a record.
func (u *user) read(limit Limit) bool {
	err := u.l.Read(u.from, limit, &u.b)
	u.note("read from %d: %d to %d, %v", u.from, len(u.b.Records), u.b.Next, err)
	if err != nil {
		if len(u.b.Records) > 0 || u.b.Next != u.from {
			u.fatalf("records with an error, or a step")
		}
		u.excuse(err)
		return true
	}
	got := map[Offset]bool{}
	size, last := 0, u.from
	for i, r := range u.b.Records {
		id, err := numberOf(r)
		if err != nil {
			u.fatalf("%v", err)
		}
		if u.at[r.Offset] != id {
			u.fatalf("offset %d is record %d, and was %d", r.Offset, id, u.at[r.Offset])
		}
		if r.Offset < last {
			u.fatalf("offset %d after %d", r.Offset, last)
		}
		last = r.Offset + 1
		got[r.Offset] = true
		if size += len(r.Body); i > 0 && (i >= limit.Records || size > limit.Bytes) {
			u.fatalf("%d records, %d bytes with %+v", len(u.b.Records), size, limit)
		}
	}
	upTo := u.b.Next
	if len(u.b.Records) == 0 {
		if upTo = u.l.next; u.b.Next != u.from {
			u.fatalf("nothing, but a step from %d to %d", u.from, u.b.Next)
		}
	} else if upTo != last {
		u.fatalf("next is %d after %d", upTo, last)
	}
	for _, o := range slices.Sorted(maps.Keys(u.at)) {
		if o >= max(u.from, u.trimmed) && o < upTo && !got[o] && (u.durable[o] || !u.sim.forgot) {
			u.fatalf("record at %d (durable: %v) was not read from %d to %d", o, u.durable[o], u.from, upTo)
		}
	}
	u.from = u.b.Next
	return len(u.b.Records) > 0
}

func (u *user) trim() {
	before := u.trimmed + Offset(u.rng.IntN(40))
	if u.rng.IntN(4) == 0 {
		before = u.l.next + 5
	}
	u.trimmed = max(u.trimmed, min(before, u.l.next))
	err := u.l.Trim(before)
	u.note("trim %d: %v", before, err)
	if err != nil {
		u.excuse(err)
		return
	}
	for o := range u.at {
		if o < u.trimmed && (len(u.l.segments.all) == 0 || o < u.l.segments.all[0].base) {
			delete(u.at, o)
			delete(u.durable, o)
			delete(u.doubtful, o)
		}
	}
}

func (u *user) save() {
	u.saved++
	u.floors[u.saved] = u.l.next
	text := binary.BigEndian.AppendUint64(nil, u.saved)
	text = append(text, bytes.Repeat([]byte{byte(u.saved)}, u.rng.IntN(300))...)
	err := u.l.SaveCursors(text)
	u.note("save %d: %v", u.saved, err)
	if err != nil {
		u.excuse(err)
		u.allowed[u.saved] = true
		return
	}
	u.allowed = map[uint64]bool{u.saved: true}
	u.next = max(u.next, u.l.next)
}

// reopens closes the log or kills the process, and opens it again.
func (u *user) reopens(close bool) bool {
	if close {
		next := u.l.next
		err := u.l.Close()
		u.note("close: %v", err)
		if err != nil {
			u.excuse(err)
			for o := range u.at { // some of the records, perhaps
				if !u.durable[o] {
					u.doubtful[o] = true
				}
			}
		} else {
			u.acknowledged(next)
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
	for range 5 {
		if u.opens() {
			u.take(false)
			return !u.sim.dead
		}
		u.sim.kill()
	}
	return false
}

// take reads the whole log just after opening and compares the records with the model.
func (u *user) take(powerLost bool) {
	snapshot, err := u.l.LoadCursors()
	if err != nil {
		u.excuse(err)
	} else {
		number := uint64(0)
		if len(snapshot) > 0 {
			number = binary.BigEndian.Uint64(snapshot)
		}
		u.note("snapshot %d", number)
		if !u.allowed[number] {
			u.fatalf("snapshot %d is loaded, allowed are %v", number, u.allowed)
		}
		if u.l.next < u.floors[number] {
			u.fatalf("next is %d, when snapshot %d was saved it was %d", u.l.next, number, u.floors[number])
		}
		if powerLost { // otherwise the snapshot may be of a failed save and not durable
			u.allowed = map[uint64]bool{number: true}
		}
	}
	there := map[Offset]bool{}
	u.from = 0
	for {
		err := u.l.Read(u.from, Limit{Records: 1 + u.rng.IntN(10), Bytes: 1 + u.rng.IntN(1000)}, &u.b)
		if err != nil {
			u.excuse(err)
			if u.sim.dead {
				return
			}
			continue // other faults of reading pass
		}
		if len(u.b.Records) == 0 {
			break
		}
		for _, r := range u.b.Records {
			id, err := numberOf(r)
			switch {
			case err != nil:
				u.fatalf("%v", err)
			case r.Offset < u.from:
				u.fatalf("offset %d from %d", r.Offset, u.from)
			case id > u.last:
				u.fatalf("record %d was never appended", id)
			case u.at[r.Offset] != 0 && u.at[r.Offset] != id && u.durable[r.Offset]:
				u.fatalf("offset %d is record %d, and was %d", r.Offset, id, u.at[r.Offset])
			}
			there[r.Offset] = true
			u.at[r.Offset] = id // of an append in progress, or trimmed and restored
		}
		u.from = u.b.Next
	}
	u.note("there are %v, next is %d", slices.Sorted(maps.Keys(there)), u.l.next)
	for _, o := range slices.Sorted(maps.Keys(u.at)) {
		acknowledged := u.durable[o] || !powerLost && !u.sim.forgot
		if acknowledged && o >= u.trimmed && !there[o] {
			u.fatalf("record at %d (durable: %v) is lost; trimmed to %d", o, u.durable[o], u.trimmed)
		}
		if !there[o] {
			delete(u.at, o)
			delete(u.durable, o)
		}
		if there[o] && o >= u.l.next {
			u.fatalf("next is %d, with a record at %d", u.l.next, o)
		}
	}
	for o := range u.doubtful {
		if !powerLost || !there[o] {
			continue
		}
		delete(u.doubtful, o) // the present records are the disk's records
	}
	u.next = u.l.next
	u.trimmed = min(u.trimmed, u.l.next)
}

// losesPower continues with the disk after a loss of power.
func (u *user) losesPower() {
	u.note("power lost")
	u.sim = u.sim.crash()
	if !u.opens() {
		u.fatalf("the log does not open")
	}
	u.take(true)
}

// run does so many steps, or fewer if the power fails.
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

// The test repeats the same run and cuts the power at each operation in turn. Each run then continues, and loses power
// once more.
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

// The disk is full at times, loses power, and at times fsyncs and other operations fail.
func TestFaultsOfAllKinds(t *testing.T) {
	seed := testkit.Seed(t)
	for i := range uint64(60) {
		u := newUser(t, seed+i)
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
			if u.l == nil && !u.opens() {
				u.fatalf("the log does not open")
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

// Many goroutines append and sync at the same time when the power fails.
func TestPowerLossUnderConcurrentSyncs(t *testing.T) {
	rng := testkit.Rand(t)
	for range 60 {
		sim := newSimDisk(rand.New(rand.NewPCG(rng.Uint64(), 5)))
		open := func() *Files {
			dir := testkit.Result(OpenDir("/data", sim.disk())).Must(t)
			return testkit.Result(Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 11, MaxBody: 1 << 12})).Must(t)
		}
		l := open()
		sim.dieAt = sim.ops + 1 + rng.IntN(300)
		var wg sync.WaitGroup
		acknowledged := make([]map[Offset]uint64, 8)
		for w := range acknowledged {
			acknowledged[w] = map[Offset]uint64{}
			wg.Go(func() {
				for id := uint64(w + 1); id < 2000; id += uint64(len(acknowledged)) {
					at, err := l.Append([]Record{numbered(id)})
					if err == nil {
						err = l.Sync(at + 1)
					}
					if err != nil {
						return
					}
					acknowledged[w][at] = id
				}
			})
		}
		wg.Wait()
		sim = sim.crash()
		l = open()
		there := map[Offset]uint64{}
		var b Batch
		for {
			testkit.Must(t, l.Read(b.Next, Limit{100, 1 << 20}, &b))
			if len(b.Records) == 0 {
				break
			}
			for _, r := range b.Records {
				id := testkit.Result(numberOf(r)).Must(t)
				there[r.Offset] = id
			}
		}
		for w := range acknowledged {
			for o, id := range acknowledged[w] {
				if there[o] != id {
					t.Fatalf("worker %d: record %d at %d was acknowledged to it, there is %d", w, id, o, there[o])
				}
			}
		}
	}
}
