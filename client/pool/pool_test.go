package pool_test

import (
	"context"
	"errors"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// world is a pool, and the broker of the publishers p, q and r of topic t.
type world struct {
	*testing.T
	*pool.Pool
	broker    *fake.Broker
	placement *fake.Placement
}

func newWorld(t *testing.T, cfg pool.Config) *world {
	broker := testkit.Result(fake.NewBroker("a", &fake.Log{})).Must(t)
	t.Cleanup(broker.Close)
	placement := testkit.Result(fake.NewPlacement()).Must(t)
	t.Cleanup(placement.Close)
	placement.Place("t", broker.Address(), "p", "q", "r")
	p, err := pool.New(client.Config{Address: placement.Address()}, cfg)
	testkit.Must(t, err)
	t.Cleanup(func() {
		testkit.NoError(t, p.Close(context.Background()))
		_, err := p.Use(pool.Key{Topic: "t", ID: "p"})
		testkit.ErrorIs(t, err, client.ErrClosed, "used after it was closed")
	})
	return &world{t, p, broker, placement}
}

func (w *world) use(id string) *pool.Shared {
	w.Helper()
	return testkit.Result(w.Use(pool.Key{Topic: "t", ID: id})).Must(w)
}

func (w *world) open(id string) (*pool.Shared, *client.Publisher) {
	w.Helper()
	one := w.use(id)
	publisher := testkit.Result(one.Publisher(w.Context())).Must(w)
	return one, publisher
}

func TestAPublisherIsOpenedOnceForAll(t *testing.T) {
	w := newWorld(t, pool.Config{Max: 1, Idle: time.Hour, OpenWithin: testkit.Hang})
	first, second := w.use("p"), w.use("p")
	a, err := first.Publisher(t.Context())
	testkit.Must(t, err)
	if b, err := second.Publisher(t.Context()); a != b || err != nil {
		t.Errorf("%p and %p, %v", a, b, err)
	}
	w.Release(first)
	_, err = w.Use(pool.Key{Topic: "t", ID: "q"})
	testkit.ErrorIs(t, err, pool.ErrFull, "another, while the second user has it")
	if s := w.States(); len(s) != 1 || s[0] != (pool.State{Topic: "t", Publisher: "p", Broker: w.broker.Address(), Users: 1}) {
		t.Errorf("state %+v", s)
	}
	w.Release(second)
	w.open("q")
	testkit.Equal(t, w.Len(), 1, "publishers")
	NewWithT(t).Eventually(w.broker.Clients).WithTimeout(testkit.Hang).Should(Equal([]string{"q"}))
}

func TestWhatCannotBeOpenedIsTriedAgain(t *testing.T) {
	w := newWorld(t, pool.Config{Max: 1, Idle: time.Hour, OpenWithin: testkit.Hang})
	one := w.use("x")
	if _, err := one.Publisher(t.Context()); !errors.Is(err, client.ErrUnknown) {
		t.Fatalf("an unknown publisher: %v", err)
	}
	w.Release(one)
	w.placement.Place("t", w.broker.Address(), "x")
	w.open("x")
}

// A client has one publisher for a topic and id. While a closing publisher waits for its last answers, its successor
// cannot open.
func TestAPublisherIsUsedAgainWhileItCloses(t *testing.T) {
	w := newWorld(t, pool.Config{Max: 2, Idle: time.Hour, OpenWithin: testkit.Hang})
	p, publisher := w.open("p")
	w.broker.Hold(true)
	ctx, cancel := context.WithCancel(t.Context())
	given := make(chan error, 1)
	go func() { given <- publisher.Publish(ctx, []byte("m")) }()
	NewWithT(t).Eventually(w.broker.Held).WithTimeout(testkit.Hang).Should(Equal(1))
	cancel()
	testkit.ErrorIs(t, <-given, client.ErrUnanswered, "given up without an answer")
	w.Release(p)
	q, _ := w.open("q")
	r, _ := w.open("r") // in the place of p, which is closing
	w.Release(q)
	p = w.use("p") // in the place of q
	w.Release(r)
	w.open("q") // in the place of r: waits as long as p
	w.broker.Hold(false)
	_, err := p.Publisher(t.Context())
	testkit.NoError(t, err)
}

// A broker that is alive and does not answer must not keep an unused publisher open.
func TestAPublisherDoesNotCloseForGood(t *testing.T) {
	w := newWorld(t, pool.Config{Max: 1, Idle: time.Hour, OpenWithin: 4 * time.Second})
	p, publisher := w.open("p")
	w.broker.Hold(true)
	defer w.broker.Hold(false)
	ctx, cancel := context.WithCancel(t.Context())
	given := make(chan error, 1)
	go func() { given <- publisher.Publish(ctx, []byte("m")) }()
	NewWithT(t).Eventually(w.broker.Held).WithTimeout(testkit.Hang).Should(Equal(1))
	cancel()
	<-given
	w.Release(p)
	for _, id := range []string{"q", "p"} { // q in the place of p, which is closing
		testkit.WaitFor(t, id+" is opened", func() bool { // a busy machine may need longer than OpenWithin
			one, err := w.Use(pool.Key{Topic: "t", ID: id})
			testkit.Must(t, err)
			defer w.Release(one)
			_, err = one.Publisher(t.Context())
			return err == nil
		})
	}
}

func TestIdlePublishersAreClosed(t *testing.T) {
	w := newWorld(t, pool.Config{Max: 2, Idle: time.Millisecond, OpenWithin: testkit.Hang})
	w.open("p")
	q, _ := w.open("q")
	w.Release(q)
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		w.Pool.Run(ctx)
	}()
	NewWithT(t).Eventually(w.broker.Clients).WithTimeout(testkit.Hang).Should(Equal([]string{"p"}))
	cancel()
	<-ran
}

