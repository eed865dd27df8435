package emulate_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/emulate"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestEmulate(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "emulate")
}

const topic = "sensors"

// valid is a configuration without an address.
func valid() emulate.Config {
	cfg := emulate.Config{
		Load: load.Default(), Duration: 200 * time.Millisecond, Topic: topic, Channel: "c",
		Connect: testkit.Hang, Drain: testkit.Hang, Workers: 1, MaxOutstanding: 100, Heartbeat: time.Second,
	}
	cfg.Load.Spec.Publishers, cfg.Load.Spec.Rate = 20, 50
	return cfg
}

var _ = Describe("a run", func() {
	var (
		log       *fake.Log
		a, b      *fake.Broker
		placement *fake.Placement
		lookup    *fake.Lookup
		cfg       emulate.Config
		ctx       context.Context
		cancel    context.CancelFunc
	)
	BeforeEach(func() {
		log = &fake.Log{}
		var err error
		a, err = fake.NewBroker("a", log)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(a.Close)
		b, err = fake.NewBroker("b", log)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(b.Close)
		placement, err = fake.NewPlacement()
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(placement.Close)
		lookup = fake.NewLookup()
		DeferCleanup(lookup.Close)
		cfg = valid()
		cfg.Subscribe = true
		ctx, cancel = context.WithTimeout(context.Background(), testkit.Hang)
		DeferCleanup(func() { cancel() })
	})
	build := func() *load.Load {
		GinkgoHelper()
		Expect(cfg.Validate()).To(Succeed())
		l, err := cfg.Load.Build()
		Expect(err).NotTo(HaveOccurred())
		return l
	}
	run := func(progress func(*report.Progress)) (*report.Report, error) {
		GinkgoHelper()
		return emulate.Run(ctx, cfg, build(), progress)
	}
	// reported runs the emulator and returns the run's report.
	reported := func(progress func(*report.Progress)) *report.Report {
		GinkgoHelper()
		r, err := run(progress)
		Expect(err).NotTo(HaveOccurred())
		return r
	}
	offered := func() uint64 {
		return uint64(len(schedule.Arrivals(schedule.Until(cfg.Load.Spec.Stream(), cfg.Duration))))
	}
	// placed puts the first half of the publishers on a, the others on b.
	placed := func() {
		cfg.Loaddistributor, cfg.Lookupd = placement.Address(), []string{lookup.Address()}
		var ids []string
		for _, s := range cfg.Load.Spec.Sources() {
			ids = append(ids, s.ID)
		}
		placement.Place(topic, a.Address(), ids[:10]...)
		placement.Place(topic, b.Address(), ids[10:]...)
		lookup.Set(topic, a, b)
	}

	It("accounts for every message at one broker", func() {
		cfg.Nsqd = a.Address()
		r := reported(nil)
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Offered).To(Equal(offered()))
		Expect(*r.Account).To(SatisfyAll(
			HaveField("Accepted", offered()), HaveField("Delivered", offered()), HaveField("Lost", BeZero()), HaveField("Duplicated", BeZero())))
		Expect(r.EndToEnd.Count).To(BeNumerically("==", offered()))
		Expect(r.EndToEnd.Clamped).To(BeZero(), "nothing comes before it was to be sent")
		Expect(r.Seconds).To(Equal(0.2))
		Expect(r.OfferedRate).To(BeNumerically("~", float64(offered())/0.2, 1e-6))
		Expect(r.Interrupted).To(BeFalse())
	})

	It("carries thousands of connections", func() {
		cfg.Nsqd = a.Address()
		cfg.Load.Spec.Publishers, cfg.Load.Spec.Rate, cfg.Duration = 2000, 1, 500*time.Millisecond
		r := reported(nil)
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Publishers).To(Equal(2000))
		Expect(r.Account.Delivered).To(Equal(offered()))
		Expect(r.Lost).To(BeZero())
		at := map[string]bool{}
		for _, e := range log.Events() {
			if e.Kind == fake.Connect {
				at[e.Client] = true
			}
		}
		Expect(len(at)).To(BeNumerically(">=", 2000), "each publisher has a connection of its own")
	})

	It("works without a subscriber", func() {
		cfg.Nsqd, cfg.Subscribe = a.Address(), false
		r := reported(nil)
		Expect(r.Account).To(BeNil())
		Expect(r.EndToEnd).To(BeNil())
		Expect(r.Accepted).To(Equal(offered()))
	})

	It("goes where the loaddistributor places it, and finds the topic by lookup", func() {
		placed()
		r := reported(nil)
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Account.Delivered).To(Equal(offered()))
		at := map[string]bool{}
		for _, e := range log.Events() {
			if e.Kind == fake.Pub {
				at[e.Broker] = true
			}
		}
		Expect(at).To(HaveLen(2))
	})

	It("follows its publishers to another broker without losing or repeating anything", func() {
		placed()
		cfg.Duration, cfg.Interval = time.Hour, 100*time.Millisecond
		moving, before := false, uint64(0)
		r := reported(func(p *report.Progress) {
			switch {
			case !moving && p.Accepted > 0:
				moving = true
				for _, s := range cfg.Load.Spec.Sources() {
					placement.Place(topic, b.Address(), s.ID)
				}
			case p.Moved == 10 && before == 0:
				before = p.Accepted
			case before > 0 && p.Accepted > before+100:
				cancel()
			}
		})
		Expect(r.Moved).To(BeNumerically("==", 10))
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Account.Delivered).To(Equal(r.Offered))
	})

	It("reports what was lost, and names it", func() {
		cfg.Nsqd, cfg.Drain = a.Address(), 500*time.Millisecond
		a.DeliverEach(0)
		r := reported(nil)
		Expect(r.Accepted).To(BeNumerically(">", 100))
		Expect(r.Account.Lost).To(Equal(r.Accepted))
		Expect(r.Missing).To(HaveLen(20))
		Expect(r.Fault()).To(MatchRegexp("lost .* accepted message"))
	})

	It("reports what came twice", func() {
		cfg.Nsqd = a.Address()
		a.DeliverEach(2)
		r := reported(nil)
		Expect(r.Account.Duplicated).To(Equal(offered()))
		Expect(r.Account.Lost).To(BeZero())
		Expect(r.Fault()).To(ContainSubstring("delivered more than once"))
	})

	It("reports refusals", func() {
		cfg.Nsqd = a.Address()
		a.Refuse(func(string, []byte) *wire.Error { return wire.NewError(wire.CodeQueueFull, "full") })
		r := reported(nil)
		Expect(r.Refused).To(Equal(map[string]uint64{"E_QUEUE_FULL": offered()}))
		Expect(r.Fault()).To(Equal("no message was accepted"))
		Expect(r.AchievedFraction()).To(BeZero())
	})

	It("drains and reports when it is interrupted", func() {
		cfg.Nsqd, cfg.Duration, cfg.Interval = a.Address(), time.Hour, 20*time.Millisecond
		var last report.Progress
		r := reported(func(p *report.Progress) {
			last = *p
			if p.Accepted > 100 && p.EndToEnd.Count > 0 {
				cancel()
			}
		})
		Expect(r.Interrupted).To(BeTrue())
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Accepted).To(BeNumerically(">", 100))
		Expect(r.Account.Delivered).To(Equal(r.Accepted))
		Expect(r.Seconds).To(SatisfyAll(BeNumerically(">", 0), BeNumerically("<", 30)))
		Expect(last.Connected).To(Equal(20))
		Expect(last.ElapsedSeconds).To(BeNumerically(">", 0))
		Expect(last.EndToEnd.Count).To(BeNumerically(">", 0))
	})

	It("writes down when it sent", func() {
		cfg.Nsqd, cfg.Capture = a.Address(), filepath.Join(GinkgoT().TempDir(), "times")
		r := reported(nil)
		testkit.Private(GinkgoTB(), filepath.Dir(cfg.Capture))
		text, err := os.ReadFile(cfg.Capture)
		Expect(err).NotTo(HaveOccurred())
		var times []float64
		for line := range strings.Lines(string(text)) {
			seconds, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
			Expect(err).NotTo(HaveOccurred())
			times = append(times, seconds)
		}
		Expect(times).To(HaveLen(int(r.Sent)))
		Expect(slices.IsSorted(times)).To(BeTrue())
		Expect(times[0]).To(BeNumerically(">=", 0))
	})

	It("loads brokers with a topic of others meanwhile", func() {
		cfg.Nsqd = a.Address()
		cfg.Background = emulate.DefaultBackground()
		cfg.Background.Spec.Rate = 50
		cfg.Background.At = []emulate.BackgroundAt{{Address: a.Address(), Publishers: 4}, {Address: b.Address(), Publishers: 12}}
		r := reported(nil)
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Account.Delivered).To(Equal(offered()))
		Expect(r.Account.Foreign).To(BeZero())

		spec := cfg.Background.Spec
		spec.Publishers, spec.Seed = 16, ^cfg.Load.Spec.Seed
		want := uint64(len(schedule.Arrivals(schedule.Until(spec.Stream(), cfg.Duration))))
		Expect(want).To(BeNumerically(">", 0))
		Expect(r.Background.Publishers).To(Equal(16))
		Expect(r.Background.Counts).To(SatisfyAll(HaveField("Offered", want), HaveField("Accepted", want)))
		Expect(r.Background.OfferedRate).To(BeNumerically("~", float64(want)/0.2, 1e-6))
		at := map[string]map[string]bool{"a": {}, "b": {}}
		for _, e := range log.Events() {
			if e.Kind == fake.Connect && strings.HasPrefix(e.Client, "background.") {
				at[e.Broker][e.Client] = true
			}
		}
		Expect(at["a"]).To(HaveLen(4))
		Expect(at["b"]).To(HaveLen(12))
	})

	It("keeps all counts of its latencies", func() {
		cfg.Nsqd, cfg.Histograms = a.Address(), filepath.Join(GinkgoT().TempDir(), "run.hlog")
		cfg.Background = emulate.DefaultBackground()
		cfg.Background.At = []emulate.BackgroundAt{{Address: b.Address(), Publishers: 2}}
		r := reported(nil)
		file, err := os.Open(cfg.Histograms)
		Expect(err).NotTo(HaveOccurred())
		defer file.Close()
		counts := map[string]int64{}
		log := hdrhistogram.NewHistogramLogReader(file)
		for {
			h, err := log.NextIntervalHistogram()
			Expect(err).NotTo(HaveOccurred())
			if h == nil {
				break
			}
			counts[h.Tag()] = h.TotalCount()
			if h.Tag() == "answer" {
				Expect(h.ValueAtPercentile(99)).To(Equal(r.Answer.P99Us))
			}
		}
		Expect(counts).To(And(HaveLen(6), HaveKeyWithValue("lateness", r.Lateness.Count), HaveKeyWithValue("answer", r.Answer.Count),
			HaveKeyWithValue("end_to_end", r.EndToEnd.Count), HaveKeyWithValue("background_lateness", r.Background.Lateness.Count)))
	})

	It("replays a recording to its end", func() {
		path := filepath.Join(GinkgoT().TempDir(), "r.csv")
		var rows bytes.Buffer
		rows.WriteString("offset_seconds,publisher_id,correlation_key,payload_bytes\n")
		for i := range 50 {
			rows.WriteString("0." + strconv.Itoa(i/5) + ",p" + strconv.Itoa(i%7) + ",k,60\n")
		}
		Expect(os.WriteFile(path, rows.Bytes(), 0o644)).To(Succeed())
		cfg.Load.Trace, cfg.Load.Replay.Compress, cfg.Load.Replay.Copies = path, 10, 3
		cfg.Nsqd, cfg.Duration = a.Address(), time.Hour
		r := reported(nil)
		Expect(r.Publishers).To(Equal(21))
		Expect(r.Offered).To(BeNumerically("==", 150))
		Expect(r.Fault()).To(BeEmpty())
		Expect(r.Seconds).To(BeNumerically("<", 1))
	})

	Describe("that cannot begin", func() {
		// cannot expects that a run fails with an error, within the time of a run.
		cannot := func(want string) {
			GinkgoHelper()
			Eventually(func() error {
				cfg.Connect *= 2
				_, err := run(nil)
				return err
			}).Should(MatchError(ContainSubstring(want)))
		}
		It("says that the topic is unknown", func() {
			cfg.Loaddistributor, cfg.Lookupd = placement.Address(), []string{lookup.Address()}
			_, err := run(nil)
			Expect(err).To(MatchError(client.ErrUnknown))
		})
		It("says how many publishers the topic has", func() {
			placed()
			cfg.Load.Spec.Publishers, cfg.Connect = 25, 200*time.Millisecond
			cannot("20 of 25 publishers connected")
			cannot("the loaddistributor has placed 20 of them in topic sensors")
		})
		It("says that there is no broker", func() {
			a.Close()
			cfg.Nsqd, cfg.Subscribe, cfg.Connect = a.Address(), false, 50*time.Millisecond
			cannot("refused")
		})
		It("says that the subscriber finds no broker", func() {
			placed()
			lookup.Set(topic, a)
			cfg.Connect = 150 * time.Millisecond
			cannot("the subscriber is connected to 1 of 2 brokers")
		})
		It("stops when it is interrupted", func() {
			a.Close()
			cfg.Nsqd, cfg.Subscribe = a.Address(), false
			cancel()
			_, err := run(nil)
			Expect(err).To(MatchError(context.Canceled))
		})
	})

	It("ends when its topic is deleted under it", func() {
		placed()
		cfg.Duration, cfg.Interval = time.Hour, 20*time.Millisecond
		_, err := run(func(p *report.Progress) {
			if p.Accepted > 0 {
				placement.Delete(topic)
			}
		})
		Expect(err).To(MatchError(client.ErrUnknown))
	})

	It("does not begin when what it is to write down cannot be kept", func() {
		cannot := func() {
			GinkgoHelper()
			_, err := run(nil)
			Expect(err).To(MatchError(os.ErrNotExist))
			Expect(log.Events()).To(BeEmpty())
		}
		cfg.Nsqd, cfg.Capture = a.Address(), "/no/such/folder/times"
		cannot()
		cfg.Capture, cfg.Histograms = "", "/no/such/folder/run.hlog"
		cannot()
	})

	It("does not begin without the brokers of the background", func() {
		b.Close()
		cfg.Nsqd, cfg.Connect = a.Address(), 100*time.Millisecond
		cfg.Background = emulate.DefaultBackground()
		cfg.Background.At = []emulate.BackgroundAt{{Address: b.Address(), Publishers: 1}}
		_, err := run(nil)
		Expect(err).To(MatchError(ContainSubstring("background")))
	})
})

