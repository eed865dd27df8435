package diskqueue

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) {
	if role, ok := os.LookupEnv(childEnv); ok {
		os.Exit(child(role))
	}
	testkit.Main(m)
}

func TestDiskqueue(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "nsqd/diskqueue")
}

// bench is a queue on a simulated disk.
type bench struct {
	sim  *simDisk
	disk Disk
	dir  *Dir
	q    *Queue
	cfg  Config
	logs *bytes.Buffer
	ops  []string // that change something, with the file's name
}

func newBench() *bench {
	b := &bench{sim: newSimDisk(rand.New(rand.NewPCG(1, 1))), logs: new(bytes.Buffer)}
	b.disk = b.sim.disk()
	b.cfg = Config{Name: "q", SegmentBytes: 1 << 10, MaxRecord: 1 << 12, Log: slog.New(slog.NewTextHandler(b.logs, nil))}
	b.open()
	return b
}

func (b *bench) open() {
	GinkgoHelper()
	var err error
	b.dir, err = OpenDir("/data", b.disk)
	Expect(err).NotTo(HaveOccurred())
	b.cfg.Dir = b.dir
	b.q, err = Open(b.cfg)
	Expect(err).NotTo(HaveOccurred())
}

func (b *bench) reopen() {
	GinkgoHelper()
	Expect(b.q.Close()).To(Succeed())
	Expect(b.dir.Close()).To(Succeed())
	b.open()
}

// kill ends the process and starts another.
func (b *bench) kill() {
	GinkgoHelper()
	b.sim.kill()
	b.open()
}

// fill appends the records with ids from to to, one at a time.
func (b *bench) fill(from, to uint64) (end Position) {
	GinkgoHelper()
	for id := from; id <= to; id++ {
		var err error
		end, err = b.q.Append(record(id))
		Expect(err).NotTo(HaveOccurred())
	}
	return end
}

// record is one of 100 bytes, so that a segment of 1 KiB has nine.
func record(id uint64) []byte {
	return fmt.Appendf(nil, "record %6d %s", id, strings.Repeat(".", 86))
}

func numberOf(data []byte) (id uint64) {
	if n, err := fmt.Sscanf(string(data), "record %d", &id); n != 1 || !bytes.Equal(data, record(id)) {
		panic(fmt.Sprintf("%q is no record: %v", data, err))
	}
	return id
}

// rest reads all that is unread.
func (b *bench) rest() (ids []uint64) {
	GinkgoHelper()
	for {
		records, err := b.q.Read(7, 1<<20, nil)
		Expect(err).NotTo(HaveOccurred())
		if len(records) == 0 {
			return ids
		}
		for _, r := range records {
			ids = append(ids, numberOf(r.Data))
		}
	}
}

// take reads n records and releases them.
func (b *bench) take(n int) {
	GinkgoHelper()
	for n > 0 {
		records, err := b.q.Read(n, 1<<20, nil)
		Expect(err).NotTo(HaveOccurred())
		Expect(records).NotTo(BeEmpty())
		b.q.Release(records[len(records)-1].End)
		n -= len(records)
	}
}

