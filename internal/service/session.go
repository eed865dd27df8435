// Package service has what SRTM's gRPC services and their clients share, for brokers, the
// control plane, tools and the client library. It knows no particular service.
//
//   - session.go: a session is a stream on which both sides send freely after a hello, for
//     the lifetime of the peer. The client's side differs and is in nsqd/agent.
//   - dial.go: the client dials one of several replicas. Any server that answers will do.
//     The answer to a request shows whether another server leads.
//   - refusal.go: one table for each service maps errors to codes and details.
//   - share.go, expiry.go, enum.go: values become messages and messages become values.
package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

// HelloTimeout is the maximum time from a stream's opening to its hello.
const HelloTimeout = 10 * time.Second

var (
	// ErrNoHello: the peer opened a stream and sent nothing.
	ErrNoHello = errors.New("no hello in time")
	// ErrSlow: the peer does not read, and its queue is full.
	ErrSlow = errors.New("the peer does not read")
)

// Queue is the outgoing queue of a session: any goroutine puts, the session writes. Put
// never blocks. Make it with NewQueue.
type Queue[T any] struct {
	limit int // set by NewQueue
	wake  chan struct{}
	ended chan struct{} // closed when cause is set
	mu    struct {
		sync.Mutex
		items []T
		cause error // why the session must end; nil while it lives
	}
}

// NewQueue returns a queue for up to limit unwritten messages.
func NewQueue[T any](limit int) *Queue[T] {
	return &Queue[T]{limit: limit, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Put queues a message. If the queue is full, Put ends the session with ErrSlow. If the
// session has ended, Put does nothing.
func (q *Queue[T]) Put(m T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.cause != nil {
		return
	}
	if len(q.mu.items) == q.limit {
		q.endLocked(ErrSlow)
		return
	}
	q.mu.items = append(q.mu.items, m)
	select {
	case q.wake <- struct{}{}:
	default: // the writer has been woken and has not run yet
	}
}

// End ends the session with cause. The first cause stays.
func (q *Queue[T]) End(cause error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.endLocked(cause)
}

func (q *Queue[T]) endLocked(cause error) {
	if q.mu.cause == nil {
		q.mu.cause, q.mu.items = cause, nil
		close(q.ended)
	}
}

func (q *Queue[T]) take() []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.mu.items
	q.mu.items = nil
	return items
}

func (q *Queue[T]) cause() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.mu.cause
}

// Session is a service's side of a stream after the hello.
type Session[In, Out any] struct {
	Out *Queue[*Out]
	// Handle receives the messages after the hello, one at a time. An error ends the
	// session.
	Handle func(*In) error
	// Over is called once, after the last call of Handle.
	Over func()
}

// Server serves streams until Close. Make it with NewServer.
type Server struct {
	done  chan struct{}  // closed when mu.cause is set
	calls sync.WaitGroup // Serve, its readers and its writers; Add under mu, before a cause is set
	mu    struct {
		sync.Mutex
		cause error
	}
}

// NewServer returns a Server without sessions.
func NewServer() *Server { return &Server{done: make(chan struct{})} }

// Close ends all sessions with cause and refuses new sessions with cause. It returns when
// all sessions have ended, at the latest when their gRPC server stops.
func (s *Server) Close(cause error) {
	s.mu.Lock()
	if s.mu.cause == nil {
		s.mu.cause = cause
		close(s.done)
	}
	s.mu.Unlock()
	s.calls.Wait()
}

// enter counts a Serve with its reader and writer. It returns the cause if the server is
// closed.
func (s *Server) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.cause == nil {
		s.calls.Add(3)
	}
	return s.mu.cause
}

func (s *Server) cause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.cause
}

// Serve serves one stream. It passes the first message to begin, then handles messages
// and sends queued messages until the session ends. A session ends when the peer ends it
// (nil), the stream breaks, a message is refused, Out is ended, or s is closed. Serve
// returns this cause unchanged.
func Serve[In, Out any](s *Server, stream grpc.BidiStreamingServer[In, Out], begin func(*In) (Session[In, Out], error)) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	received := make(chan *In)
	broken := make(chan error, 2) // room for both
	// A silent peer may block the reader in gRPC, and a peer that does not read may block
	// the writer. Serve does not wait for them: gRPC releases a stream's calls when its
	// handler has returned.
	writing := make(chan *Queue[*Out], 1) // receives the queue, or is closed without one
	defer close(writing)
	go func() {
		defer s.calls.Done()
		if out, ok := <-writing; ok {
			if err := write(ctx, stream, out); err != nil {
				broken <- err
			}
		}
	}()
	go func() {
		defer s.calls.Done()
		for {
			m, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case received <- m:
			case <-ctx.Done():
				broken <- ctx.Err() // the peer has left; its last messages are dropped
				return
			}
		}
	}()

	hello := time.NewTimer(HelloTimeout)
	defer hello.Stop()
	var session Session[In, Out]
	select {
	case m := <-received:
		var err error
		if session, err = begin(m); err != nil {
			return err
		}
	case err := <-broken:
		return ended(err)
	case <-hello.C:
		return ErrNoHello
	case <-s.done:
		return s.cause()
	}
	defer session.Over()
	writing <- session.Out
	for {
		select {
		case m := <-received:
			if err := session.Handle(m); err != nil {
				return err
			}
		case <-session.Out.ended:
			return session.Out.cause()
		case err := <-broken:
			return ended(err)
		case <-s.done:
			return s.cause()
		}
	}
}

// write sends the queued messages until the session ends.
func write[In, Out any](ctx context.Context, stream grpc.BidiStreamingServer[In, Out], out *Queue[*Out]) error {
	for {
		select {
		case <-out.wake:
			for _, m := range out.take() {
				if err := stream.Send(m); err != nil {
					return fmt.Errorf("send: %w", err)
				}
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// ended turns the end of a stream by its peer into nil.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// MaxMessage is the maximum message size of our servers and clients, in bytes. It fits a
// topic with the maximum number of publishers.
const MaxMessage = 64 << 20

// SessionOption is a dial option of all our clients. gRPC's default limit is 4 MiB, and the
// groups of one topic can exceed it, so a broker could never receive the topic.
func SessionOption() grpc.DialOption {
	return grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage))
}

// Limits on useless connections, so idle clients keep no descriptor from others. A gRPC
// client reconnects with its next call.
const (
	HandshakeTimeout = 5 * time.Second
	IdleTimeout      = time.Minute // without a call
)

// MaxStreams is the maximum number of open calls per connection; a gRPC client queues
// further calls. A broker has one call per server. A program of publishers has one per
// topic, up to 10,000.
const MaxStreams = 12_000

// ServerOptions are the options of all our gRPC servers. A server detects a lost host
// within seconds, and accepts keep-alives as frequent as the Go client's.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ConnectionTimeout(HandshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 2 * time.Second, Timeout: 2 * time.Second, MaxConnectionIdle: IdleTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxConcurrentStreams(MaxStreams),
		grpc.MaxHeaderListSize(64 << 10), // instead of 16 MiB, because unauthenticated connections also use this memory
		grpc.WaitForHandlers(true),
	}
}
