package broker_test

import (
	"cmp"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"pgregory.net/rapid"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// arrival is a message as the control plane receives it.
type arrival struct {
	at        mono.Wall
	publisher string
}

func inOrder(a []arrival) {
	slices.SortStableFunc(a, func(a, b arrival) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.publisher, b.publisher))
	})
}

// listener joins the pieces of one capture as the proto file describes.
type listener struct {
	publishers []string
	lost       uint64
	others     uint64
	pieces     int
}

func (l *listener) take(a *srtmv1.Arrivals) ([]arrival, error) {
	if a == nil {
		return nil, fmt.Errorf("piece %d is missing", l.pieces)
	}
	if a.First != (l.pieces == 0) {
		return nil, fmt.Errorf("piece %d: first is %v", l.pieces, a.First)
	}
	l.pieces++
	l.publishers = append(l.publishers, a.Publishers...)
	l.lost += a.Lost
	l.others += a.Others
	if len(a.GapNs) != len(a.Publisher) {
		return nil, fmt.Errorf("%d gaps, %d publishers", len(a.GapNs), len(a.Publisher))
	}
	if len(a.GapNs) == 0 {
		if a.StartNs != 0 {
			return nil, fmt.Errorf("a start without messages: %d", a.StartNs)
		}
		return nil, nil
	}
	if a.GapNs[0] != 0 {
		return nil, fmt.Errorf("a gap before the first: %d", a.GapNs[0])
	}
	var all []arrival
	at := mono.Wall(a.StartNs)
	for i, gap := range a.GapNs {
		if int(a.Publisher[i]) >= len(l.publishers) {
			return nil, fmt.Errorf("publisher %d of %d", a.Publisher[i], len(l.publishers))
		}
		at += mono.Wall(gap)
		all = append(all, arrival{at, l.publishers[a.Publisher[i]]})
	}
	return all, nil
}

// alike is a batch of so many equal messages.
type alike int

func (n alike) Len() int { return int(n) }

func (n alike) Bytes() int { return int(n) }

func (n alike) Each(f func([]byte)) {
	for range n {
		f([]byte("x"))
	}
}

// For any publishes, in any order and by any call, each piece of the capture has the messages accepted since the piece
// before, in order of arrival.
func TestACaptureIsWhatWasAccepted(t *testing.T) {
	const offset = 1_700_000_000_000_000_000
	rapid.Check(t, func(t *rapid.T) {
		b, err := broker.New(broker.Config{Capacity: rapid.IntRange(1, 200).Draw(t, "capacity"), MaxMsgTimeout: time.Minute, Now: func() mono.Time { return 0 }})
		testkit.Must(t, err)
		defer b.Close()
		top, err := b.CreateTopic("t")
		testkit.Must(t, err)
		if rapid.Bool().Draw(t, "rejects") {
			top.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 20}, true)
		}
		type publisher struct {
			name string
			as   *broker.Publisher
		}
		publishers := []publisher{{"", nil}}
		for range rapid.IntRange(0, 6).Draw(t, "connections") {
			name := rapid.SampledFrom([]string{"", "p1", "p2", "p3"}).Draw(t, "client_id")
			publishers = append(publishers, publisher{name, top.AddPublisher(name, "", police.Identity{})})
		}

		var l *listener // nil: not captured
		var want []arrival
		accepted := func(p publisher, at mono.Time, n int) {
			for range n {
				if l != nil {
					want = append(want, arrival{offset + mono.Wall(at), p.name})
				}
			}
		}
		draw := func() (publisher, broker.Published) {
			p := rapid.SampledFrom(publishers).Draw(t, "publisher")
			at := mono.Time(rapid.Int64Range(0, 1_000_000_000).Draw(t, "at"))
			return p, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: at}, From: p.as}
		}
		flush := func(*rapid.T) {
			a := top.Arrivals()
			if l == nil {
				if a != nil {
					t.Fatalf("nothing is captured, and there is %v", a)
				}
				return
			}
			got := testkit.Result(l.take(a)).Must(t)
			if !slices.IsSortedFunc(got, func(a, b arrival) int { return cmp.Compare(a.at, b.at) }) {
				t.Fatalf("not in order of arrival: %v", got)
			}
			inOrder(got)
			inOrder(want)
			if !slices.Equal(got, want) || l.lost > 0 {
				t.Fatalf("%d lost,\n got %v\nwant %v", l.lost, got, want)
			}
			want = nil
		}
		t.Repeat(map[string]func(*rapid.T){
			"publish": func(*rapid.T) {
				p, m := draw()
				if top.Publish(1e9, 0, m) == nil {
					accepted(p, m.Arrival.At, 1)
				}
			},
			"batch": func(*rapid.T) {
				p, m := draw()
				n := rapid.IntRange(1, 50).Draw(t, "messages")
				if top.PublishBatch(1e9, 0, m, alike(n)) == nil {
					accepted(p, m.Arrival.At, n)
				}
			},
			"each": func(*rapid.T) {
				var from []publisher
				var batch []broker.Published
				for range rapid.IntRange(1, 20).Draw(t, "messages") {
					p, m := draw()
					from, batch = append(from, p), append(batch, m)
				}
				for i, err := range top.PublishEach(1e9, 0, batch, nil) {
					if err == nil {
						accepted(from[i], batch[i].Arrival.At, 1)
					}
				}
			},
			"empty": func(*rapid.T) { top.Empty() },
			"begin": func(*rapid.T) {
				top.Capture(5, offset+5)
				l, want = &listener{}, nil
			},
			"end": func(*rapid.T) {
				top.EndCapture()
				l, want = nil, nil
			},
			"flush": flush,
			"":      func(*rapid.T) {},
		})
		flush(t)
	})
}

