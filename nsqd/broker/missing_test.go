package broker_test

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/gbytes"

	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

var _ = Describe("files of messages that are changed while nsqd is down", func() {
	const total = 400
	var path string
	var errors *gbytes.Buffer
	BeforeEach(func() { path = GinkgoT().TempDir() })

	// start opens the broker. errors collects the errors that the broker logs.
	start := func(set ...func(*broker.StorageConfig)) (b *broker.Broker, stop func(), err error) {
		GinkgoHelper()
		errors = gbytes.NewBuffer()
		set = append(set, func(c *broker.StorageConfig) {
			c.Log = slog.New(slog.NewTextHandler(io.MultiWriter(errors, GinkgoWriter), &slog.HandlerOptions{Level: slog.LevelError}))
		})
		b, stop = opened(path, func(*broker.Config) {}, set...)
		return b, stop, b.Restore()
	}
	fsync := func(c *broker.StorageConfig) { c.Fsync, c.SegmentBytes = true, 4<<10 }
	memory := func(c *broker.StorageConfig) { c.SegmentBytes = 4 << 10 }
	modes := map[string]func(*broker.StorageConfig){"fsync": fsync, "memory": memory}
	// leave stores messages of two topics, and ends the broker.
	leave := func(set func(*broker.StorageConfig)) {
		GinkgoHelper()
		b, stop, err := start(set)
		Expect(err).NotTo(HaveOccurred())
		for _, name := range []string{"t", "u"} {
			Expect(topic(b, name).CreateChannel("c")).To(Succeed())
			publishAll(topic(b, name), 0, total)
		}
		Expect(errors.Contents()).To(BeEmpty())
		stop()
	}
	removeAll := func(pattern string) {
		GinkgoHelper()
		files, err := filepath.Glob(filepath.Join(path, "t.log", pattern))
		Expect(err).NotTo(HaveOccurred())
		Expect(files).NotTo(BeEmpty())
		for _, f := range files {
			Expect(os.Remove(f)).To(Succeed())
		}
	}
	missing := func(b *broker.Broker, name string) uint64 { return topic(b, name).Stats().Disk.Missing }
	lines := func() int { return strings.Count(string(errors.Contents()), "level=ERROR") }

	for mode, set := range modes {
		DescribeTable("are logged as missing with topic and path, counted once, and the broker continues, with "+mode,
			func(damage func(), said string, lost bool) {
				leave(set)
				damage()
				b, stop, err := start(set)
				Expect(err).NotTo(HaveOccurred())
				Expect(string(errors.Contents())).To(And(ContainSubstring(said), ContainSubstring("topic=t "), ContainSubstring(filepath.Join(path, "t.log"))))
				Expect(lines()).To(Equal(1))
				Expect(missing(b, "t")).To(BeEquivalentTo(1))
				Expect(missing(b, "u")).To(BeZero())
				Eventually(read(topic(b, "u"), "c", 50, true).count).Should(Equal(total))
				r := read(topic(b, "t"), "c", 50, true)
				before := total
				if lost {
					before = 0
				}
				Eventually(r.count).Should(Equal(before))
				By("the topic's next messages")
				publishAll(topic(b, "t"), 0, 50)
				Eventually(r.count).Should(Equal(before + 50))
				stop()
				b, _, err = start(set)
				Expect(err).NotTo(HaveOccurred())
				Expect(lines()).To(BeZero(), "it was said")
				Expect(missing(b, "t")).To(BeZero())
			},
			Entry("the folder", func() { Expect(os.RemoveAll(filepath.Join(path, "t.log"))).To(Succeed()) }, "the topic's log is missing", true),
			Entry("all files in it", func() { removeAll("*") }, "the topic's log is empty", true),
			Entry("the segments", func() { removeAll("*.seg") }, "unfinished messages are missing", true),
			Entry("the cursors", func() { removeAll("cursors.*") }, "cursor files are missing", false),
		)
	}

	It("are reported as missing again where the next process was killed before it stored anything", func() {
		leave(fsync)
		Expect(os.RemoveAll(filepath.Join(path, "t.log"))).To(Succeed())
		b, _, err := start(fsync)
		Expect(err).NotTo(HaveOccurred())
		Expect(durably(topic(b, "t"), "x")).To(Succeed())
		path = crashed(path)
		Expect(os.RemoveAll(filepath.Join(path, "t.log"))).To(Succeed())
		b, _, err = start(fsync)
		Expect(err).NotTo(HaveOccurred())
		Expect(missing(b, "t")).To(BeEquivalentTo(1), "the message that was stored since")
	})

	It("bring back their topics, and that is reported, where the metadata file is missing", func() {
		leave(fsync)
		Expect(os.Remove(filepath.Join(path, "metadata.json"))).To(Succeed())
		b, _, err := start(fsync)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(errors.Contents())).To(And(ContainSubstring("topic=t "), ContainSubstring("topic=u "), ContainSubstring("metadata.json")))
		Expect(lines()).To(Equal(2))
		Eventually(read(topic(b, "t"), "c", 50, true).count).Should(Equal(total))
	})

	It("end the start with topic and path where they cannot be read", func() {
		leave(fsync)
		Expect(os.RemoveAll(filepath.Join(path, "t.log"))).To(Succeed())
		Expect(os.WriteFile(filepath.Join(path, "t.log"), nil, 0o600)).To(Succeed())
		_, stop, err := start(fsync)
		Expect(err).To(MatchError(And(ContainSubstring("topic t"), ContainSubstring(filepath.Join(path, "t.log")), ContainSubstring("not a directory"))))
		stop()
		Expect(os.Remove(filepath.Join(path, "t.log"))).To(Succeed())
		By("permissions, which root does not need")
		disk := commitlog.OS()
		open := disk.Open
		disk.Open = func(name string) (commitlog.File, error) {
			if strings.Contains(name, "u.log") {
				return nil, &os.PathError{Op: "open", Path: name, Err: syscall.EACCES}
			}
			return open(name)
		}
		_, _, err = start(fsync, func(c *broker.StorageConfig) { c.Disk = &disk })
		Expect(err).To(MatchError(And(ContainSubstring("topic u"), ContainSubstring(filepath.Join(path, "u.log")), ContainSubstring("permission denied"))))
	})

	for mode, set := range modes {
		It("are not reported as missing where nothing is, with "+mode, func() {
			for name, use := range map[string]func(b *broker.Broker){
				"without a message": func(b *broker.Broker) { topic(b, "t") },
				"with all finished": func(b *broker.Broker) {
					r := read(topic(b, "t"), "c", 100, true)
					publishAll(topic(b, "t"), 0, total)
					Eventually(r.count).Should(BeNumerically(">=", total), "after a crash some come again")
					Eventually(func() int { return held(b, "c") }).Should(BeZero())
				},
				"with messages": func(b *broker.Broker) {
					Expect(topic(b, "t").CreateChannel("c")).To(Succeed())
					publishAll(topic(b, "t"), 0, total)
				},
				"deleted": func(b *broker.Broker) {
					publishAll(topic(b, "t"), 0, total)
					Expect(b.DeleteTopic("t")).To(Succeed())
				},
				"deleted and created": func(b *broker.Broker) {
					publishAll(topic(b, "t"), 0, total)
					Expect(b.DeleteTopic("t")).To(Succeed())
					topic(b, "t")
				},
			} {
				path = GinkgoT().TempDir()
				for round := range 3 {
					By(fmt.Sprint(name, round))
					b, stop, err := start(set)
					Expect(err).NotTo(HaveOccurred())
					use(b)
					Expect(b.Recorded()).To(Succeed())
					if round == 1 {
						path = crashed(path)
					} else {
						stop()
					}
					Expect(lines()).To(BeZero())
				}
				b, _, err := start(set)
				Expect(err).NotTo(HaveOccurred())
				Expect(lines()).To(BeZero())
				Expect(missing(b, "t")).To(BeZero())
			}
		})
	}

	It("are refused and not marked while the metadata file cannot record that there are messages", func() {
		b, _, err := start(fsync)
		Expect(err).NotTo(HaveOccurred())
		t := topic(b, "t")
		Expect(b.Recorded()).To(Succeed())
		temporary := filepath.Join(path, "metadata.json.new")
		Expect(os.RemoveAll(temporary)).To(Succeed())
		Expect(os.MkdirAll(filepath.Join(temporary, "x"), 0o700)).To(Succeed())
		for range 3 {
			Expect(publish(t, "refused")).To(MatchError(broker.ErrStorage))
		}
		Expect(os.RemoveAll(temporary)).To(Succeed())
		Eventually(func() error { return publish(t, "stored") }).Should(Succeed())
		r := read(t, "c", 10, true)
		Eventually(r.count).Should(Equal(1))
		Expect(bodies(r)).To(Equal([]string{"stored"}))
	})
})
