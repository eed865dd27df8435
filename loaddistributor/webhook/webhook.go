// Package webhook posts the newest of a sequence of JSON documents to a URL. A receiver that
// is slow or down never holds up the caller: at most one document waits, and a newer document
// replaces it.
package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/srtm-io/srtm/internal/obs"
)

const (
	// attempts is how often a document is sent before the Sender drops it.
	attempts = 10
	// timeout bounds an attempt, with the connection and the answer.
	timeout = 10 * time.Second
	// The pause after a failed attempt doubles from first to last.
	first, last = time.Second, time.Minute
	// maxAnswer is how much of an answer is read, in bytes, so that the connection can be
	// used again.
	maxAnswer = 64 << 10
)

// Config is fixed at start.
type Config struct {
	URL *url.URL
	// Transport carries the requests, with TLS and credentials.
	Transport http.RoundTripper
	Log       *slog.Logger
	Metrics   prometheus.Registerer // nil: not exported
}

// Check parses the URL of a receiver. tls reports whether the transport uses TLS.
func Check(address string, tls bool) (*url.URL, error) {
	u, err := url.Parse(address)
	switch {
	case err != nil:
		return nil, errors.New("not a URL") // err contains the URL, which may contain a secret
	case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Fragment != "":
		return nil, errors.New("want http://host/path or https://host/path")
	case u.User != nil:
		return nil, errors.New("a password does not belong in a URL: use a token")
	case u.Scheme == "https" && !tls:
		return nil, errors.New("https needs the authorities of the receiver's certificate")
	case u.Scheme == "http" && tls:
		return nil, errors.New("the receiver has certificates: want https")
	}
	return u, nil
}

// Sender posts documents. Make it with New, and Run it.
type Sender struct {
	// Set once.
	url        string
	displayURL string // the URL without its query, for people
	http       *http.Client
	log        *slog.Logger
	posts      *prometheus.CounterVec // by result

	newest atomic.Pointer[[]byte] // written by Send and taken by Run
	wake   chan struct{}          // 1 deep
}

// New returns a sender.
func New(c Config) *Sender {
	display := *c.URL
	display.RawQuery = ""
	s := &Sender{
		url: c.URL.String(), displayURL: display.String(), log: c.Log, wake: make(chan struct{}, 1),
		http: &http.Client{
			Transport: c.Transport, Timeout: timeout,
			// A redirect would send the token to another server.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		posts: promauto.With(c.Metrics).NewCounterVec(prometheus.CounterOpts{
			Name: "srtm_webhook_posts_total", Help: "Posts to --capacity-webhook, by result: accepted, failed (sent again later), dropped (failed too often).",
		}, []string{"result"}),
	}
	for _, result := range []string{"accepted", "failed", "dropped"} {
		s.posts.WithLabelValues(result)
	}
	return s
}

// Send passes on a document, which belongs to the Sender from then on. Send does not wait.
func (s *Sender) Send(document []byte) {
	s.newest.Store(&document)
	select {
	case s.wake <- struct{}{}:
	default: // Run is about to look
	}
}

// Run posts documents until ctx ends.
func (s *Sender) Run(ctx context.Context) error {
	defer s.http.CloseIdleConnections()
	var document *[]byte
	failures := 0
	pause := first
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
		case <-timer.C:
		}
		timer.Stop()
		if newer := s.newest.Swap(nil); newer != nil {
			document, failures, pause = newer, 0, first
		}
		if document == nil {
			continue
		}
		err := s.post(ctx, *document)
		if err == nil {
			s.posts.WithLabelValues("accepted").Inc()
			document = nil
			continue
		}
		if ctx.Err() != nil {
			return nil
		}
		s.posts.WithLabelValues("failed").Inc()
		if failures++; failures == attempts {
			s.posts.WithLabelValues("dropped").Inc()
			s.log.Error("webhook failed; dropping the document", "url", s.displayURL, "attempts", attempts, obs.KeyError, err)
			document = nil
			continue
		}
		s.log.Warn("webhook failed; retrying", "url", s.displayURL, "in", pause, obs.KeyError, err)
		timer.Reset(pause)
		pause = min(2*pause, last)
	}
}

func (s *Sender) post(ctx context.Context, document []byte) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(document))
	if err != nil {
		return withoutURL(err)
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := s.http.Do(r)
	if err != nil {
		return withoutURL(err)
	}
	defer response.Body.Close()
	_, _ = io.CopyN(io.Discard, response.Body, maxAnswer)
	if response.StatusCode < 200 || response.StatusCode > 299 {
		return fmt.Errorf("the receiver answered %s", response.Status)
	}
	return nil
}

// withoutURL removes the URL from an error of net/http. Its query may contain a secret.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}
