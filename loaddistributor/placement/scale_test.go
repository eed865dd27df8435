package placement_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// control is a control plane without processes. It calls the deciding and remembering packages in the
// same order as the loaddistributor and the tbadaptor do.
type control struct {
	testing.TB
	rng       *rand.Rand
	cat       *catalog.Catalog
	ledger    *ledger.Ledger
	widest    int                        // brokers of the widest topic
	split     int                        // topics on more than one broker
	grants    int                        // grants of all periods of the adaptor
	durations map[string][]time.Duration // by step
	topics    int
}

const (
	scaleMcap  = 64_000 // msg/s of each broker
	scaleLoad  = 0.7    // fraction of the mcap used by contracts
	scaleGroup = 25     // publishers that share a correlation key
	margin     = 1.1    // the contract's rate over the publishers' rate, as in the paper's profiling
	periods    = 5      // of the adaptor
)

func scaleBroker(i int) string { return fmt.Sprintf("b%04d", i) }
func scaleTopic(i int) string  { return fmt.Sprintf("t%06d", i) }

// newControl creates a control plane. Each topic has a number of publishers from sizes, which send
// rate msg/s each.
func newControl(t testing.TB, brokers int, sizes []int, rate float64) *control {
	c := &control{
		TB: t, rng: rand.New(rand.NewPCG(1, 0)), cat: catalog.New(), ledger: ledger.New(1, ledger.Leases{}),
		durations: map[string][]time.Duration{}, topics: len(sizes),
	}
	order := c.rng.Perm(c.topics)
	for i := range brokers {
		c.apply(catalog.BrokerJoined{
			ID: scaleBroker(i), Instance: "1", TCPAddress: fmt.Sprintf("10.%d.%d.1:4150", i/256, i%256),
			HTTPAddress: fmt.Sprintf("10.%d.%d.1:4151", i/256, i%256), Mcap: scaleMcap,
		})
		testkit.Result(c.ledger.Hello(ledger.Session{Broker: scaleBroker(i), Stamp: mono.Stamp{Process: "1"}}, 0)).Must(c)
	}
	for _, i := range order {
		c.create(scaleTopic(i), sizes[i], rate)
	}
	return c
}

func (c *control) apply(e catalog.Event) {
	c.Helper()
	testkit.Result(c.cat.Apply(e)).Must(c)
}

// timed notes how long a step takes.
func (c *control) timed(step string, f func()) {
	start := time.Now()
	f()
	c.durations[step] = append(c.durations[step], time.Since(start))
}

// create activates a topic, as a CreateTopic request does.
func (c *control) create(name string, publishers int, rate float64) {
	milli := int64(math.Ceil(float64(publishers) * rate * margin * 1000))
	demand := placement.Demand{Topic: name, RateMilli: milli, Rate: (milli + 999) / 1000}
	for left := publishers; left > 0; left -= scaleGroup {
		demand.Groups = append(demand.Groups, placement.Group{Key: fmt.Sprintf("g%d", len(demand.Groups)), Count: min(left, scaleGroup), Rate: rate})
	}
	demand.Burst = 16 + demand.Rate/100 // more than one token for each broker that could be needed
	spec := &catalog.Spec{
		Demand: demand, SLO: catalog.SLO{Quantile: 0.99, Latency: time.Millisecond},
		Policy: placement.SRTM, ShareRule: share.Proportional, Channels: []string{"c"},
	}
	var plan placement.Plan
	c.timed("place", func() { plan = testkit.Result(placement.Place(spec.Policy, c.cat.Snapshot(""), demand, c.rng)).Must(c) })
	if c.widest = max(c.widest, plan.K); plan.K > 1 {
		c.split++
	}
	c.timed("commit", func() {
		c.apply(testkit.Result(catalog.NewTopicPlaced(spec, plan, "")).Must(c))
		for _, q := range plan.Quotas {
			c.apply(catalog.MemberPrepared{Topic: name, Broker: q.Broker})
		}
		c.apply(catalog.TopicActivated{Topic: name})
	})
	var initial []share.Assigned
	for _, q := range plan.Quotas {
		initial = append(initial, share.Assigned{Broker: q.Broker, Share: q.Share})
	}
	c.timed("grant", func() {
		contract := ledger.Terms{Contract: tokenbucket.Share{Rate: tokenbucket.Rate(milli), Burst: demand.Burst}}
		c.acknowledge(testkit.Result(c.ledger.SetContract(name, contract, initial)).Must(c))
	})
}

