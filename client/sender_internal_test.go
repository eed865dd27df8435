package client

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A publisher loses its place while moving, and gets the new place back before its last answer from the old broker. The
// new connection takes over after the last answer.
func TestMovedWhileItRetires(t *testing.T) {
	var log fake.Log
	brokers := map[string]*fake.Broker{}
	for _, name := range []string{"old", "new"} {
		b := testkit.Result(fake.NewBroker(name, &log)).Must(t)
		t.Cleanup(func() { b.Close() })
		brokers[name] = b
	}
	from, to := brokers["old"], brokers["new"]
	c := testkit.Result(New(Config{Address: "127.0.0.1:1"})).Must(t)
	defer c.conn.Close()
	p := newPublisher(c, "t", "p", "")
	s := &sender{p: p, wait: newBackoff(), retry: stopped(), drain: stopped()}
	defer s.end()
	epoch := uint64(0)
	assign := func(address string) {
		epoch++
		p.assigned(&srtmv1.Assignment{TcpAddress: address, Epoch: epoch})
		s.readInbox()
	}

	assign(from.Address())
	s.connected(<-p.dialled)
	s.cur.open = []*request{{done: make(chan error, 1)}}
	assign(to.Address())
	assign("")
	assign(to.Address())
	s.connected(<-p.dialled)
	s.cur.answered(answer{})
	s.receive(s.cur)
	if s.cur == nil || s.cur.address != to.Address() || !s.canSend() {
		t.Errorf("it sends at %+v, with %+v next", s.cur, s.next)
	}
}

// A broker is alive and does not answer. The number of open publishes stays at its maximum, but the client frees their
// messages, because their callers have given up.
func TestWhatIsGivenUpIsForgotten(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r := &request{cmd: nsq.Publish("t", make([]byte, 1<<20)), done: make(chan error, 1)}
	r.state.Store(sent)
	if err := (Pending{ctx: ended, request: r}).Wait(); !errors.Is(err, ErrUnanswered) || r.cmd != nil {
		t.Errorf("%v, and keeps %v", err, r.cmd)
	}
}

// The client has sent a publish that waits to be sent again. No error may say that the publish was not sent.
func TestWhatWasSentIsNotUnsent(t *testing.T) {
	c := testkit.Result(New(Config{Address: "127.0.0.1:1"})).Must(t)
	defer c.conn.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, end := range map[string]func(*sender, *request) error{
		"its context's": func(_ *sender, r *request) error { return Pending{ctx: ended, request: r}.Wait() },
		"its publisher's": func(s *sender, r *request) error {
			s.end()
			s.queue = nil
			return <-r.done
		},
	} {
		var log fake.Log
		b := testkit.Result(fake.NewBroker("b", &log)).Must(t)
		s := &sender{p: newPublisher(c, "t", "p", ""), wait: newBackoff(), retry: stopped(), drain: stopped()}
		s.p.assigned(&srtmv1.Assignment{TcpAddress: b.Address(), Epoch: 1})
		s.readInbox()
		s.connected(<-s.p.dialled)
		r := &request{cmd: nsq.Publish("t", nil), done: make(chan error, 1)}
		r.state.Store(sent)
		s.cur.open = []*request{r}
		s.lose(s.cur, io.EOF)
		testkit.ErrorIs(t, end(s, r), ErrUnanswered, "%s end", name)
		s.end()
		b.Close()
	}
}

// newSender returns the sender of a publisher that is assigned to a broker and does not run.
func newSender(t *testing.T) *sender {
	c := testkit.Result(New(Config{Address: "127.0.0.1:1"})).Must(t)
	t.Cleanup(func() { c.conn.Close() })
	b := testkit.Result(fake.NewBroker("b", new(fake.Log))).Must(t)
	t.Cleanup(b.Close)
	s := &sender{p: newPublisher(c, "t", "p", ""), wait: newBackoff(), retry: stopped(), drain: stopped()}
	t.Cleanup(s.end)
	s.p.assigned(&srtmv1.Assignment{TcpAddress: b.Address(), Epoch: 1})
	s.readInbox()
	return s
}

// After a broker has ended in order, the client sends its unanswered messages again, even if the client notices the end
// only after a failed write.
func TestAnOrderlyEndBeforeAWriteThatFails(t *testing.T) {
	s := newSender(t)
	s.connected(<-s.p.dialled)
	open, next := &request{done: make(chan error, 1)}, &request{cmd: nsq.Publish("t", nil), done: make(chan error, 1)}
	open.state.Store(sent)
	s.cur.open, s.queue = []*request{open}, []*request{next}
	s.cur.end(io.EOF)
	s.cur.close()
	s.send()
	if !slices.Equal(s.queue, []*request{open, next}) {
		t.Errorf("%d are sent again, and the one without an answer has %v", len(s.queue), <-open.done)
	}
}

