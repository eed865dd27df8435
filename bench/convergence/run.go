package convergence

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

const (
	topicName = "sensors"
	channel   = "c"
	quantile  = 0.99

	// rateMargin is r divided by the rate, as in the paper. spareRate is mcap divided by r.
	// As in the paper, one broker suffices by rate alone.
	rateMargin = 1.1
	spareRate  = 2
	// profiled is the length of the schedule from which the burst is profiled.
	profiled = time.Minute

	callTimeout  = 10 * time.Second
	startTimeout = 30 * time.Second
	// connecting bounds the time until all publishers send.
	connecting = 30 * time.Second
	// settle is the time between the end of a fit and the check. Delays that the last move
	// caused are not measured.
	settle = 2 * time.Second
	poll   = 100 * time.Millisecond
)

// profile returns a contract with r = 1.1 times the rate. The burst is the profiled burst
// plus the margin.
func profile(s schedule.Spec, slo time.Duration, margin float64) (*srtmv1.Contract, error) {
	arrivals := schedule.Arrivals(schedule.Until(s.Stream(), profiled))
	rate := tokenbucket.PerSecond(rateMargin * s.Rate * float64(s.Publishers))
	burst, err := tokenbucket.Profile(arrivals, rate, quantile)
	if err != nil {
		return nil, fmt.Errorf("profile the schedule: %w", err)
	}
	return &srtmv1.Contract{
		RateMilli: int64(rate), Burst: int64(math.Ceil(float64(burst) * (1 + margin))),
		Slo: &srtmv1.Slo{Quantile: quantile, Latency: durationpb.New(slo)},
	}, nil
}

// bench is the state of a row.
type bench struct {
	config  *config
	logf    func(format string, args ...any)
	cluster *local.Cluster
	admin   srtmv1.AdminServiceClient
	sending *local.Process
	sent    bytes.Buffer // output of the publishers, complete after they end
}

// row fits one topic on its own cluster and checks the result.
func (c *config) row(ctx context.Context, group int, mode string, logf func(string, ...any)) (_ *Row, err error) {
	spec := c.spec(group)
	contract, err := profile(spec, c.slo, c.margin)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(c.data, fmt.Sprintf("srtm-convergence-%d-%s-", group, mode))
	if err != nil {
		return nil, err
	}
	b := &bench{config: c, logf: logf}
	defer func() {
		if err != nil || c.data != "" {
			logf("the logs are in %s", dir)
			return
		}
		err = os.RemoveAll(dir)
	}()
	flags := []string{
		"--fitting=" + mode, "--window=" + c.check.String(), "--rebalance=off", "--log-level=debug",
		"--seed=" + strconv.FormatUint(spec.Seed+1, 10), // 0 would select a random seed
	}
	if mode == tuner.ModePaper {
		flags = append(flags, "--fitting-round="+c.round.String())
	}
	b.cluster, err = local.StartCluster(ctx, local.ClusterConfig{
		Brokers: c.brokers, Mcap: cmp.Or(c.mcap, spareRate*contract.RateMilli/1000), BinDir: c.bin, LogDir: dir, StartTimeout: startTimeout,
		BrokerFlags: []string{"--log-level=warn", "--mem-queue-size=1000000"}, LoaddistributorFlags: flags,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.cluster.Stop()) }()
	b.admin = srtmv1.NewAdminServiceClient(b.cluster.Conn)
	return b.measure(ctx, spec, contract, mode, dir)
}

// measure creates the topic, starts the publishers, waits for the fit, and checks the
// result.
func (b *bench) measure(ctx context.Context, spec schedule.Spec, contract *srtmv1.Contract, mode, dir string) (_ *Row, err error) {
	if err := b.create(ctx, spec, contract); err != nil {
		return nil, fmt.Errorf("create topic: %w", err)
	}
	if err := b.send(spec, dir); err != nil {
		return nil, err
	}
	defer func() { // after success the process has already stopped
		if stopped := b.sending.Stop(); err != nil {
			err = errors.Join(err, stopped)
		}
	}()
	row := &Row{Group: spec.GroupSize, Mode: mode, Seed: spec.Seed, RateMilli: contract.RateMilli, Burst: contract.Burst}
	if err := b.connected(ctx, spec); err != nil {
		return nil, err
	}
	if mode != modeOff {
		if err := b.waitForFit(ctx, row); err != nil {
			return nil, err
		}
	}
	if err := b.checked(ctx, row); err != nil {
		return nil, err
	}
	return row, b.reported(row)
}

// create creates the topic with static shares, so that the measurement does not include
// share updates.
func (b *bench) create(ctx context.Context, s schedule.Spec, contract *srtmv1.Contract) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	spec := &srtmv1.TopicSpec{Name: topicName, Contract: contract, PlacementPolicy: "srtm", ShareRule: share.Static, Channels: []string{channel}}
	for _, g := range s.Groups() {
		spec.Groups = append(spec.Groups, &srtmv1.PublisherGroup{Key: g.Key, Count: int32(g.Count), Rate: s.Rate, Batch: int32(s.Batch)})
	}
	_, err := topics.Create(ctx, b.admin, &srtmv1.CreateTopicRequest{Spec: spec}, nil)
	return err
}

