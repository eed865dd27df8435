package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/wire"
)

const (
	topic   = "stamps"
	channel = "sink"
	// credit is the subscriber's RDY count.
	credit = 2500
	// clockTick is the unit of the processor times in /proc, fixed by its ABI.
	clockTick = 10 * time.Millisecond
	patience  = 10 * time.Second
)

// usage is what one measurement cost, per message.
type usage struct {
	broker time.Duration // in the broker's process
	// all adds the sender's process, in whose time the filter runs on loopback.
	all    time.Duration
	source string
}

// cpu measures the broker with each source, in turns, so that what else the
// machine does falls on all alike.
func cpu(ctx context.Context, c config, out io.Writer) error {
	fmt.Fprintln(out, "\nProcessor time per message, us: medians of the rounds, and of their ratios to the last source.")
	w := tabwriter.NewWriter(out, 7, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "source\tconns\tmsg/s\tbroker\tratio\tleast\tmost\tbroker and sender\tratio\tleast\tmost\t")
	for _, rate := range c.rates {
		rounds := make([][]usage, len(c.modes))
		for range c.rounds {
			for i, mode := range c.modes {
				u, err := c.use(ctx, mode, rate)
				if err != nil {
					return fmt.Errorf("%s at %d msg/s: %w", mode, rate, err)
				}
				rounds[i] = append(rounds[i], u)
			}
		}
		base := rounds[len(rounds)-1]
		for _, us := range rounds {
			brokers, alls := column(us, base, func(u usage) time.Duration { return u.broker }), column(us, base, func(u usage) time.Duration { return u.all })
			fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t\n", us[0].source, c.conns, rate, brokers, alls)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// column describes one kind of cost: the median, and how its ratio to the base
// of the same round is spread.
func column(us, base []usage, of func(usage) time.Duration) string {
	var times []time.Duration
	var ratios []float64
	for i, u := range us {
		times = append(times, of(u))
		ratios = append(ratios, float64(of(u))/float64(of(base[i])))
	}
	slices.Sort(times)
	slices.Sort(ratios)
	mid := len(times) / 2
	return fmt.Sprintf("%.2f\t%.3f\t%.3f\t%.3f", float64(times[mid])/1e3, ratios[mid], ratios[0], ratios[len(ratios)-1])
}

// use measures one run of the broker.
func (c config) use(ctx context.Context, mode hook.Mode, rate int) (u usage, err error) {
	b, err := startBroker(ctx, c.nsqd, mode)
	if err != nil {
		return usage{}, err
	}
	defer func() { err = errors.Join(err, b.stop()) }()
	if u.source, err = b.source(ctx); err != nil {
		return usage{}, err
	}
	if mode == hook.EBPF && u.source != "ebpf" {
		return usage{}, fmt.Errorf("the broker uses %s", u.source)
	}
	sub, err := subscribe(ctx, b.address)
	if err != nil {
		return usage{}, err
	}
	defer sub.close()

	frame := wire.AppendPub(nil, topic, make([]byte, c.size))
	s, err := startSender(ctx, order{
		Address: b.address, Conns: c.conns, Rate: rate, Duration: c.duration, Seed: c.seed,
		Hello: []byte(wire.Magic), Frame: frame, Times: len(frame) - c.size, Answers: true,
	})
	if err != nil {
		return usage{}, err
	}
	if err := s.connected(); err != nil {
		return usage{}, err
	}
	before, err := b.cpu()
	if err != nil {
		return usage{}, err
	}
	report, err := s.finish()
	if err != nil {
		return usage{}, err
	}
	if err := sub.wait(report.Sent); err != nil {
		return usage{}, err
	}
	after, err := b.cpu()
	if err != nil {
		return usage{}, err
	}
	u.broker = (after - before) / time.Duration(report.Sent)
	u.all = (after - before + report.CPU) / time.Duration(report.Sent)
	return u, nil
}

// broker is an nsqd of our own.
type broker struct {
	cmd           *exec.Cmd
	data          string // its folder
	log           bytes.Buffer
	address, http string
}

func startBroker(ctx context.Context, path string, mode hook.Mode, more ...string) (*broker, error) {
	b := &broker{}
	for _, to := range []*string{&b.address, &b.http} {
		ln, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free, most likely still in a moment
		if err != nil {
			return nil, err
		}
		*to = ln.Addr().String()
		if err := ln.Close(); err != nil {
			return nil, err
		}
	}
	data, err := os.MkdirTemp("", "stamps-")
	if err != nil {
		return nil, err
	}
	b.data = data
	b.cmd = exec.CommandContext(ctx, path, append([]string{
		"--data-path=" + data, "--tcp-address=" + b.address, "--http-address=" + b.http, "--https-address=",
		"--arrival-stamps=" + string(mode), "--log-level=warn",
		"--mem-queue-size=10000000", // nothing is refused, so that each message costs the same
	}, more...)...)
	b.cmd.Stdout, b.cmd.Stderr = &b.log, &b.log
	if err := b.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(data))
	}
	for _, address := range []string{b.address, b.http} {
		if err := waitFor(address); err != nil {
			return nil, errors.Join(err, b.stop())
		}
	}
	return b, nil
}

// waitFor waits until somebody listens.
func waitFor(address string) error {
	for give := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("tcp", address)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(give) {
			return fmt.Errorf("broker: %w", err)
		}
	}
}

