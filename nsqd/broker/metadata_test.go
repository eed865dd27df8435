package broker_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/tokenbucket"
)

// file returns the path of the metadata in the folder of stored.
func file(path string) string { return filepath.Join(path, "metadata.json") }

// crashed returns a copy of the folder as a process leaves the folder if the process ends now.
func crashed(path string) string {
	GinkgoHelper()
	to := GinkgoT().TempDir()
	// If files are replaced during a round, another round copies the folder again.
	Eventually(func() error {
		if err := os.RemoveAll(to); err != nil {
			return err
		}
		return os.CopyFS(to, os.DirFS(path))
	}).Should(Succeed())
	return to
}

// names returns the names of the topics, and of their channels after a colon. A paused topic or channel has an
// exclamation mark.
func names(b *broker.Broker) (all []string) {
	mark := func(paused bool) string {
		if paused {
			return "!"
		}
		return ""
	}
	for _, t := range b.Topics() {
		s := t.Stats()
		name := s.Name + mark(s.Paused) + ":"
		for _, c := range s.Channels {
			name += " " + c.Name + mark(c.Paused)
		}
		all = append(all, name)
	}
	return all
}

var _ = Describe("what a broker records besides messages", func() {
	share := tokenbucket.Share{Rate: tokenbucket.PerSecond(2.5), Burst: 3}

	It("is the same after a restart, and after a crash once it is recorded", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		topic(b, "empty")
		t := topic(b, "t")
		for _, c := range []string{"a", "b", "gone", "e#ephemeral"} {
			Expect(t.CreateChannel(c)).To(Succeed())
		}
		Expect(t.PauseChannel("b")).To(Succeed())
		Expect(t.DeleteChannel("gone")).To(Succeed())
		topic(b, "u#ephemeral")
		topic(b, "paused").Pause()
		limited := topic(b, "limited")
		limited.Contract(share, true)
		limited.Pause()
		limited.Unpause()
		free := topic(b, "free")
		free.Contract(share, true)
		free.RemoveContract()
		topic(b, "deleted")
		Expect(b.DeleteTopic("deleted")).To(Succeed())
		b.Recorded()
		want := []string{"empty:", "free:", "limited:", "paused!:", "t: a b!"}
		check := func(b *broker.Broker) {
			GinkgoHelper()
			Expect(names(b)).To(Equal(want))
			Expect(topic(b, "free").Stats().Limited).To(BeFalse())
			s := topic(b, "limited").Stats()
			Expect(s.Limited).To(BeTrue())
			Expect(s.Share).To(Equal(share))
			Expect(s.Tokens).To(BeNumerically("<", share.Burst*1000), "the bucket may have been used up before")
		}
		other, _ := stored(crashed(path), false)
		check(other)
		stop()
		b, stop = stored(path, false)
		check(b)
		Expect(topic(b, "t").UnpauseChannel("b")).To(Succeed())
		topic(b, "paused").Unpause()
		stop()
		b, _ = stored(path, false)
		Expect(names(b)).To(Equal([]string{"empty:", "free:", "limited:", "paused:", "t: a b"}))
	})

	It("is complete after a crash, with the changes of a large file", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		var wg sync.WaitGroup
		for i := range 700 {
			wg.Go(func() { // changes of several goroutines share a write
				defer GinkgoRecover()
				Expect(topic(b, fmt.Sprintf("t%03d", i)).CreateChannel("channel")).To(Succeed())
			})
		}
		wg.Wait()
		Expect(b.Recorded()).To(Succeed())
		appended := 0
		for range 2 { // one of the changes may find the changes as large as the file
			Expect(topic(b, "t007").Pause()).To(Succeed())
			Expect(b.Recorded()).To(Succeed())
			if _, err := os.Stat(file(path) + ".changes"); err == nil {
				appended++
			}
		}
		Expect(appended).To(BeNumerically(">=", 1))
		Expect(topic(b, "t008").CreateChannel("late")).To(Succeed())
		Expect(topic(b, "t009").PauseChannel("channel")).To(Succeed())
		Expect(b.DeleteTopic("t010")).To(Succeed())
		topic(b, "new")
		Expect(b.Recorded()).To(Succeed())
		want := names(b)
		other, _ := stored(crashed(path), false)
		Expect(names(other)).To(Equal(want))
		stop()
		Expect(file(path) + ".changes").NotTo(BeAnExistingFile())
		b, _ = stored(path, false)
		Expect(names(b)).To(Equal(want))
	})

	It("does not include a contract that is given anew at each start, and which stands", func() {
		path := GinkgoT().TempDir()
		first, end := opened(path, func(c *broker.Config) {
			c.Presets = map[string]metadata.Contract{"preset": {RateMilli: 1, Burst: 1}}
		})
		Expect(first.Restore()).To(Succeed())
		Expect(topic(first, "preset").Stats().Limited).To(BeTrue())
		topic(first, "kept").Contract(share, false)
		end()
		other := metadata.Contract{RateMilli: 7, Burst: 7}
		b := storedWith(path, func(c *broker.Config) { c.Presets = map[string]metadata.Contract{"kept": other} })
		Expect(topic(b, "preset").Stats().Limited).To(BeFalse())
		Expect(topic(b, "kept").Stats().Share).To(Equal(other.Share()))
	})

	It("has no contract for a broker that a loaddistributor gives them, and has its pauses", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		topic(b, "t").Contract(share, false)
		topic(b, "t").Pause()
		stop()
		b = storedWith(path, func(c *broker.Config) { c.AutoCreate = false })
		t, err := b.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(t.Stats().Limited).To(BeTrue())
		Expect(t.Stats().Share.IsZero()).To(BeTrue())
		Expect(t.Stats().Paused).To(BeTrue())
	})

	It("is which topic of its name it is, and has a deletion before the order is carried out", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		is := &srtmv1.TopicIdentity{Log: 1 << 63, Created: 7}
		Expect(b.Node().Prepare("t", listed("c"), 1, time.Second, 0.9, 0, is)).Error().NotTo(HaveOccurred())
		Expect(b.Node().Prepare("t", nil, 0, time.Second, 0.9, 0, nil)).Error().NotTo(HaveOccurred())
		Expect(publish(topic(b, "t"), "old")).To(Succeed())
		stop()
		b = storedWith(path, func(c *broker.Config) { c.AutoCreate = false })
		Expect(proto.Equal(b.Node().Identity("t"), is)).To(BeTrue())
		Expect(b.Node().Remove("t")).To(Succeed())
		Expect(b.Node().Identity("t")).To(BeNil())
		after := storedWith(crashed(path), func(*broker.Config) {})
		Expect(after.Node().Topics()).To(BeEmpty())
	})

	It("lets nothing leave a paused topic or channel while it is restored", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		t.Pause()
		publishAll(t, 0, 50)
		stop()
		b, stop = stored(path, false)
		s := topic(b, "t").Stats()
		Expect(s.Waiting).To(Equal(50))
		Expect(s.Channels[0].Ready).To(BeZero())
		stop()
	})

	It("is an error when it is damaged, and stays as it is", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		Expect(topic(b, "t").CreateChannel("c")).To(Succeed())
		stop()
		was, err := os.ReadFile(file(path))
		Expect(err).NotTo(HaveOccurred())
		damaged := []byte(strings.Replace(string(was), `"c"`, `"d"`, 1))
		Expect(os.WriteFile(file(path), damaged, 0o600)).To(Succeed())

		b, end := opened(path, func(*broker.Config) {})
		topic(b, "u") // as a flag might
		Expect(b.Restore()).To(MatchError(metadata.ErrDamaged))
		topic(b, "v")
		b.Recorded()
		end()
		Expect(os.ReadFile(file(path))).To(Equal(damaged))
	})

	It("is recorded when that works again, and the log and Health report it", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		clear := obstruct(path)
		topic(b, "t")
		Expect(b.Recorded()).To(MatchError(broker.ErrStorage)) // does not wait forever
		Expect(b.Health()).To(MatchError(ContainSubstring("metadata.json.new")))
		clear()
		Eventually(b.Health).Should(Succeed())
		other, _ := stored(crashed(path), false)
		Expect(names(other)).To(Equal([]string{"t:"}))
		stop()
	})
})
