package scenario

import (
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/sim/bucket"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// Report is the report of a run. The JSON form is drlsim's contract.
type Report struct {
	Name        string         `json:"name,omitempty"`
	Seed        uint64         `json:"seed"`
	Calibration string         `json:"calibration"`
	Duration    float64        `json:"duration_s"`
	Topics      []TopicReport  `json:"topics"`
	Brokers     []BrokerReport `json:"brokers"`
}

// TopicReport describes a topic's messages that arrived in the measured time.
type TopicReport struct {
	Name   string `json:"name"`
	Policy string `json:"policy"`
	// K is the number of brokers of the topic; 0 if the topic is infeasible.
	K          int         `json:"k"`
	Infeasible *Infeasible `json:"infeasible"`
	Publishers int         `json:"publishers"`
	Contract   Share       `json:"contract"`
	SLO        Verdict     `json:"slo"`
	Figures
	// Waiting is the number of messages without a token at the end of the run. No other
	// value includes them.
	Waiting int          `json:"waiting"`
	Parts   []PartReport `json:"brokers"`
}

// Infeasible says why a topic has no placement.
type Infeasible struct {
	Need  int64  `json:"need"`
	Have  int64  `json:"have"`
	Bound string `json:"bound"`
}

// Share is a contract or a part of one.
type Share struct {
	RateMilli int64 `json:"rate_milli"`
	Burst     int64 `json:"burst"`
}

func shareOf(s tokenbucket.Share) Share { return Share{int64(s.Rate), s.Burst} }

// Verdict is the SLO and its result.
type Verdict struct {
	Quantile float64      `json:"quantile"`
	Latency  bucket.Delay `json:"latency_s"`
	Met      bool         `json:"met"`
	// Exceeded is the number of late messages among Messages.
	Exceeded uint64  `json:"exceeded"`
	Fraction float64 `json:"fraction"`
	// Worst is the broker with the largest fraction.
	Worst         string  `json:"worst,omitempty"`
	WorstFraction float64 `json:"worst_fraction"`
}

// Figures are delays, rounded up by at most 1 %.
type Figures struct {
	Messages   int64     `json:"messages"`
	Access     Quantiles `json:"access_s"`
	Processing Quantiles `json:"processing_s"`
	Delivery   Quantiles `json:"delivery_s"`
}

// Quantiles of a delay.
type Quantiles struct {
	P50  bucket.Delay `json:"p50"`
	P90  bucket.Delay `json:"p90"`
	P95  bucket.Delay `json:"p95"`
	P99  bucket.Delay `json:"p99"`
	P999 bucket.Delay `json:"p99.9"`
	Max  bucket.Delay `json:"max"`
}

// PartReport is a broker's part of a topic. Share is the broker's last share.
type PartReport struct {
	Broker     string `json:"broker"`
	Publishers int    `json:"publishers"`
	Rate       int64  `json:"rate"`
	Share      Share  `json:"share"`
	Exceeded   uint64 `json:"exceeded"`
	Figures
}

// BrokerReport describes a broker.
type BrokerReport struct {
	Broker    string `json:"broker"`
	Mcap      int64  `json:"mcap"`
	Allocated int64  `json:"allocated"` // to background load and topics
	// Busy is the busy fraction of the broker's servers in the measured time.
	Busy float64 `json:"busy"`
}

func quantiles(l *histogram.Latency) Quantiles {
	at := func(q float64) bucket.Delay { return bucket.Delay(l.Quantile(q)) }
	return Quantiles{at(0.5), at(0.9), at(0.95), at(0.99), at(0.999), at(1)}
}

func (p *part) figures() Figures {
	return Figures{p.delivery.Count(), quantiles(p.access), quantiles(p.processing), quantiles(p.delivery)}
}

func (b *Built) report(parts [][]*part, cluster *engine.Cluster, waiting []int, busy []float64) *Report {
	s := b.Scenario
	r := &Report{Name: s.Name, Seed: s.Seed, Calibration: s.Calibration, Duration: s.Duration}
	for l, broker := range b.Brokers {
		r.Brokers = append(r.Brokers, BrokerReport{Broker: broker.ID, Mcap: broker.Mcap, Allocated: broker.Allocated, Busy: busy[l]})
	}
	for i, p := range b.Topics {
		t := TopicReport{
			Name: p.Spec.Name, Policy: p.Spec.Policy, K: p.Plan.K, Publishers: len(p.Where),
			Contract: shareOf(p.Contract), Waiting: waiting[i], Parts: []PartReport{},
		}
		if f := p.Infeasible; f != nil {
			t.Infeasible = &Infeasible{f.Need, f.Have, f.Bound}
		}
		whole := newPart()
		for _, q := range p.Plan.Quotas {
			l := find(b.Brokers, q.Broker)
			whole.add(parts[i][l])
			r.Brokers[l].Allocated += q.Rate
			t.Parts = append(t.Parts, PartReport{
				Broker: q.Broker, Publishers: len(q.Publishers), Rate: q.Rate, Share: shareOf(cluster.Share(i, l)),
				Exceeded: parts[i][l].exceeded, Figures: parts[i][l].figures(),
			})
		}
		v := b.judge(p.Spec.SLO.Quantile, parts[i])
		t.SLO = Verdict{
			Quantile: p.Spec.SLO.Quantile, Latency: bucket.Delay(duration(p.Spec.SLO.LatencyMs / 1000)),
			Met: v.Met, Exceeded: whole.exceeded, Fraction: v.Fraction, Worst: v.Worst, WorstFraction: v.WorstFraction,
		}
		t.Figures = whole.figures()
		r.Topics = append(r.Topics, t)
	}
	return r
}
