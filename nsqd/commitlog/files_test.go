package commitlog

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
	"time"

	"github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// Ginkgo also exports the name Offset.
var (
	Describe, It, DescribeTable, Entry, BeforeEach = ginkgo.Describe, ginkgo.It, ginkgo.DescribeTable, ginkgo.Entry, ginkgo.BeforeEach
	GinkgoHelper                                   = ginkgo.GinkgoHelper
)

func TestMain(m *testing.M) {
	if role, ok := os.LookupEnv(childEnv); ok {
		os.Exit(child(role))
	}
	testkit.Main(m)
}

func TestCommitlog(t *testing.T) {
	RegisterFailHandler(ginkgo.Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	ginkgo.RunSpecs(t, "nsqd/commitlog")
}

// bench is a log on a simulated disk.
type bench struct {
	sim  *simDisk
	disk Disk
	dir  *Dir
	l    *Files
	cfg  Config
	logs *bytes.Buffer
	now  mono.Wall
}

func newBench() *bench {
	b := &bench{sim: newSimDisk(rand.New(rand.NewPCG(1, 1))), logs: new(bytes.Buffer)}
	b.disk = b.sim.disk()
	b.cfg = Config{Name: "q", SegmentBytes: 1 << 10, MaxBody: 1 << 12, Log: slog.New(slog.NewTextHandler(b.logs, nil)),
		Now: func() mono.Wall { return b.now }}
	b.open()
	return b
}

func (b *bench) open() {
	GinkgoHelper()
	var err error
	b.dir, err = OpenDir("/data", b.disk)
	Expect(err).NotTo(HaveOccurred())
	b.cfg.Dir = b.dir
	b.l, err = Open(b.cfg)
	Expect(err).NotTo(HaveOccurred())
}

func (b *bench) close() {
	GinkgoHelper()
	Expect(b.l.Close()).To(Succeed())
	Expect(b.dir.Close()).To(Succeed())
}

func (b *bench) reopen() {
	GinkgoHelper()
	b.close()
	b.open()
}

// kill ends the process and starts another.
func (b *bench) kill() {
	GinkgoHelper()
	b.sim.kill()
	b.open()
}

// size is the size of a record of function of in a file, in bytes. A segment of 1 KiB has nine records.
const size = 108

// of returns the record with the given number.
func of(id Offset) Record {
	r := Record{Timestamp: mono.Wall(id) * mono.Wall(time.Second), Body: fmt.Appendf(nil, "record %6d %s", id, strings.Repeat(".", 46))}
	copy(r.ID[:], fmt.Sprintf("%016x", id))
	return r
}

// fill appends the records from to to, one at a time. The first record of a new log has offset 0.
func (b *bench) fill(from, to Offset) {
	GinkgoHelper()
	for id := from; id <= to; id++ {
		_, err := b.l.Append([]Record{of(id)})
		Expect(err).NotTo(HaveOccurred())
	}
}

func idOf(r Record) Offset {
	var id Offset
	if n, err := fmt.Sscanf(string(r.Body), "record %d", &id); n != 1 || !bytes.Equal(r.Body, of(id).Body) {
		panic(fmt.Sprintf("%q is no record: %v", r.Body, err))
	}
	return id
}

// from reads all records from an offset on.
func (b *bench) from(at Offset) (ids []Offset) {
	GinkgoHelper()
	var batch Batch
	for batch.Next = at; ; {
		Expect(b.l.Read(batch.Next, Limit{Records: 7, Bytes: 1 << 20}, &batch)).To(Succeed())
		if len(batch.Records) == 0 {
			return ids
		}
		for _, r := range batch.Records {
			ids = append(ids, idOf(r))
		}
	}
}

func upTo(from, to Offset, but ...Offset) (ids []Offset) {
	for id := from; id <= to; id++ {
		if !slices.Contains(but, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// files returns the log's files without the cursors.
func (b *bench) files() []string {
	GinkgoHelper()
	names, err := b.disk.List(b.l.folder.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	Expect(err).NotTo(HaveOccurred())
	return slices.DeleteFunc(names, func(name string) bool {
		return strings.HasPrefix(name, cursorName) && !strings.HasSuffix(name, badSuffix)
	})
}

func (b *bench) path(name string) string { return filepath.Join(b.l.folder.path, name) }

// flip changes a bit of a file.
func (b *bench) flip(name string, off int) {
	b.sim.edit(b.path(name), func(c []byte) []byte {
		c[off] ^= 0x10
		return c
	})
}

func failing(op string, err error) func(string, string) error {
	return func(o, _ string) error {
		if o == op {
			return err
		}
		return nil
	}
}

var seg1, seg2, seg3, seg4 = segmentName(0), segmentName(9), segmentName(18), segmentName(27)

var _ = Describe("a log in files", func() {
	var b *bench
	BeforeEach(func() { b = newBench() })

	It("has no file before the first append", func() {
		at, err := b.l.Append(nil)
		Expect(err).NotTo(HaveOccurred())
		Expect(at).To(BeZero())
		Expect(b.l.Sync(5)).To(Succeed())
		Expect(b.l.Trim(5)).To(Succeed())
		Expect(b.l.Rest()).To(Succeed())
		b.reopen()
		Expect(b.dir.Logs()).To(BeEmpty())
		Expect(b.files()).To(BeEmpty())
		Expect(b.sim.open).To(BeZero())
	})

	It("gives records back in order over many segments, after a kill as well", func() {
		b.fill(0, 99)
		Expect(b.l.Stats().Segments).To(BeNumerically(">", 10))
		Expect(b.from(0)).To(Equal(upTo(0, 99)))
		Expect(b.from(57)).To(Equal(upTo(57, 99)))
		b.kill()
		Expect(b.from(57)).To(Equal(upTo(57, 99)))
		b.reopen()
		Expect(b.from(0)).To(Equal(upTo(0, 99)))
		s := b.l.Stats()
		Expect([]any{s.First, s.Next, s.Records}).To(Equal([]any{Offset(0), Offset(100), int64(100)}))
	})

	It("reads only the last segment when it is opened", func() {
		b.fill(0, 999)
		segments := b.l.Stats().Segments
		for _, again := range []func(){b.kill, b.reopen} {
			b.sim.readAt = 0
			again()
			Expect(b.sim.readAt).To(BeNumerically("<=", 1<<10+2*minCursors+segments*(headerSize+footerSize)))
		}
		Expect(b.from(990)).To(Equal(upTo(990, 999)))
	})

	It("finds its place in a large segment, with and without a hint", func() {
		b.cfg.SegmentBytes = 100 << 20
		b.reopen()
		var batch []Record
		for id := range Offset(20_000) {
			batch = append(batch, of(id))
		}
		for rest := batch; len(rest) > 0; rest = rest[500:] {
			_, err := b.l.Append(rest[:500])
			Expect(err).NotTo(HaveOccurred())
		}
		for _, again := range []func(){func() {}, b.kill} {
			again()
			Expect(b.from(19_990)).To(Equal(upTo(19_990, 19_999)))
			Expect(b.from(0)).To(HaveLen(20_000)) // all records are known now
			var into Batch
			b.sim.readAt = 0
			Expect(b.l.Read(15_000, Limit{Records: 1, Bytes: 1}, &into)).To(Succeed())
			Expect(idOf(into.Records[0])).To(Equal(Offset(15_000)))
			Expect(b.sim.readAt).To(BeNumerically("<=", 3*markEvery))
			b.sim.readAt = 0
			Expect(b.l.Read(into.Next, Limit{Records: 1, Bytes: 1}, &into)).To(Succeed())
			Expect(idOf(into.Records[0])).To(Equal(Offset(15_001)))
			Expect(b.sim.readAt).To(BeNumerically("<=", minRead))
		}
	})

	Describe("appending", func() {
		It("refuses a batch with a record that is not one", func() {
			b.fill(0, 2)
			for _, bad := range []Record{{Body: make([]byte, 1<<12+1)}, {Channel: make([]byte, 256)}, {Source: stamp.Source(stamp.Sources)}, {Offset: noSegment}, {Offset: 1 << 40}} {
				_, err := b.l.Append([]Record{of(3), bad, of(4)})
				Expect(err).To(MatchError(ErrRecord))
			}
			Expect(b.from(0)).To(Equal(upTo(0, 2)))
			b.fill(3, 3)
			Expect(b.from(0)).To(Equal(upTo(0, 3)))
		})

		It("puts a batch that is larger than a segment into one", func() {
			batch := make([]Record, 50)
			for i := range batch {
				batch[i] = of(Offset(i))
			}
			_, err := b.l.Append(batch)
			Expect(err).NotTo(HaveOccurred())
			Expect(b.files()).To(ConsistOf(seg1))
			Expect(b.from(0)).To(Equal(upTo(0, 49)))
		})

		It("begins another segment when offsets are too far from its first", func() {
			b.fill(0, 0)
			r := of(1)
			r.Offset = 1 << 33
			_, err := b.l.Append([]Record{r})
			Expect(err).NotTo(HaveOccurred())
			Expect(b.files()).To(ConsistOf(seg1, segmentName(1<<33)))
			b.kill()
			Expect(b.from(0)).To(Equal(upTo(0, 1)))
			Expect(b.l.Stats().Missing).To(BeZero())
		})

		It("leaves everything as it was while the disk is full, and appends again afterwards", func() {
			b.fill(0, 4)
			before := b.sim.content(b.path(seg1))
			b.sim.capacity = b.sim.used() + 150
			_, err := b.l.Append([]Record{of(5), of(6)})
			Expect(err).To(MatchError(ErrNoSpace))
			Expect(err).To(MatchError(syscall.ENOSPC))
			Expect(b.sim.content(b.path(seg1))).To(Equal(before))
			b.fill(5, 5)                                            // there is room for one record
			_, err = b.l.Append(slices.Repeat([]Record{of(9)}, 20)) // in a new segment
			Expect(err).To(MatchError(ErrNoSpace))
			Expect(b.files()).To(ConsistOf(seg1))
			b.sim.capacity = 1 << 40
			b.fill(6, 40)
			b.kill()
			Expect(b.from(0)).To(Equal(upTo(0, 40)))
		})

		It("continues in another file when the present file cannot be cut back", func() {
			b.fill(0, 1)
			b.sim.fault = func(op, _ string) error {
				return map[string]error{"write": errShort, "truncate": errIO}[op]
			}
			_, err := b.l.Append([]Record{of(2), of(3)})
			Expect(err).To(HaveOccurred())
			b.sim.fault = nil
			b.fill(2, 3)
			Expect(b.files()).To(ConsistOf(seg1, segmentName(2)))
			b.kill()
			Expect(b.from(0)).To(Equal(upTo(0, 3)))
		})

		It("fails without a descriptor to spare, and works with one", func() {
			b.sim.fault = failing("create", syscall.EMFILE)
			_, err := b.l.Append([]Record{of(0)})
			Expect(err).To(MatchError(syscall.EMFILE))
			b.sim.fault = nil
			b.fill(0, 0)
			Expect(b.from(0)).To(Equal(upTo(0, 0)))
		})
	})

	Describe("trimming", func() {
		It("deletes whole segments", func() {
			b.fill(0, 29)
			Expect(b.l.Trim(20)).To(Succeed())
			Expect(b.files()).To(ConsistOf(seg3, seg4))
			Expect(b.from(0)).To(Equal(upTo(18, 29)))
			Expect(b.l.Stats().First).To(Equal(Offset(18)))
			Expect(b.l.Size()).To(And(Equal(b.l.Stats().Bytes), BeNumerically("~", 12*size, 2*headerSize)))
			b.reopen()
			Expect(b.from(0)).To(Equal(upTo(18, 29)))
		})

		It("leaves no segment when all is done and the next offset is known from the cursors", func() {
			b.fill(0, 29)
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.files()).To(ConsistOf(seg4))
			Expect(b.l.SaveCursors([]byte("c"))).To(Succeed())
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.files()).To(BeEmpty())
			Expect(b.l.Stats().Segments).To(BeZero())
			Expect(b.l.Stats().Bytes).To(BeZero())
			b.fill(30, 31)
			Expect(b.from(0)).To(Equal(upTo(30, 31)))
			b.kill()
			Expect(b.from(0)).To(Equal(upTo(30, 31)))
			Expect(b.l.Trim(32)).To(Succeed())
			Expect(b.files()).To(ContainElement(segmentName(30)))
		})

		It("retains by age and by size", func() {
			b.now = mono.Wall(29 * time.Second)
			b.l.SetRetain(Retain{Age: 15 * time.Second})
			b.fill(0, 29)
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.from(0)[0]).To(Equal(Offset(9)), "the second segment's last is 12 s old")
			b.l.SetRetain(Retain{Age: time.Hour, Bytes: 1200})
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.from(0)[0]).To(Equal(Offset(18)), "so many bytes at least")
			Expect(b.l.Needed()).To(BeNumerically("<", 600), "the last segment is never known as done")
			Expect(b.l.Records(20)).To(BeNumerically("==", 10))
			Expect(b.l.Need(20)).To(Equal(Offset(18)))
			b.l.SetRetain(Retain{})
			Expect(b.l.Trim(0)).To(Succeed())
			Expect(b.from(0)[0]).To(Equal(Offset(18)), "a reader needs it again")
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.from(0)[0]).To(Equal(Offset(27)))
		})

		It("retains for no longer what a clock that was wrong has dated in the future, and what came after it", func() {
			late := of(0)
			late.Timestamp = mono.Wall(time.Hour)
			_, err := b.l.Append([]Record{late})
			Expect(err).NotTo(HaveOccurred())
			b.fill(1, 29)
			b.l.SetRetain(Retain{Age: 15 * time.Second})
			b.now = mono.Wall(29 * time.Second)
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.from(0)[0]).To(BeZero(), "the second segment's last is 12 s old")
			b.now = mono.Wall(35 * time.Second)
			Expect(b.l.Trim(30)).To(Succeed())
			Expect(b.from(0)[0]).To(Equal(Offset(18)))
		})

		It("works on a full disk", func() {
			b.fill(0, 29)
			b.sim.capacity = b.sim.used()
			Expect(b.l.SaveCursors(make([]byte, minCursors))).To(MatchError(ErrNoSpace)) // more than is reserved
			Expect(b.l.Trim(20)).To(Succeed())
			b.fill(30, 33)
			Expect(b.l.SaveCursors([]byte("x"))).To(Succeed())
		})
	})

	It("finds the first record that is not older than a time", func() {
		b.fill(0, 29)
		for at, want := range map[time.Duration]Offset{-1: 0, 0: 0, 1: 1, 17 * time.Second: 17, 18 * time.Second: 18, 29 * time.Second: 29, 29*time.Second + 1: 30} {
			Expect(b.l.At(mono.Wall(at))).To(Equal(want), "%v", at)
		}
		b.reopen()
		Expect(b.l.At(mono.Wall(17 * time.Second))).To(Equal(Offset(17)))
	})

	Describe("the cursors", func() {
		It("are those before when the last snapshot is damaged, and none when both are", func() {
			b.fill(0, 29)
			Expect(b.l.SaveCursors([]byte("first"))).To(Succeed())
			Expect(b.l.SaveCursors([]byte("second"))).To(Succeed())
			b.close()
			b.flip("cursors.1", 33)
			b.open()
			Expect(b.l.LoadCursors()).To(Equal([]byte("first")))
			Expect(b.logs.String()).To(ContainSubstring("the one before it holds"))
			Expect(b.l.SaveCursors([]byte("third"))).To(Succeed())
			b.reopen()
			Expect(b.l.LoadCursors()).To(Equal([]byte("third")))
			b.close()
			b.flip("cursors.0", 33)
			b.flip("cursors.1", 33)
			b.open()
			Expect(b.l.LoadCursors()).To(BeNil())
			Expect(b.logs.String()).To(ContainSubstring("no snapshot of cursors is intact"))
			Expect(b.files()).To(ContainElements("cursors.0.bad", "cursors.1.bad"))
			Expect(b.l.Stats().KeepErrors).To(Equal(uint64(2)))
			b.reopen()
			Expect(b.l.Stats().KeepErrors).To(BeZero())
		})

		It("keep the next offset although the records were lost", func() {
			b.fill(0, 4)
			Expect(b.l.Sync(5)).To(Succeed())
			b.fill(5, 7)
			Expect(b.l.SaveCursors([]byte("c"))).To(Succeed())
			b.sim.kill()
			b.sim.edit(b.path(seg1), func(c []byte) []byte { return c[:headerSize+5*size+40] })
			b.open()
			Expect(b.from(0)).To(Equal(upTo(0, 4)))
			Expect(b.l.Append(nil)).To(Equal(Offset(8)))
			Expect(b.l.Append([]Record{of(8)})).To(Equal(Offset(8)))
			Expect(b.from(0)).To(Equal(append(upTo(0, 4), 8)))
		})
	})

	Describe("syncing", func() {
		It("does nothing for what is durable", func() {
			b.fill(0, 4)
			Expect(b.l.Sync(5)).To(Succeed())
			Expect(b.l.Sync(3)).To(Succeed())
			Expect(b.l.Sync(99)).To(Succeed())
			Expect(b.l.Stats().Fsyncs).To(Equal(uint64(1)))
			Expect(b.l.Stats().Syncs).To(Equal(uint64(1)))
		})

		It("reports its failure to the callers concerned, and to no others", func() {
			b.fill(0, 1)
			Expect(b.l.Sync(2)).To(Succeed())
			b.fill(2, 3)
			b.sim.mindful = true
			b.sim.fault = failing("sync", errIO)
			Expect(b.l.Sync(4)).To(MatchError(errIO))
			b.sim.fault = nil

			var fault *SyncError
			Expect(errors.As(b.l.Sync(4), &fault)).To(BeTrue(), "the next fsync would say nothing")
			Expect(*fault).To(Equal(SyncError{Log: "q", First: 0, Err: errIO}))
			Expect(b.l.Sync(2)).To(Succeed())
			b.fill(4, 5)
			Expect(b.l.Sync(6)).To(Succeed())
			Expect(b.logs.String()).To(ContainSubstring("fsync failed"))
			Expect(b.from(0)).To(Equal(upTo(0, 5)))
			Expect(b.l.Close()).To(MatchError(errIO))
		})

		It("covers what was there when the log was opened", func() {
			b.fill(0, 4)
			b.kill()
			Expect(b.l.Sync(5)).To(Succeed())
			b.sim = b.sim.crash()
			b.disk = b.sim.disk()
			b.open()
			Expect(b.from(0)).To(Equal(upTo(0, 4)))
		})

		It("covers the end of a full segment while the next is begun", func() {
			create, fsyncs := b.disk.Create, uint64(0)
			b.disk.Create = func(path string) (File, error) {
				f, err := create(path)
				return sealedFile{f, func() {
					Expect(b.l.Sync(9)).To(Succeed())
					fsyncs = b.l.Stats().Fsyncs
				}}, err
			}
			b.reopen()
			b.fill(0, 9)
			Expect(fsyncs).To(Equal(uint64(1)))
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
			b.fill(0, 0)
			var wg sync.WaitGroup
			errs := make(chan error, callers)
			wg.Go(func() { errs <- b.l.Sync(1) })
			<-begun
			for id := Offset(1); id < callers; id++ { // after the first sync began, so that the first sync does not cover these records
				b.fill(id, id)
				wg.Go(func() { errs <- b.l.Sync(id + 1) })
			}
			Eventually(func() uint64 { return b.l.Stats().Syncs }).Should(Equal(uint64(callers)))
			close(end)
			wg.Wait()
			for range callers {
				Expect(<-errs).NotTo(HaveOccurred())
			}
			Expect(b.l.Stats().Fsyncs).To(Equal(uint64(2)))
			Expect(b.l.Close()).To(Succeed())
		})

		It("bounds the segments that are not synced, and the files that are open", func() {
			b.fill(0, 299)
			dirty := 0
			for _, s := range b.l.segments.all {
				if s.dirty() {
					dirty++
				}
			}
			Expect(dirty).To(Equal(maxUnsynced + 1))
			b.from(0)
			Expect(b.sim.open).To(BeNumerically("<=", maxUnsynced+1+DefaultOpenFiles))
			Expect(b.l.Stats().OpenFiles).To(Equal(b.sim.open))
			Expect(b.l.Rest()).To(Succeed())
			Expect(b.sim.open).To(BeZero())
			Expect(b.from(150)).To(Equal(upTo(150, 299)))
			b.fill(300, 301)
			Expect(b.from(299)).To(Equal(upTo(299, 301)))
		})
	})

	It("refuses everything when it is closed", func() {
		b.fill(0, 4)
		Expect(b.l.Close()).To(Succeed())
		_, err := b.l.Append([]Record{of(1)})
		Expect(err).To(MatchError(ErrClosed))
		Expect(b.l.Read(0, Limit{}, new(Batch))).To(MatchError(ErrClosed))
		Expect(b.l.Sync(5)).To(MatchError(ErrClosed))
		Expect(b.l.Trim(5)).To(MatchError(ErrClosed))
		Expect(b.l.Rest()).To(MatchError(ErrClosed))
		Expect(b.l.SaveCursors(nil)).To(MatchError(ErrClosed))
		_, err = b.l.LoadCursors()
		Expect(err).To(MatchError(ErrClosed))
		_, err = b.l.At(0)
		Expect(err).To(MatchError(ErrClosed))
		Expect(b.l.Remove()).To(MatchError(ErrClosed))
		Expect(b.l.Close()).To(MatchError(ErrClosed))
		Expect(b.sim.open).To(BeZero())
	})

	It("is removed with all that it has", func() {
		b.fill(0, 29)
		b.flip(seg1, headerSize+20)
		Expect(b.from(0)).To(Equal(upTo(1, 29)))
		Expect(b.l.SaveCursors([]byte("x"))).To(Succeed())
		Expect(b.l.Remove()).To(Succeed())
		Expect(b.disk.List("/data")).To(BeEmpty())
	})

	It("continues after a read error, with the same record", func() {
		b.fill(0, 8)
		var batch Batch
		b.sim.fault = failing("read", errIO)
		for range 3 {
			Expect(b.l.Read(3, Limit{Records: 5, Bytes: 1000}, &batch)).To(MatchError(errIO))
			Expect(batch.Records).To(BeEmpty())
			Expect(batch.Next).To(Equal(Offset(3)))
		}
		b.sim.fault = nil
		Expect(b.from(3)).To(Equal(upTo(3, 8)))
		Expect(b.l.Stats().ReadErrors).To(Equal(uint64(3)))
		Expect(b.l.Stats().Quarantined).To(BeZero())
	})
})