func upTo(from, to uint64, but ...uint64) (ids []uint64) {
	for id := from; id <= to; id++ {
		if !slices.Contains(but, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (b *bench) files() []string {
	GinkgoHelper()
	names, err := b.disk.List(b.q.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	Expect(err).NotTo(HaveOccurred())
	return names
}

func (b *bench) path(name string) string { return filepath.Join(b.q.folder, name) }

// size is the size of a record made by record, in a file.
const size = recordExtra + 100

// flip changes a bit of the file.
func (b *bench) flip(name string, off int) {
	b.sim.edit(b.path(name), func(c []byte) []byte {
		c[off] ^= 0x10
		return c
	})
}

// trace notes the operations that change something.
func (b *bench) trace() {
	b.ops = nil
	b.sim.fault = func(op, name string) error {
		if op != "open" && op != "read" {
			b.ops = append(b.ops, op+" "+name)
		}
		return nil
	}
}

const (
	seg1 = "00000000000000000001.seg"
	seg2 = "00000000000000000002.seg"
	seg3 = "00000000000000000003.seg"
	seg4 = "00000000000000000004.seg"
)

var _ = Describe("a queue", func() {
	var b *bench
	BeforeEach(func() { b = newBench() })

	It("has no file before the first append", func() {
		Expect(b.q.Checkpoint()).To(Succeed())
		Expect(b.q.Sync()).To(Succeed())
		Expect(b.q.Empty()).To(Succeed())
		b.reopen()
		Expect(b.dir.Queues()).To(BeEmpty())
		Expect(b.files()).To(BeEmpty())
		Expect(b.sim.open).To(BeZero())
	})

	It("gives records back in order, over many segments", func() {
		b.fill(1, 100)
		Expect(len(b.q.segments)).To(BeNumerically(">", 10))
		records, bytes := b.q.Unread()
		Expect(records).To(Equal(int64(100)))
		Expect(bytes).To(Equal(int64(100 * size)))
		Expect(b.rest()).To(Equal(upTo(1, 100)))
		Expect(b.rest()).To(BeEmpty())
		records, bytes = b.q.Unread()
		Expect([]int64{records, bytes}).To(Equal([]int64{0, 0}))
		records, bytes = b.q.Held()
		Expect([]int64{records, bytes}).To(Equal([]int64{100, 100 * size}))
	})

	It("keeps its records when it is closed and opened", func() {
		b.fill(1, 50)
		b.take(20)
		b.reopen()
		Expect(b.rest()).To(Equal(upTo(21, 50)))
	})

	It("keeps its records when the process ends", func() {
		b.fill(1, 50)
		b.take(20)
		Expect(b.q.Checkpoint()).To(Succeed())
		b.take(10)
		b.kill()
		Expect(b.rest()).To(Equal(upTo(21, 50)), "from the checkpoint on")
	})

	It("does not read segments that are sealed when it is opened", func() {
		b.fill(1, 1000)
		segments := len(b.q.segments)
		Expect(b.q.Close()).To(Succeed())
		Expect(b.dir.Close()).To(Succeed())
		b.sim.readAt = 0
		b.open()
		Expect(b.sim.readAt).To(BeNumerically("<=", segments*(headerSize+footerSize)+cursorSize))
		records, _ := b.q.Held()
		Expect(records).To(Equal(int64(1000)))
		Expect(b.rest()).To(Equal(upTo(1, 1000)))
	})

	It("reads only the last segment when it is opened after the process ended", func() {
		b.fill(1, 1000)
		segments := len(b.q.segments)
		b.sim.readAt = 0
		b.kill()
		Expect(b.sim.readAt).To(BeNumerically("<=", 1<<10+segments*(headerSize+footerSize)))
		Expect(b.rest()).To(Equal(upTo(1, 1000)))
	})

	Describe("appending", func() {
		It("refuses records that are empty or too long, and those with them", func() {
			b.fill(1, 3)
			for _, bad := range [][]byte{nil, {}, make([]byte, 1<<12+1)} {
				_, err := b.q.Append(record(4), bad, record(5))
				Expect(err).To(MatchError(ErrRecordSize))
			}
			_, err := b.q.Append(make([]byte, 1<<12))
			Expect(err).NotTo(HaveOccurred())
			records, _ := b.q.Held()
			Expect(records).To(Equal(int64(4)))
		})

		It("returns the position after the last, and nothing for nothing", func() {
			first := b.fill(1, 1)
			none, err := b.q.Append()
			Expect(err).NotTo(HaveOccurred())
			Expect(none).To(Equal(first))
			second := b.fill(2, 2)
			Expect(first.Before(second)).To(BeTrue())
			records, err := b.q.Read(2, 1<<20, nil)
			Expect(err).NotTo(HaveOccurred())
			Expect([]Position{records[0].End, records[1].End}).To(Equal([]Position{first, second}))
		})

		It("puts a batch that is larger than a segment into one", func() {
			var batch [][]byte
			for id := uint64(1); id <= 50; id++ {
				batch = append(batch, record(id))
			}
			_, err := b.q.Append(batch...)
			Expect(err).NotTo(HaveOccurred())
			Expect(b.q.segments).To(HaveLen(1))
			Expect(b.rest()).To(Equal(upTo(1, 50)))
		})

		It("leaves everything as it was when the disk is full, and goes on when it is not", func() {
			b.fill(1, 5)
			before := b.sim.content(b.path(seg1))
			b.sim.capacity = b.sim.used() + 150
			_, err := b.q.Append(record(6), record(7))
			Expect(err).To(MatchError(ErrNoSpace))
			Expect(err).To(MatchError(syscall.ENOSPC))
			Expect(b.sim.content(b.path(seg1))).To(Equal(before))
			b.fill(8, 8) // there is room for one
			Expect(b.rest()).To(Equal([]uint64{1, 2, 3, 4, 5, 8}))

			_, err = b.q.Append(slices.Repeat([][]byte{record(9)}, 20)...) // in a new segment
			Expect(err).To(MatchError(ErrNoSpace))
			Expect(b.files()).To(ConsistOf(seg1))
			b.sim.capacity = 1 << 40
			b.fill(10, 40)
			Expect(b.rest()).To(Equal(upTo(10, 40)))
			Expect(b.q.Stats().NoSpace).To(Equal(uint64(2)))
			Expect(b.q.Stats().AppendErrors).To(BeZero())
			b.reopen()
			Expect(b.rest()).To(Equal(append([]uint64{1, 2, 3, 4, 5, 8}, upTo(10, 40)...)))
		})

		It("takes a short write for an error", func() {
			b.fill(1, 2)
			b.sim.fault = func(op, _ string) error {
				if op == "write" {
					return errShort
				}
				return nil
			}
			_, err := b.q.Append(record(3))
			Expect(err).To(HaveOccurred())
			b.sim.fault = nil
			b.fill(4, 5)
			Expect(b.rest()).To(Equal([]uint64{1, 2, 4, 5}))
		})

		It("goes on in another file when the one at hand cannot be cut back", func() {
			b.fill(1, 2)
			b.sim.fault = func(op, _ string) error {
				if op == "write" {
					return errShort
				}
				if op == "truncate" {
					return errIO
				}
				return nil
			}
			_, err := b.q.Append(record(3), record(4))
			Expect(err).To(HaveOccurred())
			b.sim.fault = nil
			b.fill(5, 6)
			Expect(b.files()).To(ConsistOf(seg1, seg2))
			b.reopen()
			Expect(b.rest()).To(Equal([]uint64{1, 2, 5, 6}))
			Expect(b.q.Stats().Torn).To(BeZero(), "it was cut when it was possible")
		})

		It("fails without a descriptor to spare, and works with one", func() {
			b.sim.fault = func(op, _ string) error {
				if op == "create" || op == "open" {
					return syscall.EMFILE
				}
				return nil
			}
			_, err := b.q.Append(record(1))
			Expect(err).To(MatchError(syscall.EMFILE))
			b.sim.fault = nil
			b.fill(2, 2)
			Expect(b.rest()).To(Equal([]uint64{2}))
		})
	})

	Describe("reading", func() {
		It("stops at the limits, but not before the first record", func() {
			b.fill(1, 30)
			for _, c := range []struct{ records, bytes, want int }{
				{0, 1000, 0}, {-1, 1000, 0}, {1, 1000, 1}, {3, 1000, 3}, {3, 199, 1}, {3, 200, 2}, {3, 0, 1}, {1, -1, 1},
			} {
				before, _ := b.q.Unread()
				records, err := b.q.Read(c.records, c.bytes, nil)
				Expect(err).NotTo(HaveOccurred())
				Expect(records).To(HaveLen(c.want), "%+v", c)
				after, _ := b.q.Unread()
				Expect(before - after).To(Equal(int64(c.want)))
			}
		})

		It("appends to what it is given, and hands over memory of the caller's own", func() {
			b.fill(1, 9)
			records, err := b.q.Read(2, 1<<20, nil)
			Expect(err).NotTo(HaveOccurred())
			records, err = b.q.Read(2, 1<<20, records)
			Expect(err).NotTo(HaveOccurred())
			for i, r := range records {
				Expect(numberOf(r.Data)).To(Equal(uint64(i + 1)))
				Expect(cap(r.Data)).To(Equal(len(r.Data)), "appending to it must not reach the next")
				clear(r.Data)
			}
			Expect(b.rest()).To(Equal(upTo(5, 9)))
		})

		It("reads records that are longer than its window", func() {
			long := bytes.Repeat([]byte("0123456789abcdef"), 256)
			_, err := b.q.Append(slices.Repeat([][]byte{[]byte("short"), long}, 300)...)
			Expect(err).NotTo(HaveOccurred())
			var got []Record
			for len(got) < 600 {
				before := len(got)
				got, err = b.q.Read(600, 1<<30, got)
				Expect(err).NotTo(HaveOccurred())
				Expect(len(got)).To(BeNumerically(">", before))
			}
			for i, r := range got {
				if i%2 == 0 {
					Expect(string(r.Data)).To(Equal("short"))
				} else {
					Expect(r.Data).To(Equal(long))
				}
			}
		})

		It("starts again at what is released", func() {
			b.fill(1, 30)
			b.take(12)
			Expect(b.rest()).To(Equal(upTo(13, 30)))
			b.q.Rewind()
			Expect(b.rest()).To(Equal(upTo(13, 30)))
		})

		It("goes on after an error, with the same record", func() {
			b.fill(1, 9)
			b.take(3)
			b.sim.fault = func(op, _ string) error {
				if op == "read" {
					return errIO
				}
				return nil
			}
			for range 3 {
				_, err := b.q.Read(5, 1000, nil)
				Expect(err).To(MatchError(errIO))
			}
			b.sim.fault = nil
			Expect(b.rest()).To(Equal(upTo(4, 9)))
			Expect(b.q.Stats().ReadErrors).To(Equal(uint64(3)))
			Expect(b.q.Stats().Quarantined).To(BeZero())
		})

		It("skips a segment that cannot be read when it is told to", func() {
			b.fill(1, 30)
			b.take(3)
			b.sim.fault = func(op, name string) error {
				if op == "read" && strings.HasPrefix(name, seg1) {
					return errIO
				}
				return nil
			}
			_, err := b.q.Read(5, 1000, nil)
			Expect(err).To(MatchError(errIO))
			Expect(b.q.Skip()).To(Equal(int64(6 * size)))
			Expect(b.files()).To(ContainElement(seg1 + badSuffix))
			Expect(b.rest()).To(Equal(upTo(10, 30)))
			Expect(b.q.Skip()).To(BeZero())
			records, bytes := b.q.Held()
			Expect([]int64{records, bytes}).To(Equal([]int64{21, 21 * size}))
		})
	})

	Describe("releasing", func() {
		It("deletes segments at the checkpoint, and not before", func() {
			b.fill(1, 30)
			b.take(20)
			Expect(b.files()).To(ConsistOf(seg1, seg2, seg3, seg4))
			b.trace()
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.files()).To(ConsistOf(seg3, seg4, cursorName))
			Expect(b.ops).To(Equal([]string{
				"create cursor.new", "write cursor.new", "sync cursor.new", "rename cursor.new", "syncdir q.queue",
				"remove " + seg1, "remove " + seg2, "syncdir q.queue",
			}), "the cursor is durable before anything is deleted")
			records, bytes := b.q.Held()
			Expect([]int64{records, bytes}).To(Equal([]int64{10, 10 * size}))
		})

		It("writes nothing when nothing was released", func() {
			b.fill(1, 30)
			b.take(20)
			Expect(b.q.Checkpoint()).To(Succeed())
			b.trace()
			b.fill(31, 31)
			b.ops = nil
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.ops).To(BeEmpty())
		})

		It("ignores positions that are behind, or not in the queue", func() {
			b.fill(1, 9)
			records, err := b.q.Read(9, 1<<20, nil)
			Expect(err).NotTo(HaveOccurred())
			b.q.Release(records[4].End)
			b.q.Release(records[2].End)
			b.q.Release(Position{})
			b.q.Release(Position{segment: 99, offset: 99, index: 1})
			held, _ := b.q.Held()
			Expect(held).To(Equal(int64(4)))
		})

		It("takes the reader along", func() {
			b.fill(1, 9)
			records, err := b.q.Read(5, 1<<20, nil)
			Expect(err).NotTo(HaveOccurred())
			b.q.Rewind()
			b.q.Release(records[4].End)
			Expect(b.rest()).To(Equal(upTo(6, 9)))
		})

		It("frees a disk that is so full that the cursor cannot be written", func() {
			b.fill(1, 30)
			b.take(20)
			b.sim.capacity = b.sim.used()
			_, err := b.q.Append(record(31), record(32), record(33), record(34))
			Expect(err).To(MatchError(ErrNoSpace))
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.files()).To(ConsistOf(seg3, seg4, cursorName))
			b.fill(35, 40)
			b.kill()
			Expect(b.rest()).To(Equal(append(upTo(21, 30), upTo(35, 40)...)))
		})

		It("gives back files, and the disk if all is released, when nothing is appended", func() {
			b.fill(1, 30)
			b.take(20)
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.sim.open).To(BeNumerically(">", 0))
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.sim.open).To(BeZero())
			b.fill(31, 31)
			Expect(b.rest()).To(Equal(upTo(21, 31)))
			b.q.Rewind()
			b.take(11)
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.q.Checkpoint()).To(Succeed())
			Expect(b.files()).To(ConsistOf(cursorName))
			Expect(b.sim.open).To(BeZero())
			b.reopen()
			Expect(b.q.Stats().Missing).To(BeZero(), "what is deleted is not missed")
			b.fill(32, 33)
			Expect(b.rest()).To(Equal(upTo(32, 33)))
		})
	})

	Describe("syncing", func() {
		syncFails := func(op, _ string) error {
			if op == "sync" {
				return errIO
			}
			return nil
		}

		It("does nothing for what is durable", func() {
			end := b.fill(1, 5)
			Expect(b.q.SyncTo(end)).To(Succeed())
			Expect(b.q.SyncTo(end)).To(Succeed())
			Expect(b.q.Sync()).To(Succeed())
			Expect(b.q.Stats().Fsyncs).To(Equal(uint64(1)))
			Expect(b.q.Stats().Syncs).To(Equal(uint64(1)))
		})

		It("says that it failed to those concerned, and to nobody else", func() {
			good := b.fill(1, 2)
			Expect(b.q.SyncTo(good)).To(Succeed())
			bad := b.fill(3, 4)
			b.sim.mindful = true
			b.sim.fault = syncFails
			Expect(b.q.SyncTo(bad)).To(MatchError(errIO))
			b.sim.fault = nil

			var fault *SyncError
			Expect(errors.As(b.q.SyncTo(bad), &fault)).To(BeTrue(), "the next fsync would say nothing")
			Expect(*fault).To(Equal(SyncError{Queue: "q", Segment: 1, Err: errIO}))
			Expect(b.q.SyncTo(good)).To(Succeed())
			later := b.fill(5, 6)
			Expect(b.q.SyncTo(later)).To(Succeed())
			Expect(b.q.Sync()).To(MatchError(errIO))
			Expect(b.logs.String()).To(ContainSubstring("fsync failed"))

			records, err := b.q.Read(4, 1<<20, nil)
			Expect(err).NotTo(HaveOccurred())
			b.q.Release(records[len(records)-1].End)
			Expect(b.q.Sync()).To(Succeed(), "nothing of it is left")
			Expect(b.rest()).To(Equal(upTo(5, 6)))
			Expect(b.q.Stats().SyncErrors).To(Equal(uint64(1)))
		})

		It("says so when it closes", func() {
			b.fill(1, 2)
			b.sim.fault = syncFails
			Expect(b.q.Close()).To(MatchError(errIO))
			Expect(b.q.Sync()).To(MatchError(ErrClosed))
		})

		It("covers what was there when the queue was opened", func() {
			b.fill(1, 5)
			b.kill()
			Expect(b.q.Sync()).To(Succeed())
			b.sim = b.sim.crash()
			b.disk = b.sim.disk()
			b.open()
			Expect(b.rest()).To(Equal(upTo(1, 5)))
		})

		It("shares an fsync between all who wait", func() {
			const callers = 50
			b.cfg.SegmentBytes = 1 << 20
			begun, end := make(chan struct{}, callers), make(chan struct{})
			create := b.disk.Create
			b.disk.Create = func(path string) (File, error) {
				f, err := create(path)
				return gatedFile{f, begun, end}, err
			}
			b.reopen()
			var ends []Position
			for id := uint64(1); id <= callers; id++ {
				at, err := b.q.Append(record(id)[:10])
				Expect(err).NotTo(HaveOccurred())
				ends = append(ends, at)
			}
			var wg sync.WaitGroup
			errs := make(chan error, callers)
			wg.Go(func() { errs <- b.q.SyncTo(ends[0]) })
			<-begun
			// Appended after it began, so that it does not cover them.
			for i := range ends {
				at, err := b.q.Append(record(uint64(i))[:1])
				Expect(err).NotTo(HaveOccurred())
				if i > 0 {
					wg.Go(func() { errs <- b.q.SyncTo(at) })
				}
			}
			Eventually(func() uint64 { return b.q.Stats().Syncs }).Should(Equal(uint64(callers)))
			close(end)
			wg.Wait()
			for range callers {
				Expect(<-errs).NotTo(HaveOccurred())
			}
			Expect(b.q.Stats().Fsyncs).To(Equal(uint64(2)))
			Expect(b.q.Close()).To(Succeed())
		})

		It("bounds the segments that nobody syncs", func() {
			b.fill(1, 300)
			dirty := 0
			for _, s := range b.q.segments {
				if s.dirty() {
					dirty++
				}
			}
			Expect(dirty).To(Equal(maxUnsynced + 1))
			Expect(b.sim.open).To(Equal(maxUnsynced + 1))
		})
	})

	Describe("emptying", func() {
		It("drops what is there and keeps what comes", func() {
			b.fill(1, 30)
			b.take(5)
			stale := b.fill(31, 31)
			Expect(b.q.Empty()).To(Succeed())
			Expect(b.files()).To(ConsistOf(cursorName))
			records, bytes := b.q.Held()
			Expect([]int64{records, bytes}).To(Equal([]int64{0, 0}))
			Expect(b.q.SyncTo(stale)).To(Succeed())
			b.fill(32, 35)
			b.q.Release(stale)
			Expect(b.rest()).To(Equal(upTo(32, 35)))
			b.kill()
			Expect(b.rest()).To(Equal(upTo(32, 35)))
		})

		It("works on a full disk", func() {
			b.fill(1, 30)
			b.sim.capacity = b.sim.used()
			Expect(b.q.Empty()).To(Succeed())
			Expect(b.files()).To(ConsistOf(cursorName))
			b.fill(31, 33)
			b.kill()
			Expect(b.rest()).To(Equal(upTo(31, 33)))
		})

		It("changes nothing when it fails", func() {
			b.fill(1, 5)
			b.sim.fault = func(op, name string) error {
				if op == "sync" {
					return errIO
				}
				return nil
			}
			Expect(b.q.Empty()).To(MatchError(errIO))
			b.sim.fault = nil
			b.fill(6, 8)
			Expect(b.rest()).To(Equal(upTo(1, 8)))
			Expect(b.q.Empty()).To(Succeed())
			Expect(b.rest()).To(BeEmpty())
		})

		It("keeps what is appended after it failed, whatever became of the cursor", func() {
			b.fill(1, 5)
			b.sim.fault = func(op, name string) error {
				if op == "syncdir" {
					return errIO
				}
				return nil
			}
			Expect(b.q.Empty()).To(MatchError(errIO))
			b.sim.fault = nil
			end := b.fill(6, 8)
			Expect(b.q.SyncTo(end)).To(Succeed())
			b.kill()
			Expect(b.rest()).To(ContainElements(upTo(6, 8)))
		})

		It("makes sure of the cursor before it deletes what the last process left", func() {
			b.fill(1, 30)
			b.sim.fault = func(op, name string) error {
				if op == "remove" {
					return errIO
				}
				return nil
			}
			Expect(b.q.Empty()).To(MatchError(errIO))
			b.sim.kill()
			b.trace()
			b.open()
			Expect(b.ops).To(Equal([]string{"mkdir data", "syncdir /", "syncdir q.queue", "remove " + seg1, "remove " + seg2, "remove " + seg3, "remove " + seg4, "syncdir q.queue"}))
			Expect(b.rest()).To(BeEmpty())
		})
	})

	Describe("when it is closed", func() {
		It("refuses everything", func() {
			end := b.fill(1, 5)
			Expect(b.q.Close()).To(Succeed())
			_, err := b.q.Append(record(1))
			Expect(err).To(MatchError(ErrClosed))
			_, err = b.q.Read(1, 1, nil)
			Expect(err).To(MatchError(ErrClosed))
			_, err = b.q.Skip()
			Expect(err).To(MatchError(ErrClosed))
			Expect(b.q.SyncTo(end)).To(MatchError(ErrClosed))
			Expect(b.q.Sync()).To(MatchError(ErrClosed))
			Expect(b.q.Checkpoint()).To(MatchError(ErrClosed))
			Expect(b.q.Empty()).To(MatchError(ErrClosed))
			Expect(b.q.Remove()).To(MatchError(ErrClosed))
			Expect(b.q.Close()).To(MatchError(ErrClosed))
			b.q.Release(end)
			b.q.Rewind()
			records, _ := b.q.Held()
			Expect(records).To(BeZero())
			Expect(b.sim.open).To(BeZero())
		})

		It("lets those go who wait for a sync", func() {
			begun, end := make(chan struct{}, 9), make(chan struct{})
			create := b.disk.Create
			b.disk.Create = func(path string) (File, error) {
				f, err := create(path)
				return gatedFile{f, begun, end}, err
			}
			b.reopen()
			b.fill(1, 1)
			var wg sync.WaitGroup
			errs := make(chan error, 9)
			wg.Go(func() { errs <- b.q.Sync() })
			<-begun
			at := b.fill(2, 2)
			for range 8 {
				wg.Go(func() { errs <- b.q.SyncTo(at) })
			}
			Eventually(func() uint64 { return b.q.Stats().Syncs }).Should(Equal(uint64(9)))
			wg.Go(func() { Expect(b.q.Remove()).To(Succeed()) })
			close(end)
			wg.Wait()
			for range 9 {
				Expect(<-errs).To(Or(BeNil(), MatchError(ErrClosed)))
			}
		})
	})
})

