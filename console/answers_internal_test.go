package console

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Every page that shows a broker is drawn at the same time: it is one question all the same,
// also when the page that asked has left.
func TestManyPagesAreOneQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		c := &Console{cfg: Config{Brokers: roundTripper(func(*http.Request) (*http.Response, error) {
			asked.Add(1)
			<-time.After(100 * time.Millisecond)
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader([]byte("all")))}, nil
		})}}
		for n := range 3 {
			var all sync.WaitGroup
			for range 50 {
				all.Go(func() {
					if body, err := c.remembered(t.Context(), "b:1", "/stats"); string(body) != "all" {
						t.Errorf("%q, %v", body, err)
					}
				})
			}
			all.Wait()
			if got := asked.Load(); got != int64(n+1) {
				t.Errorf("asked %d times, want %d", got, n+1)
			}
			<-time.After(2 * tick)
		}
	})
}

// What brokers have answered is not kept longer than it is used, nor beyond a bound.
func TestAnswersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Console{cfg: Config{Brokers: roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(io.LimitReader(zeros{}, 4<<20))}, nil
		})}}
		held := func() (n, bytes int) {
			c.answers.mu.Lock()
			defer c.answers.mu.Unlock()
			for _, a := range c.answers.known {
				n, bytes = n+1, bytes+cap(a.body)
			}
			return n, bytes
		}
		for _, pause := range []time.Duration{0, 2 * tick} {
			for i := range 20 {
				if body, err := c.remembered(t.Context(), fmt.Sprintf("b%d:1", i), "/stats"); len(body) != 4<<20 {
					t.Errorf("%d, %v", len(body), err)
				}
				<-time.After(pause)
			}
			if n, bytes := held(); bytes > 48<<20 || pause > 0 && n > 1 {
				t.Errorf("%d answers of %d MiB are kept", n, bytes>>20)
			}
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