var _ = Describe("A capture of arrivals", func() {
	It("is of a topic there is, while it is there", func() {
		b := start(nil)
		node := b.Node()
		Expect(node.Capture("t")).To(BeFalse())
		Expect(node.Arrivals("t")).To(BeNil())
		t := topic(b, "t")
		Expect(node.Arrivals("t")).To(BeNil())
		before := clock.Wall()
		Expect(node.Capture("t")).To(BeTrue())
		Expect(publish(t, "x")).To(Succeed())
		got, err := (&listener{}).take(node.Arrivals("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(got).To(HaveLen(1))
		const slack = mono.Wall(time.Millisecond) // two clocks are read one after the other, and one clock is slewed
		Expect(got[0].at).To(And(BeNumerically(">=", before-slack), BeNumerically("<=", clock.Wall()+slack)))

		Expect(b.DeleteTopic("t")).To(Succeed())
		Expect(node.Arrivals("t")).To(BeNil())
		node.EndCapture("t")
		topic(b, "t")
		Expect(node.Arrivals("t")).To(BeNil())
		Expect(node.Capture("t")).To(BeTrue())
		node.EndCapture("t")
		Expect(node.Arrivals("t")).To(BeNil())
	})

	It("is bounded, and reports what it lost", func() {
		t := topic(start(nil), "t")
		one := func(p *broker.Publisher, n int) {
			GinkgoHelper()
			Expect(t.PublishBatch(0, 0, broker.Published{From: p}, alike(n))).To(Succeed())
		}
		t.Capture(0, 0)
		l := &listener{}
		one(nil, 1<<16-10)
		one(nil, 30)
		got, err := l.take(t.Arrivals())
		Expect(err).NotTo(HaveOccurred())
		Expect(got).To(HaveLen(1 << 16))
		Expect(l.lost).To(BeEquivalentTo(20))
		one(nil, 7)
		got, err = l.take(t.Arrivals())
		Expect(err).NotTo(HaveOccurred())
		Expect(got).To(HaveLen(7))
		Expect(l.lost).To(BeEquivalentTo(20))
		Expect(l.publishers).To(Equal([]string{""}))
	})

	It("distinguishes a bounded number of publishers", func() {
		t := topic(start(func(c *broker.Config) { c.Capacity = 1 << 17 }), "t")
		t.Capture(0, 0)
		l := &listener{}
		tb, recorded := GinkgoTB(), 0
		for i := range 1<<16 + 5 {
			p := t.AddPublisher(strconv.Itoa(i), strconv.Itoa(i%2), police.Identity{})
			for range 2 {
				testkit.Must(tb, t.Publish(0, 0, broker.Published{From: p}))
			}
			p.Leave()
			if i%10_000 == 0 || i == 1<<16+4 {
				got, err := l.take(t.Arrivals())
				Expect(err).NotTo(HaveOccurred())
				recorded += len(got)
			}
			t.Empty()
		}
		Expect(l.publishers).To(HaveLen(1 << 16))
		Expect(recorded).To(Equal(2 << 16))
		Expect(l.lost).To(BeEquivalentTo(10))
		Expect(l.others).To(BeEquivalentTo(10))
	})

	It("keeps room for others beside a host that thinks up client_ids", func() {
		const most = 1 << 16 / 8 * 7
		t := topic(start(func(c *broker.Config) { c.Capacity = 1 << 18 }), "t")
		t.Capture(0, 0)
		l := &listener{}
		tb := GinkgoTB()
		send := func(p *broker.Publisher) {
			testkit.Must(tb, t.Publish(0, 0, broker.Published{From: p}))
			p.Leave()
		}
		for i := range 100_000 {
			id := "flood" + strconv.Itoa(i)
			send(t.AddPublisher(id, "10.0.0.1", police.Identity{Kind: "client", ID: id}))
		}
		send(t.AddPublisher("honest", "10.0.0.2", police.Identity{Kind: "client", ID: "honest"}))
		send(t.AddPublisher("own", "10.0.0.1", police.Identity{Kind: "auth", ID: "gateway"}))
		_, err := l.take(t.Arrivals())
		Expect(err).NotTo(HaveOccurred())
		Expect(l.publishers).To(HaveLen(most + 2))
		Expect(l.publishers[most:]).To(Equal([]string{"honest", "own"}))
		Expect(l.others).To(BeEquivalentTo(100_000 - most))
	})

	It("names publishers as they are placed, or as they are known otherwise", func() {
		t := topic(start(func(*broker.Config) {}), "t")
		t.Capture(0, 0)
		for _, p := range []*broker.Publisher{
			t.AddPublisher("north.1", "10.0.0.1", police.Identity{Kind: "auth", ID: "fleet"}),
			t.AddPublisher("", "10.0.0.1", police.Identity{Kind: "auth", ID: "fleet"}),
			t.AddPublisher("", "10.0.0.1", police.Identity{Kind: "cert", ID: "ca\xfft"}),
			t.AddPublisher("", "10.0.0.9", police.Identity{Kind: "addr", ID: "10.0.0.9"}),
			t.Visit(police.Identity{Kind: "addr", ID: "10.0.0.8"}),
			t.AddPublisher("auth:fleet", "10.0.0.1", police.Identity{Kind: "client", ID: "auth:fleet"}),
			t.AddPublisher("a:b", "10.0.0.1", police.Identity{Kind: "client", ID: "a:b"}),
		} {
			Expect(t.Publish(0, 0, broker.Published{From: p})).To(Succeed())
		}
		l := &listener{}
		_, err := l.take(t.Arrivals())
		Expect(err).NotTo(HaveOccurred())
		Expect(l.publishers).To(Equal([]string{"north.1", "auth:fleet", "cert:ca?t", "addr:10.0.0.9", "addr:10.0.0.8", "client:auth:fleet", "a:b"}))
	})

	It("does not count an unauthenticated client's messages as those of the authenticated publisher with the same client_id", func() {
		t := topic(start(func(*broker.Config) {}), "t")
		t.Capture(0, 0)
		fleet, other := police.Identity{Kind: "auth", ID: "fleet"}, police.Identity{Kind: "auth", ID: "other"}
		one := t.AddPublisher("north.1", "10.0.0.1", fleet)
		for _, p := range []*broker.Publisher{
			one, t.AddPublisher("north.1", "10.0.0.2", fleet), // from another host
			t.AddPublisher("north.1", "10.0.0.1", other),
			t.AddPublisher("north.1", "10.0.0.3", police.Identity{Kind: "client", ID: "north.1"}),
			t.AddPublisher("addr:10.0.0.3/north.1", "10.0.0.3", police.Identity{Kind: "client", ID: "x"}),
			t.AddPublisher("free", "10.0.0.3", police.Identity{Kind: "client", ID: "free"}),
			t.AddPublisher("free", "10.0.0.4", police.Identity{Kind: "client", ID: "free"}), // from any host
		} {
			Expect(t.Publish(0, 0, broker.Published{From: p})).To(Succeed())
		}
		l := &listener{}
		piece := t.Arrivals()
		Expect(piece.Owners).To(Equal([]string{"auth:fleet", "auth:other", "", "", ""}))
		all, err := l.take(piece)
		Expect(err).NotTo(HaveOccurred())
		sent := map[string]int{}
		for _, a := range all {
			sent[a.publisher]++
		}
		Expect(sent).To(Equal(map[string]int{
			"north.1": 2, "auth:other/north.1": 1, "addr:10.0.0.3/north.1": 1, "client:addr:10.0.0.3/north.1": 1, "free": 2,
		}))
		// A recorded publisher keeps its identity during the capture.
		one.Rename("north.1", other)
		Expect(t.Publish(0, 0, broker.Published{From: one})).To(Succeed())
		all, err = l.take(t.Arrivals())
		Expect(err).NotTo(HaveOccurred())
		Expect(all[0].publisher).To(Equal("auth:other/north.1"))
	})

	DescribeTable("has what goes to disk, too", func(through bool) {
		log := slog.New(slog.NewTextHandler(GinkgoWriter, nil))
		path := GinkgoT().TempDir()
		st, err := broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 1000, WriteThrough: through, Log: log})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(st.Close)
		t := topic(start(func(c *broker.Config) { c.Capacity, c.Storage = 10, st }), "t")
		p := t.AddPublisher("p", "", police.Identity{})
		t.Capture(0, 0)
		var want []arrival
		for i := range 100 {
			at := stamp.Arrival{At: mono.Time(i)}
			want = append(want, arrival{mono.Wall(i), "p"})
			Expect(t.Publish(0, 0, broker.Published{Body: []byte("x"), Arrival: at, From: p})).To(Succeed())
		}
		read(t, "c", 10, true) // messages that come back from the disk are not accepted again
		Eventually(func() uint64 { return t.Stats().Delivered }).Should(BeEquivalentTo(100))
		Expect((&listener{}).take(t.Arrivals())).To(Equal(want))
	},
		Entry("what memory does not hold", false),
		Entry("everything", true),
	)
})

// BenchmarkCapture measures the cost of a message to a topic that only accepts messages, with and without capture of
// arrivals.
func BenchmarkCapture(b *testing.B) {
	for _, on := range []bool{false, true} {
		b.Run(fmt.Sprintf("on=%v", on), func(b *testing.B) {
			br := testkit.Result(broker.New(broker.Config{Capacity: 1000, MaxMsgTimeout: time.Minute})).Must(b)
			defer br.Close()
			t := testkit.Result(br.CreateTopic("t")).Must(b)
			if on {
				t.Capture(0, 0)
			}
			var from []*broker.Publisher
			for i := range 1000 {
				from = append(from, t.AddPublisher(strconv.Itoa(i), "", police.Identity{}))
			}
			p := broker.Published{Body: make([]byte, 100)}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				p.From, p.Arrival.At = from[n%1000], mono.Time(n)
				testkit.Must(b, t.Publish(0, 0, p))
				if n%1000 == 999 {
					t.Empty()
				}
				if n%2500 == 2499 { // as 10,000 msg/s, four times a second
					t.Arrivals()
				}
			}
		})
	}
}
