package broker_test

import (
	"os"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsqd/broker"
)

var _ = Describe("a message on disk that cannot be read", func() {
	const total = 300
	takeAll := func(b *broker.Broker, want int) []string {
		GinkgoHelper()
		r := read(topic(b, "t"), "c", 100, true)
		Eventually(r.count).Should(Equal(want))
		Eventually(func() int { return held(b, "c") }).Should(BeZero())
		return bodies(r)
	}

	It("is kept in its damaged file, counted and logged; other files still work, and no deleted topic returns", func() {
		path := GinkgoT().TempDir()
		b, stop := restored(path, 100, false)
		Expect(topic(b, "t").CreateChannel("c")).To(Succeed())
		publishAll(topic(b, "t"), 0, total)
		Eventually(func() int { return topic(b, "t").Stats().Waiting }).Should(BeZero())
		stop()
		files, err := filepath.Glob(filepath.Join(path, "t.log", "*.seg"))
		Expect(err).NotTo(HaveOccurred())
		Expect(files).NotTo(BeEmpty())
		content, err := os.ReadFile(files[0])
		Expect(err).NotTo(HaveOccurred())
		content[len(content)/2]++
		Expect(os.WriteFile(files[0], content, 0o600)).To(Succeed())
		for range 2 {
			b, stop := restored(path, 50, false)
			if held(b, "c") > 0 {
				takeAll(b, total-1)
				Expect(topic(b, "t").Stats().Channels[0].Counters.Lost).To(BeEquivalentTo(1))
			}
			Expect(b.Unreadable()).To(BeEquivalentTo(1))
			stop()
			Expect(filepath.Glob(filepath.Join(path, "t.log", "*.seg.*"))).To(HaveLen(1))
		}
		Expect(os.Remove(filepath.Join(path, "metadata.json"))).To(Succeed())
		b, stop = restored(path, 50, false)
		Expect(b.Topics()).To(BeEmpty())
		By("a new topic of that name")
		publishAll(topic(b, "t"), 0, total)
		stop()
		b, _ = restored(path, 50, false)
		Expect(takeAll(b, total)).To(Equal(numbers(0, total)))
		Expect(filepath.Glob(filepath.Join(path, "t.log", "*.seg.*"))).To(HaveLen(1))
	})
})
