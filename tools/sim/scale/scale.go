package scale

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Size is how large a cluster is.
type Size struct {
	Brokers    int `json:"brokers"`
	Topics     int `json:"topics"`
	Publishers int `json:"publishers"`
}

// Bounds of a Size.
const (
	MaxBrokers    = 10_000
	MaxTopics     = 1_000_000
	MaxPublishers = 50_000_000
)

// Config is a study of one size.
type Config struct {
	Size
	// Policy is a placement's, Rule a share rule's name.
	Policy, Rule string
	// Mcap is what each broker carries, msg/s, and Load the part of it that the
	// contracts take, above 0 and below 1.
	Mcap int64
	Load float64
	// GroupSize is how many publishers of a topic share a correlation key.
	GroupSize int
	// Ticks is how many periods of the adaptor are run.
	Ticks int
	Seed  uint64
}

// Validate returns every fault at once, joined, or nil.
func (c Config) Validate() error {
	var f faults.List
	between := func(name string, v, minimum, maximum int) {
		f.If(v < minimum || v > maximum, "%s: %d, want %d .. %d", name, v, minimum, maximum)
	}
	between("brokers", c.Brokers, 1, MaxBrokers)
	between("topics", c.Topics, 1, MaxTopics)
	between("publishers", c.Publishers, max(1, c.Topics), min(MaxPublishers, max(1, c.Topics)*placement.MaxPublishers))
	between("group size", c.GroupSize, 1, placement.MaxPublishers)
	between("ticks", c.Ticks, 1, 1000)
	f.If(c.Mcap < 1 || c.Mcap > placement.MaxRate, "mcap: %d msg/s, want 1 .. %d", c.Mcap, placement.MaxRate)
	f.If(!(c.Load > 0 && c.Load < 1), "load: %v, want more than 0 and less than 1", c.Load)
	f.If(!slices.Contains(placement.Policies(), c.Policy), "policy: %q, want one of %s", c.Policy, strings.Join(placement.Policies(), ", "))
	f.If(!slices.Contains(share.Rules(), c.Rule), "rule: %q, want one of %s", c.Rule, strings.Join(share.Rules(), ", "))
	return f.Err()
}

// Meter is what a study measures with.
type Meter struct {
	// Now is a clock, Heap how many bytes are in use; it may take its time.
	Now  func() mono.Time
	Heap func() uint64
	// Progress is called now and then; total is above 0.
	Progress func(stage string, done, total int)
}

// Times are quantiles of how long a step took; Total is the sum.
type Times struct {
	Count int           `json:"count"`
	Total time.Duration `json:"total_ns"`
	P50   time.Duration `json:"p50_ns"`
	P99   time.Duration `json:"p99_ns"`
	Max   time.Duration `json:"max_ns"`
}

// Report is what a study found. All but its times and bytes depends on the
// Config alone.
type Report struct {
	Size
	// Split is how many topics are on more than one broker, and Widest on how
	// many the widest is. Largest is the publishers of the largest topic.
	Split   int `json:"split_topics"`
	Widest  int `json:"widest"`
	Largest int `json:"largest_topic"`

	// Place is a topic's placement with the snapshot it is made on; Commit what
	// the catalog does until it is active; Grant what the ledger does until all
	// shares are acknowledged; Resolve a publisher's question; Tick a period of
	// the adaptor over all topics; Rejoin a broker that comes back, in catalog
	// and ledger.
	Place   Times `json:"place"`
	Commit  Times `json:"commit"`
	Grant   Times `json:"grant"`
	Resolve Times `json:"resolve"`
	Tick    Times `json:"tick"`
	Rejoin  Times `json:"rejoin"`

	// CatalogBytes and LedgerBytes are what either holds when all is up.
	CatalogBytes uint64 `json:"catalog_bytes"`
	LedgerBytes  uint64 `json:"ledger_bytes"`

	Messages Messages `json:"messages"`
}

// Up is how long it took to bring all topics up.
func (r Report) Up() time.Duration { return r.Place.Total + r.Commit.Total + r.Grant.Total }

