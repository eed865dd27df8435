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
	"github.com/srtm-io/srtm/internal/targets"
)

const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 5 * time.Second
	// standbyBackoff is the most while no server leads: within seconds one does, and
	// creations of topics wait for that and then for this broker's hello.
	standbyBackoff = 500 * time.Millisecond
	// claimBackoff is the pause while the broker's id belongs to another process that may
	// have ended: its lease is over within seconds.
	claimBackoff = 300 * time.Millisecond

	// A link's queue towards the other side. Reports use half of it and are
	// dropped beyond that; a reply that finds it full cuts the session, for the
	// other side would wait for it: after the next hello all is asked again.
	linkQueue    = 1024
	reportsQueue = linkQueue / 2

	// arrivalsQueue bounds the messages in the pieces of captures in that queue,
	// each of about ten bytes. Beyond it the pieces stay in the broker's record,
	// which is bounded too.
	arrivalsQueue = 1 << 18
)

var (
	errSlow    = errors.New("the other side does not read: too many replies wait")
	errOldTerm = errors.New("an adaptor of a later term has led since")
	errRemoved = errors.New("the broker was removed from the cluster")
	errTaken   = errors.New("the broker's id belongs to another process")
)

// link is one session's way out. The owner puts, a sender of the reconnector writes.
type link[Req any] struct {
	// Set once.
	address string // of the other side
	out     chan queued[Req]
	cut     context.CancelCauseFunc

	// Atomic: the owner adds what it queues, the sender takes off what it wrote. A
	// stale reading holds a piece back for a moment longer.
	arrivals atomic.Int64 // messages in the pieces in out
}

// queued is a message on its way, and how many arrivals are in it.
type queued[Req any] struct {
	message  *Req
	arrivals int64
}

// reply queues a message that must not be lost while the session lasts.
func (l *link[Req]) reply(m *Req) { l.put(queued[Req]{m, 0}) }

func (l *link[Req]) put(m queued[Req]) {
	l.arrivals.Add(m.arrivals)
	select {
	case l.out <- m:
	default:
		l.cut(errSlow)
	}
}

// report queues a message that the next one makes up for; false: dropped.
func (l *link[Req]) report(m *Req) bool {
	if len(l.out) >= reportsQueue {
		return false
	}
	l.reply(m)
	return true
}

// behind reports whether there is no room for a piece of a capture.
func (l *link[Req]) behind() bool {
	return len(l.out) >= reportsQueue || l.arrivals.Load() >= arrivalsQueue
}

// reconnector holds one session after the other open.
type reconnector[Req, Res any] struct {
	name      string
	addresses []string // any of them will do, or says which
	options   []grpc.DialOption
	log       *slog.Logger
	rng       *rand.Rand // owned by run
	open      func(ctx context.Context, conn *grpc.ClientConn) (grpc.BidiStreamingClient[Req, Res], error)
	// The owner is told in this order: up, in..., down, for every session. up
	// must put the hello.
	up   func(*link[Req])
	in   func(*link[Req], *Res)
	down func(*link[Req], error)
}

// notLeading is the reason of an adaptor that does not lead, or no more.
const notLeading = "NOT_LEADING"

// run has sessions until ctx ends. Between two it waits: longer and longer
// up to maxBackoff while sessions fail at once, with jitter so that brokers do
// not return all together. It follows a server's word that another one leads without a wait
// as often as there are addresses, and then waits as well: servers that name each other
// would be asked again and again. It logs the end of a session once, and the same failure
// at the same address again only after a session.
func (k reconnector[Req, Res]) run(ctx context.Context) {
	conns := make([]*grpc.ClientConn, len(k.addresses))
	for i, address := range k.addresses {
		var err error
		if conns[i], err = targets.Keep(address, maxBackoff, k.options...); err != nil {
			// Only a target that does not parse; Config.Validate or the hello let it through.
			k.log.Error("session impossible", obs.KeyName, k.name, obs.KeyAddress, address, obs.KeyError, err)
			return
		}
		defer func() { conns[i].Close() }()
	}

	at, hops := 0, 0
	delay := firstBackoff
	logged := map[string]string{} // the newest failure, by address
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
		if targets.Reason(err) == notLeading {
			// Behind one address there may be several, of which another leads.
			conns[at].Close()
			conns[at], _ = targets.Keep(address, maxBackoff, k.options...) // it has parsed before
			delay = min(delay, standbyBackoff)
		}
		if time.Since(began) > maxBackoff {
			delay = firstBackoff
		}
		level, failure := slog.LevelWarn, err.Error()
		switch status.Code(err) {
		case codes.Aborted, codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated:
			// Our hello or token is wrong: hurrying does not help.
			level, delay = slog.LevelError, maxBackoff
		}
		if targets.Reason(err) == identity.ReasonInUse {
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

// next returns which address to try after a failure at one of them: the leader's if the
// failure names it, or else the one that follows. named: the failure names another of the
// addresses. elsewhere: the failure is the answer of a server that does not lead.
func next(addresses []string, at int, err error) (i int, named, elsewhere bool) {
	leader, elsewhere := targets.Leader(err)
	if i := slices.Index(addresses, leader); i >= 0 && i != at {
		return i, true, true
	}
	return (at + 1) % len(addresses), false, elsewhere
}

var errUnreachable = errors.New("cannot connect")

// failure returns why the connection is in transient failure: gRPC tells only those who call.
func (k reconnector[Req, Res]) failure(ctx context.Context, conn *grpc.ClientConn) error {
	err := conn.Invoke(ctx, "/grpc.health.v1.Health/Check", &emptypb.Empty{}, &emptypb.Empty{})
	if err == nil || status.Code(err) != codes.Unavailable {
		return errUnreachable // it may be connected meanwhile
	}
	why := status.Convert(err).Message()
	if _, dial, is := strings.Cut(why, "Error while dialing: "); is {
		why = strings.TrimSuffix(dial, `"`)
	} else if strings.Contains(why, "HTTP/1.1 header") || strings.Contains(why, "frame too large") || strings.Contains(why, "not a settings frame") {
		why = "no gRPC server answers there; is the port right?"
	}
	return fmt.Errorf("%w: %s", errUnreachable, why)
}

// reach waits until the other side is reachable, or ctx ends; where there are
// others it does not wait long. A session waits for that as well, but says
// nothing: a mistyped address would never show.
func (k reconnector[Req, Res]) reach(ctx context.Context, conn *grpc.ClientConn) error {
	told := false
	for {
		state := conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Idle:
			conn.Connect()
		case connectivity.TransientFailure:
			if len(k.addresses) > 1 || !told {
				why := k.failure(ctx, conn)
				if len(k.addresses) > 1 {
					return why
				}
				k.log.Warn("cannot connect; retrying", obs.KeyName, k.name, obs.KeyAddress, k.addresses[0], obs.KeyError, why)
				told = true
			}
		}
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
}

// session runs one session and returns why it ended, after its goroutine has. welcome: the
// other side sent something.
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
					return // Recv says why
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
