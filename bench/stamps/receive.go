//go:build linux

package stamps

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/load"
)

// sample holds the times of one message.
type sample struct {
	before  mono.Time // start of the write
	after   mono.Time // end of the write; 0: unknown
	arrival stamp.Arrival
	read    mono.Time // end of the read
}

// receiver collects samples in the order of reading.
type receiver struct {
	size int

	mu      sync.Mutex
	samples []sample
	reads   int
	err     error
}

// serve reads one connection until the end.
func (r *receiver) serve(c *hook.Conn) {
	defer c.Release()
	buf := make([]byte, 4*r.size)
	length := 0
	last := -1 // index in r.samples of the connection's previous message
	for {
		n, err := c.Read(buf[length:])
		length += n
		read := clock.Mono()
		if n > 0 {
			last = r.take(c, buf[:length], read, last)
			length = copy(buf, buf[length/r.size*r.size:length])
		}
		if err != nil {
			if err != io.EOF {
				r.mu.Lock()
				r.err = errors.Join(r.err, err)
				r.mu.Unlock()
			}
			return
		}
	}
}

// take appends samples of the complete messages in b.
func (r *receiver) take(c *hook.Conn, b []byte, read mono.Time, last int) int {
	at := c.Offset() - int64(len(b))
	counted := false
	for ; len(b) >= r.size; b = b[r.size:] {
		s := sample{
			before:  mono.Time(binary.LittleEndian.Uint64(b[load.TimeBefore:])),
			arrival: c.Arrival(at, at+int64(r.size)),
			read:    read,
		}
		after := mono.Time(binary.LittleEndian.Uint64(b[load.TimeAfter:]))
		at += int64(r.size)
		r.mu.Lock()
		if last >= 0 {
			r.samples[last].after = after
		}
		last = len(r.samples)
		r.samples = append(r.samples, s)
		if !counted {
			r.reads++
			counted = true
		}
		r.mu.Unlock()
	}
	return last
}

// measureErrors prints a row for each source and rate.
func measureErrors(ctx context.Context, c config, out io.Writer) error {
	runtime.GOMAXPROCS(c.procs)
	var rows []result
	for _, rate := range c.rates {
		for _, mode := range c.modes {
			r, err := c.measure(ctx, mode, rate)
			if err != nil {
				return fmt.Errorf("%s at %d msg/s: %w", mode, rate, err)
			}
			rows = append(rows, r)
		}
	}
	writeTables(out, rows)
	return nil
}

// measure receives from a sender with stamps from one source.
func (c config) measure(ctx context.Context, mode hook.Mode, rate int) (result, error) {
	s, err := hook.Open(mode, hook.Config{}, quiet)
	if err != nil {
		return result{}, err
	}
	lc := net.ListenConfig{Control: s.Control}
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return result{}, errors.Join(err, s.Close())
	}
	defer ln.Close()
	snd, err := startSender(order{Address: ln.Addr().String(), Scenario: c.scenario(rate), Duration: c.duration + c.warm, Seed: c.seed})
	if err != nil {
		return result{}, errors.Join(err, s.Close())
	}
	defer func() { _ = snd.Kill() }() // normally the sender has ended
	go func() {
		<-snd.Done()
		ln.Close() // no more connections
	}()

	rcv := &receiver{size: c.size, samples: make([]sample, 0, int(float64(rate)*(c.duration+c.warm).Seconds()*1.2))}
	var readers sync.WaitGroup
	for range c.conns {
		nc, err := ln.Accept()
		if err != nil {
			return result{}, errors.Join(err, s.Close())
		}
		readers.Go(func() {
			rcv.serve(s.Track(nc))
			nc.Close()
		})
	}
	idle := load.Spin(c.busy)
	sent, err := snd.finish()
	readers.Wait()
	idle()
	r := evaluate(rcv, c.burst, rate, c.warm)
	r.mode, r.rate, r.conns, r.busy = mode, rate, c.conns, c.busy
	counters := s.Info().Counters
	r.lost, r.refused = counters.RecordsLost, counters.RingsRefused
	if sent != len(rcv.samples) {
		err = errors.Join(err, fmt.Errorf("%d messages were sent, but %d arrived", sent, len(rcv.samples)))
	}
	return r, errors.Join(err, rcv.err, s.Close())
}

// result is a row of the tables.
type result struct {
	mode        hook.Mode
	conns, rate int
	busy        int
	achieved    float64 // msg/s
	perRead     float64 // messages
	bySource    [stamp.Sources]int
	lost        uint64
	refused     uint64 // refused requests for a ring
	// off is the time from the start of the write to the stamp, readOff the time from the
	// start of the write to the end of the read. within is the number of stamps within
	// their write.
	off, readOff  quantiles
	early, within int
	withWriteEnd  int // messages with a known end of the write
	// Delays of a rate limiter with the sender's contract, in the order of reading. The
	// limiter judges by stamp, by stamp with a bucket without hindsight, or by the time of
	// the read.
	byStamp, forgetful, byRead verdict
}

// verdict is the result of a rate limiter. The access delay counts from the judged time,
// held from the read.
type verdict struct{ access, held quantiles }