// Messages counts messages on gRPC streams, and calls as two.
type Messages struct {
	// PerTopic is the mean for bringing a topic up: creation, preparation,
	// contract, grants, acknowledgements; without publishers.
	PerTopic float64 `json:"per_topic"`
	// PerPublisher: it asks once for its broker.
	PerPublisher float64 `json:"per_publisher"`
	// ReportsPerSecond is what brokers send by themselves: one report each to
	// the loaddistributor and to the adaptor. EntriesPerSecond is the lines in
	// them, one for each topic a broker carries.
	ReportsPerSecond float64 `json:"reports_per_s"`
	EntriesPerSecond float64 `json:"report_entries_per_s"`
	// GrantsPerSecond is grants and acknowledgements of retuning, where no
	// topic's shares rest: every split topic's traffic shifts all the time.
	GrantsPerSecond float64 `json:"grants_per_s"`
}

// PerSecond is the steady state.
func (m Messages) PerSecond() float64 { return m.ReportsPerSecond + m.GrantsPerSecond }

// sizes returns the publishers of each topic, largest first: as 1 over their
// rank, at least one, none above placement's bound.
func (c Config) sizes() []int {
	harmonic := 0.0
	for i := range c.Topics {
		harmonic += 1 / float64(i+1)
	}
	sizes := make([]int, c.Topics)
	spare := c.Publishers - c.Topics // beyond one for each
	left := spare
	for i := range sizes {
		extra := min(int(float64(spare)/harmonic/float64(i+1)), placement.MaxPublishers-1, left)
		sizes[i] = 1 + extra
		left -= extra
	}
	// What rounding left goes to the small ones, evenly.
	for i := len(sizes) - 1; left > 0; i = (i + len(sizes) - 1) % len(sizes) {
		add := min(left, (left+len(sizes)-1)/len(sizes), placement.MaxPublishers-sizes[i])
		sizes[i] += add
		left -= add
	}
	return sizes
}

// study is a Run under way.
type study struct {
	cfg   Config
	meter Meter
	rng   *rand.Rand
	cat   *catalog.Catalog
	led   *ledger.Ledger
	// rate is each publisher's, msg/s; the contracts have 10 % more.
	rate     float64
	messages int // of bringing topics up
	grants   int // of all ticks
	report   Report

	place, commit, grant, resolve, tick, rejoin []time.Duration
}

func broker(i int) string { return fmt.Sprintf("b%04d", i) }
func name(i int) string   { return fmt.Sprintf("t%06d", i) }

// Run does a study.
//
// Requires: cfg is valid.
func Run(cfg Config, meter Meter) (Report, error) {
	s := &study{
		cfg: cfg, meter: meter, rng: rand.New(rand.NewPCG(cfg.Seed, 0)),
		cat: catalog.New(), led: ledger.New(1, ledger.Leases{}), report: Report{Size: cfg.Size},
	}
	s.rate = float64(cfg.Mcap) * float64(cfg.Brokers) * cfg.Load / margin / float64(cfg.Publishers)
	sizes := cfg.sizes()
	s.report.Largest = sizes[0]
	order := s.rng.Perm(cfg.Topics)
	empty := meter.Heap()
	for i := range cfg.Brokers {
		if err := s.join(i); err != nil {
			return Report{}, err
		}
	}
	for done, i := range order {
		if done%max(1, cfg.Topics/100) == 0 {
			meter.Progress("placing topics", done, cfg.Topics)
		}
		if err := s.create(i, sizes[i]); err != nil {
			return Report{}, fmt.Errorf("topic %d of %d, of %d publishers: %w", done+1, cfg.Topics, sizes[i], err)
		}
	}
	held := meter.Heap()
	if err := s.ask(sizes); err != nil {
		return Report{}, err
	}
	for i := range cfg.Ticks {
		meter.Progress("retuning shares", i, cfg.Ticks)
		if err := s.turn(); err != nil {
			return Report{}, err
		}
	}
	const breaks = 5
	for i := range breaks {
		meter.Progress("brokers come back", i, breaks)
		if err := s.rejoins(broker(s.rng.IntN(cfg.Brokers))); err != nil {
			return Report{}, err
		}
	}
	s.finish()
	// What is left without the catalog is the ledger.
	s.cat = nil
	ledgerOnly := meter.Heap()
	s.report.LedgerBytes = sub(ledgerOnly, empty)
	s.report.CatalogBytes = sub(held, ledgerOnly)
	if n := len(s.led.View()); n != cfg.Topics {
		return Report{}, fmt.Errorf("the ledger holds %d topics, want %d", n, cfg.Topics)
	}
	return s.report, nil
}

// margin is the contract's rate over that of the publishers, as in the paper's
// profiling.
const margin = 1.1

