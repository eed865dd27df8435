package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/topics"
)

// Bounds of requests to brokers.
const (
	brokerTimeout = 3 * time.Second
	maxAnswer     = 8 << 20             // bytes
	maxElements   = bounded.MaxElements // of an answer's arrays, or of its metrics
	maxRemembered = 64                  // answers
	maxHeld       = 4 * maxAnswer
	maxShown      = 100     // clients of a broker on a page
	maxPeeked     = 4 << 10 // bytes of a message's body on a page
)

// requester sends requests to the HTTP APIs of brokers.
type requester struct {
	// Set once.
	transport http.RoundTripper // Config.Brokers
	self      string            // Config.Self
	admin     srtmv1.AdminServiceClient
	watched   *watched

	answers answers
}

// answers holds recent answers, so concurrent pages share one request.
type answers struct {
	pending singleflight.Group // by key
	mu      sync.Mutex
	recent  map[string]answer // guarded by mu; by key
}

type answer struct {
	expiry time.Time // then the answer is too old
	body   []byte
	err    error
}

// cachedGet returns a recent or pending answer to the same GET request, or sends the
// request.
func (a *requester) cachedGet(ctx context.Context, transport http.RoundTripper, address, path string) ([]byte, error) {
	return a.answers.get(ctx, address+" "+path, tick, func(ctx context.Context) ([]byte, error) {
		return a.ask(ctx, transport, http.MethodGet, address, path)
	})
}

// get returns the answer that a key had within age, or a pending answer, or calls ask. The
// caller does not modify the answer.
func (a *answers) get(ctx context.Context, key string, age time.Duration, ask func(context.Context) ([]byte, error)) ([]byte, error) {
	a.mu.Lock()
	recent, ok := a.recent[key]
	a.mu.Unlock()
	if ok && time.Now().Before(recent.expiry) {
		return recent.body, recent.err
	}
	body, err, _ := a.pending.Do(key, func() (any, error) {
		body, err := ask(context.WithoutCancel(ctx)) // all waiting callers share the request
		a.add(key, answer{time.Now().Add(age), body, err})
		return body, err
	})
	return body.([]byte), err
}

// add stores an answer if there is room beside the other recent answers.
func (a *answers) add(key string, kept answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	bytes, now := len(kept.body), time.Now()
	for key, other := range a.recent {
		if !now.Before(other.expiry) {
			delete(a.recent, key)
		} else {
			bytes += len(other.body)
		}
	}
	if a.recent == nil {
		a.recent = map[string]answer{}
	}
	if len(a.recent) < maxRemembered && bytes <= maxHeld {
		a.recent[key] = kept
	}
}

// ask sends a request without a body to an HTTP API.
func (a *requester) ask(ctx context.Context, transport http.RoundTripper, method, address, path string) ([]byte, error) {
	return a.send(ctx, transport, method, address, path, nil)
}