// The bytes in transit to a slow broker are bounded and leave room for messages to another broker. Order is kept.
func TestASlowBrokerLeavesRoomForOthers(t *testing.T) {
	const body = 1000
	w := newWorld(t, pool.Config{Max: 10, Idle: time.Hour, OpenWithin: testkit.Hang, MaxBytes: 8 * (body + pool.Overhead), MaxBrokerBytes: 2 * (body + pool.Overhead)})
	other := testkit.Result(fake.NewBroker("b", &fake.Log{})).Must(t)
	t.Cleanup(other.Close)
	w.placement.Place("u", other.Address(), "p")
	w.broker.Hold(true)
	slow, fast := w.Line(), w.Line()
	defer slow.Close()
	defer fast.Close()
	message := func(n byte) pool.Message {
		m := pool.Message{Body: make([]byte, body)}
		m.Body[0] = n
		return m
	}
	var pending []pool.Pending
	for n := range byte(2) {
		pending = append(pending, slow.Begin(t.Context(), pool.Key{Topic: "t", ID: "p"}, message(n+1)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	third := slow.Begin(ctx, pool.Key{Topic: "t", ID: "p"}, message(3))
	testkit.ErrorIs(t, third.Wait(), context.DeadlineExceeded, "there is room for two")
	testkit.MustEqual(t, third.Failed(), true)
	for n := range byte(20) {
		is := fast.Begin(t.Context(), pool.Key{Topic: "u", ID: "p"}, message(n+1))
		testkit.NoError(t, is.Wait())
	}
	w.broker.Hold(false)
	for i := range pending {
		testkit.NoError(t, pending[i].Wait())
	}
	large := slow.Begin(t.Context(), pool.Key{Topic: "t", ID: "p"}, pool.Message{Body: make([]byte, 100*body)})
	testkit.NoError(t, large.Wait(), "larger than the bound, and alone")
}

// The pool finds a topic that was deleted and created again.
func TestATopicThatComesBack(t *testing.T) {
	w := newWorld(t, pool.Config{Max: 10, Idle: time.Hour, OpenWithin: testkit.Hang})
	line := w.Line()
	defer line.Close()
	publish := func() error {
		is := line.Begin(t.Context(), pool.Key{Topic: "t", ID: "p"}, pool.Message{Body: []byte("x")})
		return is.Wait()
	}
	testkit.Must(t, publish())
	w.placement.Delete("t")
	testkit.WaitFor(t, "the end of the topic", func() bool { return errors.Is(publish(), client.ErrUnknown) })
	w.placement.Place("t", w.broker.Address(), "p")
	testkit.NoError(t, publish())
}
