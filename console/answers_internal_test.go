package console

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Several pages that show a broker at the same time cause one request to the broker, even if the page
// that requested first has left.
func TestManyPagesAreOneQuestion(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var asked atomic.Int64
		c := &requester{transport: roundTripper(func(*http.Request) (*http.Response, error) {
			asked.Add(1)
			<-time.After(100 * time.Millisecond)
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader([]byte("all")))}, nil
		})}
		for n := range 3 {
			var all sync.WaitGroup
			for range 50 {
				all.Go(func() {
					if body, err := c.cachedGet(t.Context(), c.transport, "b:1", "/stats"); string(body) != "all" {
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

// Answers of brokers are not kept longer than they are used, nor beyond a bound.
func TestAnswersAreBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		c := &requester{transport: roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(io.LimitReader(zeros{}, 4<<20))}, nil
		})}
		held := func() (n, bytes int) {
			c.answers.mu.Lock()
			defer c.answers.mu.Unlock()
			for _, a := range c.answers.recent {
				n, bytes = n+1, bytes+cap(a.body)
			}
			return n, bytes
		}
		for _, pause := range []time.Duration{0, 2 * tick} {
			for i := range 20 {
				if body, err := c.cachedGet(t.Context(), c.transport, fmt.Sprintf("b%d:1", i), "/stats"); len(body) != 4<<20 {
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

// A few bytes of an answer may be a hundred bytes decoded. The console refuses an answer that is
// within its bound in bytes but would take far more memory, before decoding all of it.
func TestAnswersAreDecodedWithinABound(t *testing.T) {
	full := func(before, one, after string) []byte {
		text := append([]byte(before), bytes.Repeat([]byte(one+","), (maxAnswer-len(before)-len(after))/(len(one)+1))...)
		return append(bytes.TrimSuffix(text, []byte(",")), after...)
	}
	for what, body := range map[string][]byte{
		"objects":           full(`{"topics":[`, `{}`, `]}`),
		"of another type":   full(`{"topics":[`, `0`, `]}`),
		"lists of one":      full(`{"topics":[`, `{"channels":[{}]}`, `]}`),
		"of a channel":      full(`{"topics":[{"channels":[{"clients":[`, `{}`, `]}]}]}`),
		"after a quotation": full(`{"health":"\"[\\","topics":[`, `{}`, `]}`),
		"many samples":      bytes.Repeat([]byte("srtm_nsqd_connections 1\n"), maxAnswer/24),
		"many labels":       full(`srtm_nsqd_connections{`, `a="1"`, "} 1\n"),
		"of other metrics":  bytes.Repeat([]byte("a 1\n"), maxAnswer/4),
	} {
		c := &requester{transport: roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(body))}, nil
		})}
		var before, after runtime.MemStats
		var known brokerStats
		var err error
		runtime.ReadMemStats(&before)
		if body[0] == '{' {
			known, err = c.stats(t.Context(), "b:1", "", "", true)
		} else {
			_, err = metrics("b:1", body, time.Time{})
		}
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 8*maxAnswer { // mostly for reading the body
			t.Errorf("%s: %d MiB were allocated for an answer of %d", what, took>>20, len(body)>>20)
		}
		if refused := err != nil; refused == (what == "of other metrics") || refused && !strings.Contains(err.Error(), "b:1 answers with more than 65536 entries") {
			t.Errorf("%s: %d topics, %v", what, len(known.Topics), err)
		}
	}
}