// send sends a request to an HTTP API.
func (a *requester) send(ctx context.Context, transport http.RoundTripper, method, address, path string, body io.Reader) ([]byte, error) {
	if transport == nil {
		return nil, &problem{http.StatusNotImplemented, "This console sends no requests to brokers."}
	}
	client := &http.Client{Transport: transport, Timeout: brokerTimeout, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	r, err := http.NewRequestWithContext(ctx, method, "http://"+address+path, body)
	if err != nil {
		return nil, err
	}
	if authorization := userOf(ctx).authorization; authorization != "" && a.self != "" { // the broker that serves this console
		r.Header.Set("Authorization", authorization)
	}
	res, err := client.Do(r)
	if err != nil {
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s does not answer: %v", address, err)}
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s: %v", address, err)}
	case len(answer) > maxAnswer:
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s answers with more than %d MiB.", address, maxAnswer>>20)}
	case res.StatusCode != http.StatusOK:
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s: %s: %.300s", address, res.Status, answer)}
	}
	return answer, nil
}

// brokerStats is the shown part of a broker's /stats.
type brokerStats struct {
	Health    string        `json:"health"`
	Topics    []brokerTopic `json:"topics"`
	Producers []client      `json:"producers"`
}

type brokerTopic struct {
	Name     string          `json:"topic_name"`
	Channels []brokerChannel `json:"channels"`
	Depth    int             `json:"depth"`
	Paused   bool            `json:"paused"`
	SRTM     struct {
		Limited bool    `json:"limited"`
		Expired uint64  `json:"expired"`
		Rate    float64 `json:"rate"`
		Burst   int64   `json:"burst"`
		Latency struct {
			Access   quantiles `json:"access_us"`
			Broker   quantiles `json:"processing_us"`
			Consumer quantiles `json:"consumer_us"`
		} `json:"latency"`
	} `json:"srtm"`
}

type quantiles struct {
	P99 int64 // µs
}

// Last returns the quantile at 0.99 as a duration.
func (q quantiles) Last() time.Duration { return time.Duration(q.P99) * time.Microsecond }

type brokerChannel struct {
	Name         string   `json:"channel_name"`
	Depth        int      `json:"depth"`         // of all waiting messages
	BackendDepth int      `json:"backend_depth"` // of the waiting messages, those on disk alone
	InFlight     int      `json:"in_flight_count"`
	Deferred     int      `json:"deferred_count"`
	Requeued     uint64   `json:"requeue_count"`
	TimedOut     uint64   `json:"timeout_count"`
	ClientCount  int      `json:"client_count"`
	Clients      []client `json:"clients"`
	Paused       bool     `json:"paused"`
	SRTM         struct {
		Expired      uint64 `json:"expired"`
		GivenUp      uint64 `json:"given_up"`
		DeadLettered uint64 `json:"dead_lettered"`
		Expiry       expiry `json:"expiry"`
	} `json:"srtm"`
}

// expiry is the expiry in force in a channel of a broker.
type expiry struct {
	TTL         float64 `json:"ttl_seconds"`
	MaxAttempts uint32  `json:"max_attempts"`
	DeadLetter  string  `json:"dead_letter"`
}

// Text describes the settings in one line; "" if messages stay until they are finished.
func (e expiry) Text() string {
	p := &srtmv1.Expiry{MaxAttempts: e.MaxAttempts, DeadLetterTopic: e.DeadLetter}
	if e.TTL > 0 && e.TTL < maxTTL {
		p.Ttl = durationpb.New(time.Duration(e.TTL * float64(time.Second)))
	}
	return topics.ExpiryText(p)
}

// maxTTL is the longest shown TTL, in seconds.
const maxTTL = 1e9

type client struct {
	ID        string `json:"client_id"`
	Remote    string `json:"remote_address"`
	UserAgent string `json:"user_agent"`
	Version   string `json:"version"`
	Ready     int    `json:"ready_count"`
	InFlight  int    `json:"in_flight_count"`
	Messages  uint64 `json:"message_count"`
	Published []struct {
		Topic string `json:"topic"`
		Count uint64 `json:"count"`
	} `json:"pub_counts"`
}

// Protocol returns nsq, mqtt3.1.1 or mqtt5. Brokers report the protocol of NSQ as V2, as NSQ's nsqd
// does.
func (c client) Protocol() string {
	if c.Version == "V2" {
		return "nsq"
	}
	return c.Version
}

// stats requests a broker's stats of all topics, or of one topic or channel.
func (a *requester) stats(ctx context.Context, address, topic, channel string, clients bool) (s brokerStats, err error) {
	q := url.Values{"format": {"json"}, "include_mem": {"false"}, "include_clients": {strconv.FormatBool(clients)}}
	if topic != "" {
		q.Set("topic", topic)
	}
	if channel != "" {
		q.Set("channel", channel)
	}
	body, err := a.cachedGet(ctx, a.transport, address, "/stats?"+q.Encode())
	if err == nil {
		err = decode(address, body, &s)
	}
	return s, err
}

// decode decodes a broker's answer into v. It refuses an answer that would take far more
// memory than its text.
func decode(address string, body []byte, v any) error {
	err := bounded.Decode(body, maxElements, v)
	switch {
	case errors.Is(err, bounded.ErrElements):
		return tooMany(address)
	case err != nil:
		return &problem{http.StatusBadGateway, fmt.Sprintf("%s: %v", address, err)}
	}
	return nil
}

func tooMany(address string) error {
	return &problem{http.StatusBadGateway, fmt.Sprintf("%s answers with more than %d entries.", address, maxElements)}
}

// address returns the HTTP address of a broker.
func (a *requester) address(id string) (string, *srtmv1.Broker, error) {
	if a.self != "" {
		return a.self, nil, nil
	}
	brokers := a.watched.cluster().Brokers
	i := slices.IndexFunc(brokers, func(b *srtmv1.Broker) bool { return b.Id == id })
	if i < 0 {
		return "", nil, &problem{http.StatusNotFound, fmt.Sprintf("There is no broker %s.", id)}
	}
	return brokers[i].HttpAddress, brokers[i], nil
}

// holders returns the connected brokers that have a topic, by id, with their addresses, and
// the ids of the disconnected brokers that have it.
func (a *requester) holders(ctx context.Context, topic string) (addresses map[string]string, disconnected []string, err error) {
	if a.self != "" {
		return map[string]string{"": a.self}, nil, nil
	}
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	reply, err := a.admin.ListBrokers(limited, &srtmv1.ListBrokersRequest{})
	if err != nil {
		return nil, nil, err
	}
	addresses = map[string]string{}
	for _, b := range reply.Brokers {
		switch {
		case !slices.Contains(b.Topics, topic):
		case b.Connected:
			addresses[b.Id] = b.HttpAddress
		default:
			disconnected = append(disconnected, b.Id)
		}
	}
	if len(addresses) == 0 {
		return nil, nil, &problem{http.StatusNotFound, fmt.Sprintf("No broker that is there has a topic %s.", topic)}
	}
	return addresses, disconnected, nil
}

// maxAsked is the maximum number of concurrent requests to brokers.
const maxAsked = 16

// each sends a request to all brokers concurrently, so stalled brokers together take only
// brokerTimeout. It returns the answers in the order of the brokers' ids.
func each[A any](brokers map[string]string, ask func(id, address string) A) []A {
	ids := sortedKeys(brokers)
	answers := make([]A, len(ids))
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for i, id := range ids {
		group.Go(func() error {
			answers[i] = ask(id, brokers[id])
			return nil
		})
	}
	_ = group.Wait() // the group's functions return no errors
	return answers
}