// If a broker refuses for good and hangs up again and again, the client does not dial the broker a hundred times a
// second for each publisher.
func TestABrokerThatRefusesIsDialledLess(t *testing.T) {
	s := newSender(t)
	answers := func(a answer) {
		s.connect()
		if s.dialling {
			s.connected(<-s.p.dialled)
		}
		s.cur.open = []*request{{done: make(chan error, 1)}}
		s.cur.answered(a)
		s.receive(s.cur)
	}
	for range 8 {
		answers(answer{&RefusedError{Code: "E_BAD_TOPIC"}})
	}
	testkit.Equal(t, s.wait.next, lastBackoff)
	answers(answer{&RefusedError{Code: "E_RATE_LIMITED"}})
	testkit.Equal(t, s.wait.next, firstBackoff, "from one that works")
}

// brief returns streams that end after one assignment.
type brief struct {
	grpc.ClientConnInterface
	streams int
}

func (b *brief) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	b.streams++
	return &briefStream{}, nil
}

type briefStream struct {
	grpc.ClientStream
	sent bool
}

func (*briefStream) SendMsg(any) error { return nil }
func (*briefStream) CloseSend() error  { return nil }
func (s *briefStream) RecvMsg(m any) error {
	if s.sent {
		return io.EOF
	}
	s.sent = true
	m.(*srtmv1.WatchResponse).Assignments = []*srtmv1.Assignment{{}}
	return nil
}

// The client also opens streams less often if a loaddistributor's streams end after their first message.
func TestStreamsThatEndAtOnceAreOpenedLess(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var conn brief
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := Follow(ctx, &conn, "t", nil, func([]*srtmv1.Assignment) {})
		testkit.ErrorIs(t, err, context.DeadlineExceeded)
		if conn.streams > 100 {
			t.Errorf("%d streams in a minute", conn.streams)
		}
	})
}

// placing gives a publisher the epoch n in its n-th stream.
type placing struct {
	srtmv1.UnimplementedPlacementServiceServer
	streams atomic.Uint64
}

func (p *placing) Watch(_ *srtmv1.WatchRequest, to grpc.ServerStreamingServer[srtmv1.WatchResponse]) error {
	err := to.Send(&srtmv1.WatchResponse{Assignments: []*srtmv1.Assignment{{Epoch: p.streams.Add(1)}}})
	<-to.Context().Done()
	return err
}

// losable is a connection whose peer becomes unreachable without notice.
type losable struct {
	net.Conn
	lost   *atomic.Bool
	closed context.Context
	close  context.CancelFunc
}

func (l losable) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if l.lost.Load() {
		<-l.closed.Done()
		return 0, net.ErrClosed
	}
	return n, err
}

func (l losable) Write(b []byte) (int, error) {
	if l.lost.Load() {
		return len(b), nil
	}
	return l.Conn.Write(b)
}

func (l losable) Close() error {
	l.close()
	return l.Conn.Close()
}

// A loaddistributor on a lost host answers nothing and refuses nothing.
func TestALoaddistributorThatIsOutOfReachIsLeft(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		ln := testkit.NewPiped()
		server := grpc.NewServer(service.ServerOptions()...)
		srtmv1.RegisterPlacementServiceServer(server, &placing{})
		testkit.ServeOn(t, ln, server)
		var lost atomic.Bool // the first connection
		firstly := &lost
		c := testkit.Result(New(Config{Address: "passthrough:server", DialOptions: []grpc.DialOption{
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				mine, theirs := net.Pipe()
				ln.Conns <- theirs
				closed, end := context.WithCancel(context.Background())
				conn := losable{mine, firstly, closed, end}
				firstly = &atomic.Bool{}
				return conn, nil
			}),
		}})).Must(t)
		defer c.conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began, epoch := time.Now(), uint64(0)
		err := Follow(ctx, c.conn, "t", nil, func(assignments []*srtmv1.Assignment) {
			if epoch = assignments[0].Epoch; epoch == 2 {
				cancel()
			}
			lost.Store(true)
		})
		if took := time.Since(began); epoch != 2 || took > 20*time.Second {
			t.Errorf("after %v it gets epoch %d: %v", took, epoch, err)
		}
	})
}