func (b *broker) stop() error {
	if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := b.cmd.Wait(); err != nil {
		return fmt.Errorf("broker: %w\n%s", err, &b.log)
	}
	return os.RemoveAll(b.data)
}

// source asks the broker where its stamps come from.
func (b *broker) source(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.http+"/info", nil)
	if err != nil {
		return "", err
	}
	resp, err := (&http.Client{Timeout: patience}).Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var info struct {
		Stamps hook.Info `json:"arrival_stamps"`
	}
	err = json.NewDecoder(resp.Body).Decode(&info)
	return info.Stamps.Source, err
}

// cpu returns the processor time that the broker has used.
func (b *broker) cpu() (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", b.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	// The name in brackets may hold anything; the times are the 12th and 13th
	// fields behind it.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("stat of the broker: %q", stat)
	}
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	return time.Duration(user+system) * clockTick, errors.Join(err1, err2)
}

// subscriber takes and finishes messages.
type subscriber struct {
	c    net.Conn
	got  chan int // counts that were reached, latest only
	done chan error
}

func subscribe(ctx context.Context, address string) (*subscriber, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	hello := wire.AppendRdy(wire.AppendSub(wire.AppendMagic(nil), topic, channel), credit)
	if _, err := c.Write(hello); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	s := &subscriber{c: c, got: make(chan int, 1), done: make(chan error, 1)}
	go func() { s.done <- s.run() }()
	return s, nil
}

// run answers until the connection is closed.
func (s *subscriber) run() error {
	in, out := make([]byte, 0, 1<<17), []byte(nil)
	for got := 0; ; {
		n, err := s.c.Read(in[len(in):cap(in)])
		if err != nil {
			return err
		}
		in = in[:len(in)+n]
		rest := in
		for {
			kind, data, n, err := wire.ParseFrame(rest, cap(in))
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
			rest = rest[n:]
			switch kind {
			case wire.FrameMessage:
				m, err := wire.ParseMessage(data)
				if err != nil {
					return err
				}
				out = wire.AppendFin(out, m.ID)
				got++
			case wire.FrameError:
				return fmt.Errorf("the broker says %s", data)
			default:
				if string(data) == "_heartbeat_" {
					out = wire.AppendNop(out)
				}
			}
		}
		in = in[:copy(in[:cap(in)], rest)]
		if len(out) > 0 {
			if _, err := s.c.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		select { // whoever waits wants the latest
		case <-s.got:
		default:
		}
		s.got <- got
	}
}

// wait waits until that many messages were delivered.
func (s *subscriber) wait(want int) error {
	give := time.NewTimer(patience)
	defer give.Stop()
	for got := 0; got < want; {
		select {
		case got = <-s.got:
		case err := <-s.done:
			s.done <- err
			return fmt.Errorf("subscriber: %w", err)
		case <-give.C:
			return fmt.Errorf("%d of %d messages were delivered", got, want)
		}
	}
	return nil
}

func (s *subscriber) close() {
	s.c.Close()
	<-s.done
}
