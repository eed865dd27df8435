package broker_test

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
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
			Eventually(t.Spilling).Should(BeZero(), "everything is done with")
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

// What a topic takes that had a few messages and is left alone, after reports to a
// control plane, is what is here for each of 100,000 of them.
func TestIdleTopicsAreSmall(t *testing.T) {
	for _, c := range []struct {
		name    string
		through bool
		most    uint64 // bytes of heap
	}{{"in memory", false, 16 << 10}, {"stored first", true, 18 << 10}} {
		t.Run(c.name, func(t *testing.T) {
			const topics = 200
			dir := t.TempDir()
			st, err := broker.OpenStorage(broker.StorageConfig{
				Path: filepath.Join(dir, "messages"), Metadata: filepath.Join(dir, "metadata.json"),
				MaxRecord: 1 << 20, Overflow: 100, WriteThrough: c.through, Log: slog.New(slog.DiscardHandler),
			})
			testkit.Must(t, err)
			defer st.Close()
			b := testkit.Result(broker.New(broker.Config{Capacity: 1000, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st})).Must(t)
			defer b.Close()
			testkit.Must(t, b.Restore())
			before := heap()
			all := make([]*broker.Topic, topics)
			for i := range all {
				all[i] = testkit.Result(b.CreateTopic(fmt.Sprintf("topic-%d", i))).Must(t)
				use(t, b, all[i])
			}
			for range 3 {
				b.Report(true)
			}
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for _, top := range all {
				for top.Spilling() > 0 {
					<-tick.C
				}
			}
			each := (heap() - before) / topics
			t.Logf("%d bytes a topic", each)
			if each > c.most {
				t.Errorf("%d bytes a topic, want at most %d", each, c.most)
			}
			runtime.KeepAlive(all)
		})
	}
}

// use sends messages through a topic.
func use(t *testing.T, b *broker.Broker, top *broker.Topic) {
	t.Helper()
	wake := make(chan struct{}, 1)
	sub, err := top.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	testkit.Must(t, err)
	defer sub.Close()
	testkit.Must(t, sub.Ready(100))
	const messages = 10
	for range messages {
		testkit.Must(t, top.Publish(b.Now(), 0, broker.Published{Body: make([]byte, 100), Arrival: stamp.Arrival{At: b.Now()}}))
	}
	for finished := 0; finished < messages; {
		<-wake
		var out broker.Outgoing
		sub.Take(&out, plenty)
		sub.Wrote(&out)
		for in := out.Frames; len(in) > 0; {
			_, data, n, err := wire.ParseFrame(in, plenty)
			testkit.Must(t, err)
			m, err := wire.ParseMessage(data)
			if err == nil {
				err = sub.Finish(m.ID)
			}
			testkit.Must(t, err)
			finished++
			in = in[n:]
		}
	}
}

// heap is what is in use, in bytes.
func heap() uint64 {
	for range 3 { // what pools have goes with the second
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
