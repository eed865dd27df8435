package calibrate

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
)

// broker sends requests to a broker's HTTP port, or to its HTTPS port if the broker
// requires TLS.
type broker struct {
	address string
	secure  *tls.Config // nil: without TLS
}

// topicStats are the fields read from a topic in /stats.
type topicStats struct {
	Name     string
	Delivery *histogram.Latency
}

const (
	requestTimeout = 5 * time.Second
	maxStats       = 64 << 20 // bytes
	maxElements    = 1 << 20  // of a broker with topics: their histograms
	maxFrame       = 1 << 20
)

// Identity requests a broker's id in its cluster.
func Identity(ctx context.Context, httpAddress string, secure *tls.Config) (id string, err error) {
	text, err := broker{httpAddress, secure}.ask(ctx, http.MethodGet, "/info")
	if err != nil {
		return "", err
	}
	var info struct {
		BrokerID string `json:"broker_id"`
	}
	if err := json.Unmarshal(text, &info); err != nil {
		return "", fmt.Errorf("/info of %s: %w", httpAddress, err)
	}
	if info.BrokerID == "" {
		return "", fmt.Errorf("/info of %s names no broker_id: it is none of ours", httpAddress)
	}
	return info.BrokerID, nil
}

// statusError is an answer other than 200.
type statusError struct {
	path string
	code int
}

func (e *statusError) Error() string { return fmt.Sprintf("%s: status %d", e.path, e.code) }

func (b broker) ask(ctx context.Context, method, path string) ([]byte, error) {
	text, err := b.request(ctx, method, "http://"+b.address, path)
	var answer *statusError
	if !errors.As(err, &answer) || answer.code != http.StatusForbidden {
		return text, err
	}
	url := Secured(b.address, text)
	if url == "" {
		return nil, err
	}
	if b.secure == nil {
		return nil, ErrTLS
	}
	return b.request(ctx, method, url, path)
}

// ErrTLS: a broker requires TLS, and no TLS is configured.
var ErrTLS = errors.New("the broker requires TLS: say whom it is trusted by, with --nsqd-tls-ca")

// Secured returns the URL of a broker's HTTPS port if its plain answer at address
// requires HTTPS, else "".
func Secured(address string, answer []byte) (url string) {
	var required struct {
		Port int `json:"https_port"`
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil || json.Unmarshal(answer, &required) != nil || required.Port == 0 {
		return ""
	}
	return "https://" + net.JoinHostPort(host, strconv.Itoa(required.Port))
}

// request returns the body even with a *statusError.
func (b broker) request(ctx context.Context, method, to, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, to+path, nil)
	if err != nil {
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: b.secure}}
	res, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close() // read: nothing can be lost
	text, err := bounded.Read(res.Body, maxStats)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		err = &statusError{path, res.StatusCode}
	}
	return text, err
}

func (b broker) topics(ctx context.Context) ([]topicStats, error) {
	text, err := b.ask(ctx, http.MethodGet, "/stats?format=json&include_clients=false&include_mem=false&include_histograms=true")
	if err != nil {
		return nil, err
	}
	return parseStats(text)
}

func parseStats(text []byte) ([]topicStats, error) {
	var s struct {
		Topics []struct {
			Name string `json:"topic_name"`
			SRTM struct {
				Latency struct {
					Delivery *srtmv1.Histogram `json:"delivery_histogram"`
				} `json:"latency"`
			} `json:"srtm"`
		} `json:"topics"`
	}
	if err := bounded.Decode(text, maxElements, &s); err != nil {
		return nil, fmt.Errorf("/stats: %w", err)
	}
	var all []topicStats
	for _, t := range s.Topics {
		if t.SRTM.Latency.Delivery == nil {
			return nil, errors.New("/stats has no delivery_histogram: is this an nsqd of SRTM, and as new as this program?")
		}
		l, err := obs.LatencyFromProto(t.SRTM.Latency.Delivery)
		if err != nil {
			return nil, fmt.Errorf("/stats, topic %.80q: %w", t.Name, err)
		}
		all = append(all, topicStats{t.Name, l})
	}
	return all, nil
}

// remove deletes a topic. A missing topic is no error.
func (b broker) remove(ctx context.Context, topic string) error {
	_, err := b.ask(ctx, http.MethodPost, "/topic/delete?topic="+url.QueryEscape(topic))
	var answer *statusError
	if errors.As(err, &answer) && answer.code == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", topic, err)
	}
	return nil
}

// since returns the increase of a histogram. It fails if a count decreased, for example
// by a restart of the broker.
func since(before, after *histogram.Latency) (*histogram.Latency, error) {
	was, is := obs.LatencyProto(before), obs.LatencyProto(after)
	less := map[uint32]uint64{}
	for i, index := range was.Index {
		less[index] = was.Count[i]
	}
	more := &srtmv1.Histogram{LowestUs: is.LowestUs, HighestUs: is.HighestUs, SignificantDigits: is.SignificantDigits}
	for i, index := range is.Index {
		n := is.Count[i]
		if n < less[index] {
			return nil, errors.New("the broker counts less than before: was it restarted?")
		}
		if n > less[index] {
			more.Index, more.Count = append(more.Index, index), append(more.Count, n-less[index])
		}
		delete(less, index)
	}
	if len(less) > 0 {
		return nil, errors.New("the broker counts less than before: was it restarted?")
	}
	return obs.LatencyFromProto(more)
}

// hold subscribes without taking messages, and so keeps an ephemeral channel alive until
// release.
func hold(address, topic, channel string) (*nsq.Consumer, error) {
	cfg := nsq.NewConfig()
	cfg.ClientID, cfg.DialTimeout, cfg.MaxInFlight = "srtm-calibrate", connectTimeout, 0
	c, err := nsq.NewConsumer(topic, channel, cfg)
	if err != nil {
		return nil, err
	}
	c.SetLoggerLevel(nsq.LogLevelMax)
	c.AddHandler(nsq.HandlerFunc(func(*nsq.Message) error { return nil }))
	if err := c.ConnectToNSQD(address); err != nil {
		c.Stop()
		return nil, fmt.Errorf("subscribe to %s: %w", topic, err)
	}
	return c, nil
}

// release ends a hold, and reports an error if the hold's connection had ended before.
func release(c *nsq.Consumer) (err error) {
	if c.Stats().Connections == 0 {
		err = errors.New("the connection that holds the topic ended")
	}
	c.Stop()
	<-c.StopChan
	return err
}
