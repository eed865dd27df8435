package webhook

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// receiver is a transport whose answer to a post is decided by the test.
type receiver func(r *http.Request) (status int, err error)

func (f receiver) RoundTrip(r *http.Request) (*http.Response, error) {
	status, err := f(r)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Body: io.NopCloser(strings.NewReader("ok")), Header: http.Header{"Location": {"http://elsewhere/"}}, Request: r}, nil
}

func sender(t *testing.T, log io.Writer, to receiver) *Sender {
	u, err := Check("http://scaler/hook?key=secret", false)
	testkit.Must(t, err)
	s := New(Config{URL: u, Transport: to, Log: slog.New(slog.NewTextHandler(log, nil))})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); testkit.Must(t, <-ended) })
	return s
}

func body(t *testing.T, r *http.Request) string {
	text, err := io.ReadAll(r.Body)
	testkit.Must(t, err)
	return string(text)
}

func TestSenderPostsTheDocument(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var got []string
		s := sender(t, t.Output(), func(r *http.Request) (int, error) {
			got = append(got, r.Method+" "+r.URL.String()+" "+r.Header.Get("Content-Type")+" "+body(t, r))
			return http.StatusNoContent, nil
		})
		s.Send([]byte("{}"))
		synctest.Wait()
		testkit.EqualSlices(t, got, []string{"POST http://scaler/hook?key=secret application/json {}"}, "posts")
		testkit.Equal(t, testutil.ToFloat64(s.posts.WithLabelValues("accepted")), 1)
	})
}

// A failed post is repeated with growing pauses, and dropped after some time. The log never
// shows the query of the URL, which may contain a secret.
func TestFailedPostIsRepeatedThenDropped(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var log strings.Builder
		var at []time.Duration
		start := time.Now()
		s := sender(t, &log, func(*http.Request) (int, error) {
			at = append(at, time.Since(start))
			switch len(at) % 3 {
			case 0:
				return http.StatusInternalServerError, nil
			case 1:
				return http.StatusTemporaryRedirect, nil // not followed
			}
			return 0, errors.New("connection refused")
		})
		s.Send([]byte("{}"))
		<-time.After(time.Hour)
		synctest.Wait()
		testkit.Equal(t, len(at), attempts)
		testkit.Equal(t, at[1], time.Second)
		testkit.Equal(t, at[3], 7*time.Second)
		testkit.Equal(t, at[attempts-1]-at[attempts-2], last)
		testkit.Equal(t, testutil.ToFloat64(s.posts.WithLabelValues("dropped")), 1)
		for _, part := range []string{"webhook failed; retrying", "webhook failed; dropping the document", "connection refused", "Temporary Redirect"} {
			if !strings.Contains(log.String(), part) {
				t.Errorf("the log lacks %q", part)
			}
		}
		if strings.Contains(log.String(), "secret") {
			t.Errorf("the log shows the secret:\n%s", log.String())
		}
	})
}

// A receiver that does not answer delays no caller, and only the newest document waits.
func TestNewestWins(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var got []string
		s := sender(t, t.Output(), func(r *http.Request) (int, error) {
			if got = append(got, body(t, r)); len(got) == 1 {
				<-r.Context().Done()
				return 0, r.Context().Err()
			}
			return http.StatusOK, nil
		})
		s.Send([]byte("1"))
		synctest.Wait()
		s.Send([]byte("2"))
		s.Send([]byte("3"))
		<-time.After(timeout + time.Second)
		synctest.Wait()
		testkit.EqualSlices(t, got, []string{"1", "3"}, "posts")
		<-time.After(time.Hour)
		synctest.Wait()
		testkit.Equal(t, len(got), 2)
	})
}

// Over a real connection, with an endless answer.
func TestOverHTTP(t *testing.T) {
	got := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- body(t, r)
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}))
	defer server.Close()
	u, err := Check(server.URL, false)
	testkit.Must(t, err)
	s := New(Config{URL: u, Transport: &http.Transport{}, Log: slog.New(slog.DiscardHandler)})
	testkit.Must(t, s.post(t.Context(), []byte("{}")))
	testkit.Equal(t, <-got, "{}")
	s.http.CloseIdleConnections()
}

func TestCheckRefusesUnsafeAddresses(t *testing.T) {
	for address, c := range map[string]struct {
		tls  bool
		want string
	}{
		"http://h/p":            {false, ""},
		"http://h:81":           {false, ""},
		"https://h/p":           {true, ""},
		"https://h/q?":          {false, "https needs"},
		"http://h/q":            {true, "want https"},
		"http://u:secret@h/":    {false, "use a token"},
		"ftp://h":               {false, "want http://"},
		"h:80":                  {false, "want http://"},
		"http://:80":            {false, "want http://"},
		"http://h/#f":           {false, "want http://"},
		"http://h/%zz?key=hide": {false, "not a URL"},
	} {
		_, err := Check(address, c.tls)
		if c.want == "" {
			testkit.Must(t, err)
			continue
		}
		testkit.ErrorHas(t, err, c.want, "%s", address)
		if strings.Contains(err.Error(), "hide") {
			t.Errorf("%v shows a secret", err)
		}
	}
}