// sealedFile signals when its footer is written.
type sealedFile struct {
	File
	sealed func()
}

func (f sealedFile) WriteAt(b []byte, off int64) (int, error) {
	if len(b) == footerSize {
		f.sealed()
	}
	return f.File.WriteAt(b, off)
}

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
		b.fill(0, 29)
	})

	DescribeTable("costs the record that has it, while the file is kept",
		func(off int, lost ...Offset) {
			b.close()
			b.flip(seg2, off)
			b.open()
			Expect(b.from(0)).To(Equal(upTo(0, 29, lost...)))
			stats := b.l.Stats()
			Expect(stats.Quarantined).To(Equal(uint64(1)))
			Expect(stats.Unreadable).To(Equal(uint64(1)))
			Expect(stats.Torn).To(BeZero())
			Expect(b.files()).To(ContainElement(seg2 + badSuffix))
			Expect(b.files()).NotTo(ContainElement(seg2))
			Expect(b.logs.String()).To(And(ContainSubstring("level=ERROR"), ContainSubstring(seg2+badSuffix)))

			Expect(b.from(0)).To(Equal(upTo(0, 29, lost...)), "again")
			Expect(b.l.Stats().Unreadable).To(Equal(uint64(1)), "it is counted once")
			b.reopen()
			Expect(b.from(0)).To(Equal(upTo(0, 29, lost...)), "after another start")
			Expect(b.l.Stats().Quarantined).To(BeZero(), "it is known")
			Expect(b.l.Stats().Unreadable).To(Equal(uint64(1)))

			// The file outlives its records, and its records do not come back.
			Expect(b.l.Trim(29)).To(Succeed())
			b.reopen()
			Expect(b.from(0)).To(Equal(upTo(27, 29)))
			Expect(b.files()).To(ConsistOf(seg2+".1"+keptSuffix, seg4))
			Expect(b.l.Stats().Unreadable).To(Equal(uint64(1)))
			Expect(b.l.Stats().Missing).To(BeZero())
		},
		Entry("in the body of the first", headerSize+60, Offset(9)),
		Entry("in the body of one in the middle", headerSize+4*size+60, Offset(13)),
		Entry("in the body of the last", headerSize+8*size+60, Offset(17)),
		Entry("in a checksum", headerSize+3*size, Offset(12)),
		Entry("in a length", headerSize+3*size+7, Offset(12)),
		Entry("in a length, so that it is too long", headerSize+3*size+4, Offset(12)),
		Entry("in the last length", headerSize+8*size+7, Offset(17)),
	)

	DescribeTable("is counted in records, found at the start or while the log is read, and after other starts",
		func(footer bool, want int, damage func(c []byte)) {
			lost := func() int { return int(b.l.Stats().Unreadable) }
			change := func() {
				b.sim.edit(b.path(seg2), func(c []byte) []byte {
					if damage(c); !footer {
						c = c[:len(c)-footerSize]
					}
					return c
				})
			}
			if footer {
				other := newBench()
				other.fill(0, 29)
				other.sim.edit(other.path(seg2), func(c []byte) []byte { damage(c); return c })
				left := len(other.from(0))
				Expect(30 - left).To(Equal(want))
				Expect(other.l.Stats().Unreadable).To(BeEquivalentTo(want))
				other.from(0)
				Expect(other.l.Stats().Unreadable).To(BeEquivalentTo(want), "they are counted once")
			}
			b.close()
			change()
			b.open()
			read := len(b.from(0))
			Expect(lost()).To(Equal(want))
			for range 2 {
				b.reopen()
				Expect(b.from(0)).To(HaveLen(read))
				Expect(lost()).To(Equal(want))
			}
			// The file outlives its records.
			Expect(b.l.Trim(29)).To(Succeed())
			Expect(lost()).To(Equal(want))
			Expect(b.l.Stats().Damaged).To(Equal(1))
			for range 2 {
				b.reopen()
				Expect(lost()).To(Equal(want))
				Expect(b.l.Stats().Damaged).To(Equal(1))
			}
		},
		Entry("two neighbours", true, 2, func(c []byte) { c[headerSize+3*size+60]++; c[headerSize+4*size+60]++ }),
		Entry("two places", true, 2, func(c []byte) { c[headerSize+2*size+60]++; c[headerSize+5*size+60]++ }),
		Entry("all in a block", true, 4, func(c []byte) { clear(c[headerSize+3*size+5 : headerSize+6*size+9]) }),
		Entry("the end", true, 5, func(c []byte) { clear(c[headerSize+4*size : headerSize+9*size]) }),
		Entry("two neighbours, as their lengths say", false, 2, func(c []byte) { c[headerSize+3*size+60]++; c[headerSize+4*size+60]++ }),
		Entry("a block, of at least one", false, 1, func(c []byte) { clear(c[headerSize+3*size+5 : headerSize+6*size+9]) }),
	)

	It("that is found later is counted, too", func() {
		b.reopen()
		b.flip(seg2, headerSize+60)
		Expect(b.from(0)).To(Equal(upTo(0, 29, 9)))
		b.flip(seg2+badSuffix, headerSize+4*size+60)
		Expect(b.from(0)).To(Equal(upTo(0, 29, 9, 13)))
		Expect(b.l.Stats().Unreadable).To(BeEquivalentTo(2))
		b.reopen()
		Expect(b.l.Stats().Unreadable).To(BeEquivalentTo(2))
	})

	It("of the header costs nothing while there is a footer", func() {
		b.close()
		b.flip(seg2, 25)
		b.open()
		Expect(b.from(0)).To(Equal(upTo(0, 29)))
		Expect(b.l.Stats().Quarantined).To(Equal(uint64(1)))
		Expect(b.l.Stats().Unreadable).To(BeZero())
	})

	It("of the footer costs nothing", func() {
		b.close()
		b.flip(seg2, headerSize+9*size+30)
		b.open()
		Expect(b.from(0)).To(Equal(upTo(0, 29)))
	})

	It("of header and footer costs the segment, and nothing else", func() {
		b.close()
		b.flip(seg2, 25)
		b.flip(seg2, headerSize+9*size+30)
		b.open()
		Expect(b.from(0)).To(Equal(append(upTo(0, 8), upTo(18, 29)...)))
		Expect(b.files()).To(ContainElement(seg2 + badSuffix))
		Expect(b.l.Stats().Missing).To(BeZero())
		b.reopen()
		Expect(b.from(0)).To(Equal(append(upTo(0, 8), upTo(18, 29)...)))
	})

	It("of all after a place costs just that", func() {
		b.close()
		b.sim.edit(b.path(seg2), func(c []byte) []byte {
			for i := headerSize + 4*size; i < len(c)-footerSize; i++ {
				c[i] = byte(i)
			}
			return c
		})
		b.open()
		Expect(b.from(0)).To(Equal(append(upTo(0, 12), upTo(18, 29)...)))
	})

	It("of the segment that is appended to is left behind, and what was not durable is reported", func() {
		b.flip(seg4, headerSize+60)
		Expect(b.from(0)).To(Equal(upTo(0, 29, 27)))
		Expect(b.l.Sync(30)).To(MatchError(errDamaged))
		b.fill(30, 32)
		Expect(b.l.Sync(33)).To(Succeed())
		Expect(b.files()).To(ContainElements(seg4+badSuffix, segmentName(30)))
		Expect(b.l.Close()).To(MatchError(errDamaged))
		Expect(b.dir.Close()).To(Succeed())
		b.open()
		Expect(b.from(0)).To(Equal(upTo(0, 32, 27)))
	})

	It("at the end of the last segment does not have its offsets given again", func() {
		last := b.l.segments.all[3]
		b.sim.kill()
		b.sim.edit(b.path(seg4), func(c []byte) []byte {
			c[headerSize+size+60] ^= 1
			c[headerSize+2*size+60] ^= 1
			r := of(29) // and an intact record without a neighbour
			r.Offset = 30
			return append(last.appendRecord(c, &r, 27, int64(len(c))), 1, 2, 3)
		})
		b.open()
		Expect(b.from(0)).To(Equal(upTo(0, 27)))
		Expect(b.l.Append(nil)).To(BeNumerically(">=", 31))
	})

	It("that is a file gone is counted", func() {
		b.close()
		Expect(b.disk.Remove(b.path(seg2))).To(Succeed())
		b.open()
		Expect(b.from(0)).To(Equal(append(upTo(0, 8), upTo(18, 29)...)))
		Expect(b.l.Stats().Missing).To(Equal(uint64(1)))
		Expect(b.logs.String()).To(ContainSubstring("missing"))
	})

	DescribeTable("that is the end of a file, or all of it, gone is counted and reported",
		func(name string, left int, torn int, said string, from, to Offset) {
			lost := upTo(from, to-1)
			Expect(b.l.SaveCursors(nil)).To(Succeed())
			b.close()
			b.sim.edit(b.path(name), func(c []byte) []byte { return c[:left] })
			b.open()
			Expect(b.from(0)).To(Equal(upTo(0, 29, lost...)))
			Expect(b.l.Stats().Missing).To(Equal(uint64(1)))
			Expect(b.l.Stats().Torn).To(BeEquivalentTo(torn))
			Expect(b.logs.String()).To(ContainSubstring(fmt.Sprintf("missing: %s\" log=q from=%d to=%d at_most=%d", said, from, to, to-from)))
			b.fill(30, 32)
			Expect(b.from(0)).To(Equal(upTo(0, 32, lost...)))
		},
		Entry("behind a record", seg2, headerSize+7*size, 0, "the end of their file was cut", Offset(16), Offset(18)),
		Entry("within a record", seg2, headerSize+7*size+10, 1, "the end of their file was cut", Offset(16), Offset(18)),
		Entry("all", seg2, 0, 1, "the end of their file was cut", Offset(9), Offset(18)),
		Entry("of the last file", seg4, headerSize+size, 0, "there were more when cursors were saved, unless the power went just then", Offset(28), Offset(30)),
		Entry("all of the last file", seg4, 0, 1, "there were more when cursors were saved, unless the power went just then", Offset(27), Offset(30)),
	)

	It("is of a version that releases without attributes refuse, from the first attribute on", func() {
		b = newBench()
		versions := func() (all []byte) {
			for _, name := range b.files() {
				if c := b.sim.content(b.path(name)); strings.HasSuffix(name, segmentSuffix) {
					all = append(all, c[11])
				}
			}
			return all
		}
		with := of(5)
		with.Attribute = []byte("attribute")
		b.fill(0, 4)
		Expect(versions()).To(Equal([]byte{2}))
		Expect(b.l.Append([]Record{with})).To(Equal(Offset(5)))
		Expect(versions()).To(Equal([]byte{2, 3}))
		b.fill(6, 29)
		Expect(versions()).To(Equal([]byte{2, 3, 3, 3}))
		b.reopen()
		Expect(b.from(0)).To(Equal(upTo(0, 29)))
		b.fill(30, 31)
		Expect(versions()).To(Equal([]byte{2, 3, 3, 3, 2}))
		Expect(b.l.Append([]Record{with})).To(Equal(Offset(32)))
		Expect(versions()).To(Equal([]byte{2, 3, 3, 3, 2, 3}))
	})

	It("is not what a later version wrote", func() {
		Expect(b.l.SaveCursors([]byte("x"))).To(Succeed())
		b.close()
		for _, name := range []string{seg2, "cursors.0"} {
			old := b.sim.content(b.path(name))
			b.sim.edit(b.path(name), func(c []byte) []byte {
				c[11] += 2
				if name == seg2 {
					return append(appendSum(c[:40]), c[44:]...)
				}
				return appendSum(c[:33])
			})
			before := b.files()
			dir, err := OpenDir("/data", b.disk)
			Expect(err).NotTo(HaveOccurred())
			b.cfg.Dir = dir
			_, err = Open(b.cfg)
			var later *VersionError
			Expect(errors.As(err, &later)).To(BeTrue(), "%v", err)
			Expect(later.Version).To(Equal(uint32(4)))
			Expect(b.files()).To(Equal(before))
			Expect(dir.Close()).To(Succeed())
			b.sim.edit(b.path(name), func([]byte) []byte { return old })
		}
		b.open()
		Expect(b.from(0)).To(Equal(upTo(0, 29)))
	})

	It("is not the end of the last segment, which is cut wherever a write was interrupted", func() {
		whole := b.sim.content(b.path(seg4)) // without a footer
		for n := range len(whole) {
			b = newBench()
			b.dir.salt = func() uint64 { return 1 }
			b.fill(0, 29)
			b.sim.edit(b.path(seg4), func(c []byte) []byte { return c[:n] })
			b.kill()
			left := Offset(max(0, (n-headerSize)/size))
			Expect(b.from(0)).To(Equal(upTo(0, 26+left)), "cut at %d", n)
			Expect(b.l.Append([]Record{of(99)})).To(Equal(27+left), "cut at %d", n)
			b.reopen()
			Expect(b.from(0)).To(Equal(append(upTo(0, 26+left), 99)))
			Expect(b.l.Stats().Torn + b.l.Stats().Quarantined + b.l.Stats().Missing).To(BeZero())
		}
		for _, tail := range [][]byte{make([]byte, 5000), bytes.Repeat([]byte{0xff}, 5000), bytes.Repeat([]byte{0, 0, 0, 1}, 5000), []byte("x")} {
			b = newBench()
			b.fill(0, 29)
			b.sim.edit(b.path(seg4), func(c []byte) []byte { return append(c, tail...) })
			b.kill()
			Expect(b.from(0)).To(Equal(upTo(0, 29)))
			Expect(b.l.Stats().Torn).To(Equal(uint64(1)))
			Expect(b.l.Stats().TornBytes).To(Equal(uint64(len(tail))))
		}
	})
})