// acknowledge lets brokers apply grants and the grants that follow, and returns the number of grants.
// A shrinking bucket counts as full: the bucket gives up as many tokens as the burst shrinks.
func (c *control) acknowledge(grants []ledger.Grant) (sent int) {
	testkit.Must(c, c.ledger.Settle(grants, func(g ledger.Grant) (tokenbucket.Tokens, bool) {
		sent++
		view, _ := c.ledger.Topic(g.Topic)
		i, _ := slices.BinarySearchFunc(view.Members, g.Broker, func(m ledger.MemberView, id string) int { return strings.Compare(m.Broker, id) })
		return tokenbucket.Tokens(max(0, view.Members[i].Acknowledged.Burst-g.Share.Burst)) * tokenbucket.Token, true
	}))
	return sent
}

// resolve lets a thousand publishers look up their brokers.
func (c *control) resolve(sizes []int) {
	for range 1000 {
		i := c.rng.IntN(c.topics)
		p := c.rng.IntN(sizes[i])
		topic, id := scaleTopic(i), fmt.Sprintf("g%d.%d", p/scaleGroup, p%scaleGroup)
		c.timed("resolve", func() { testkit.Result(c.cat.Resolve(topic, id)).Must(c) })
	}
}

// retune is a period of the adaptor in which every topic has traffic: the rate at a broker is within a
// tenth of its publishers' rate, and some messages wait.
func (c *control) retune() {
	var spent time.Duration
	for i := range c.topics {
		view, _ := c.ledger.Topic(scaleTopic(i))
		if len(view.Members) < 2 {
			continue // a share that equals the contract stays
		}
		loads := make([]share.Load, len(view.Members))
		for j, m := range view.Members {
			loads[j] = share.Load{
				Broker: m.Broker, Share: m.Target, Publishers: 1,
				Rate:       m.Target.Rate.PerSecond() / margin * (0.9 + 0.2*c.rng.Float64()),
				MaxBacklog: 1 + c.rng.Int64N(m.Target.Burst+1),
			}
		}
		start := time.Now()
		target := testkit.Result(share.Split(share.Proportional, view.Contract, loads)).Must(c)
		c.grants += c.acknowledge(testkit.Result(c.ledger.Propose(view.Topic, target)).Must(c))
		spent += time.Since(start)
	}
	c.durations["retune"] = append(c.durations["retune"], spent)
}

// rejoin lets a broker lose its sessions and open new sessions with the same shares.
func (c *control) rejoin(id string) {
	b, _ := c.cat.Broker(id)
	var held []ledger.HeldShare
	for _, topic := range c.cat.Placed(id) {
		view, _ := c.ledger.Topic(topic)
		for _, m := range view.Members {
			if m.Broker == id {
				held = append(held, ledger.HeldShare{Topic: topic, Share: m.Acknowledged, Epoch: m.AcknowledgedEpoch})
			}
		}
	}
	c.timed("rejoin", func() {
		c.apply(catalog.BrokerLeft{ID: id})
		c.ledger.Disconnect(id)
		testkit.Result(c.ledger.Hello(ledger.Session{Broker: id, Stamp: mono.Stamp{Process: "1"}, Shares: held}, 0)).Must(c)
		c.apply(catalog.BrokerJoined{ID: id, Instance: b.Instance, TCPAddress: b.TCPAddress, HTTPAddress: b.HTTPAddress, Mcap: b.Mcap})
		_, prepare := c.cat.Work(id)
		for _, topic := range prepare {
			c.apply(catalog.MemberPrepared{Topic: topic, Broker: id})
		}
	})
}

// scaleSizes returns the publishers of each topic, largest first: proportional to 1 over the topic's
// rank, at least one, and none above placement's bound.
func scaleSizes(topics, publishers int) []int {
	harmonic := 0.0
	for i := range topics {
		harmonic += 1 / float64(i+1)
	}
	sizes := make([]int, topics)
	spare := publishers - topics // beyond one publisher per topic
	left := spare
	for i := range sizes {
		extra := min(int(float64(spare)/harmonic/float64(i+1)), placement.MaxPublishers-1, left)
		sizes[i] = 1 + extra
		left -= extra
	}
	for i := len(sizes) - 1; left > 0; i = (i + len(sizes) - 1) % len(sizes) { // the remainder of the rounding, evenly
		add := min(left, (left+len(sizes)-1)/len(sizes), placement.MaxPublishers-sizes[i])
		sizes[i] += add
		left -= add
	}
	return sizes
}