var _ = DescribeTable("Validate", func(change func(*emulate.Config), want string) {
	cfg := valid()
	cfg.Nsqd = "127.0.0.1:4150"
	Expect(cfg.Validate()).To(Succeed())
	change(&cfg)
	Expect(cfg.Validate()).To(MatchError(want))
},
	Entry("topic", func(c *emulate.Config) { c.Topic = "no topic" }, `topic: "no topic" is no valid name`),
	Entry("channel", func(c *emulate.Config) { c.Subscribe, c.Channel = true, "" }, `channel: "" is no valid name`),
	Entry("duration", func(c *emulate.Config) { c.Duration = 0 }, "duration: 0s, want more than 0"),
	Entry("nowhere", func(c *emulate.Config) { c.Nsqd = "" }, "want either the address of a broker or that of a loaddistributor"),
	Entry("two places", func(c *emulate.Config) { c.Loaddistributor = "h:1" }, "want either the address of a broker or that of a loaddistributor"),
	Entry("no lookupd", func(c *emulate.Config) { c.Nsqd, c.Loaddistributor, c.Subscribe = "", "h:1", true },
		"subscribing needs the address of a lookupd where the loaddistributor places the publishers"),
	Entry("MQTT", func(c *emulate.Config) {
		c.MQTT, c.Nsqd, c.Loaddistributor, c.Mpub, c.Subscribe, c.Heartbeat = "h:1", "", "h:2", true, true, 24*time.Hour
	}, "brokers redirect publishers of MQTT: want no address of a loaddistributor\nMQTT has no MPUB\n"+
		"subscribing needs the NSQ address of a broker, or the address of a lookupd\nheartbeat: 24h0m0s, want at most 18h12m15s with MQTT"),
	Entry("a name without MQTT", func(c *emulate.Config) { c.Name = "a/b" }, "an MQTT topic name needs --protocol mqtt"),
	Entry("address", func(c *emulate.Config) { c.Nsqd = "here" }, `address "here": want host:port`),
	Entry("background", func(c *emulate.Config) {
		c.Background.Topic = c.Topic
		c.Background.At = []emulate.BackgroundAt{{Address: "h:1", Publishers: 1}, {Address: "h:1", Publishers: 0}}
	}, "background topic: \"sensors\" is no valid name other than the run's own\nbackground \"h:1\": want host:port, each once\nbackground h:1: 0 publishers, want at least 1"),
	Entry("background's load", func(c *emulate.Config) {
		c.Background = emulate.DefaultBackground()
		c.Background.Spec.Batch = 0
		c.Background.At = []emulate.BackgroundAt{{Address: "h:1", Publishers: 1}}
	}, "background: batch: 0 messages, want 1 .. 10000"),
	Entry("several", func(c *emulate.Config) {
		c.Workers, c.MaxOutstanding, c.Heartbeat, c.Interval, c.Drain = 0, 0, 0, -1, 0
	},
		"connect timeout 2m0s and drain timeout 0s: want more than 0\nworkers: 0, want at least 1\nmax outstanding: 0, want at least 1\nheartbeat: 0s, want at least 1s\ninterval: -1ns, want 0 or more"),
)

func TestParseBackground(t *testing.T) {
	got, err := emulate.ParseBackground([]string{"a:1=20", "[::1]:4150=3"})
	want := []emulate.BackgroundAt{{Address: "a:1", Publishers: 20}, {Address: "[::1]:4150", Publishers: 3}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "a:1", "a:1=", "a:1=x", "=", "a:1=1=2"} {
		if got, err := emulate.ParseBackground([]string{bad}); err == nil {
			t.Errorf("%q gave %v", bad, got)
		}
	}
}
