//go:build linux

// Package scaling measures the value of event loops. An nsqd with 1, 2, 4, ... loops, up to
// one per processor, and with --io-loops=auto, takes as many messages as possible from
// publishers of one topic, and of many topics.
//
//	go run ./bench scaling --nsqd bin/nsqd
//
// Each topic has a publisher and a subscriber. The publisher writes 50 messages of 100
// bytes at a time, with at most 2,000 unanswered. The subscriber finishes the messages of
// each read in one write. The load shares the processors with the broker. On four or more
// processors the load uses only the upper half, and the broker the lower half.
package scaling

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/nsq/wire"
)

const (
	together = 50
	ahead    = 2000
	size     = 100
	warming  = time.Second
)

// Run prints the page about event loops and processors.
func Run(ctx context.Context, args []string, stdout, _ io.Writer) error {
	fs := flag.NewFlagSet("scaling", flag.ContinueOnError)
	path := fs.String("nsqd", "bin/nsqd", "`path` of the broker (make build)")
	lasting := fs.Duration("duration", 4*time.Second, "how long is measured, after a second of warming up")
	rounds := fs.Int("rounds", 3, "how often; the table has medians")
	topics := fs.Int("topics", 2*runtime.NumCPU(), "`number` of topics of the second half; the first has one")
	if err := host.Parse(fs, args, stdout); err != nil {
		return host.Usage(err)
	}
	nsqd, err := host.Program(*path)
	if err != nil {
		return err
	}
	return run(ctx, stdout, nsqd, *lasting, *rounds, *topics)
}

func run(ctx context.Context, out io.Writer, nsqd string, lasting time.Duration, rounds, most int) error {
	cpus := runtime.NumCPU()
	loops := []string{}
	for n := 1; n < 2*cpus; n *= 2 {
		loops = append(loops, strconv.Itoa(min(n, cpus)))
	}
	loops = append(loops, "auto")
	pinned := ""
	if cpus >= 4 {
		pinned = fmt.Sprintf("0-%d", cpus/2-1)
		var mine unix.CPUSet
		for cpu := cpus / 2; cpu < cpus; cpu++ {
			mine.Set(cpu)
		}
		if err := unix.SchedSetaffinity(0, &mine); err != nil {
			return fmt.Errorf("pin the load: %w", err)
		}
	}
	fmt.Fprintf(out, "# Event loops and processors\n\nMade by `make scaling`. Measured: %d processors, broker on %s; medians of %d runs of %v,\nalternating. Messages of %d bytes, one publisher and one subscriber a topic, as fast as they go.\n\n",
		cpus, orAll(pinned), rounds, lasting, size)
	host.Head(out, "topics", "loops", "at the end", "msg/s in and out", "to 1 loop", "CPU us/msg")
	for _, n := range slices.Compact([]int{1, most}) {
		var subjects []host.Subject[result]
		for _, l := range loops {
			subjects = append(subjects, host.Subject[result]{Name: l, Measure: func(int) (result, error) { return measure(ctx, nsqd, l, n, lasting, pinned) }})
		}
		all, err := host.Rounds(ctx, rounds, subjects)
		if err != nil {
			return fmt.Errorf("%d topics: %w", n, err)
		}
		medians := make([]result, len(loops))
		for i, l := range loops {
			r := median(all[l])
			medians[i] = r
			host.Rowf(out, "%d\t%s\t%d\t%.0f\t%.2f\t%.2f", n, l, r.loops, r.rate, r.rate/medians[0].rate, r.cpu)
		}
		if n == most && len(loops) > 2 {
			model(out, medians[0].cpu, medians[1].cpu)
		}
	}
	return nil
}

// model extrapolates the costs with one and two loops to larger machines. With n loops, all
// but one in n messages go from one loop to another; with two loops, every second message
// does.
func model(out io.Writer, one, two float64) {
	fmt.Fprintf(out, "\n**Modelled**, not measured: loops that share nothing but what the two did, on a broker's own\n"+
		"processors, with many topics: a message costs %.2f us on one loop and %.2f us more if it goes to another.\n\n", one, max(0, 2*(two-one)))
	host.Head(out, "processors", "CPU us/msg", "msg/s at most")
	for _, n := range []float64{1, 2, 4, 16, 64} {
		cost := one + 2*max(0, two-one)*(1-1/n)
		host.Rowf(out, "%.0f\t%.2f\t%.1f M", n, cost, n/cost)
	}
	fmt.Fprintln(out, "\nOne topic's messages pass under one lock, so it stays at what one loop carries, whatever the\nnumber of processors: its rows above.")
}

func orAll(pinned string) string {
	if pinned == "" {
		return "all of them, with the load"
	}
	return pinned
}

