// Package why explains whether a topic keeps its SLO and, if not, which part is to blame:
// the tokens, the broker or the consumers. It judges by the answer of GetTopic and the
// theory of package tokenbucket, and keeps no state.
package why

import (
	"fmt"
	"math"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Outcomes of a Verdict.
const (
	Met       = "met"
	Missed    = "missed"
	Undecided = "undecided" // too few deliveries, or more than the contract
)

// Verdict is the evaluation of a topic.
type Verdict struct {
	SLO     string // Met, Missed or Undecided
	Culprit string // cause of a miss: "tokens", "broker" or "tokens and broker"; "" without a miss
	Text    string // one to three sentences
}

// Latencies holds the parts of a delay. An unreadable histogram counts as empty.
type Latencies struct{ Access, Broker, Consumer, Delivery *histogram.Latency }

// LatenciesOf returns the latencies of a topic's or a broker's statistics.
func LatenciesOf(s *srtmv1.TopicStats) Latencies {
	latency := func(h *srtmv1.Histogram) *histogram.Latency {
		l, err := obs.LatencyFromProto(h)
		if err != nil {
			return histogram.NewLatency()
		}
		return l
	}
	return Latencies{latency(s.GetAccess()), latency(s.GetProcessing()), latency(s.GetConsumer()), latency(s.GetDelivery())}
}

// tokensAbove and brokerBelow bound access delay's part of a p99. From tokensAbove on the
// tokens alone are to blame. Up to brokerBelow the broker alone is to blame.
const tokensAbove, brokerBelow = 0.6, 0.4

// Judge judges a topic.
func Judge(t *srtmv1.Topic) Verdict {
	status, slo := t.GetStatus(), t.GetSpec().GetContract().GetSlo()
	l := LatenciesOf(status.GetPooled())
	limit, quantile := slo.GetLatency().AsDuration(), slo.GetQuantile()
	v := Verdict{SLO: Undecided}
	if status.GetPooled().GetDelivered() == 0 {
		v.Text = "Nothing was delivered lately, so there is nothing to judge."
		if c := waiting(l, limit); c != "" || status.GetPooled().GetDepth() > 0 {
			v.Text = fmt.Sprintf("Nothing was delivered lately. Waiting in channels for consumers: %s.", plural.Count(status.GetPooled().GetDepth(), "message"))
		}
		return v
	}
	sentence := fmt.Sprintf("%s of deliveries are later than %v; %s may be.", percent(status.GetExceedFraction()), limit, percent(1-quantile))
	p99 := l.Delivery.Quantile(0.99)
	switch {
	case status.SloMet == nil:
		v.Text = sentence + " The SLO is not judged: too few messages were delivered, or the topic sends more than its contract."
	case *status.SloMet:
		v.SLO = Met
		v.Text = sentence
		if f := status.P99AccessFraction; f != nil {
			v.Text += fmt.Sprintf(" Of the p99 of %s, the wait for tokens is %s and the work of the broker %s.", Duration(p99), percent(*f), percent(1-*f))
		}
	default:
		v.SLO = Missed
		v.Culprit, v.Text = blame(t, l, sentence)
	}
	if c := waiting(l, limit); c != "" {
		v.Text += " " + c
	}
	return v
}

// blame explains why a topic misses its SLO.
func blame(t *srtmv1.Topic, l Latencies, sentence string) (culprit, text string) {
	fraction := -1.0 // access delay's fraction of the p99
	if f := t.GetStatus().P99AccessFraction; f != nil {
		fraction = *f
	} else if a, b := l.Access.Quantile(0.99), l.Broker.Quantile(0.99); a+b > 0 {
		fraction = float64(a) / float64(a+b)
	}
	p99 := Duration(l.Delivery.Quantile(0.99))
	tokens := fmt.Sprintf("%s of the p99 of %s is the wait for tokens.", percent(fraction), p99)
	if short := short(t); short != "" {
		tokens += " " + short
	}
	broker := fmt.Sprintf("the brokers take %s (p99) to deliver a message that has its token, so they are overloaded or stalled.", Duration(l.Broker.Quantile(0.99)))
	switch {
	case fraction >= tokensAbove:
		return "tokens", sentence + " The cause is the tokens: " + tokens
	case fraction <= brokerBelow:
		return "broker", sentence + " The cause is the broker: " + broker
	}
	return "tokens and broker", sentence + " There are two causes. " + tokens + " And " + broker
}

// short explains what the shares lack.
func short(t *srtmv1.Topic) string {
	brokers := t.GetStatus().GetBrokers()
	worst, need := -1, 0.0
	for i, b := range brokers {
		needed, burst := float64(b.GetLast().GetBurstNeeded()), float64(b.GetShare().GetBurst())
		if needed > burst && burst > 0 && needed/burst > need {
			worst, need = i, needed/burst
		}
	}
	if worst < 0 {
		return ""
	}
	w := brokers[worst]
	text := fmt.Sprintf("The messages that arrive at %s at once need a burst of %d.", w.GetBrokerId(), w.GetLast().GetBurstNeeded())
	if len(brokers) > 1 {
		return fmt.Sprintf("%s The broker's share has a burst of %d: the contract's burst of %d is split over %s.", text, w.GetShare().GetBurst(), t.GetSpec().GetContract().GetBurst(), plural.Count(len(brokers), "broker"))
	}
	return fmt.Sprintf("%s The contract has a burst of %d.", text, w.GetShare().GetBurst())
}

// waiting reports slow consumers; "" if consumers are fast enough.
func waiting(l Latencies, limit time.Duration) string {
	if w := l.Consumer.Quantile(0.99); l.Consumer.Count() > 0 && w > limit && limit > 0 {
		return fmt.Sprintf("Consumers keep messages waiting for %s at p99, which is not part of the SLO.", Duration(w))
	}
	return ""
}

// Penalty is the cost of splitting, in mean access delays.
type Penalty struct {
	Whole    time.Duration // by theory, for Poisson arrivals in one bucket with the whole contract
	Split    time.Duration // by theory, for the present shares, each with its offered rate
	Measured time.Duration // in the window
	Factor   float64       // Split / Whole; 0 if meaningless
}

// PenaltyOf returns the topic's penalty; false without traffic or shares.
func PenaltyOf(t *srtmv1.Topic) (p Penalty, ok bool) {
	status, contract := t.GetStatus(), t.GetSpec().GetContract()
	total, sum := 0.0, 0.0
	for _, b := range status.GetBrokers() {
		rate := topics.PerSecond(b.GetWindow().GetOffered(), b.GetWindow())
		share := b.GetShare()
		if rate == 0 {
			continue
		}
		if share.GetRateMilli() == 0 || share.GetBurst() < 1 {
			return p, false
		}
		total += rate
		sum += rate * tokenbucket.ExpectedDelayExact(rate, float64(share.GetRateMilli())/1000, float64(share.GetBurst()))
	}
	if total == 0 {
		return p, false
	}
	whole := tokenbucket.ExpectedDelayExact(total, float64(contract.GetRateMilli())/1000, float64(contract.GetBurst()))
	p.set(whole, sum/total)
	p.Measured = LatenciesOf(status.GetPooled()).Access.Mean()
	return p, true
}

// PlanPenalty is PenaltyOf for a planned topic with an expected rate offered, in msg/s,
// in proportion to its shares.
func PlanPenalty(t *srtmv1.Topic, offered float64) (p Penalty, ok bool) {
	contract := t.GetSpec().GetContract()
	rate := float64(contract.GetRateMilli()) / 1000
	if len(t.GetQuotas()) == 0 || rate <= 0 || offered <= 0 {
		return p, false
	}
	mean := 0.0
	for _, q := range t.Quotas {
		share := float64(q.GetShare().GetRateMilli()) / 1000
		if share <= 0 || q.GetShare().GetBurst() < 1 {
			return p, false
		}
		mean += share / rate * tokenbucket.ExpectedDelayExact(offered*share/rate, share, float64(q.GetShare().GetBurst()))
	}
	whole := tokenbucket.ExpectedDelayExact(offered, rate, float64(contract.GetBurst()))
	p.set(whole, mean)
	return p, true
}

// set sets the theoretical values, in seconds.
func (p *Penalty) set(whole, split float64) {
	p.Whole, p.Split = seconds(whole), seconds(split)
	if whole >= 1e-9 && !math.IsInf(split, 0) {
		p.Factor = split / whole
	}
}

// Forever stands for a delay without bound.
const Forever = time.Duration(math.MaxInt64)

func seconds(s float64) time.Duration {
	if math.IsNaN(s) || s > Forever.Seconds()/2 {
		return Forever
	}
	return time.Duration(s * float64(time.Second))
}

// Duration formats d with about three digits.
func Duration(d time.Duration) string {
	switch {
	case d == Forever:
		return "without bound"
	case d == 0:
		return "0 ms"
	case d >= time.Second:
		return fmt.Sprintf("%.3g s", d.Seconds())
	case d >= time.Millisecond:
		return fmt.Sprintf("%.3g ms", float64(d)/1e6)
	case d >= time.Microsecond:
		return fmt.Sprintf("%.3g µs", float64(d)/1e3)
	}
	return fmt.Sprintf("%d ns", d.Nanoseconds())
}

func percent(fraction float64) string {
	text := fmt.Sprintf("%.2f", 100*fraction)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text + " %"
}