// send starts the publishers and a consumer. reported stops them.
func (b *bench) send(s schedule.Spec, dir string) (err error) {
	l := b.config.load
	l.Spec = s
	args := append([]string{
		"run", "--topic=" + topicName, "--loaddistributor-address=" + b.cluster.GRPC, "--subscribe", "--channel=" + channel, "--lookupd-http-address=" + b.cluster.Lookup, "--output=json", "--progress=0",
		"--connect-timeout=" + connecting.String(), "--duration=" + (2*connecting + b.config.limit + 2*b.config.check).String(),
	}, l.Args()...)
	b.sending, err = local.Start(filepath.Join(b.config.bin, "iotpub"), args, local.Options{Log: filepath.Join(dir, "iotpub.log"), Stdout: &b.sent})
	return err
}

// topic returns the topic.
func (b *bench) topic(ctx context.Context) (*srtmv1.Topic, error) {
	if err := b.cluster.Died(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := b.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: topicName, OmitPublishers: true})
	if err != nil {
		return nil, fmt.Errorf("get topic: %w", err)
	}
	return r.Topic, nil
}

// waitFor polls the topic until condition returns true.
func (b *bench) waitFor(ctx context.Context, limit time.Duration, what string, condition func(*srtmv1.Topic) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("timed out waiting for %s after %v", what, limit))
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		topic, err := b.topic(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx) // rather than the error of the interrupted call
		}
		if err != nil {
			return err
		}
		if condition(topic) {
			return nil
		}
		select {
		case <-tick.C:
		case <-b.sending.Done():
			return errors.Join(errors.New("iotpub ended early"), b.sending.Failure())
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// connected waits until all publishers send.
func (b *bench) connected(ctx context.Context, s schedule.Spec) error {
	return b.waitFor(ctx, connecting, "the connections of all publishers", func(t *srtmv1.Topic) bool {
		pooled := t.Status.GetPooled()
		return int(pooled.GetPublishers()) == s.Publishers && pooled.GetOffered() > 0
	})
}

// waitForFit waits for the end of the fit.
func (b *bench) waitForFit(ctx context.Context, row *Row) error {
	k, state := 0, ""
	return b.waitFor(ctx, b.config.limit, "the fit's end", func(t *srtmv1.Topic) bool {
		f := t.Status.GetFit()
		if k != 0 && k != len(t.Quotas) {
			b.logf("until %.0f s: %s", f.GetTook().AsDuration().Seconds(), state)
		}
		k, state = len(t.Quotas), t.Status.GetFitting()
		if !f.GetEnded() {
			return false
		}
		row.Fit = &Fit{Fitted: f.Fitted, Reason: t.Status.Fitting, Seconds: f.Took.AsDuration().Seconds()}
		for _, r := range f.Rounds {
			row.Fit.Rounds = append(row.Fit.Rounds, Rounds{K: int(r.K), Rounds: int(r.Rounds)})
		}
		b.logf("ended after %.1f s on %d brokers: %s", row.Fit.Seconds, len(t.Quotas), row.Fit.Reason)
		return true
	})
}

// checked measures over the loaddistributor's window, which is as long as the check.
func (b *bench) checked(ctx context.Context, row *Row) error {
	begins := time.Now().Add(settle)
	var last *srtmv1.Topic
	err := b.waitFor(ctx, settle+b.config.check+connecting, "the check's end", func(t *srtmv1.Topic) bool {
		last = t
		// If the machine stalled, the window can be empty.
		return time.Since(begins) >= b.config.check && t.Status.GetPooled().GetDelivered() > 0
	})
	if err != nil {
		return err
	}
	pooled := last.Status.GetPooled()
	delivery, err := obs.LatencyFromProto(pooled.GetDelivery())
	access, err2 := obs.LatencyFromProto(pooled.GetAccess())
	processing, err3 := obs.LatencyFromProto(pooled.GetProcessing())
	if err := errors.Join(err, err2, err3); err != nil {
		return fmt.Errorf("the topic's histograms: %w", err)
	}
	row.K, row.State = len(last.Quotas), last.State.String()
	row.Check = Check{
		Seconds: pooled.GetInterval().AsDuration().Seconds(), Messages: pooled.GetDelivered(), Late: last.Status.ExceedFraction, Met: last.Status.SloMet,
		Delivery: report.QuantilesOf(delivery), Access: report.QuantilesOf(access), Processing: report.QuantilesOf(processing),
	}
	b.logf("checked on %d brokers: p99 %v, %.2f %% late", row.K, delivery.Quantile(quantile), row.Check.Late*100)
	return nil
}

// reported stops the publishers, and reads their lateness and number of moves from iotpub's
// report.
func (b *bench) reported(row *Row) error {
	if err := b.sending.Stop(); err != nil {
		return err
	}
	lines := bytes.Split(bytes.TrimSpace(b.sent.Bytes()), []byte("\n"))
	var r report.Report
	if err := json.Unmarshal(lines[len(lines)-1], &r); err != nil {
		return fmt.Errorf("iotpub's report: %w", err)
	}
	if fault := r.Fault(); fault != "" {
		return errors.New("iotpub: " + fault)
	}
	row.Publishers = Publishers{Sent: r.Sent, Accepted: r.Accepted, Moved: r.Moved, Lost: r.Lost, Late: r.Lateness}
	return nil
}
