package service_test

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// stream is a peer in memory. The test writes the peer's messages into in and reads the server's
// messages from out. The stream ends as a gRPC stream does: Recv fails when the context ends.
type stream struct {
	grpc.ServerStream
	ctx context.Context
	in  chan *string
	out chan *string
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) Recv() (*string, error) {
	select {
	case m, ok := <-s.in:
		if !ok {
			return nil, io.EOF
		}
		return m, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

func (s *stream) Send(m *string) error {
	select {
	case s.out <- m:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// recorder records the messages of a session.
type recorder struct {
	out     *service.Queue[*string]
	refuse  error
	handled func(string) error
	over    int
}

func (s *recorder) begin(*string) (service.Session[string, string], error) {
	return service.Session[string, string]{
		Out:    s.out,
		Handle: func(m *string) error { return s.handled(*m) },
		Over:   func() { s.over++ },
	}, s.refuse
}

type fixture struct {
	*recorder
	server *service.Server
	stream *stream
	hangUp context.CancelFunc
	result chan error
}

// serve starts a session in the background. As with gRPC, the stream's context ends when the handler
// returns.
func serve(t *testing.T) *fixture {
	f := &fixture{recorder: &recorder{out: service.NewQueue[*string](3)}, server: service.NewServer(), result: make(chan error, 1)}
	f.handled = func(string) error { return nil }
	ctx, cancel := context.WithCancel(t.Context())
	f.hangUp = cancel
	f.stream = &stream{ctx: ctx, in: make(chan *string), out: make(chan *string)}
	return f
}

func (f *fixture) start() {
	go func() {
		err := service.Serve(f.server, f.stream, f.begin)
		f.hangUp()
		f.result <- err
	}()
}

func say(text string) *string { return &text }

func TestASessionHandlesAndSendsInOrder(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := serve(t)
		var heard []string
		f.handled = func(m string) error { heard = append(heard, m); return nil }
		f.start()
		f.stream.in <- say("hello")
		f.stream.in <- say("a")
		f.out.Put(say("1"))
		f.out.Put(say("2"))
		if one, two := *<-f.stream.out, *<-f.stream.out; one != "1" || two != "2" {
			t.Errorf("sent %q, %q", one, two)
		}
		f.stream.in <- say("b")
		close(f.stream.in)
		if err := <-f.result; err != nil {
			t.Errorf("the peer ended it, and Serve says %v", err)
		}
		if len(heard) != 2 || heard[0] != "a" || heard[1] != "b" || f.over != 1 {
			t.Errorf("heard %q, over %d times", heard, f.over)
		}
	})
}

// hello sends a hello, and returns when the service has read it.
func (f *fixture) hello() {
	f.stream.in <- say("hello")
	synctest.Wait()
}

func TestHowASessionEnds(t *testing.T) {
	refused, bad, replaced, closing := errors.New("refused"), errors.New("bad"), errors.New("replaced"), errors.New("closing")
	for _, test := range []struct {
		name string
		act  func(f *fixture)
		want error
		over int
	}{
		{"no hello in time", func(*fixture) {}, service.ErrNoHello, 0},
		{"the peer goes before its hello", func(f *fixture) { close(f.stream.in) }, nil, 0},
		{"the hello is refused", func(f *fixture) { f.refuse = refused; f.stream.in <- say("hello") }, refused, 0},
		{"a message is refused", func(f *fixture) {
			f.handled = func(string) error { return bad }
			f.stream.in <- say("hello")
			f.stream.in <- say("x")
		}, bad, 1},
		{"the stream breaks", func(f *fixture) { f.hello(); f.hangUp() }, context.Canceled, 1},
		{"the service ends it", func(f *fixture) { f.hello(); f.out.End(replaced); f.out.End(bad) }, replaced, 1},
		{"the queue is full", func(f *fixture) {
			f.stream.in <- say("hello")
			for range 1 + 3 + 1 { // one message is with the writer, and stays there
				f.out.Put(say("m"))
				synctest.Wait()
			}
		}, service.ErrSlow, 1},
		{"the server closes", func(f *fixture) { f.hello(); go f.server.Close(closing) }, closing, 1},
		{"the server closes before the hello", func(f *fixture) { synctest.Wait(); go f.server.Close(closing) }, closing, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				f := serve(t)
				f.start()
				test.act(f)
				if err := <-f.result; !errors.Is(err, test.want) || (test.want == nil && err != nil) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				f.server.Close(closing) // waits for the reader
				if f.over != test.over {
					t.Errorf("over was called %d times, want %d", f.over, test.over)
				}
			})
		})
	}
}

// The server notices a peer that vanishes, even while the peer's last message waits to be handled.
func TestAPeerThatVanishesBehindAMessage(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := serve(t)
		busy := make(chan struct{})
		f.handled = func(string) error { <-busy; return nil }
		f.start()
		f.stream.in <- say("hello")
		f.stream.in <- say("a") // being handled
		f.stream.in <- say("b") // read, waiting
		synctest.Wait()
		f.hangUp()
		synctest.Wait()
		close(busy)
		testkit.ErrorIs(t, <-f.result, context.Canceled)
		f.server.Close(nil)
	})
}

func TestAClosedServerRefuses(t *testing.T) {
	closing := errors.New("closing")
	f := serve(t)
	f.server.Close(closing)
	f.start()
	testkit.ErrorIs(t, <-f.result, closing)
}

func TestAQueueTakesFromManyAndLosesNothing(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := serve(t)
		f.out = service.NewQueue[*string](1000)
		f.start()
		f.stream.in <- say("hello")
		var writers sync.WaitGroup
		for range 10 {
			writers.Go(func() {
				for range 100 {
					f.out.Put(say("m"))
				}
			})
		}
		for range 1000 {
			<-f.stream.out
		}
		writers.Wait()
		close(f.stream.in)
		testkit.NoError(t, <-f.result)
		f.out.Put(say("after the end")) // does nothing, and does not block
		f.server.Close(errors.New("done"))
	})
}