// gatedFile waits in Sync.
type gatedFile struct {
	File
	begun, end chan struct{}
}

func (f gatedFile) Sync() error {
	select {
	case f.begun <- struct{}{}:
	default:
	}
	<-f.end
	return f.File.Sync()
}

var _ = Describe("damage", func() {
	var b *bench
	BeforeEach(func() {
		b = newBench()
		b.fill(1, 30)
	})
	reopens := func() {
		GinkgoHelper()
		Expect(b.q.Close()).To(Succeed())
		Expect(b.dir.Close()).To(Succeed())
	}

	DescribeTable("costs the record that has it, while the file is kept",
		func(off int, lost ...uint64) {
			reopens()
			b.flip(seg2, off)
			b.open()
			Expect(b.rest()).To(Equal(upTo(1, 30, lost...)))
			stats := b.q.Stats()
			Expect(stats.Quarantined).To(Equal(uint64(1)))
			Expect(stats.Torn).To(BeZero())
			Expect(b.files()).To(ContainElement(seg2 + badSuffix))
			Expect(b.files()).NotTo(ContainElement(seg2))
			Expect(b.logs.String()).To(ContainSubstring("level=ERROR"))
			Expect(b.logs.String()).To(ContainSubstring(seg2 + badSuffix))

			b.q.Rewind()
			Expect(b.rest()).To(Equal(upTo(1, 30, lost...)), "again")
			held, _ := b.q.Held()
			Expect(held).To(Equal(int64(30 - len(lost))))
			b.reopen()
			Expect(b.rest()).To(Equal(upTo(1, 30, lost...)), "after another start")
			Expect(b.q.Stats().Quarantined).To(BeZero(), "it is known")

			// The file outlives its records, and its records do not come back.
			b.q.Rewind()
			b.take(30 - len(lost))
			Expect(b.q.Checkpoint()).To(Succeed())
			b.reopen()
			Expect(b.rest()).To(BeEmpty())
			Expect(b.files()).To(ConsistOf(seg2+badSuffix, cursorName))
			b.fill(31, 33)
			Expect(b.rest()).To(Equal(upTo(31, 33)))
			b.reopen()
			Expect(b.rest()).To(Equal(upTo(31, 33)))
		},
		Entry("in the data of the first", headerSize+20, uint64(10)),
		Entry("in the data of one in the middle", headerSize+4*size+20, uint64(14)),
		Entry("in the data of the last", headerSize+8*size+20, uint64(18)),
		Entry("in a checksum", headerSize+3*size, uint64(13)),
		Entry("in a length", headerSize+3*size+7, uint64(13)),
		Entry("in a length, so that it is too long", headerSize+3*size+4, uint64(13)),
		Entry("in the last length", headerSize+8*size+7, uint64(18)),
	)

	It("of the header costs nothing while there is a footer", func() {
		reopens()
		b.flip(seg2, 25)
		b.open()
		Expect(b.rest()).To(Equal(upTo(1, 30)))
		Expect(b.q.Stats().Quarantined).To(Equal(uint64(1)))
		Expect(b.files()).To(ContainElement(seg2 + badSuffix))
	})

	It("of the footer costs nothing", func() {
		reopens()
		b.flip(seg2, headerSize+9*size+30)
		b.open()
		Expect(b.rest()).To(Equal(upTo(1, 30)))
	})

	It("of header and footer costs the segment, and nothing else", func() {
		reopens()
		b.flip(seg2, 25)
		b.flip(seg2, headerSize+9*size+30)
		b.open()
		Expect(b.rest()).To(Equal(append(upTo(1, 9), upTo(19, 30)...)))
		Expect(b.files()).To(ContainElement(seg2 + badSuffix))
		Expect(b.q.Stats().Quarantined).To(Equal(uint64(1)))
		Expect(b.q.Stats().Missing).To(BeZero())
		Expect(b.q.Stats().LostBytes).To(Equal(uint64(headerSize + 9*size + footerSize)))
	})

	It("of all after a place costs just that", func() {
		reopens()
		b.sim.edit(b.path(seg2), func(c []byte) []byte {
			for i := headerSize + 4*size; i < len(c)-footerSize; i++ {
				c[i] = byte(i)
			}
			return c
		})
		b.open()
		Expect(b.rest()).To(Equal(append(upTo(1, 13), upTo(19, 30)...)))
		held, bytes := b.q.Held()
		Expect([]int64{held, bytes}).To(Equal([]int64{25, 25 * size}))
	})

	It("of the segment that is appended to is left behind", func() {
		Expect(b.q.Sync()).To(Succeed())
		b.flip(seg4, headerSize+20)
		Expect(b.rest()).To(Equal(upTo(1, 30, 28)))
		end := b.fill(31, 33)
		Expect(b.q.SyncTo(end)).To(Succeed())
		Expect(b.rest()).To(Equal(upTo(31, 33)))
		Expect(b.files()).To(ContainElements(seg4+badSuffix, "00000000000000000005.seg"))
		b.reopen()
		Expect(b.rest()).To(Equal(upTo(1, 33, 28)))
	})

	It("at the end of the segment that is appended to is left behind", func() {
		end := b.q.last()
		b.flip(seg4, headerSize+2*size+20)
		Expect(b.rest()).To(Equal(upTo(1, 29)))
		b.fill(31, 33)
		Expect(b.rest()).To(Equal(upTo(31, 33)))
		Expect(b.q.SyncTo(end)).To(MatchError(errDamaged), "it was never durable")
		Expect(b.q.Sync()).To(MatchError(errDamaged))
		held, _ := b.q.Held()
		Expect(held).To(Equal(int64(32)))
	})

	It("found later does not hold back what was read before", func() {
		records, err := b.q.Read(9, 1<<20, nil)
		Expect(err).NotTo(HaveOccurred())
		Expect(records).To(HaveLen(9))
		b.q.Rewind()
		b.flip(seg1, headerSize+8*size+20)
		Expect(b.rest()).To(Equal(upTo(1, 30, 9)))
		b.q.Release(records[8].End)
		held, _ := b.q.Held()
		Expect(held).To(Equal(int64(21)))
	})

	It("to a segment whose file was cut short costs what is cut off", func() {
		reopens()
		b.sim.edit(b.path(seg2), func(c []byte) []byte { return c[:headerSize+3*size+50] })
		b.open()
		Expect(b.rest()).To(Equal(append(upTo(1, 12), upTo(19, 30)...)))
		Expect(b.q.Stats().Torn).To(Equal(uint64(1)))
		Expect(b.q.Stats().TornBytes).To(Equal(uint64(50)))
	})

	It("that is a file gone is counted", func() {
		reopens()
		Expect(b.disk.Remove(b.path(seg2))).To(Succeed())
		b.open()
		Expect(b.rest()).To(Equal(append(upTo(1, 9), upTo(19, 30)...)))
		Expect(b.q.Stats().Missing).To(Equal(uint64(1)))
		Expect(b.logs.String()).To(ContainSubstring("missing"))
	})

	It("of the cursor has everything read again", func() {
		b.take(12)
		reopens()
		b.flip(cursorName, 15)
		b.open()
		Expect(b.rest()).To(Equal(upTo(10, 30)), "but not what was deleted")
		Expect(b.files()).To(ContainElement(cursorName + badSuffix))
		Expect(b.logs.String()).To(ContainSubstring("cursor"))
	})

	It("is not what a later version wrote", func() {
		b.take(1)
		reopens()
		for _, name := range []string{seg2, cursorName} {
			old := b.sim.content(b.path(name))
			b.sim.edit(b.path(name), func(c []byte) []byte {
				c[11]++
				if name == cursorName {
					return appendSum(c[:36])
				}
				return append(appendSum(c[:32]), c[36:]...)
			})
			before := b.files()
			dir, err := OpenDir("/data", b.disk)
			Expect(err).NotTo(HaveOccurred())
			b.cfg.Dir = dir
			_, err = Open(b.cfg)
			var later *VersionError
			Expect(errors.As(err, &later)).To(BeTrue(), "%v", err)
			Expect(later.Version).To(Equal(uint32(2)))
			Expect(b.files()).To(Equal(before))
			Expect(dir.Close()).To(Succeed())
			b.sim.edit(b.path(name), func([]byte) []byte { return old })
		}
		b.open()
		Expect(b.rest()).To(Equal(upTo(2, 30)))
	})
})

