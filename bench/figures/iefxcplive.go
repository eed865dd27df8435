package figures

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/tools/iotpub/greedy"
)

// The live figure is a topic with the paper's flows as publishers: 50 publishers of weights
// 1, 2, 4, 8 and 10, and 100 publishers in the middle third. Each publisher offers twice
// its part among fifty.
const (
	paceRate   = 2000 // msg/s
	paceBurst  = 100
	paceThird  = 15 * time.Second
	paceSample = time.Second
)

var paceWeights = []uint8{1, 2, 4, 8, 10}

// paced holds the samples of a run.
type paced struct {
	at     []float64
	rates  [][]float64 // by weight: mean of the first fifty publishers
	depths []float64
}

func iefxcpLive(w *harness) error {
	line := panel{id: "iefxcplive-line", title: "Pacing, live: backlog", xLabel: "s", yLabel: "messages", header: []string{"s", "mode", "backlog"}}
	worst, used, depth := map[string]string{}, map[string]string{}, map[string]string{}
	for _, mode := range []string{"off", "advise"} {
		r, err := w.pacedRun(mode)
		if err != nil {
			return err
		}
		a := panel{id: "iefxcplive-" + mode, title: "Pacing, live: msg/s of a publisher, " + mode, xLabel: "s", yLabel: "msg/s", header: []string{"s", "weight", "rate"}}
		for i, at := range r.at {
			line.point(mode, at, r.depths[i])
			line.add(at, mode, r.depths[i])
			for k, weight := range paceWeights {
				a.point(fmt.Sprint("weight ", weight), at, r.rates[i][k])
				a.add(at, weight, r.rates[i][k])
			}
		}
		w.out.plot(a)
		worst[mode], used[mode] = r.settled()
		depth[mode] = fmt.Sprintf("%.0f", r.depths[len(r.depths)-1])
	}
	w.out.plot(line)
	both := func(of map[string]string) string { return "off " + of["off"] + "; advise " + of["advise"] }
	w.out.tell(
		row{Figure: "IEFXCP, live", Quantity: "farthest from its part among 100 publishers, last third of their time", Paper: "“adapt quickly”", Live: both(worst), Note: "a weight's mean; 2,000 msg/s, each offers four times its part; what is not paced waits in the backlog"},
		row{Figure: "IEFXCP, live", Quantity: "accepted of the contract, the same time", Live: both(used), Note: "twice the messages of the first 50 publishers"},
		row{Figure: "IEFXCP, live", Quantity: "backlog at the end, messages", Paper: "“drained quickly”", Live: both(depth)},
	)
	return nil
}

// settled evaluates the last third of the time with a hundred publishers. A sample has the second
// before it, and comes a little late, so the middle of its second decides.
func (r *paced) settled() (worst, used string) {
	sums, n := make([]float64, len(paceWeights)), 0.0
	for i, at := range r.at {
		if t := time.Duration(at*1e9) - paceSample/2; t > 2*paceThird-paceThird/3 && t <= 2*paceThird {
			n++
			for k := range sums {
				sums[k] += r.rates[i][k]
			}
		}
	}
	total, weight, far := 0.0, 0.0, 0.0
	for k, w := range paceWeights {
		total, weight = total+20*sums[k]/n, weight+20*float64(w)
	}
	for k, w := range paceWeights {
		far = max(far, max(sums[k]/n/(paceRate*float64(w)/weight)-1, 1-sums[k]/n/(paceRate*float64(w)/weight)))
	}
	return fmt.Sprintf("%.1f %%", 100*far), fmt.Sprintf("%.3f", total/paceRate)
}

// pacedRun runs nsqd and the publishers.
func (w *harness) pacedRun(mode string) (_ *paced, err error) {
	var running *local.Process
	_, end, err := w.daemon("nsqd", func(bin, dir string) (_ *decide.Server, err error) {
		running, err = local.NSQD(filepath.Join(bin, "nsqd"), dir, "--log-level=error", "--max-weight=10", "--mem-queue-size=1000000",
			"--pacing="+mode, fmt.Sprintf("--topic-limit=t:%d:%d", paceRate, paceBurst))
		return &decide.Server{Process: running}, err
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()

	ctx, stop := context.WithCancel(w)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer stop()
	sending.Go(func() { greedy.Consume(ctx, running.TCP, "t", "c", nil) })
	join := func(ctx context.Context, prefix string, publishers []*greedy.Publisher) {
		for i := range publishers {
			p := &greedy.Publisher{ID: prefix + strconv.Itoa(i), Demand: 2 * paceRate * float64(paceWeights[i%5]) / 250}
			if publishers[i] = p; mode != "off" {
				p.Weight = paceWeights[i%5]
			}
			sending.Go(func() {
				_ = p.Run(ctx, "t", 100, func(context.Context) (string, error) { return running.TCP, nil })
			})
		}
	}
	first := make([]*greedy.Publisher, 50)
	join(ctx, "first", first)
	second, leave := context.WithCancel(ctx)
	defer leave()
	began, r := time.Now(), &paced{}
	last, before := began, make([]int64, len(paceWeights))
	tick := time.NewTicker(paceSample)
	defer tick.Stop()
	for third := 0; ; {
		select {
		case <-w.Done():
			return nil, w.Err()
		case <-tick.C:
		}
		now := time.Now()
		depth, err := host.Depth(w, running.HTTP, "t")
		if err != nil {
			return nil, err
		}
		counts, rates := make([]int64, len(paceWeights)), make([]float64, len(paceWeights))
		for i, p := range first {
			counts[i%5] += p.Accepted.Load()
		}
		for k := range rates {
			rates[k] = float64(counts[k]-before[k]) / now.Sub(last).Seconds() / float64(len(first)/5)
		}
		r.at, r.rates, r.depths = append(r.at, now.Sub(began).Seconds()), append(r.rates, rates), append(r.depths, float64(depth))
		last, before = now, counts
		switch passed := now.Sub(began); {
		case third == 0 && passed >= paceThird:
			join(second, "second", make([]*greedy.Publisher, 50))
			third++
		case third == 1 && passed >= 2*paceThird:
			leave()
			third++
		case passed >= 3*paceThird:
			return r, nil
		}
	}
}