// All topics become active, whatever the policies' other parts do. The ledger has each topic, no
// broker exceeds its mcap, and every publisher has a broker with a share of its topic.
func TestAControlPlaneComesUp(t *testing.T) {
	sizes := scaleSizes(40, 4000)
	c := newControl(t, 10, sizes, scaleMcap*10*scaleLoad/margin/4000)
	testkit.Equal(t, len(c.ledger.View()), 40, "topics of the ledger")
	if c.split < 1 || c.widest < 2 || sizes[0] < 900 {
		t.Errorf("%d topics split, the widest over %d brokers, the largest of %d publishers", c.split, c.widest, sizes[0])
	}
	for range periods {
		c.retune()
	}
	for i := range 10 {
		c.rejoin(scaleBroker(i))
	}
	allocated := map[string]tokenbucket.Rate{}
	for _, topic := range c.ledger.View() {
		var sum tokenbucket.Share
		for _, m := range topic.Members {
			sum.Rate, sum.Burst = sum.Rate+m.Acknowledged.Rate, sum.Burst+m.Acknowledged.Burst
		}
		testkit.Equal(t, sum, topic.Contract, "shares of topic %s", topic.Topic)
		placed, _ := c.cat.Topic(topic.Topic)
		for _, q := range placed.Plan.Quotas {
			allocated[q.Broker] += q.Share.Rate
		}
	}
	for id, rate := range allocated {
		if rate > scaleMcap*1000 {
			t.Errorf("broker %s has %v of %d msg/s", id, rate.PerSecond(), scaleMcap)
		}
	}
	c.resolve(sizes)
}

func TestSizesAddUp(t *testing.T) {
	for _, c := range [][2]int{{1, 1}, {500, 500}, {7, 1000}, {100, 10_000}, {3, 3 * placement.MaxPublishers}} {
		sum := 0
		for i, n := range scaleSizes(c[0], c[1]) {
			if sum += n; n < 1 || n > placement.MaxPublishers {
				t.Errorf("topic %d of %d has %d publishers", i, c[0], n)
			}
		}
		testkit.Equal(t, sum, c[1], "publishers")
	}
}

// BenchmarkScale gives the figures of docs/evaluation/trouble.md with -benchtime=1x: the control plane's
// own cost with 100 topics and 10,000 publishers for each broker.
func BenchmarkScale(b *testing.B) {
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for brokers := 1; brokers <= 1000; brokers *= 10 {
		b.Run(fmt.Sprintf("brokers=%d", brokers), func(b *testing.B) {
			sizes := scaleSizes(100*brokers, 10_000*brokers)
			for b.Loop() {
				empty := heap()
				c := newControl(b, brokers, sizes, scaleMcap*scaleLoad/margin/10_000)
				full := heap()
				c.resolve(sizes)
				for range periods {
					c.retune()
				}
				for range periods {
					c.rejoin(scaleBroker(c.rng.IntN(brokers)))
				}
				c.report(b)
				c.cat = nil
				ledgerAlone := heap()
				b.ReportMetric((full-ledgerAlone)/1e6, "catalog-MB")
				b.ReportMetric((ledgerAlone-empty)/1e6, "ledger-MB")
				runtime.KeepAlive(c)
			}
		})
	}
}

func (c *control) report(b *testing.B) {
	b.ReportMetric(float64(c.widest), "widest")
	b.ReportMetric(2*float64(c.grants)/periods, "retuning-messages/s")
	var elapsed time.Duration
	for step, durations := range c.durations {
		slices.Sort(durations)
		if step == "place" || step == "commit" || step == "grant" {
			for _, d := range durations {
				elapsed += d
			}
		}
		microseconds := func(d time.Duration) float64 { return float64(d) / 1e3 }
		b.ReportMetric(microseconds(durations[tokenbucket.Rank(len(durations), 0.5)]), step+"-median-µs")
		b.ReportMetric(microseconds(durations[len(durations)-1]), step+"-max-µs")
	}
	b.ReportMetric(elapsed.Seconds(), "up-s")
}
