// Command pacing measures a topic that is offered more than its contract, on a real nsqd:
// publishers that are told what they may send (advise), that are not told and policed
// (police), and delayed alone (delay), in runs that are alike. It prints, for each, what
// was accepted of the contract, Jain's index of what each publisher got for its weight,
// the farthest from its part, the backlog, and the access delay. Figures are ratios of
// counters; nothing is asserted. Other brokers are not started: none of them has a contract.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/tools/iotpub/greedy"
)

// weight of the i-th publisher, as in the paper.
func (c config) weight(i int) float64 { return []float64{1, 2, 4, 8, 10}[i%5] }

// config is what is measured.
type config struct {
	nsqd              string
	rate, load        float64
	burst, publishers int
	warm, steady      time.Duration
	tcp, web          string
}

func main() {
	var c config
	flag.StringVar(&c.nsqd, "nsqd", "bin/nsqd", "`program` to measure")
	flag.Float64Var(&c.rate, "rate", 2000, "contract, `msg/s`")
	flag.IntVar(&c.burst, "burst", 100, "contract, `messages`")
	flag.Float64Var(&c.load, "load", 1.5, "offered, in contracts; each publisher offers this many times its part, every tenth five times as much")
	flag.IntVar(&c.publishers, "publishers", 50, "`number`, of weights 1, 2, 4, 8, 10 in turns")
	flag.DurationVar(&c.warm, "warm-up", 10*time.Second, "time before counting")
	flag.DurationVar(&c.steady, "steady", 15*time.Second, "time of counting")
	flag.Parse()
	fmt.Println("mode\taccepted/r\tJain\tfarthest\trefused\tbacklog p99\tbacklog max\taccess p99")
	for _, mode := range []string{"delay", "advise", "police"} {
		line, err := c.run(mode)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", mode, err)
			os.Exit(1)
		}
		fmt.Println(line)
	}
}

func (c config) run(mode string) (string, error) {
	dir, err := os.MkdirTemp("", "pacing")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	c.tcp, c.web = freePort(), freePort()
	args := []string{
		"--tcp-address", c.tcp, "--http-address", c.web, "--data-path", dir, "--log-level", "error", "--max-weight", "10",
		"--mem-queue-size", "1000000", "--topic-limit", fmt.Sprintf("t:%g:%d", c.rate, c.burst),
	}
	flags := map[string]string{"delay": "off", "advise": "advise", "police": "police"}
	cmd := exec.Command(c.nsqd, append(args, "--pacing", flags[mode])...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return "", err
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for range 100 {
		if _, err = c.stats(); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return "", err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	all.Go(func() { greedy.Consume(ctx, c.tcp, "t", "c") })
	publishers := make([]*greedy.Publisher, c.publishers)
	sum := 0.0
	for i := range publishers {
		sum += c.weight(i)
	}
	for i := range publishers {
		p := &greedy.Publisher{ID: strconv.Itoa(i), Demand: c.load * c.rate * c.weight(i) / sum, Deaf: mode == "police" && i%2 == 1}
		if i%10 == 0 {
			p.Demand *= 5 // the loud
		}
		if mode != "delay" {
			p.Weight = uint8(c.weight(i))
		}
		publishers[i] = p
		all.Go(func() {
			if err := p.Run(ctx, "t", 100, func(context.Context) (string, error) { return c.tcp, nil }); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		})
	}
	time.Sleep(c.warm)
	began := clock.Mono()
	was := make([]int64, len(publishers))
	refused := int64(0)
	for i, p := range publishers {
		was[i] = p.Accepted.Load()
		refused -= p.Refused.Load()
	}
	var depths []int
	var last stats
	for clock.Mono().Sub(began) < c.steady {
		if last, err = c.stats(); err != nil {
			return "", err
		}
		depths = append(depths, last.Depth)
		time.Sleep(50 * time.Millisecond)
	}
	seconds := clock.Mono().Sub(began).Seconds()
	total, ratio, square, farthest := 0.0, 0.0, 0.0, 0.0
	for i, p := range publishers {
		got := float64(p.Accepted.Load()-was[i]) / seconds
		refused += p.Refused.Load()
		total += got
		x := got / (c.rate * c.weight(i) / sum)
		ratio += x
		square += x * x
		farthest = max(farthest, math.Abs(x-1))
	}
	n := float64(len(publishers))
	slices.Sort(depths)
	return fmt.Sprintf("%s\t%.3f\t%.4f\t%.3f\t%d\t%d\t%d\t%v", mode, total/c.rate, ratio*ratio/(n*square), farthest, refused,
		depths[len(depths)*99/100], depths[len(depths)-1], time.Duration(last.SRTM.Latency.Access.P99)*time.Microsecond), nil
}

type stats struct {
	Depth int
	SRTM  struct {
		Latency struct {
			Access struct{ P99 int64 } `json:"access_us"`
		}
	}
}

func (c config) stats() (stats, error) {
	client := http.Client{Timeout: 5 * time.Second}
	r, err := client.Get("http://" + c.web + "/stats?format=json&topic=t&include_clients=false")
	if err != nil {
		return stats{}, err
	}
	defer r.Body.Close()
	var all struct{ Topics []stats }
	if err := json.NewDecoder(r.Body).Decode(&all); err != nil {
		return stats{}, err
	}
	if len(all.Topics) != 1 {
		return stats{}, errors.New("no topic")
	}
	return all.Topics[0], nil
}

func freePort() string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}
