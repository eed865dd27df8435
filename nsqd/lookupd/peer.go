package lookupd

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
)

const (
	batch      = 64 // commands under way; their answers fit into any socket's buffer
	mostFactor = 32 // maximum pause between attempts, in multiples of RetryAfter
)

// errUnasked: the daemon sent an answer without a request.
var errUnasked = errors.New("an answer without a request")

type peer struct {
	// Set once.
	address string
	cfg     *Config
	log     *slog.Logger
	changed chan struct{}      // capacity 1: registrations may have changed
	stop    context.CancelFunc // of run

	// Owned by run.
	rng *rand.Rand

	// Atomic: written by run, read for display and by HTTP handlers.
	web        atomic.Pointer[string] // host:port of the daemon's HTTP server; nil while disconnected
	registered atomic.Int64           // topics and channels registered for this node
	failures   atomic.Uint64          // connections that ended or failed
}

func newPeer(cfg *Config, address string, rng *rand.Rand) *peer {
	return &peer{
		address: address,
		cfg:     cfg,
		log:     cfg.Log.With(obs.KeyAddress, address),
		changed: make(chan struct{}, 1),
		rng:     rng,
	}
}

// notify reports that registrations may have changed.
func (p *peer) notify() {
	select {
	case p.changed <- struct{}{}:
	default: // a check is pending already
	}
}

// run keeps the daemon informed until ctx ends, and reconnects without limit. It logs the first
// of a series of failures as a warning.
func (p *peer) run(ctx context.Context) {
	backoff, level := p.cfg.RetryAfter, slog.LevelWarn
	for {
		greeted, err := p.connect(ctx)
		p.web.Store(nil)
		p.registered.Store(0)
		if ctx.Err() != nil {
			return
		}
		p.failures.Add(1)
		if greeted {
			backoff, level = p.cfg.RetryAfter, slog.LevelWarn
		}
		wait := backoff/2 + time.Duration(p.rng.Int64N(int64(backoff)))
		p.log.Log(ctx, level, "nsqlookupd lost", obs.KeyError, err, "retry_in", wait)
		backoff, level = min(2*backoff, mostFactor*p.cfg.RetryAfter), slog.LevelDebug
		clock.Sleep(ctx, wait)
	}
}

// connect keeps the daemon informed over one connection until the connection fails or ctx ends.
// greeted reports that the daemon accepted the IDENTIFY.
func (p *peer) connect(ctx context.Context) (greeted bool, err error) {
	d := net.Dialer{Timeout: p.cfg.ConnectTimeout}
	nc, err := d.DialContext(ctx, "tcp", p.address)
	if err != nil {
		return false, err
	}
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	c := &conversation{nc: nc, timeout: p.cfg.RequestTimeout, answers: make(chan []byte, batch)}
	var reader sync.WaitGroup
	reader.Go(c.read)
	defer reader.Wait()
	defer nc.Close()

	if err := p.greet(c); err != nil {
		return false, err
	}
	p.log.Info("registered with nsqlookupd")
	ping := time.NewTicker(p.cfg.PingInterval)
	defer ping.Stop()
	registered := make(map[key]bool)
	for {
		if registered, err = p.update(c, registered); err != nil {
			return true, err
		}
		select {
		case <-ctx.Done():
			return true, context.Cause(ctx)
		case <-p.changed:
		case <-ping.C:
			if err := c.okay([]byte(pingCommand)); err != nil {
				return true, err
			}
		case _, open := <-c.answers:
			if open {
				return true, errUnasked
			}
			return true, c.err
		}
	}
}

func (p *peer) greet(c *conversation) error {
	hello, err := appendIdentify([]byte(magic), p.cfg.Node)
	if err != nil {
		return err
	}
	answers, err := c.ask(hello)
	if err != nil {
		return fmt.Errorf("IDENTIFY: %w", err)
	}
	id, err := parseIdentity(answers[0])
	if err != nil {
		return err
	}
	if id.BroadcastAddress != "" && id.HTTPPort != 0 {
		web := net.JoinHostPort(id.BroadcastAddress, strconv.Itoa(id.HTTPPort))
		p.web.Store(&web)
	} else {
		p.web.Store(new(string))
	}
	return nil
}

// update sends the changes since registered, and returns the new registrations.
func (p *peer) update(c *conversation, registered map[key]bool) (map[key]bool, error) {
	current := keysOf(p.cfg.Topics())
	for commands := range slices.Chunk(changes(registered, current), batch) {
		if err := c.okay(commands...); err != nil {
			return registered, err
		}
	}
	p.registered.Store(int64(len(current)))
	return current, nil
}

// conversation is one connection to a daemon.
type conversation struct {
	// Set once.
	nc      net.Conn
	timeout time.Duration // of a batch of commands
	answers chan []byte   // from read; closed at the end of the connection
	// Set by read before it closes answers.
	err error
}

// read forwards the answers to ask. An answer beyond the channel's capacity is an error, so read
// never blocks on the channel.
func (c *conversation) read() {
	defer close(c.answers)
	r := bufio.NewReader(c.nc)
	for {
		answer, err := readAnswer(r)
		if errors.Is(err, io.EOF) {
			err = errors.New("nsqlookupd closed the connection")
		}
		if err != nil {
			c.err = err
			return
		}
		select {
		case c.answers <- answer:
		default:
			c.err = errUnasked
			return
		}
	}
}

// ask sends commands and returns their answers, in order.
func (c *conversation) ask(commands ...[]byte) ([][]byte, error) {
	limit := time.NewTimer(c.timeout)
	defer limit.Stop()
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return nil, fmt.Errorf("write deadline: %w", err)
	}
	if _, err := c.nc.Write(bytes.Join(commands, nil)); err != nil {
		return nil, fmt.Errorf("write: %w", err)
	}
	var answers [][]byte
	for range commands {
		select {
		case answer, open := <-c.answers:
			if !open {
				return nil, c.err
			}
			answers = append(answers, answer)
		case <-limit.C:
			return nil, fmt.Errorf("no answer within %v", c.timeout)
		}
	}
	return answers, nil
}

// okay sends commands and requires the answer OK to each.
func (c *conversation) okay(commands ...[]byte) error {
	answers, err := c.ask(commands...)
	if err != nil {
		return err
	}
	for i, answer := range answers {
		if err := expectOK(answer); err != nil {
			return fmt.Errorf("%s: %w", bytes.TrimSpace(commands[i]), err)
		}
	}
	return nil
}