var _ = Describe("a durable log", func() {
	It("writes zeros ahead of its records, which are no damage after a crash", func() {
		b := newBench()
		b.cfg.Durable = true
		b.reopen()
		b.fill(0, 1)
		length := func() int { return len(b.sim.content(b.path(segmentName(0)))) }
		ahead := length()
		Expect(ahead).To(Equal(headerSize + 2*size + minReserve))
		b.fill(2, 4)
		Expect(length()).To(Equal(ahead), "an fsync is to find the file's size as it was")
		b.kill()
		Expect(b.from(0)).To(Equal(upTo(0, 4)))
		Expect(b.l.Stats().Torn + b.l.Stats().Quarantined).To(BeZero())
		Expect(length()).To(Equal(headerSize + 5*size + footerSize))
		b.fill(5, 7)
		b.reopen()
		Expect(b.from(0)).To(Equal(upTo(0, 7)))
		Expect(b.sim.content(b.path(segmentName(5)))).To(HaveLen(headerSize + 3*size + footerSize))
	})

	for _, durable := range []bool{false, true} {
		It(fmt.Sprint("saves cursors on a disk that is full, and is freed by that; durable: ", durable), func() {
			b := newBench()
			b.cfg.Durable = durable
			b.reopen()
			b.fill(0, 0)
			b.sim.capacity = b.sim.used()
			_, err := b.l.Append([]Record{of(1)})
			Expect(err).To(MatchError(ErrNoSpace))
			for i := range 5 {
				Expect(b.l.SaveCursors(fmt.Append(nil, "snapshot ", i))).To(Succeed())
			}
			Expect(b.l.Trim(1)).To(Succeed())
			b.fill(1, 1)
			b.kill()
			Expect(b.l.LoadCursors()).To(BeEquivalentTo("snapshot 4"))
		})
	}

	It("saves cursors after a crash on a full disk, again and again", func() {
		b := newBench()
		b.cfg.Durable = true
		b.reopen()
		b.fill(0, 0)
		Expect(b.l.SaveCursors([]byte("snapshot"))).To(Succeed())
		for i := range 5 {
			b.kill()
			b.sim.capacity = b.sim.used()
			for range i {
				Expect(b.l.SaveCursors(fmt.Append(nil, "snapshot ", i))).To(Succeed())
			}
			b.sim.capacity = b.sim.used()
		}
		b.kill()
		Expect(b.l.LoadCursors()).To(BeEquivalentTo("snapshot 4"))
	})

	It("takes no message before its files of cursors have room", func() {
		b := newBench()
		b.cfg.Durable = true
		b.reopen()
		b.sim.capacity = 3*minCursors - 1
		_, err := b.l.Append([]Record{of(0)})
		Expect(err).To(MatchError(ErrNoSpace))
		b.sim.capacity = 1 << 40
		b.fill(0, 0)
	})

	It("is as good where nothing can be written ahead", func() {
		b := newBench()
		b.cfg.Durable = true
		b.reopen()
		b.fill(0, 0)
		b.sim.capacity = int64(3*minCursors + headerSize + 3*size)
		b.fill(1, 2)
		_, err := b.l.Append([]Record{of(3)})
		Expect(err).To(MatchError(ErrNoSpace))
		b.sim.capacity = 1 << 40
		b.fill(3, 3)
		b.kill()
		Expect(b.from(0)).To(Equal(upTo(0, 3)))
	})
})

