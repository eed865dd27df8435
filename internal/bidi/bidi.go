package bidi

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

// HelloTimeout is how long a stream may be open before its hello.
const HelloTimeout = 10 * time.Second

var (
	// ErrNoHello: the peer opened a stream and said nothing.
	ErrNoHello = errors.New("no hello in time")
	// ErrSlow: the peer does not read what it is sent, and its queue is full.
	ErrSlow = errors.New("the peer does not read")
)

// Queue is the way out of a session: any goroutine puts, the session writes.
// It never blocks. Make it with NewQueue.
type Queue[T any] struct {
	limit int // set once
	wake  chan struct{}
	ended chan struct{} // closed when cause is set
	mu    struct {
		sync.Mutex
		items []T
		cause error // why the session is to end; nil while it lives
	}
}

// NewQueue returns a queue for up to limit messages that are not yet written.
func NewQueue[T any](limit int) *Queue[T] {
	return &Queue[T]{limit: limit, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Put queues a message. When the queue is full it ends the session with
// ErrSlow; when the session has ended it does nothing.
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
	default: // the writer has been woken and has not looked yet
	}
}

// End ends the session with cause; the first cause stays.
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

// Session is what a service makes of a hello.
type Session[In, Out any] struct {
	Out *Queue[*Out]
	// Handle takes the messages after the hello, one at a time. An error ends
	// the session with it.
	Handle func(*In) error
	// Over is called once, when nothing more will be handled.
	Over func()
}

// Server serves streams until it is closed. Make it with NewServer.
type Server struct {
	done  chan struct{}  // closed when mu.cause is set
	calls sync.WaitGroup // Serve, its readers and its writers; Add under mu, without a cause
	mu    struct {
		sync.Mutex
		cause error
	}
}

// NewServer returns a Server without sessions.
func NewServer() *Server { return &Server{done: make(chan struct{})} }

// Close ends all sessions with cause, refuses new ones with it, and returns
// when all have ended, at the latest when their gRPC server stops.
func (s *Server) Close(cause error) {
	s.mu.Lock()
	if s.mu.cause == nil {
		s.mu.cause = cause
		close(s.done)
	}
	s.mu.Unlock()
	s.calls.Wait()
}

// enter counts a Serve, its reader and its writer in, or says why not.
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

// Serve runs one stream: begin gets the first message, and then messages are
// handled and queued ones sent until the peer ends (nil), the stream breaks,
// a message is refused, Out is ended, or s is closed; it returns that cause,
// unchanged.
func Serve[In, Out any](s *Server, stream grpc.BidiStreamingServer[In, Out], begin func(*In) (Session[In, Out], error)) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	received := make(chan *In)
	broken := make(chan error, 2) // room for both
	// Both may be held up in gRPC, by a peer that says nothing or does not read,
	// and must not hold up the end of the session: that ends them, for gRPC
	// lets go of a stream's calls when its handler has returned.
	writing := make(chan *Queue[*Out], 1) // gets the queue, or is closed without
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
				broken <- ctx.Err() // the peer is gone; what it said last is dropped
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

// write sends what is queued until the session ends.
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

// MaxMessage is the largest message that a server or a client of ours takes, in bytes: a
// topic with all the publishers it may have is about this.
const MaxMessage = 64 << 20

// Receive is of every client of ours. gRPC's own limit is 4 MiB, which the groups of one
// topic can exceed: a broker could not be told of it, again and again.
func Receive() grpc.DialOption {
	return grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage))
}

// How long a connection may be of no use: those that only connect, or have asked all that they
// wanted, keep no descriptor from others. A client of gRPC's connects again with its next call.
const (
	HandshakeTimeout = 5 * time.Second
	IdleTimeout      = time.Minute // without a call
)

// MaxStreams is how many calls a connection may have open; a client of gRPC's has the next one
// wait. A broker has one to each server, a program of publishers one for each topic that it
// follows, of which there may be 10,000.
const MaxStreams = 12_000

// ServerOptions are those of every gRPC server of ours: a peer whose host is
// gone is noticed within seconds, and a client may ask as often as the Go
// client does.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ConnectionTimeout(HandshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 2 * time.Second, Timeout: 2 * time.Second, MaxConnectionIdle: IdleTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxConcurrentStreams(MaxStreams),
		grpc.MaxHeaderListSize(64 << 10), // instead of 16 MiB, for each connection of strangers, too
		grpc.WaitForHandlers(true),
	}
}
