package auth_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/auth"
)

// clerk answers queries. If turn is set, each query waits for a turn.
type clerk struct {
	asked atomic.Int64
	turn  chan struct{} // nil: no caller waits
	grant *auth.Grant
	err   error
}

func (c *clerk) ask(ctx context.Context, _ auth.Query) (*auth.Grant, error) {
	c.asked.Add(1)
	if c.turn != nil {
		select {
		case <-c.turn:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return c.grant, c.err
}

func answers(t *testing.T, text string) *auth.Grant {
	t.Helper()
	return testkit.Result(auth.ParseAnswer([]byte(text))).Must(t)
}

func TestAnAnswerHoldsForItsTime(t *testing.T) {
	var now mono.Time
	at := &clerk{grant: answers(t, all)} // a minute
	c := auth.NewCache(at.ask, func() mono.Time { return now }, 20)
	expect := func(q auth.Query, asked int64) {
		t.Helper()
		if g, err := c.Ask(t.Context(), q); g != at.grant || !errors.Is(err, at.err) || at.asked.Load() != asked {
			t.Errorf("%+v: %v %v, asked %d times, want %d", q, g, err, at.asked.Load(), asked)
		}
	}
	me := auth.Query{Secret: "s", RemoteIP: "192.0.2.1"}
	expect(me, 1)
	now = now.Add(time.Minute - 1)
	expect(me, 1)
	for i, other := range []auth.Query{{Secret: "s"}, {Secret: "s", RemoteIP: "192.0.2.2"}, {Secret: "s", RemoteIP: "192.0.2.1", TLS: true}, {Secret: "s", RemoteIP: "192.0.2.1", CommonName: "n"}} {
		expect(other, int64(i)+2)
	}
	now = now.Add(1)
	expect(me, 6)
	expect(me, 6)
	// The cache keeps neither a grant that permits nothing nor an error.
	now = now.Add(time.Minute)
	at.grant = answers(t, rules(""))
	for i := range int64(300) {
		expect(me, 7+i)
	}
	at.grant, at.err = nil, errors.New("unavailable")
	for i := range int64(300) {
		expect(me, 307+i)
	}
}

func TestACacheIsBounded(t *testing.T) {
	at := &clerk{grant: answers(t, all)}
	c := auth.NewCache(at.ask, func() mono.Time { return 0 }, 20)
	const clients, remembered = 5000, 4096
	for range 2 {
		for i := range clients {
			testkit.Result(c.Ask(t.Context(), auth.Query{Secret: fmt.Sprint(i)})).Must(t)
		}
	}
	if n := at.asked.Load(); n < 2*clients-remembered || n == 2*clients {
		t.Errorf("asked %d times: either all are remembered, or none", n)
	}
}

func TestOneQuestionForAllWhoAskTheSame(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		at := &clerk{grant: answers(t, all), turn: make(chan struct{})}
		c := auth.NewCache(at.ask, func() mono.Time { return 0 }, 20)
		var wg sync.WaitGroup
		var served atomic.Int64
		ask := func(ctx context.Context, secret string, want error) {
			wg.Go(func() {
				_, err := c.Ask(ctx, auth.Query{Secret: secret})
				testkit.ErrorIs(t, err, want, "%s", secret)
				served.Add(1)
			})
			synctest.Wait()
		}
		impatient, leave := context.WithCancel(t.Context())
		ask(impatient, "s", context.Canceled) // sends the query that all callers wait for
		ask(impatient, "s", context.Canceled) // waits for the answer
		for range 10 {
			ask(t.Context(), "s", nil)
		}
		testkit.MustEqual(t, at.asked.Load(), 1, "times asked")
		leave() // the querying caller leaves: another caller queries
		synctest.Wait()
		if n, s := at.asked.Load(), served.Load(); n != 2 || s != 2 {
			t.Fatalf("asked %d times, %d have an answer", n, s)
		}
		// The maximum number of callers wait. Further unknown clients are refused at once; known clients are not.
		for i := range 20 - 10 {
			ask(t.Context(), fmt.Sprint(i), nil)
		}
		ask(t.Context(), "one more", auth.ErrBusy)
		ask(t.Context(), "s", auth.ErrBusy)
		close(at.turn)
		wg.Wait()
		ask(t.Context(), "s", nil)
		ask(t.Context(), "one more", nil)
		wg.Wait()
	})
}