// appendSum appends the checksum of b.
func appendSum(b []byte) []byte {
	sum := layout{}.check(b, 0)
	return append(b, byte(sum>>24), byte(sum>>16), byte(sum>>8), byte(sum))
}

var _ = Describe("a folder of logs", func() {
	It("lists its logs and nothing else", func() {
		b := newBench()
		for _, name := range []string{"b", "..", ".", "x.log", "lock"} {
			b.cfg.Name = name
			l, err := Open(b.cfg)
			Expect(err).NotTo(HaveOccurred())
			_, err = l.Append([]Record{of(1)})
			Expect(err).NotTo(HaveOccurred())
			Expect(l.Close()).To(Succeed())
		}
		Expect(b.disk.Mkdir("/data/other")).To(Succeed())
		Expect(b.dir.Logs()).To(Equal([]string{".", "..", "b", "lock", "x.log"}))
	})

	DescribeTable("refuses names", func(name string) {
		b := newBench()
		b.cfg.Name = name
		_, err := Open(b.cfg)
		Expect(err).To(MatchError(ErrName))
	},
		Entry("without characters", ""), Entry("of a path", "a/b"), Entry("of a path above", "../a"), Entry("of a path on other systems", `a\b`),
		Entry("with a zero", "a\x00"), Entry("with other letters", "ä"), Entry("that are too long", strings.Repeat("a", maxName+1)),
	)

	It("refuses other nonsense, all at once", func() {
		_, err := Open(Config{Name: "/", SegmentBytes: 1, MaxBody: -1, Retain: Retain{Bytes: -1}})
		Expect(err).To(MatchError(And(ContainSubstring("Dir"), ContainSubstring("name"), ContainSubstring("SegmentBytes"), ContainSubstring("MaxBody"), ContainSubstring("Retain"))))
	})

	It("has no more files open than it may, whatever the number of logs", func() {
		b := newBench()
		b.close()
		var logs []*Files
		for process := range Offset(3) {
			b.dir = testkit.Result(OpenDir("/data", b.disk)).Must(ginkgo.GinkgoT())
			b.dir.Bound(20)
			logs = nil
			for i := range 50 {
				b.cfg.Dir, b.cfg.Name = b.dir, fmt.Sprint("log", i)
				b.l = testkit.Result(Open(b.cfg)).Must(ginkgo.GinkgoT())
				Expect(b.from(0)).To(HaveLen(25 * int(process)))
				logs = append(logs, b.l)
				Expect(b.sim.open).To(BeNumerically("<=", 20+5))
			}
			for _, b.l = range logs {
				b.fill(25*process, 25*process+24)
				Expect(b.from(0)).To(HaveLen(25 * int(process+1)))
				Expect(b.sim.open).To(BeNumerically("<=", 20+5))
			}
			for _, l := range logs {
				Expect(l.Close()).To(Succeed())
			}
			Expect(b.sim.open).To(BeZero())
			Expect(b.dir.files.Load()).To(BeZero())
			Expect(b.dir.mu.opened).To(BeEmpty())
			Expect(b.dir.Close()).To(Succeed())
		}
	})

	It("has each log open once, and itself", func() {
		b := newBench()
		_, err := Open(b.cfg)
		Expect(err).To(MatchError(ErrInUse))
		Expect(b.dir.Close()).To(MatchError(ErrInUse))
		closes := b.dir.Closes()
		Expect(b.l.Close()).To(Succeed())
		Expect(closes).To(BeClosed())
		_, err = OpenDir("/data", b.disk)
		Expect(err).To(MatchError(ErrInUse))
		Expect(b.dir.Close()).To(Succeed())
		_, err = Open(b.cfg)
		Expect(err).To(MatchError(ErrClosed))
	})

	It("finishes a removal that was interrupted", func() {
		b := newBench()
		b.fill(0, 29)
		b.sim.fault = failing("remove", errIO)
		Expect(b.l.Remove()).To(MatchError(errIO))
		b.sim.fault = nil
		Expect(b.dir.Close()).To(Succeed())
		b.open()
		Expect(b.disk.List("/data")).To(BeEmpty())
	})

	It("reports whether the disk takes anything", func() {
		b := newBench()
		Expect(b.dir.Probe(1000)).To(Succeed())
		b.sim.capacity = 10
		Expect(b.dir.Probe(1000)).To(MatchError(ErrNoSpace))
		Expect(b.disk.List("/data")).To(BeEmpty())
	})
})