func sub(a, b uint64) uint64 { return a - min(a, b) }

// timed adds how long f took to times.
func (s *study) timed(times *[]time.Duration, f func() error) error {
	began := s.meter.Now()
	err := f()
	*times = append(*times, s.meter.Now().Sub(began))
	return err
}

func (s *study) join(i int) error {
	_, err := s.cat.Apply(catalog.BrokerJoined{
		ID: broker(i), Instance: "1", TCPAddress: fmt.Sprintf("10.%d.%d.1:4150", i/256, i%256),
		HTTPAddress: fmt.Sprintf("10.%d.%d.1:4151", i/256, i%256), Mcap: s.cfg.Mcap,
	})
	if err != nil {
		return err
	}
	_, err = s.led.Hello(ledger.Session{Broker: broker(i), Said: mono.Said{Process: "1"}}, 0)
	return err
}

// create brings topic i up, as a CreateTopic request does.
func (s *study) create(i, publishers int) error {
	milli := int64(math.Ceil(float64(publishers) * s.rate * margin * 1000))
	demand := placement.Demand{Topic: name(i), RateMilli: milli, Rate: (milli + 999) / 1000}
	for left := publishers; left > 0; left -= s.cfg.GroupSize {
		demand.Groups = append(demand.Groups, placement.Group{Key: fmt.Sprintf("g%d", len(demand.Groups)), Count: min(left, s.cfg.GroupSize), Rate: s.rate})
	}
	// A token for each broker that could be needed, and then some.
	demand.Burst = 16 + demand.Rate/100
	spec := &catalog.Spec{
		Demand: demand, SLO: catalog.SLO{Quantile: 0.99, Latency: time.Millisecond},
		Policy: s.cfg.Policy, ShareRule: s.cfg.Rule, Channels: []string{"c"},
	}
	var plan placement.Plan
	err := s.timed(&s.place, func() (err error) {
		plan, err = placement.Place(s.cfg.Policy, s.cat.Snapshot(), demand, s.rng)
		return err
	})
	if err != nil {
		return err
	}
	s.report.Widest = max(s.report.Widest, plan.K)
	if plan.K > 1 {
		s.report.Split++
	}
	var initial []share.Assigned
	for _, q := range plan.Quotas {
		initial = append(initial, share.Assigned{Broker: q.Broker, Share: q.Share})
	}
	// The request and its stream of two steps and the topic; then each broker
	// is told to prepare, and answers.
	s.messages += 4 + 2*plan.K
	err = s.timed(&s.commit, func() error {
		placed, err := catalog.NewTopicPlaced(spec, plan, "")
		if err != nil {
			return err
		}
		if _, err := s.cat.Apply(placed); err != nil {
			return err
		}
		for _, q := range plan.Quotas {
			if _, err := s.cat.Apply(catalog.MemberPrepared{Topic: demand.Topic, Broker: q.Broker}); err != nil {
				return err
			}
		}
		_, err = s.cat.Apply(catalog.TopicActivated{Topic: demand.Topic})
		return err
	})
	if err != nil {
		return err
	}
	s.messages += 2 // SetContract and its answer
	return s.timed(&s.grant, func() error {
		grants, err := s.led.SetContract(demand.Topic, ledger.Terms{Contract: tokenbucket.Share{Rate: tokenbucket.Rate(milli), Burst: demand.Burst}}, initial)
		if err != nil {
			return err
		}
		sent, err := s.acknowledge(grants)
		s.messages += 2 * sent
		return err
	})
}

// acknowledge has brokers apply grants, and those that follow, until none does,
// and returns how many there were. A bucket that shrinks gives up what its burst
// shrinks by: it was full.
func (s *study) acknowledge(grants []ledger.Grant) (sent int, err error) {
	err = s.led.Settle(grants, func(g ledger.Grant) (tokenbucket.Tokens, bool) {
		sent++
		view, _ := s.led.Topic(g.Topic)
		i, _ := slices.BinarySearchFunc(view.Members, g.Broker, func(m ledger.MemberView, id string) int { return strings.Compare(m.Broker, id) })
		return tokenbucket.Tokens(max(0, view.Members[i].Acknowledged.Burst-g.Share.Burst)) * tokenbucket.Token, true
	})
	return sent, err
}

