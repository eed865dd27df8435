package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
)

const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 5 * time.Second
	// standbyBackoff is the maximum backoff while no server leads. A server leads within seconds, and
	// creations of topics wait for the leader and for this broker's hello.
	standbyBackoff = 500 * time.Millisecond
	// claimBackoff is the pause while the broker's id belongs to another process that may have ended.
	// The lease of such a process is over within seconds.
	claimBackoff = 300 * time.Millisecond

	// linkQueue is the size of a link's queue to the other side. A reply that finds the queue full cuts
	// the session, as the other side would wait for the reply. After the next hello the other side repeats
	// its requests. After a hello there may be a reply for each topic, so linkQueue exceeds the
	// number of topics of a broker. Reports and pieces of captures use the first reportsQueue places;
	// more reports are dropped.
	linkQueue    = 1 << 16
	reportsQueue = 512

	// arrivalsQueue bounds the arrivals in the queued pieces of captures, about ten bytes each. Further
	// arrivals stay in the broker's record, which is bounded too.
	arrivalsQueue = 1 << 18
)

var (
	errSlow    = errors.New("the other side does not read: too many replies wait")
	errOldTerm = errors.New("an adaptor of a later term has led since")
	errRemoved = errors.New("the broker was removed from the cluster")
	errTaken   = errors.New("the broker's id belongs to another process")
)

// link is the sending side of one session. The owner puts messages in, and a goroutine of the
// reconnector sends them.
type link[Req any] struct {
	// Set once.
	address string // address of the peer
	out     chan queued[Req]
	cut     context.CancelCauseFunc

	// Atomic: the owner adds the arrivals that it queues, and the sender subtracts the arrivals that it
	// sent. A stale value delays a piece for a moment.
	arrivals atomic.Int64 // arrivals in the queued pieces
}

// queued is a message in the queue, with the number of its arrivals.
type queued[Req any] struct {
	message  *Req
	arrivals int64
}

// reply queues a message that must not be lost during the session.
func (l *link[Req]) reply(m *Req) { l.put(queued[Req]{m, 0}) }

func (l *link[Req]) put(m queued[Req]) {
	l.arrivals.Add(m.arrivals)
	select {
	case l.out <- m:
	default:
		l.cut(errSlow)
	}
}

// report queues a message whose loss the next report repairs. report returns false if it dropped the
// message.
func (l *link[Req]) report(m *Req) bool {
	if len(l.out) >= reportsQueue {
		return false
	}
	l.reply(m)
	return true
}

// behind reports whether the queue has no room for a piece of a capture.
func (l *link[Req]) behind() bool {
	return len(l.out) >= reportsQueue || l.arrivals.Load() >= arrivalsQueue
}

// reconnector keeps a session open: when a session ends, reconnector opens another.
type reconnector[Req, Res any] struct {
	name      string
	addresses []string // any server works, or names the leader
	options   []grpc.DialOption
	log       *slog.Logger
	rng       *rand.Rand // owned by run
	open      func(ctx context.Context, conn *grpc.ClientConn) (grpc.BidiStreamingClient[Req, Res], error)
	// For every session: up, in..., down, in this order. up must put the hello.
	up   func(*link[Req])
	in   func(*link[Req], *Res)
	down func(*link[Req], error)
}

// notLeading is the reason that an adaptor gives when it does not lead.
const notLeading = "NOT_LEADING"

