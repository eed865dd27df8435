package conn_test

import (
	"errors"
	"os"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/nsq/wire"
)

var _ = overBoth("a process out of descriptors", func() {
	It("accepts again once there are some", func() {
		n := start(nil)
		first := n.dial() // before the answer, the server may not serve yet
		first.send(wire.AppendPub(nil, "t", []byte("x")))
		first.expect(wire.FrameResponse, "OK")
		var limit unix.Rlimit
		Expect(unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)).To(Succeed())
		open, err := os.ReadDir("/proc/self/fd")
		Expect(err).NotTo(HaveOccurred())
		low := limit
		low.Cur = uint64(len(open) + 100)
		Expect(unix.Setrlimit(unix.RLIMIT_NOFILE, &low)).To(Succeed())
		DeferCleanup(func() { Expect(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)).To(Succeed()) })

		var spare []int
		DeferCleanup(func() {
			for _, fd := range spare {
				unix.Close(fd)
			}
		})
		for {
			fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if errors.Is(err, unix.EMFILE) {
				break
			}
			Expect(err).NotTo(HaveOccurred())
			spare = append(spare, fd)
		}
		give := func() {
			Expect(unix.Close(spare[0])).To(Succeed())
			spare = spare[1:]
		}
		give() // for the client; no descriptor is left for the server
		p := n.dial()
		Eventually(func() uint64 { return n.server.Stats().Refused }).Should(BeNumerically(">", 0))
		give()
		p.send(wire.AppendPub(nil, "t", []byte("x")))
		p.expect(wire.FrameResponse, "OK")
	})
})
