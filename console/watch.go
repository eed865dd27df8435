package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/console/history"
	"github.com/srtm-io/srtm/console/why"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/topics"
)

// Bounds of requests and of the kept data.
const (
	tick        = time.Second
	callTimeout = 2 * time.Second
	seldom      = 5 // ticks between two samples of a topic that no page shows
	viewed      = 30 * time.Second
	maxTracked  = 40       // topics with a history
	maxHistory  = 16 << 20 // bytes of all histories
	maxListed   = 100_000  // listed topics
	shareEvents = 50       // changes of shares per request
)

// row is a topic in a list.
type row struct {
	Name, State, Reason string
	Rate                float64 // msg/s
	Burst               int64
	SLO                 string
	Brokers             int
}

// cluster is the last answer of the loaddistributor. Immutable.
type cluster struct {
	Brokers []*srtmv1.Broker
	Topics  []row  // by name
	Trouble string // why there is no new answer; "": none
}

// tracked is a topic with a history.
type tracked struct {
	observed // without the data of the series
	series   history.Series
	viewed   time.Time // by a page
	texts    [3]string // last texts of events: state, fit, move
	quotas   map[string]uint32

	reading reading // the last, of a broker's history
}

// observed is a copy of a topic for a page.
type observed struct {
	Topic   *srtmv1.Topic       // nil: never seen
	Shares  *srtmv1.TopicShares // nil: unknown
	Trouble string
	Gone    bool // the topic was deleted
	Last    history.Sample
	Events  []history.Event
}

// watched is the console's knowledge of the cluster.
type watched struct {
	mu      sync.Mutex
	now     cluster             // guarded by mu
	topics  map[string]*tracked // guarded by mu; at most maxTracked
	changed chan struct{}       // guarded by mu; closed and replaced in every round
	viewed  time.Time           // guarded by mu; any page
	totals  []total             // guarded by mu; of the last hour, one per seldom ticks
}

func (w *watched) init() {
	w.topics, w.changed = map[string]*tracked{}, make(chan struct{})
}

// changes returns a channel that closes when there is new data.
func (w *watched) changes() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

// cluster returns the last state of the cluster, for a page.
func (w *watched) cluster() cluster {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.viewed = time.Now()
	return w.now
}

// rows returns samples of a topic.
func (w *watched) rows(topic string, since int64) rows {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.topics[topic]
	if t == nil {
		return rows{Topic: topic, Brokers: []string{}, Samples: [][]float64{}}
	}
	r := rowsOf(topic, &t.series, since)
	r.SLO = t.Topic.GetSpec().GetContract().GetSlo().GetLatency().AsDuration().Seconds() * 1000
	return r
}