// run keeps sessions until ctx ends. Between two sessions run waits. While sessions fail at once, the
// wait grows to maxBackoff, with jitter so that brokers do not return together. If a server names
// another leader, run tries the leader after the shortest wait, but only as often as there are
// addresses: servers that name each other must not cause a busy loop. run logs the end of a session
// once, and logs the same failure at the same address again only after a session.
func (k reconnector[Req, Res]) run(ctx context.Context) {
	conns := make([]*grpc.ClientConn, len(k.addresses))
	for i, address := range k.addresses {
		var err error
		if conns[i], err = service.Keep(address, maxBackoff, k.options...); err != nil {
			// Only a target that does not parse; Config.Validate or the hello accepted the target.
			k.log.Error("session impossible", obs.KeyName, k.name, obs.KeyAddress, address, obs.KeyError, err)
			return
		}
		defer func() { conns[i].Close() }()
	}

	at, hops := 0, 0
	delay := firstBackoff
	logged := map[string]string{} // newest logged failure by address
	for ctx.Err() == nil {
		began := time.Now()
		address := k.addresses[at]
		err := k.reach(ctx, conns[at])
		welcome := false
		if err == nil {
			welcome, err = k.session(ctx, conns[at], address)
		}
		if ctx.Err() != nil {
			return
		}
		if welcome {
			hops = 0
			clear(logged)
		}
		if service.Reason(err) == notLeading {
			// Behind one address there may be several servers, and another may lead.
			conns[at].Close()
			conns[at], _ = service.Keep(address, maxBackoff, k.options...) // no error: the address parsed before
			delay = min(delay, standbyBackoff)
		}
		if time.Since(began) > maxBackoff {
			delay = firstBackoff
		}
		level, failure := slog.LevelWarn, err.Error()
		switch status.Code(err) {
		case codes.Aborted, codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated:
			// Our hello or token is wrong: a quick retry does not help.
			level, delay = slog.LevelError, maxBackoff
		}
		if service.Reason(err) == identity.ReasonInUse {
			level, delay, failure = slog.LevelInfo, claimBackoff, identity.ReasonInUse
		}
		pause := delay
		var named, elsewhere bool
		if at, named, elsewhere = next(k.addresses, at, err); elsewhere {
			level, delay = slog.LevelInfo, min(delay, standbyBackoff)
			if pause = delay; named && hops < len(k.addresses) {
				hops++
				pause = firstBackoff
			}
		}
		wait := time.Duration(float64(pause) * (0.5 + k.rng.Float64()))
		if logged[address] != failure {
			logged[address] = failure
			k.log.Log(ctx, level, "session ended", obs.KeyName, k.name, obs.KeyAddress, address, obs.KeyError, err, "retry", wait)
		}
		clock.Sleep(ctx, wait)
		delay = min(delay*8/5, maxBackoff)
	}
}

// next returns the index of the address to try after a failure at index at: the leader if the failure
// names a leader, else the following address. named: the failure names another address of addresses.
// elsewhere: the failure comes from a server that does not lead.
func next(addresses []string, at int, err error) (i int, named, elsewhere bool) {
	leader, elsewhere := service.Leader(err)
	if i := slices.Index(addresses, leader); i >= 0 && i != at {
		return i, true, true
	}
	return (at + 1) % len(addresses), false, elsewhere
}

var errUnreachable = errors.New("cannot connect")

// failure returns why conn is in transient failure. gRPC gives the reason only to a call.
func (k reconnector[Req, Res]) failure(ctx context.Context, conn *grpc.ClientConn) error {
	err := conn.Invoke(ctx, "/grpc.health.v1.Health/Check", &emptypb.Empty{}, &emptypb.Empty{})
	if err == nil || status.Code(err) != codes.Unavailable {
		return errUnreachable // conn may be connected by now
	}
	reason := status.Convert(err).Message()
	if _, dial, ok := strings.Cut(reason, "Error while dialing: "); ok {
		reason = strings.TrimSuffix(dial, `"`)
	} else if strings.Contains(reason, "HTTP/1.1 header") || strings.Contains(reason, "frame too large") || strings.Contains(reason, "not a settings frame") {
		reason = "no gRPC server answers there; is the port right?"
	}
	return fmt.Errorf("%w: %s", errUnreachable, reason)
}

// reach waits until it has connected to the other side, or ctx ends. With several addresses reach returns at
// the first failure. A session would wait too, but without a log line: a mistyped address would never
// show.
func (k reconnector[Req, Res]) reach(ctx context.Context, conn *grpc.ClientConn) error {
	logged := false
	for {
		state := conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Idle:
			conn.Connect()
		case connectivity.TransientFailure:
			if len(k.addresses) > 1 || !logged {
				reason := k.failure(ctx, conn)
				if len(k.addresses) > 1 {
					return reason
				}
				k.log.Warn("cannot connect; retrying", obs.KeyName, k.name, obs.KeyAddress, k.addresses[0], obs.KeyError, reason)
				logged = true
			}
		}
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
}

// session runs one session and returns why the session ended, after its sender has ended. welcome: the
// other side sent a message.
func (k reconnector[Req, Res]) session(ctx context.Context, conn *grpc.ClientConn, address string) (welcome bool, err error) {
	ctx, cut := context.WithCancelCause(ctx)
	var sender sync.WaitGroup
	defer sender.Wait()
	defer cut(nil)

	stream, err := k.open(ctx, conn)
	if err != nil {
		return false, fmt.Errorf("open session: %w", err)
	}
	l := &link[Req]{address: address, out: make(chan queued[Req], linkQueue), cut: cut}
	sender.Go(func() {
		for {
			select {
			case m := <-l.out:
				if stream.Send(m.message) != nil {
					return // Recv returns the reason
				}
				l.arrivals.Add(-m.arrivals)
			case <-ctx.Done():
				return
			}
		}
	})
	k.up(l)
	for {
		m, err := stream.Recv()
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			} else if errors.Is(err, io.EOF) {
				err = errors.New("the other side ended it")
			}
			k.down(l, err)
			return welcome, err
		}
		welcome = true
		k.in(l, m)
	}
}