var _ = Describe("the end of the last segment", func() {
	var b *bench
	var whole []byte
	BeforeEach(func() {
		b = newBench()
		b.fill(1, 12)
		whole = b.sim.content(b.path(seg2)) // without a footer
	})
	// now opens the queue with such a file after the process has ended.
	now := func(content []byte) {
		GinkgoHelper()
		b = newBench()
		b.fill(1, 12)
		b.sim.edit(b.path(seg2), func([]byte) []byte { return content })
		b.cfg.Dir = nil
		b.kill()
	}

	It("is cut wherever a write was interrupted", func() {
		salt := whole
		for n := range len(whole) {
			b = newBench()
			b.dir.salt = func() uint64 { return 1 }
			b.fill(1, 12)
			b.sim.edit(b.path(seg2), func(c []byte) []byte { salt = c; return c[:n] })
			b.kill()
			left := max(0, (n-headerSize)/size)
			Expect(b.rest()).To(Equal(upTo(1, 9+uint64(left))), "cut at %d", n)
			held, _ := b.q.Held()
			Expect(held).To(Equal(int64(9 + left)))
			b.fill(20, 22)
			Expect(b.rest()).To(Equal(upTo(20, 22)))
			if torn := n > 0 && (n < headerSize || (n-headerSize)%size > 0); torn {
				Expect(b.q.Stats().Torn).To(Equal(uint64(1)), "cut at %d", n)
			}
			Expect(b.q.Stats().Quarantined).To(BeZero())
			b.reopen()
			Expect(b.rest()).To(Equal(append(upTo(1, 9+uint64(left)), upTo(20, 22)...)))
			Expect(b.q.Stats().Torn).To(BeZero(), "once")
		}
		Expect(salt).NotTo(BeEmpty())
	})

	It("is cut when it is zeros or garbage", func() {
		for _, tail := range [][]byte{make([]byte, 5000), bytes.Repeat([]byte{0xff}, 5000), bytes.Repeat([]byte{0, 0, 0, 1}, 5000), []byte("x")} {
			b = newBench()
			b.fill(1, 12)
			b.sim.edit(b.path(seg2), func(c []byte) []byte { return append(c, tail...) })
			b.kill()
			Expect(b.rest()).To(Equal(upTo(1, 12)))
			Expect(b.q.Stats().Torn).To(Equal(uint64(1)))
			Expect(b.q.Stats().TornBytes).To(Equal(uint64(len(tail))))
			Expect(b.files()).To(ConsistOf(seg1, seg2))
		}
	})

	It("is nothing if it is all zeros", func() {
		now(make([]byte, 3000))
		Expect(b.rest()).To(Equal(upTo(1, 9)))
		Expect(b.files()).To(ConsistOf(seg1))
	})

	It("is kept if there is something in it that was a record", func() {
		b.flip(seg2, headerSize+20) // the first of three
		b.kill()
		Expect(b.rest()).To(Equal(upTo(1, 12, 10)))
		b.reopen()
		b.sim.edit(b.path(seg2+badSuffix), func(c []byte) []byte {
			c[headerSize+size] ^= 1 // and the second: the third stands alone, at the end
			return append(c, make([]byte, 100)...)
		})
		Expect(b.q.Close()).To(Succeed())
		Expect(b.dir.Close()).To(Succeed())
		before := b.sim.content(b.path(seg2 + badSuffix))
		b.open()
		Expect(b.rest()).To(Equal(upTo(1, 9)), "one alone is not proof enough to deliver it")
		Expect(b.sim.content(b.path(seg2+badSuffix))).To(Equal(before), "but to keep it")
	})

	It("is not cut in front of a record that stands alone", func() {
		b.sim.edit(b.path(seg2), func(c []byte) []byte {
			c[headerSize] ^= 1
			c[headerSize+size] ^= 1
			return append(c, 1, 2, 3)
		})
		before := b.sim.content(b.path(seg2))
		b.kill()
		Expect(b.rest()).To(Equal(upTo(1, 9)))
		Expect(b.sim.content(b.path(seg2 + badSuffix))).To(Equal(before))
		Expect(b.q.Stats().Quarantined).To(Equal(uint64(1)))
		Expect(b.q.Stats().Torn).To(BeZero())
	})

	It("may be before the cursor", func() {
		b.take(12)
		Expect(b.q.Checkpoint()).To(Succeed())
		b.sim.edit(b.path(seg2), func(c []byte) []byte { return c[:headerSize+size] })
		b.kill()
		held, bytes := b.q.Held()
		Expect([]int64{held, bytes}).To(Equal([]int64{0, 0}))
		b.fill(13, 15)
		b.kill()
		Expect(b.rest()).To(Equal(upTo(13, 15)))
	})

	It("may be gone with the cursor in it", func() {
		b.take(12)
		Expect(b.q.Checkpoint()).To(Succeed())
		Expect(b.disk.Remove(b.path(seg2))).To(Succeed())
		b.kill()
		Expect(b.q.Stats().Missing).To(Equal(uint64(1)))
		b.fill(13, 15)
		b.kill()
		Expect(b.rest()).To(Equal(upTo(13, 15)))
	})
})