// quantiles are exact quantiles of single messages.
type quantiles struct{ p50, p99, p999, max time.Duration }

func quantilesOf(d []time.Duration) quantiles {
	slices.Sort(d)
	return quantiles{load.Quantile(d, 0.5), load.Quantile(d, 0.99), load.Quantile(d, 0.999), load.Quantile(d, 1)}
}

// evaluate evaluates the samples after the warm-up.
func evaluate(r *receiver, burst, rate int, warming time.Duration) (res result) {
	if len(r.samples) == 0 {
		return res
	}
	first, last := mono.Never, mono.Time(0)
	for _, s := range r.samples {
		first, last = min(first, s.before), max(last, s.before)
	}
	warm := first.Add(warming)
	var off, readOff []time.Duration
	for _, s := range r.samples {
		if s.before.Before(warm) {
			continue
		}
		off = append(off, s.arrival.At.Sub(s.before))
		readOff = append(readOff, s.read.Sub(s.before))
		res.bySource[s.arrival.Source]++
		if s.arrival.At.Before(s.before) {
			res.early++
		}
		if s.after != 0 {
			res.withWriteEnd++
			if !s.arrival.At.Before(s.before) && !s.after.Before(s.arrival.At) {
				res.within++
			}
		}
	}
	res.achieved = float64(len(off)) / last.Sub(warm).Seconds()
	res.perRead = float64(len(r.samples)) / float64(r.reads)
	res.off, res.readOff = quantilesOf(off), quantilesOf(readOff)

	// One extra token: the network adds some microseconds of jitter, so a message can
	// arrive just before the bucket earns the token that the sender spent.
	contract := load.Contract(float64(rate), burst+1)
	judge := func(timeOf func(sample) mono.Time, take func(at mono.Time) mono.Time) verdict {
		var access, held []time.Duration
		for _, s := range r.samples {
			e := take(timeOf(s))
			if !s.before.Before(warm) {
				access = append(access, e.Sub(timeOf(s)))
				held = append(held, max(0, e.Sub(s.read)))
			}
		}
		return verdict{quantilesOf(access), quantilesOf(held)}
	}
	// nsqd uses a bucket with hindsight.
	hindsight := func(timeOf func(sample) mono.Time) verdict {
		start := timeOf(slices.MinFunc(r.samples, func(a, b sample) int { return cmp.Compare(timeOf(a), timeOf(b)) }))
		var b tokenbucket.Hindsight
		b.Retune(start, contract, tokenbucket.Tokens(contract.Burst)*tokenbucket.Token)
		return judge(timeOf, func(at mono.Time) mono.Time {
			e, _ := b.Take(at, mono.Never)
			return e
		})
	}
	byStamp := func(s sample) mono.Time { return s.arrival.At }
	res.byRead = hindsight(func(s sample) mono.Time { return s.read })
	res.byStamp = hindsight(byStamp)
	forgetful := tokenbucket.NewFull(contract, byStamp(r.samples[0]))
	res.forgetful = judge(byStamp, forgetful.Take)
	return res
}

func micros(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d)/1e3) }

func writeTables(out io.Writer, rows []result) {
	percent := func(k, of int) string { return fmt.Sprintf("%.2f", 100*float64(k)/float64(max(of, 1))) }
	begin := func(title, columns string) {
		fmt.Fprintf(out, "\n%s\n\n", title)
		host.Head(out, strings.Split(columns, ", ")...)
	}
	begin("Stamps, us after the write began (read: the time after the read); within: before it returned.",
		"source, conns, busy, msg/s, per read, p50, p99, p99.9, max, early, within %, read p50, p99, max")
	for _, r := range rows {
		host.Rowf(out, "%s\t%d\t%d\t%.0f\t%.2f\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s",
			r.mode, r.conns, r.busy, r.achieved, r.perRead, micros(r.off.p50), micros(r.off.p99), micros(r.off.p999), micros(r.off.max),
			r.early, percent(r.within, r.withWriteEnd), micros(r.readOff.p50), micros(r.readOff.p99), micros(r.readOff.max))
	}
	begin("Their sources, in percent.", "source, exact, overwritten, upper bound, read, records lost, rings refused")
	for _, r := range rows {
		n, cells := 0, []string{fmt.Sprint(r.mode)}
		for _, k := range r.bySource {
			n += k
		}
		for _, k := range r.bySource {
			cells = append(cells, percent(k, n))
		}
		host.Row(out, append(cells, fmt.Sprint(r.lost), fmt.Sprint(r.refused))...)
	}
	begin("What a rate limiter with the sender's own contract makes of it, us: access delay (from the time judged by), held (from the read).",
		"source, judged by, access p50, p99, max, held p50, p99, max")
	for _, r := range rows {
		for _, v := range []struct {
			bySource string
			verdict
		}{{"stamp", r.byStamp}, {"stamp, without hindsight", r.forgetful}, {"time of the read", r.byRead}} {
			host.Rowf(out, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", r.mode, v.bySource,
				micros(v.access.p50), micros(v.access.p99), micros(v.access.max), micros(v.held.p50), micros(v.held.p99), micros(v.held.max))
		}
	}
}
