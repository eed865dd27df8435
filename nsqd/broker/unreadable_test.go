package broker_test

import (
	"os"
	"path/filepath"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/diskqueue"
)

// rewrite replaces what is in a queue on disk, which nobody has open.
func rewrite(path, name string, change func(records [][]byte) [][]byte) {
	GinkgoHelper()
	dir, err := diskqueue.OpenDir(path, diskqueue.OS())
	Expect(err).NotTo(HaveOccurred())
	q, err := diskqueue.Open(diskqueue.Config{Dir: dir, Name: name})
	Expect(err).NotTo(HaveOccurred())
	var records [][]byte
	for held, _ := q.Held(); len(records) < int(held); {
		read, err := q.Read(1<<20, 1<<30, nil)
		Expect(err).NotTo(HaveOccurred())
		for _, r := range read {
			records = append(records, r.Data)
		}
	}
	records = change(records)
	Expect(q.Empty()).To(Succeed())
	_, err = q.Append(records...)
	Expect(err).NotTo(HaveOccurred())
	Expect(q.Close()).To(Succeed())
	Expect(dir.Close()).To(Succeed())
}

var _ = Describe("a message on disk that cannot be read", func() {
	const total = 300
	var path string
	BeforeEach(func() {
		path = GinkgoT().TempDir()
		b, stop := restored(path, 100, false)
		Expect(topic(b, "t").CreateChannel("c")).To(Succeed())
		publishAll(topic(b, "t"), 0, total)
		Eventually(func() int { return topic(b, "t").Stats().Waiting }).WithTimeout(20 * time.Second).Should(BeZero())
		stop()
	})
	takeAll := func(b *broker.Broker, want int) []string {
		GinkgoHelper()
		r := read(topic(b, "t"), "c", 100, true)
		Eventually(r.count).WithTimeout(20 * time.Second).Should(Equal(want))
		Eventually(func() int { return held(b, "c") }).Should(BeZero())
		return bodies(r)
	}

	It("is kept, counted and said, and the others go on", func() {
		var later [][]byte
		for _, name := range []string{"t##c", "t#c"} { // what memory held, and what was on disk
			rewrite(path, name, func(records [][]byte) [][]byte {
				Expect(len(records)).To(BeNumerically(">", 3))
				for _, i := range []int{0, 2, len(records) - 1} {
					records[i][0] = 9 // a version that does not exist yet
					later = append(later, records[i])
				}
				return records
			})
		}
		for range 2 { // the second time it finds what the first has put aside
			b, stop := restored(path, 50, false)
			if b.Unreadable() < int64(len(later)) { // those on disk are found as they are read
				Expect(takeAll(b, total-len(later))).To(HaveLen(total - len(later)))
			}
			Expect(b.Unreadable()).To(BeEquivalentTo(len(later)))
			stop()
		}
		var found [][]byte
		for _, name := range []string{"t##c##unreadable", "t#c##unreadable"} {
			rewrite(path, name, func(records [][]byte) [][]byte { found = append(found, records...); return records })
		}
		Expect(found).To(Equal(later))
		Expect(filepath.Glob(filepath.Join(path, "t#*c.queue"))).To(BeEmpty())
	})

	It("stays where it is when it cannot be put aside, to be found by the next process", func() {
		rewrite(path, "t#c", func(records [][]byte) [][]byte { records[len(records)-1][0] = 9; return records })
		disk := diskqueue.OS()
		mkdir := disk.Mkdir
		disk.Mkdir = func(folder string) error {
			if filepath.Base(folder) == "t#c##unreadable.queue" {
				return syscall.ENOSPC
			}
			return mkdir(folder)
		}
		b, stop := opened(path, func(c *broker.Config) { c.Capacity = 50 }, func(c *broker.StorageConfig) { c.Disk = &disk })
		Expect(b.Restore()).To(Succeed())
		takeAll(b, total-1)
		Expect(b.Unreadable()).To(BeZero())
		stop()
		b, _ = restored(path, 50, false)
		Eventually(b.Unreadable).WithTimeout(20 * time.Second).Should(BeEquivalentTo(1))
	})

	It("is not taken for one of a channel that is called unreadable", func() {
		path := GinkgoT().TempDir()
		for _, capacity := range []int{total + 1, 50} { // all in memory; and some of it
			b, stop := restored(path, capacity, false)
			Expect(topic(b, "t").CreateChannel("unreadable")).To(Succeed())
			publishAll(topic(b, "t"), 0, total)
			Eventually(func() int { return held(b, "unreadable") }).WithTimeout(20 * time.Second).Should(BeNumerically(">=", total))
			stop()
			for range 2 {
				b, stop = restored(path, 50, false)
				Expect(b.Unreadable()).To(BeZero())
				stop()
			}
			b, stop = restored(path, 50, false)
			r := read(topic(b, "t"), "unreadable", 100, true)
			Eventually(r.count).WithTimeout(20 * time.Second).Should(Equal(total))
			Eventually(func() int { return held(b, "unreadable") }).Should(BeZero())
			stop()
		}
	})

	It("is kept in its damaged file when all others are done with, and that brings no topic back", func() {
		var damaged []string
		for _, name := range []string{"t##c", "t#c"} {
			files, err := filepath.Glob(filepath.Join(path, name+".queue", "*.seg"))
			Expect(err).NotTo(HaveOccurred())
			Expect(files).NotTo(BeEmpty())
			b, err := os.ReadFile(files[0])
			Expect(err).NotTo(HaveOccurred())
			b[60]++ // in the first record
			Expect(os.WriteFile(files[0], b, 0o600)).To(Succeed())
			damaged = append(damaged, files[0]+".bad")
		}
		for range 2 {
			b, stop := restored(path, 50, false)
			if held(b, "c") > 0 {
				takeAll(b, total-2)
			}
			stop()
			for _, file := range damaged {
				Expect(file).To(BeARegularFile())
			}
		}
		Expect(os.Remove(filepath.Join(path, "metadata.json"))).To(Succeed())
		b, _ := restored(path, 50, false)
		Expect(b.Topics()).To(BeEmpty())
	})
})
