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
	"github.com/srtm-io/srtm/internal/service"
)

// Follow reports the assignments of publishers of a topic: all assignments once, then every
// change, until ctx ends. Without ids it reports every publisher of the topic. Follow calls
// report on its own goroutine, with each new or changed assignment. After a reconnect
// assignments may repeat, and Follow does not filter older epochs. An unknown id gets an
// assignment with Unknown set.
//
// While the loaddistributor is unreachable, or the topic is not active yet, Follow retries,
// and earlier reports remain valid. Follow returns ErrUnknown if the topic does not exist or
// is deleted, the error of a refused request, or the cause of ctx.
func Follow(ctx context.Context, conn grpc.ClientConnInterface, topic string, ids []string, report func([]*srtmv1.Assignment)) error {
	wait := newBackoff()
	for {
		start := time.Now()
		err := followOnce(ctx, conn, topic, ids, report)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Since(start) > lastBackoff { // a server whose streams end immediately does not count
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

// followOnce reads one stream until it ends. The error is never nil.
func followOnce(ctx context.Context, conn grpc.ClientConnInterface, topic string, ids []string, report func([]*srtmv1.Assignment)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
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

// Bounds of the wait between two attempts of a remote operation.
const (
	firstBackoff = 10 * time.Millisecond
	lastBackoff  = 2 * time.Second
)

// backoff doubles the wait after each attempt, and draws it from the upper half. So
// publishers that lost the same broker do not return at the same instant.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: firstBackoff} }

func (b *backoff) reset() { b.next = firstBackoff }

// advance returns the next wait.
func (b *backoff) advance() time.Duration {
	d := b.next/2 + rand.N(b.next/2)
	b.next = min(2*b.next, lastBackoff)
	return d
}

// sleep waits, or returns the cause of ctx.
func (b *backoff) sleep(ctx context.Context) error {
	if !clock.Sleep(ctx, b.advance()) {
		return context.Cause(ctx)
	}
	return nil
}

// resolve requests a publisher's assignment. It retries while the topic is not active yet
// or no server answers.
func resolve(ctx context.Context, conn grpc.ClientConnInterface, options []grpc.DialOption, req *srtmv1.ResolveRequest) (*srtmv1.Assignment, error) {
	wait := newBackoff()
	for {
		resp, err := srtmv1.NewPlacementServiceClient(conn).Resolve(ctx, req)
		if leader, _ := service.Leader(err); leader != "" && req.Create {
			resp, err = resolveAt(ctx, leader, options, req)
		}
		if err == nil {
			return resp.Assignment, nil
		}
		operation := fmt.Sprintf("resolve publisher %q of topic %q", req.PublisherId, req.Topic)
		if ctx.Err() == nil {
			switch status.Code(err) {
			case codes.NotFound:
				return nil, fmt.Errorf("%s: %w: %s", operation, ErrUnknown, status.Convert(err).Message())
			case codes.ResourceExhausted:
				if req.Create {
					return nil, fmt.Errorf("%s: %w: %s", operation, ErrNotCreated, status.Convert(err).Message())
				}
			case codes.FailedPrecondition, codes.Unavailable, codes.Aborted:
			default:
				return nil, fmt.Errorf("%s: %w", operation, err)
			}
		}
		if ended := wait.sleep(ctx); ended != nil {
			// The last answer is more informative than the timeout.
			return nil, fmt.Errorf("%s: %w: %s", operation, ended, status.Convert(err).Message())
		}
	}
}

// resolveAt sends the request to the leading loaddistributor, which alone creates topics.
func resolveAt(ctx context.Context, leader string, options []grpc.DialOption, req *srtmv1.ResolveRequest) (*srtmv1.ResolveResponse, error) {
	conn, err := service.Dial(leader, options...)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return srtmv1.NewPlacementServiceClient(conn).Resolve(ctx, req)
}

// errMembership ends a stream whose set of publishers has changed.
var errMembership = errors.New("publishers joined or left")
