package console

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"testing"
	"time"

	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// listing is an API that lists count brokers with a topic.
type listing struct {
	srtmv1.AdminServiceClient
	count int
}

func (l listing) ListBrokers(context.Context, *srtmv1.ListBrokersRequest, ...grpc.CallOption) (*srtmv1.ListBrokersResponse, error) {
	var reply srtmv1.ListBrokersResponse
	for i := range l.count {
		reply.Brokers = append(reply.Brokers, &srtmv1.Broker{Id: fmt.Sprintf("b%02d", i), HttpAddress: fmt.Sprintf("b%d:1", i), Topics: []string{"t"}, Connected: true})
	}
	return &reply, nil
}

// Several brokers that do not answer delay a page only as long as one such broker.
func TestStalledBrokersAreWaitedForAtOnce(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		by := roundTripper(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		})
		c := &Console{cfg: Config{Log: slog.New(slog.DiscardHandler)}, requester: requester{transport: by, admin: listing{count: maxAsked}}}
		q := url.Values{"topic": {"t"}, "channel": {"c"}}
		for what, ask := range map[string]func() int{
			"channel": func() int {
				return len(testkit.Result(c.channel(t.Context(), q, user{})).Must(t).Data.(channelData).Holders)
			},
			"peek": func() int { return len(testkit.Result(c.peek(t.Context(), q, user{})).Must(t).Data.(peekData).Trouble) },
			"pause": func() int {
				_, err := operator{c.requester.admin, &c.requester}.onHolders(t.Context(), q, "/channel/pause", q, "Paused")
				testkit.ErrorHas(t, err, "b15:1 does not answer")
				return maxAsked
			},
		} {
			began := time.Now()
			testkit.Equal(t, ask(), maxAsked, "%s: brokers", what)
			testkit.Equal(t, time.Since(began), brokerTimeout, "%s", what)
		}
	})
}

// sampled is an API that has every topic.
type sampled struct{ listing }

func (sampled) ListTopics(context.Context, *srtmv1.ListTopicsRequest, ...grpc.CallOption) (*srtmv1.ListTopicsResponse, error) {
	return &srtmv1.ListTopicsResponse{}, nil
}

func (sampled) GetTopic(_ context.Context, r *srtmv1.GetTopicRequest, _ ...grpc.CallOption) (*srtmv1.GetTopicResponse, error) {
	return &srtmv1.GetTopicResponse{Topic: &srtmv1.Topic{Spec: &srtmv1.TopicSpec{Name: r.Name}}}, nil
}

// stalledShares never answers.
type stalledShares struct{ srtmv1.GrantServiceClient }

func (stalledShares) ListShares(ctx context.Context, _ *srtmv1.ListSharesRequest, _ ...grpc.CallOption) (*srtmv1.ListSharesResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// Pages get the state of topics immediately, even while share requests are not answered. All topics
// together wait for shares no longer than one topic does.
func TestStalledSharesDelayNoPage(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		c := &Console{admin: sampled{}, grants: stalledShares{}}
		c.watched.init()
		began, changed := time.Now(), c.watched.changes()
		for i := range maxTracked {
			c.watched.topics[fmt.Sprint(i)] = &tracked{viewed: began}
		}
		round := make(chan struct{})
		go func() {
			defer close(round)
			c.round(t.Context(), 0)
		}()
		<-changed
		testkit.Equal(t, time.Since(began), 0, "until pages were updated")
		for i := range maxTracked {
			testkit.Equal(t, len(c.watched.rows(fmt.Sprint(i), 0).Samples), 1, "samples of %d", i)
		}
		<-round
		testkit.Equal(t, time.Since(began), callTimeout, "a round")
	})
}

// A rate above zero is not shown as zero.
func TestSmallRatesAreNotShownAsZero(t *testing.T) {
	measured := functions["measured32"].(func(float64) string)
	for rate, want := range map[float64]string{0: "0", 0.016: "0.02", 0.5: "0.5", 3: "3", 9.999: "10", 12.4: "12"} {
		testkit.Equal(t, measured(rate), want, "%v", rate)
	}
}

// The request carries exactly the numbers that the user typed.
func TestNumbersOfTheForm(t *testing.T) {
	form := url.Values{"name": {"t"}, "rate": {"1.001"}, "burst": {"7"}, "quantile": {"0.99"}, "latency": {"20ms"}}
	spec, faults := specOf(form)
	testkit.Equal(t, spec.Contract.RateMilli, 1001, "%v", faults)
	form.Set("burst", "7.5")
	_, faults = specOf(form)
	testkit.EqualSlices(t, faults, []string{"burst: 7.5 is not a whole number"}, "faults")
}
