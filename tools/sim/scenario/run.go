package scenario

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// part is what one broker delivered of one topic.
type part struct {
	access, processing, delivery *obs.Latency
	exceeded                     uint64
}

func newPart() *part {
	return &part{obs.NewLatency(), obs.NewLatency(), obs.NewLatency(), 0}
}

func newParts(n int) []*part {
	parts := make([]*part, n)
	for i := range parts {
		parts[i] = newPart()
	}
	return parts
}

// record counts a delivery; what took more than limit is late.
func (p *part) record(d engine.Delivery, limit time.Duration) {
	p.access.Record(d.Access())
	p.processing.Record(d.Processing())
	p.delivery.Record(d.Latency())
	if d.Latency() > limit {
		p.exceeded++
	}
}

func (p *part) add(q *part) {
	p.access.Merge(q.access)
	p.processing.Merge(q.processing)
	p.delivery.Merge(q.delivery)
	p.exceeded += q.exceeded
}

// Cluster returns the engine with everything in place: the scenario's topics have
// the first numbers, in their order.
func (b *Built) Cluster(observe func(engine.Delivery)) (*engine.Cluster, error) {
	var topics []engine.Topic
	for _, p := range b.Topics {
		topics = append(topics, engine.Topic{Stream: p.Stream(), Where: p.Where, Limited: true, Shares: p.Shares})
	}
	for _, bg := range b.background {
		where := slices.Repeat([]int{bg.broker}, len(bg.source.publishers))
		topics = append(topics, engine.Topic{Stream: bg.source.stream(), Where: where})
	}
	return engine.New(b.Models, topics, b.Scenario.seed("brokers"), observe)
}

// Run simulates the scenario. The report depends on the arguments alone.
func Run(b *Built) (*Report, error) {
	s := b.Scenario
	start := mono.Time(duration(s.Warmup))
	end := start.Add(duration(s.Duration))
	parts := make([][]*part, len(b.Topics))
	limits := make([]time.Duration, len(b.Topics))
	for i, p := range b.Topics {
		limits[i] = duration(p.Spec.SLO.LatencyMs / 1000)
		parts[i] = newParts(len(b.Brokers))
	}
	observe := func(d engine.Delivery) {
		if d.Topic >= len(parts) || d.At < start || d.At >= end {
			return
		}
		parts[d.Topic][d.Broker].record(d, limits[d.Topic])
	}
	cluster, err := b.Cluster(observe)
	if err != nil {
		return nil, err
	}
	adaptors, shares := b.adaptors()
	before := make([]time.Duration, len(b.Brokers))
	warm := false
	for cluster.Now() < end {
		if !warm && cluster.Now() >= start {
			warm = true
			for l := range before {
				before[l] = cluster.Busy(l)
			}
		}
		next := end
		if !warm {
			next = start
		}
		for _, a := range adaptors {
			next = min(next, a.due)
		}
		cluster.Advance(next)
		for _, a := range adaptors {
			if a.due == next {
				a.due = a.due.Add(a.step)
				changed, err := a.Turn(cluster)
				if err != nil {
					return nil, err
				}
				if changed != nil {
					shares[a.Topic] = changed
				}
			}
		}
	}
	waiting := make([]int, len(b.Topics))
	for i := range b.Topics {
		for l := range b.Brokers {
			waiting[i] += cluster.Waiting(i, l)
		}
	}
	busy := make([]float64, len(b.Brokers))
	for l := range busy {
		busy[l] = (cluster.Busy(l) - before[l]).Seconds() / s.Duration / float64(b.Models[l].Servers)
	}
	return b.report(parts, shares, waiting, busy), nil
}

// adaptor is an engine.Adaptor and when it is next due.
type adaptor struct {
	engine.Adaptor
	step time.Duration
	due  mono.Time
}

// adaptors returns those that the scenario asks for, and the shares that topics
// start with.
func (b *Built) adaptors() (adaptors []*adaptor, shares [][]tokenbucket.Share) {
	for i, p := range b.Topics {
		shares = append(shares, p.Shares)
		a := p.Spec.Adapt
		if a == nil || p.Infeasible != nil {
			continue
		}
		members := map[int]int{}
		for _, q := range p.Plan.Quotas {
			members[find(b.Brokers, q.Broker)] = len(q.Publishers)
		}
		step := duration(a.Step)
		adaptors = append(adaptors, &adaptor{
			Adaptor: engine.Adaptor{Topic: i, Rule: a.Rule, Contract: p.Contract, StepSeconds: a.Step, Window: a.Window, Every: a.Every, Members: members},
			step:    step, due: mono.Time(step),
		})
	}
	return adaptors, shares
}

// counts are what brokers delivered of a topic, and how much of it late.
func (b *Built) counts(parts []*part) []tuner.Count {
	counts := make([]tuner.Count, len(parts))
	for l, p := range parts {
		counts[l] = tuner.Count{Part: b.Brokers[l].ID, Delivered: uint64(p.delivery.Count()), Exceeded: p.exceeded}
	}
	return counts
}

// judge applies the SLO's statistic.
func (b *Built) judge(quantile float64, parts []*part) tuner.Verdict {
	return tuner.Judge(quantile, b.counts(parts))
}
