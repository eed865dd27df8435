package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

var quiet = slog.New(slog.DiscardHandler)

// sendCommand makes this program the sender; it is started by itself.
const sendCommand = "send"

// order tells a sender what to do.
type order struct {
	Address  string
	Conns    int
	Rate     int
	Burst    int // of the contract it keeps; 0: none
	Duration time.Duration
	Seed     uint64
	// Hello is sent on every connection first. A message is Frame, in which
	// the sender fills in the times at Times.
	Hello, Frame []byte
	Times        int
	// Answers says that the receiver answers, and that this is to be read.
	Answers bool
}

// sendReport is what a sender says when it is done.
type sendReport struct {
	Sent int
	CPU  time.Duration `json:"-"` // of the whole process
}

// Times in a message: when its write began, when that of the message before it
// on the same connection had returned (0: it is the first), and its number.
const (
	timesBefore = 0
	timesAfter  = 8
	timesNumber = 16
	timesSize   = 24
)

// sendMain is the sender's process. It takes its order and, once it is
// connected and has said so, goes ahead when in ends.
func sendMain(ctx context.Context, in io.Reader, out io.Writer) error {
	var o order
	orders := json.NewDecoder(in)
	if err := orders.Decode(&o); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	var d net.Dialer
	d.SetMultipathTCP(false)
	for range o.Conns {
		c, err := d.DialContext(ctx, "tcp", o.Address)
		if err != nil {
			return err
		}
		conns = append(conns, c)
		if _, err := c.Write(o.Hello); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintln(out, "{}"); err != nil {
		return err
	}
	var ignored struct{}
	if err := orders.Decode(&ignored); err != io.EOF {
		return fmt.Errorf("order to go: %w", err)
	}

	var readers sync.WaitGroup
	if o.Answers {
		for _, c := range conns {
			readers.Go(func() { _, _ = io.Copy(io.Discard, c) }) // ends with the connection
		}
	}
	sent, err := send(ctx, o, conns)
	for _, c := range conns {
		err = errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}
	readers.Wait()
	return errors.Join(err, json.NewEncoder(out).Encode(sendReport{Sent: sent}))
}

// napping is how long the sender sleeps at least: shorter naps cost more
// processor time than they are worth, and messages that fall due meanwhile are
// sent together, on different connections.
const napping = 200 * time.Microsecond

// send writes messages at random times (Poisson) on random connections, held
// back only where the contract says so.
func send(ctx context.Context, o order, conns []net.Conn) (sent int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	rng := rand.New(rand.NewPCG(o.Seed, 0))
	after := make([]mono.Time, len(conns))
	var contract tokenbucket.Bucket
	start := clock.Mono()
	if o.Burst > 0 {
		contract = tokenbucket.New(contractOf(o.Rate, o.Burst), start)
	}
	end := start.Add(o.Duration)
	due := start
	for due.Before(end) && ctx.Err() == nil {
		due += mono.Time(rng.ExpFloat64() / float64(o.Rate) * 1e9)
		at := due
		if o.Burst > 0 {
			at = max(at, contract.Eligible(clock.Mono()))
		}
		for now := clock.Mono(); now.Before(at); now = clock.Mono() {
			time.Sleep(max(napping, at.Sub(now)))
		}
		i := rng.IntN(len(conns))
		before := clock.Mono()
		if o.Burst > 0 {
			contract.Take(before)
		}
		times := o.Frame[o.Times:]
		binary.LittleEndian.PutUint64(times[timesBefore:], uint64(before))
		binary.LittleEndian.PutUint64(times[timesAfter:], uint64(after[i]))
		binary.LittleEndian.PutUint64(times[timesNumber:], uint64(sent))
		if _, err := conns[i].Write(o.Frame); err != nil {
			return sent, err
		}
		after[i] = clock.Mono()
		sent++
	}
	return sent, nil
}

// contractOf is the contract that a stream of that rate keeps.
func contractOf(rate, burst int) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.PerSecond(1.1 * float64(rate)), Burst: int64(burst)}
}

// sender is a sender's process.
type sender struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

// startSender starts one; it is connected when connected returns.
func startSender(ctx context.Context, o order) (*sender, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s := &sender{cmd: exec.CommandContext(ctx, self, sendCommand)}
	s.cmd.Stderr = os.Stderr
	s.cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.out = json.NewDecoder(out)
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the sender: %w", err)
	}
	if err := json.NewEncoder(s.in).Encode(o); err != nil {
		return nil, errors.Join(err, s.cmd.Wait())
	}
	return s, nil
}

func (s *sender) connected() error {
	var ignored struct{}
	return s.out.Decode(&ignored)
}

// finish lets the sender send, and returns its report when it has ended.
func (s *sender) finish() (r sendReport, err error) {
	err = errors.Join(s.in.Close(), s.out.Decode(&r), s.cmd.Wait())
	if err == nil {
		r.CPU = s.cmd.ProcessState.UserTime() + s.cmd.ProcessState.SystemTime()
	}
	return r, err
}