// Run polls what pages show until ctx ends, and then ends all streams.
func (c *Console) Run(ctx context.Context) error {
	defer c.end()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for n := 0; ; n++ {
		c.round(ctx, n)
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// round polls what is due.
func (c *Console) round(ctx context.Context, n int) {
	w := &c.watched
	w.mu.Lock()
	now := time.Now()
	watching := now.Sub(w.viewed) < viewed
	before := w.now
	var due []string
	for name, t := range w.topics {
		if !isBroker(name) && (now.Sub(t.viewed) < viewed || n%seldom == 0) {
			due = append(due, name)
		}
	}
	ownBroker := c.cfg.Own != nil && (watching || n%seldom == 0 && now.Sub(w.viewed) < history.Span)
	w.mu.Unlock()
	if ownBroker {
		c.sampleOwn(now)
	}
	if c.admin != nil && (watching || n%seldom == 0) {
		next := c.list(ctx, before, n)
		w.mu.Lock()
		w.now = next
		for _, t := range next.Topics {
			if len(w.topics) >= maxTracked {
				break
			}
			if w.topics[t.Name] == nil {
				w.topics[t.Name] = &tracked{}
				due = append(due, t.Name)
			}
		}
		w.mu.Unlock()
	}
	var group errgroup.Group
	group.SetLimit(4)
	for _, name := range due {
		group.Go(func() error {
			_ = c.sample(ctx, name) // the topic stores the error
			return nil
		})
	}
	_ = group.Wait() // the group's functions return no errors
	w.mu.Lock()
	w.shrink(now)
	if n%seldom == 0 && c.admin != nil {
		w.totals = append(w.totals, w.total())
		w.totals = slices.Delete(w.totals, 0, max(0, len(w.totals)-maxTotals))
	}
	close(w.changed)
	w.changed = make(chan struct{})
	w.mu.Unlock()
	// Pages receive shares in the next round, because the tbadaptor may be stalled.
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for _, name := range due {
		group.Go(func() error {
			c.sampleShares(limited, name)
			return nil
		})
	}
	_ = group.Wait()
}

// list polls the brokers, and all topics at a rate that depends on their number.
func (c *Console) list(ctx context.Context, before cluster, n int) cluster {
	next := before
	next.Trouble = ""
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	reply, err := c.admin.ListBrokers(limited, &srtmv1.ListBrokersRequest{})
	cancel()
	if err != nil {
		next.Trouble = problemOf(err).text
		return next
	}
	next.Brokers = reply.Brokers
	if every := 1 + len(before.Topics)/500; n%every != 0 {
		return next
	}
	var topics []row
	for token := ""; ; {
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		page, err := c.admin.ListTopics(limited, &srtmv1.ListTopicsRequest{PageSize: 1000, PageToken: token})
		cancel()
		if err != nil {
			next.Trouble = problemOf(err).text
			return next
		}
		for _, t := range page.Topics {
			topics = append(topics, rowOf(t))
		}
		if token = page.NextPageToken; token == "" || len(topics) >= maxListed {
			break
		}
	}
	next.Topics = topics
	return next
}

func rowOf(t *srtmv1.Topic) row {
	contract := t.GetSpec().GetContract()
	return row{
		Name: t.GetSpec().GetName(), State: topics.State(t.State), Reason: t.Reason,
		Rate: float64(contract.GetRateMilli()) / 1000, Burst: contract.GetBurst(),
		SLO: topics.SLO(contract.GetSlo()), Brokers: len(t.Quotas),
	}
}

// follow returns a topic for a page and keeps its history from now on.
func (c *Console) follow(ctx context.Context, name string) observed {
	w := &c.watched
	w.mu.Lock()
	t := w.topics[name]
	w.viewed = time.Now()
	if t != nil {
		t.viewed = w.viewed
	}
	w.mu.Unlock()
	if t == nil {
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		if err := c.sample(limited, name); err != nil {
			return observed{Trouble: problemOf(err).text}
		}
		c.sampleShares(limited, name)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t = w.topics[name]; t == nil {
		return observed{Trouble: "There is no topic " + name + "."}
	}
	t.viewed = time.Now()
	k := t.observed
	k.Last, _ = t.series.Last()
	k.Events = t.series.Events()
	return k
}

// sample polls a topic without its shares. It returns why there is no sample.
func (c *Console) sample(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	reply, err := c.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: name, OmitPublishers: true})
	now := time.Now()
	w := &c.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.topics[name]
	if err != nil {
		if t == nil {
			if status.Code(err) == codes.NotFound {
				err = &problem{404, "There is no topic " + name + "."}
			}
			return err
		}
		t.Gone = status.Code(err) == codes.NotFound
		t.Trouble = problemOf(err).text
		if t.Gone {
			t.recordEvent(now, 0, "state", "deleted")
		}
		return nil
	}
	if t == nil {
		t = &tracked{viewed: now}
		w.topics[name] = t
		w.shrink(now)
	}
	t.addStatus(now, reply.Topic)
	return nil
}

// sampleShares polls the shares of a topic.
func (c *Console) sampleShares(ctx context.Context, name string) {
	if c.grants == nil {
		return
	}
	var shares *srtmv1.TopicShares
	if response, err := c.grants.ListShares(ctx, &srtmv1.ListSharesRequest{Topic: name, History: shareEvents}); err == nil && len(response.Topics) == 1 {
		shares = response.Topics[0]
		slices.Reverse(shares.History) // newest first
	}
	w := &c.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.topics[name]; t != nil && t.Trouble == "" { // else the last shares stay
		t.Shares = shares
	}
}

// addStatus adds a topic's status to its history.
func (t *tracked) addStatus(now time.Time, topic *srtmv1.Topic) {
	s := topic.GetStatus()
	state := topics.State(topic.State)
	if topic.Reason != "" {
		state += ": " + topic.Reason
	}
	t.recordEvent(now, 0, "state", state)
	t.recordEvent(now, 1, "fit", s.GetFitting())
	t.recordEvent(now, 2, "move", s.GetMoving())
	quotas := map[string]uint32{}
	for _, q := range topic.Quotas {
		quotas[q.BrokerId] = q.Publishers
	}
	if t.quotas != nil && !maps.Equal(quotas, t.quotas) {
		t.series.Note(history.Event{At: now.UnixMilli(), Kind: "move", Text: movedText(t.quotas, quotas, topic)})
	}
	t.observed, t.quotas = observed{Topic: topic, Shares: t.Shares}, quotas
	response := map[string]float32{}
	for _, b := range s.GetBrokers() {
		response[b.BrokerId] = float32(b.GetShare().GetRateMilli()) / 1000
	}
	t.series.Add(sampleOf(now, s), response)
}

// recordEvent records an event when the text about the topic changes.
func (t *tracked) recordEvent(now time.Time, i int, kind, text string) {
	if t.texts[i] != text && text != "" {
		t.series.Note(history.Event{At: now.UnixMilli(), Kind: kind, Text: text})
	}
	t.texts[i] = text
}

// movedText describes how many publishers brokers have gained and lost, and why.
func movedText(before, after map[string]uint32, topic *srtmv1.Topic) string {
	var parts []string
	names := slices.Sorted(maps.Keys(after))
	for name := range before {
		if _, there := after[name]; !there {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if before[name] != after[name] {
			parts = append(parts, fmt.Sprintf("%s %d → %d", name, before[name], after[name]))
		}
	}
	text := fmt.Sprintf("publishers: %s (epoch %d)", strings.Join(parts, ", "), topic.Epoch)
	if reason := cmp.Or(topic.GetStatus().GetMoving(), topic.GetStatus().GetFitting(), topic.Reason); reason != "" {
		text += "; meanwhile: " + reason
	}
	return text
}

// sampleOf converts a topic's sliding window to a sample.
func sampleOf(now time.Time, s *srtmv1.TopicStatus) history.Sample {
	sample := history.Sample{At: now.UnixMilli(), Exceeded: float32(s.GetExceedFraction()), Backlog: float32(s.GetPooled().GetBacklog())}
	for _, b := range s.GetBrokers() {
		w := b.GetWindow()
		sample.Offered += float32(topics.PerSecond(w.GetOffered(), w))
		sample.Released += float32(topics.PerSecond(w.GetReleased(), w))
		sample.Delivered += float32(topics.PerSecond(w.GetDelivered(), w))
		sample.Refused += float32(topics.PerSecond(w.GetRefused(), w))
	}
	l := why.LatenciesOf(s.GetPooled())
	for i, latency := range [history.Parts]*histogram.Latency{history.Access: l.Access, history.Broker: l.Broker, history.Consumer: l.Consumer, history.Delivery: l.Delivery} {
		ms := func(q float64) float32 { return float32(latency.Quantile(q).Seconds() * 1000) }
		sample.Delays[i] = history.Delay{P50: ms(0.5), P99: ms(0.99), P999: ms(0.999)}
	}
	return sample
}

// shrink forgets topics that were deleted an hour ago. While there is too much data, it
// also forgets the least recently viewed topics. Requires: mu held.
func (w *watched) shrink(now time.Time) {
	bytes := 0
	for name, t := range w.topics {
		last, exists := t.series.Last()
		if t.Gone && (!exists || now.UnixMilli()-last.At > history.Span.Milliseconds()) {
			delete(w.topics, name)
			continue
		}
		bytes += t.series.Bytes()
	}
	for len(w.topics) > maxTracked || bytes > maxHistory && len(w.topics) > 1 {
		oldest := ""
		for name, t := range w.topics {
			if oldest == "" || t.viewed.Before(w.topics[oldest].viewed) || t.viewed.Equal(w.topics[oldest].viewed) && name < oldest {
				oldest = name
			}
		}
		bytes -= w.topics[oldest].series.Bytes()
		delete(w.topics, oldest)
	}
}

// problemOf converts an error for a page.
func problemOf(err error) *problem {
	var p *problem
	if errors.As(err, &p) {
		return p
	}
	s := status.Convert(err)
	code, found := map[codes.Code]int{
		codes.NotFound: 404, codes.InvalidArgument: 400, codes.AlreadyExists: 409, codes.FailedPrecondition: 409, codes.Aborted: 409,
		codes.ResourceExhausted: 409, codes.Unavailable: 503, codes.DeadlineExceeded: 504, codes.PermissionDenied: 403, codes.Unauthenticated: 401,
	}[s.Code()]
	if !found {
		code = 502
	}
	return &problem{code, s.Message()}
}