// ask has publishers ask for their brokers.
func (s *study) ask(sizes []int) error {
	for range 1000 {
		i := s.rng.IntN(s.cfg.Topics)
		p := s.rng.IntN(sizes[i])
		topic, id := name(i), fmt.Sprintf("g%d.%d", p/s.cfg.GroupSize, p%s.cfg.GroupSize)
		err := s.timed(&s.resolve, func() error {
			_, err := s.cat.Resolve(topic, id)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// turn is one period of the adaptor in which no topic's traffic rests: the rate
// that a broker sees is within a tenth of what its publishers send, and some
// messages wait.
func (s *study) turn() error {
	grants := 0
	var spent time.Duration
	for i := range s.cfg.Topics {
		view, _ := s.led.Topic(name(i))
		if len(view.Members) < 2 {
			continue // a share that is the contract stays
		}
		loads := make([]share.Load, len(view.Members))
		for j, m := range view.Members {
			loads[j] = share.Load{
				Broker: m.Broker, Share: m.Target, Publishers: 1,
				Rate:       m.Target.Rate.PerSecond() / margin * (0.9 + 0.2*s.rng.Float64()),
				MaxBacklog: 1 + s.rng.Int64N(m.Target.Burst+1),
			}
		}
		began := s.meter.Now()
		target, err := share.Split(s.cfg.Rule, view.Contract, loads)
		if err != nil {
			return fmt.Errorf("retune %s: %w", view.Topic, err)
		}
		moved, err := s.led.Propose(view.Topic, target)
		if err != nil {
			return fmt.Errorf("retune: %w", err)
		}
		sent, err := s.acknowledge(moved)
		if err != nil {
			return fmt.Errorf("retune: %w", err)
		}
		spent += s.meter.Now().Sub(began)
		grants += sent
	}
	s.tick = append(s.tick, spent)
	s.grants += grants
	return nil
}

// rejoins has a broker lose its sessions and open them again, with what it held.
func (s *study) rejoins(id string) error {
	b, _ := s.cat.Broker(id)
	var held []ledger.Held
	for _, topic := range s.cat.Placed(id) {
		view, _ := s.led.Topic(topic)
		for _, m := range view.Members {
			if m.Broker == id {
				held = append(held, ledger.Held{Topic: topic, Share: m.Acknowledged, Epoch: m.AcknowledgedEpoch})
			}
		}
	}
	return s.timed(&s.rejoin, func() error {
		if _, err := s.cat.Apply(catalog.BrokerLeft{ID: id}); err != nil {
			return err
		}
		s.led.Disconnect(id)
		if _, err := s.led.Hello(ledger.Session{Broker: id, Said: mono.Said{Process: "1"}, Held: held}, 0); err != nil {
			return err
		}
		_, err := s.cat.Apply(catalog.BrokerJoined{ID: id, Instance: b.Instance, TCPAddress: b.TCPAddress, HTTPAddress: b.HTTPAddress, Mcap: b.Mcap})
		if err != nil {
			return err
		}
		_, prepare := s.cat.Work(id)
		for _, topic := range prepare {
			if _, err := s.cat.Apply(catalog.MemberPrepared{Topic: topic, Broker: id}); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *study) finish() {
	r := &s.report
	r.Place, r.Commit, r.Grant = timesOf(s.place), timesOf(s.commit), timesOf(s.grant)
	r.Resolve, r.Tick, r.Rejoin = timesOf(s.resolve), timesOf(s.tick), timesOf(s.rejoin)
	entries := 0
	for i := range s.cfg.Brokers {
		entries += len(s.cat.Placed(broker(i)))
	}
	m := &r.Messages
	m.PerTopic = float64(s.messages) / float64(s.cfg.Topics)
	m.PerPublisher = 2
	m.ReportsPerSecond = 2 * float64(s.cfg.Brokers)
	m.GrantsPerSecond = float64(2*s.grants) / float64(s.cfg.Ticks)
	m.EntriesPerSecond = 2 * float64(entries)
}

func timesOf(all []time.Duration) Times {
	if len(all) == 0 {
		return Times{}
	}
	sorted := slices.Sorted(slices.Values(all))
	t := Times{Count: len(sorted), Max: sorted[len(sorted)-1]}
	for _, d := range sorted {
		t.Total += d
	}
	at := func(q float64) time.Duration { return sorted[tokenbucket.Rank(len(sorted), q)] }
	t.P50, t.P99 = at(0.5), at(0.99)
	return t
}
