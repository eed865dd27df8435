package scenario

import (
	"fmt"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// part counts one broker's deliveries of one topic.
type part struct {
	access, processing, delivery *histogram.Latency
	exceeded                     uint64
}

func newPart() *part {
	return &part{histogram.NewLatency(), histogram.NewLatency(), histogram.NewLatency(), 0}
}

func newParts(n int) []*part {
	parts := make([]*part, n)
	for i := range parts {
		parts[i] = newPart()
	}
	return parts
}

// record counts a delivery. A latency above limit is late.
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

// Cluster returns an engine for the scenario. The scenario's topics have the first
// numbers, in order.
func (b *Built) Cluster(observe func(engine.Delivery)) (*engine.Cluster, error) {
	var topics []engine.Topic
	for _, p := range b.Topics {
		topics = append(topics, engine.Topic{Stream: p.Stream(), Where: p.Where, Limited: true, Shares: p.Shares})
	}
	for _, bg := range b.background {
		brokerOf := slices.Repeat([]int{bg.broker}, len(bg.source.publishers))
		topics = append(topics, engine.Topic{Stream: bg.source.stream(), Where: brokerOf})
	}
	return engine.New(b.Models, topics, b.Scenario.seed("brokers"), observe)
}

// Run simulates the scenario. The report depends only on the arguments.
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
	adaptors, err := b.adaptors()
	if err != nil {
		return nil, err
	}
	busyBefore := make([]time.Duration, len(b.Brokers))
	warm := false
	for cluster.Now() < end {
		if !warm && cluster.Now() >= start {
			warm = true
			for l := range busyBefore {
				busyBefore[l] = cluster.Busy(l)
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
				if err := a.turn(b, cluster); err != nil {
					return nil, err
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
		busy[l] = (cluster.Busy(l) - busyBefore[l]).Seconds() / s.Duration / float64(b.Models[l].Servers)
	}
	return b.report(parts, cluster, waiting, busy), nil
}

// tuning is the adaptor of one topic, and the time of its next step.
type tuning struct {
	machine      *adaptor.Machine
	topic        int
	step         time.Duration
	due          mono.Time
	every, turns int
}

func (b *Built) adaptors() (all []*tuning, err error) {
	for i, p := range b.Topics {
		a := p.Spec.Adapt
		if a == nil || p.Infeasible != nil {
			continue
		}
		step := duration(a.Step)
		tuned := &tuning{
			machine: adaptor.New(0, adaptor.Config{Window: time.Duration(a.Window) * step}),
			topic:   i, step: step, due: mono.Time(step), every: a.Every,
		}
		c := &adaptor.Contract{Topic: p.Spec.Name, Total: p.Contract, Rule: a.Rule}
		for _, q := range p.Plan.Quotas {
			if _, err := tuned.machine.Hello(0, ledger.Session{Broker: q.Broker, Stamp: mono.Stamp{Process: "1"}}); err != nil {
				return nil, err
			}
			c.Placed = append(c.Placed, share.Placed{Broker: q.Broker, Publishers: len(q.Publishers), Quota: q.Share})
		}
		_, grants, err := tuned.machine.Set(0, c)
		if err == nil { // the initial shares
			err = tuned.machine.Ledger.Settle(grants, func(ledger.Grant) (tokenbucket.Tokens, bool) { return 0, true })
		}
		if err != nil {
			return nil, fmt.Errorf("adapt topic %s: %w", p.Spec.Name, err)
		}
		all = append(all, tuned)
	}
	return all, nil
}

// turn ends a step: brokers report, and every a.every steps the rule runs.
func (a *tuning) turn(b *Built, cluster *engine.Cluster) error {
	topic, now := b.Topics[a.topic], cluster.Now()
	for _, q := range topic.Plan.Quotas {
		s := cluster.Step(a.topic, find(b.Brokers, q.Broker))
		a.machine.Report(q.Broker, topic.Spec.Name, share.Step{At: now, Length: a.step, Offered: s.Offered, MaxBacklog: s.MaxBacklog, Backlog: s.Backlog})
	}
	if a.turns++; a.turns%a.every != 0 {
		return nil
	}
	for _, name := range a.machine.Adaptive(now, false) {
		grants, _, err := a.machine.Tune(now, name)
		if err == nil {
			err = a.machine.Ledger.Settle(grants, func(g ledger.Grant) (tokenbucket.Tokens, bool) {
				return cluster.Grant(a.topic, find(b.Brokers, g.Broker), g.Share, g.Tokens), true
			})
		}
		if err != nil {
			return fmt.Errorf("adapt topic %s: %w", name, err)
		}
	}
	return nil
}

// counts returns the brokers' deliveries of a topic, and the late ones.
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