// appendSum appends the checksum of b.
func appendSum(b []byte) []byte {
	sum := layout{}.check(b, 0)
	return append(b, byte(sum>>24), byte(sum>>16), byte(sum>>8), byte(sum))
}

var _ = Describe("a folder of queues", func() {
	It("lists its queues and nothing else", func() {
		b := newBench()
		for _, name := range []string{"b", "a#ephemeral", "..", ".", "x.queue", "lock"} {
			b.cfg.Name = name
			q, err := Open(b.cfg)
			Expect(err).NotTo(HaveOccurred())
			_, err = q.Append(record(1))
			Expect(err).NotTo(HaveOccurred())
			Expect(q.Close()).To(Succeed())
		}
		Expect(b.disk.Mkdir("/data/other")).To(Succeed())
		Expect(b.dir.Queues()).To(Equal([]string{".", "..", "a#ephemeral", "b", "lock", "x.queue"}))
		Expect(b.disk.List("/data")).To(ConsistOf("..queue", "...queue", "a#ephemeral.queue", "b.queue", "lock.queue", "x.queue.queue", "other"))
	})

	DescribeTable("refuses names", func(name string) {
		b := newBench()
		b.cfg.Name = name
		_, err := Open(b.cfg)
		Expect(err).To(MatchError(ErrName))
		Expect(b.dir.Close()).To(MatchError(ErrInUse), "only of the other")
	},
		Entry("without characters", ""), Entry("of a path", "a/b"), Entry("of a path above", "../a"), Entry("of a path on other systems", `a\b`),
		Entry("with a zero", "a\x00"), Entry("with a space", "a b"), Entry("with other letters", "ä"), Entry("with half of one", "\xc3"),
		Entry("that are too long", strings.Repeat("a", maxName+1)),
	)

	It("refuses other nonsense, all at once", func() {
		_, err := Open(Config{Name: "/", SegmentBytes: 1, MaxRecord: -1})
		Expect(err).To(MatchError(And(ContainSubstring("Dir"), ContainSubstring("name"), ContainSubstring("SegmentBytes"), ContainSubstring("MaxRecord"))))
	})

	It("has each queue open once", func() {
		b := newBench()
		_, err := Open(b.cfg)
		Expect(err).To(MatchError(ErrInUse))
		Expect(b.dir.Close()).To(MatchError(ErrInUse))
		Expect(b.q.Close()).To(Succeed())
		b.q, err = Open(b.cfg)
		Expect(err).NotTo(HaveOccurred())
		_, err = OpenDir("/data", b.disk)
		Expect(err).To(MatchError(ErrInUse))
		Expect(b.q.Close()).To(Succeed())
		Expect(b.dir.Close()).To(Succeed())
		Expect(b.dir.Close()).To(MatchError(ErrClosed))
		_, err = Open(b.cfg)
		Expect(err).To(MatchError(ErrClosed))
	})

	It("removes a queue with all that it has", func() {
		b := newBench()
		b.fill(1, 30)
		b.flip(seg1, headerSize+20)
		Expect(b.rest()).To(Equal(upTo(2, 30)))
		Expect(b.files()).To(ContainElement(seg1 + badSuffix))
		Expect(b.q.Remove()).To(Succeed())
		Expect(b.dir.Queues()).To(BeEmpty())
		Expect(b.disk.List("/data")).To(BeEmpty())
		Expect(b.sim.open).To(BeZero())
		q, err := Open(b.cfg)
		Expect(err).NotTo(HaveOccurred())
		records, _ := q.Held()
		Expect(records).To(BeZero())
		Expect(q.Remove()).To(Succeed(), "though it has no files")
	})

	It("removes a queue as a whole or not at all, whenever the power goes", func() {
		removed := 0
		for at := 1; ; at++ {
			b := newBench()
			b.fill(1, 30)
			Expect(b.q.Sync()).To(Succeed())
			before := b.sim.ops
			b.sim.dieAt = before + at
			err := b.q.Remove()
			if err == nil {
				Expect(at).To(BeNumerically(">", 5))
				break
			}
			b.sim = b.sim.crash()
			b.disk = b.sim.disk()
			if at%2 == 0 { // lost again, while it is finished
				b.sim.dieAt = b.sim.ops + 1 + at/2
				if dir, err := OpenDir("/data", b.disk); err == nil {
					Expect(dir.Close()).To(Succeed())
				}
				b.sim = b.sim.crash()
				b.disk = b.sim.disk()
			}
			b.open()
			if there := b.rest(); len(there) > 0 {
				Expect(there).To(Equal(upTo(1, 30)))
			} else {
				removed++
				Expect(b.disk.List("/data")).To(BeEmpty())
			}
		}
		Expect(removed).To(BeNumerically(">", 0))
	})

	It("keeps next to nothing for a queue that is not used", func() {
		b := newBench()
		const n = 1000
		queues := make([]*Queue, n)
		perQueue := testing.AllocsPerRun(1, func() {
			for i := range queues {
				b.cfg.Name = fmt.Sprintf("topic-%d", i)
				q, err := Open(b.cfg)
				Expect(err).NotTo(HaveOccurred())
				queues[i] = q
			}
			for _, q := range queues {
				Expect(q.Close()).To(Succeed())
			}
		}) / n
		Expect(perQueue).To(BeNumerically("<", 50))
		Expect(b.sim.open).To(BeZero())
	})
})
