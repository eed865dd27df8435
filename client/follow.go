package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/targets"
)

// Follow reports where publishers of a topic belong: all of them once, then
// every change, until ctx ends. No ids means every publisher of the topic.
// report is called from this goroutine, with an assignment of each publisher
// that is new or has changed; a repetition is possible after a reconnect, an
// older epoch is not filtered out. An id that the topic does not have gets an
// assignment that is Unknown, and the others theirs.
//
// While the loaddistributor cannot be reached, or the topic is not active yet,
// Follow tries again, and what was reported stands. It returns ErrUnknown when
// the topic does not exist or is deleted, and otherwise the cause of ctx.
func Follow(ctx context.Context, conn grpc.ClientConnInterface, topic string, ids []string, report func([]*srtmv1.Assignment)) error {
	wait := newBackoff()
	for {
		began := time.Now()
		err := followOnce(ctx, conn, topic, ids, report)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Since(began) > lastBackoff { // else it may be one whose streams end at once
			wait.reset()
		}
		switch status.Code(err) {
		case codes.NotFound:
			return fmt.Errorf("%w: %s", ErrUnknown, status.Convert(err).Message())
		case codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied, codes.Unimplemented:
			return fmt.Errorf("watch topic %q: %w", topic, err)
		}
		if err := wait.sleep(ctx); err != nil {
			return err
		}
	}
}

// followOnce reads one stream to its end, which always has a reason.
func followOnce(ctx context.Context, conn grpc.ClientConnInterface, topic string, ids []string, report func([]*srtmv1.Assignment)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream whatever happens
	stream, err := srtmv1.NewPlacementServiceClient(conn).Watch(ctx, &srtmv1.WatchRequest{Topic: topic, PublisherIds: ids})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		if err != nil {
			return err
		}
		if len(resp.Assignments) > 0 {
			report(resp.Assignments)
		}
	}
}

// Bounds of the wait between two attempts at something remote.
const (
	firstBackoff = 10 * time.Millisecond
	lastBackoff  = 2 * time.Second
)

// backoff doubles a wait and spreads it over its upper half, so that publishers
// that lost the same broker do not come back at the same instant.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: firstBackoff} }

func (b *backoff) reset() { b.next = firstBackoff }

// take returns the next wait.
func (b *backoff) take() time.Duration {
	d := b.next/2 + rand.N(b.next/2)
	b.next = min(2*b.next, lastBackoff)
	return d
}

// sleep waits, or returns the cause of ctx.
func (b *backoff) sleep(ctx context.Context) error {
	if !clock.Sleep(ctx, b.take()) {
		return context.Cause(ctx)
	}
	return nil
}

// resolve asks where a publisher belongs, and again while the topic is not active yet or no
// server answers.
func resolve(ctx context.Context, conn grpc.ClientConnInterface, options []grpc.DialOption, req *srtmv1.ResolveRequest) (*srtmv1.Assignment, error) {
	wait := newBackoff()
	for {
		resp, err := srtmv1.NewPlacementServiceClient(conn).Resolve(ctx, req)
		if leader, _ := targets.Leader(err); leader != "" && req.Create {
			resp, err = resolveAt(ctx, leader, options, req)
		}
		if err == nil {
			return resp.Assignment, nil
		}
		what := fmt.Sprintf("resolve publisher %q of topic %q", req.PublisherId, req.Topic)
		if ctx.Err() == nil {
			switch status.Code(err) {
			case codes.NotFound:
				return nil, fmt.Errorf("%s: %w: %s", what, ErrUnknown, status.Convert(err).Message())
			case codes.ResourceExhausted:
				if req.Create {
					return nil, fmt.Errorf("%s: %w: %s", what, ErrNotCreated, status.Convert(err).Message())
				}
			case codes.FailedPrecondition, codes.Unavailable, codes.Aborted:
			default:
				return nil, fmt.Errorf("%s: %w", what, err)
			}
		}
		if ended := wait.sleep(ctx); ended != nil {
			// The last answer says more than that time is over.
			return nil, fmt.Errorf("%s: %w: %s", what, ended, status.Convert(err).Message())
		}
	}
}

// resolveAt asks the loaddistributor that leads: it alone creates topics.
func resolveAt(ctx context.Context, leader string, options []grpc.DialOption, req *srtmv1.ResolveRequest) (*srtmv1.ResolveResponse, error) {
	conn, err := targets.Dial(leader, options...)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return srtmv1.NewPlacementServiceClient(conn).Resolve(ctx, req)
}

// errMembership ends a stream whose set of publishers has changed.
var errMembership = errors.New("publishers joined or left")
