package broker_test

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("an idle topic that stores before it accepts", func() {
	It("has no goroutine and no timer, whether it holds messages or not, and lets go of its files", func() {
		b, _ := stored(GinkgoT().TempDir(), true)
		t := topic(b, "t")
		r := read(t, "c", 100, true)
		files := func() int { return t.Stats().Disk.Segments }
		for i := range 3 {
			publishAll(t, 100*i, 100*i+50)
			Eventually(r.count).Should(Equal(100*i + 50))
			t.Pause()
			publishAll(t, 100*i+50, 100*i+100)
			Eventually(t.Spilling).Should(BeZero(), "the topic waits")
			Expect(files()).NotTo(BeZero())
			t.Unpause()
			Eventually(r.count).Should(Equal(100*i + 100))
			Eventually(t.Spilling).Should(BeZero(), "every message is finished")
			Expect(files()).To(BeZero())
		}
		t.Pause()
		publishAll(t, 300, 350)
		Eventually(t.Spilling).Should(BeZero())
		t.Empty()
		Eventually(t.Spilling).Should(BeZero())
		Eventually(files).Should(BeZero(), "no channel keeps what it had last")
	})
})