// result is the result of one run: messages delivered per second, the broker's processor
// time per message in us, and the final number of loops.
type result struct {
	rate, cpu float64
	loops     int
}

func median(all []result) result {
	slices.SortFunc(all, func(a, b result) int { return int(a.rate - b.rate) })
	return all[len(all)/2]
}

func measure(ctx context.Context, nsqd, loops string, topics int, lasting time.Duration, pinned string) (r result, err error) {
	dir, err := os.MkdirTemp("", "scaling")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	b, err := local.NSQD(nsqd, dir, "--io-loops="+loops)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, b.Stop()) }()
	if pinned != "" {
		if out, err := exec.Command("taskset", "-a", "-c", "-p", pinned, strconv.Itoa(b.Pid())).CombinedOutput(); err != nil {
			return r, fmt.Errorf("pin the broker: %w: %s", err, out)
		}
	}
	var delivered atomic.Int64
	var all sync.WaitGroup
	var closers []io.Closer
	failed := make(chan error, 2*topics)
	stop := func() {
		for _, c := range closers {
			c.Close()
		}
		all.Wait()
	}
	defer stop()
	for i := range topics {
		topic := fmt.Sprint("t", i)
		for _, do := range []func(net.Conn, string) error{func(c net.Conn, t string) error { return subscribe(c, t, &delivered) }, publish} {
			c, err := net.Dial("tcp", b.TCP)
			if err != nil {
				return r, err
			}
			closers = append(closers, c)
			all.Go(func() {
				if err := do(c, topic); !errors.Is(err, net.ErrClosed) {
					failed <- fmt.Errorf("%s: %w", topic, err)
				}
			})
		}
	}
	wait := func(d time.Duration) error {
		select {
		case err := <-failed:
			return err
		case <-time.After(d):
			return nil
		}
	}
	if err := wait(warming); err != nil {
		return r, err
	}
	cpu, err := b.CPU()
	if err != nil {
		return r, err
	}
	from, began := delivered.Load(), time.Now()
	if err := wait(lasting); err != nil {
		return r, err
	}
	n := float64(delivered.Load() - from)
	r.rate = n / time.Since(began).Seconds()
	after, err := b.CPU()
	r.cpu = float64((after - cpu).Microseconds()) / n
	if err == nil {
		r.loops, err = count(ctx, b.HTTP)
	}
	return r, err
}

// publish writes messages and counts the answers, until the connection is closed.
func publish(c net.Conn, topic string) error {
	out := wire.AppendMagic(nil)
	if _, err := c.Write(out); err != nil {
		return err
	}
	out = out[:0]
	for range together {
		out = wire.AppendPub(out, topic, make([]byte, size))
	}
	const answer = 4 + 4 + len("OK")
	in := make([]byte, 64<<10)
	for owed := 0; ; {
		for ; owed+together <= ahead; owed += together {
			if _, err := c.Write(out); err != nil {
				return err
			}
		}
		n, err := io.ReadAtLeast(c, in, together*answer)
		if err != nil {
			return err
		}
		if i := bytes.Index(in[:n], []byte("E_")); i >= 0 {
			return fmt.Errorf("refused: %.100q", in[i:n])
		}
		if rest := n % answer; rest != 0 {
			if _, err := io.ReadFull(c, in[n:n+answer-rest]); err != nil {
				return err
			}
			n += answer - rest
		}
		owed -= n / answer
	}
}

// subscribe finishes messages until the connection is closed.
func subscribe(c net.Conn, topic string, delivered *atomic.Int64) error {
	out := wire.AppendRdy(wire.AppendSub(wire.AppendMagic(nil), topic, "c"), 2500)
	if _, err := c.Write(out); err != nil {
		return err
	}
	in := make([]byte, 0, 256<<10)
	for {
		n, err := c.Read(in[len(in):cap(in)])
		if err != nil {
			return err
		}
		in = in[:len(in)+n]
		out = out[:0]
		got, at := int64(0), 0
		for {
			kind, data, n, err := wire.ParseFrame(in[at:], cap(in))
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
			if kind == wire.FrameMessage {
				m, err := wire.ParseMessage(data)
				if err != nil {
					return err
				}
				out = wire.AppendFin(out, m.ID)
				got++
			}
			at += n
		}
		in = in[:copy(in, in[at:])]
		if len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				return err
			}
		}
		delivered.Add(got)
	}
}

// count returns the number of a broker's event loops.
func count(ctx context.Context, web string) (n int, err error) {
	all, err := host.Metrics(ctx, web)
	for name := range all {
		if strings.HasPrefix(name, "srtm_nsqd_loop_connections{") {
			n++
		}
	}
	return n, err
}
