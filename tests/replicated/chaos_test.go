package replicated_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// The contract of the topic. The test offers twice as much.
const (
	chaosRate, chaosBurst = 300, 60
	// unsaved is the time before a broker's kill in which finished messages may come again. Cursors
	// are saved five times a second, unless a NATS server has just gone.
	unsaved = 10 * time.Second
)

// histories are the observations of publishers and consumers.
type histories struct {
	mu    sync.Mutex
	sent  map[string]sending
	got   map[string][]receipt // in order
	order []string             // of first receipts
	kills []time.Time          // of brokers
	began time.Time
	moves atomic.Int64 // ends and returns of brokers
	acked atomic.Int64
}

// sending is an acknowledged message.
type sending struct {
	publisher, n  int
	before, after int64 // moves at the publish and at the acknowledgement
}

// receipt is a delivery, finished at once.
type receipt struct {
	at   time.Time
	from string
}

func (h *histories) publish(ctx context.Context, publisher int, p *client.Publisher, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s := sending{publisher: publisher, n: n, before: h.moves.Load()}
		body := fmt.Sprintf("%d of %d", n, publisher)
		try, cancel := context.WithTimeout(context.WithoutCancel(ctx), local.Patience)
		err := p.Publish(try, []byte(body))
		cancel()
		if err == nil {
			s.after = h.moves.Load()
			h.mu.Lock()
			h.sent[body] = s
			h.mu.Unlock()
			h.acked.Add(1)
		}
	}
}

// HandleMessage records a delivery.
func (h *histories) HandleMessage(m *nsq.Message) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	body := string(m.Body)
	if h.got[body] == nil {
		h.order = append(h.order, body)
	}
	h.got[body] = append(h.got[body], receipt{time.Now(), m.NSQDAddress})
	return nil
}

func (h *histories) missing() (missing []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for body := range h.sent {
		if h.got[body] == nil {
			missing = append(missing, body)
		}
	}
	return missing
}

// judge fails the test for redeliveries without a reason. judge also fails the test if a broker, while
// no broker ended or returned, did not deliver messages in their publishers' order.
func (h *histories) judge(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	twice, unexplained := 0, 0
	for body, all := range h.got {
		for i := 1; i < len(all); i++ {
			twice++
			if !slices.ContainsFunc(h.kills, func(k time.Time) bool {
				return all[i].at.After(k) && all[i-1].at.After(k.Add(-unsaved))
			}) {
				if unexplained++; unexplained < 10 {
					t.Errorf("%s: delivered and finished %v after the start, and again %v later", body, all[i-1].at.Sub(h.began), all[i].at.Sub(all[i-1].at))
				}
			}
		}
	}
	type stream struct {
		publisher int
		from      string
		moves     int64
	}
	last, ordered, disordered := map[stream]sending{}, 0, 0
	for _, body := range h.order {
		s, acked := h.sent[body]
		if !acked || s.before != s.after {
			continue
		}
		key := stream{s.publisher, h.got[body][0].from, s.before}
		before, known := last[key]
		if ordered++; known && before.n > s.n {
			if disordered++; disordered < 10 {
				t.Errorf("publisher %d: message %d came after message %d", s.publisher, s.n, before.n)
			}
		}
		last[key] = s
	}
	t.Logf("%d acknowledged, %d delivered, %d came again after a crash, %d without one; order of %d judged, %d out of it",
		len(h.sent), len(h.got), twice-unexplained, unexplained, ordered, disordered)
}

// Brokers and NATS servers are killed, and brokers' disks lost, at twice the contract. No acknowledged
// message is lost, a finished message comes again only after a crash right behind it, publishers'
// messages keep their order, and the contract holds. SRTM_CHAOS=10m sets the time; make
// chaos-replicated.
func TestChaosLosesNoAcknowledgedMessage(t *testing.T) {
	lasting := time.Duration(0) // one kill of each kind
	if v := os.Getenv("SRTM_CHAOS"); v != "" {
		lasting = testkit.Result(time.ParseDuration(v)).Must(t)
	}
	program, dir := natsProgram(t), t.TempDir()
	stores, urls, err := local.NATS(program, dir, 3)
	testkit.Must(t, err)
	t.Cleanup(func() { // after the brokers
		for _, p := range stores {
			testkit.NoError(t, p.Stop())
		}
	})
	flags := []string{"--durability=replicated", "--jetstream-url=" + urls, "--release-trace=releases.csv", "--log-level=warn"}
	c := localtest.Start(t, 3, []string{"--evacuate-after=1s", "--takeover-after=1s"}, flags...)
	const publishers = 6
	create := []string{"topic", "create", "t", "--policy=loadbalance", fmt.Sprint("--rate=", chaosRate), fmt.Sprint("--burst=", chaosBurst), "--channel=c"}
	for i := range publishers {
		create = append(create, fmt.Sprintf("--publisher=g-%d:g:%d", i, chaosRate/publishers))
	}
	localtest.Srtm(t, c.RPC, create...)
	cl, err := client.New(client.Config{Address: c.RPC})
	testkit.Must(t, err)
	defer func() { testkit.Must(t, cl.Close(context.Background())) }()

	h := &histories{began: time.Now(), sent: map[string]sending{}, got: map[string][]receipt{}}
	publishing, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	for i := range publishers {
		ctx, cancel := context.WithTimeout(t.Context(), local.Patience)
		p, err := cl.Publisher(ctx, "t", fmt.Sprintf("g-%d", i))
		cancel()
		testkit.Must(t, err)
		all.Go(func() { h.publish(publishing, i, p, time.Second*publishers/(2*chaosRate)) })
	}
	localtest.Consume(t, "t", "c", h, func(n *nsq.Config) {
		n.MaxInFlight, n.LookupdPollInterval, n.MaxAttempts = 100, 200*time.Millisecond, 0
	}, "http://"+c.Web)
	flow := func() { // messages flow again, by themselves
		until := h.acked.Load() + chaosRate/2
		within(t, "publishers go on", func() bool { return h.acked.Load() >= until })
	}
	flow()

	rng, folders, counts := testkit.Rand(t), []string{}, map[string]int{}
	for _, b := range c.Brokers {
		folders = append(folders, b.Dir)
	}
	binary := localtest.Program(t, "nsqd")
	kinds := []string{"broker and its disk", "server of NATS", "broker"}
	for began, n := time.Now(), 0; n < len(kinds) || time.Since(began) < lasting; n++ {
		if n%len(kinds) == 0 {
			rng.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		}
		what := kinds[n%len(kinds)]
		counts[what]++
		i := rng.IntN(3)
		if what == "server of NATS" {
			testkit.Must(t, stores[i].Kill())
			flow()
			stores[i] = testkit.Result(local.Start(program, stores[i].Flags, local.Options{Log: filepath.Join(dir, "again.log")})).Must(t)
			flow()
			continue
		}
		b := c.Brokers[i]
		h.mu.Lock()
		h.kills = append(h.kills, time.Now())
		h.mu.Unlock()
		h.moves.Add(1)
		testkit.Must(t, b.Kill())
		flow()
		home := b.Dir
		if what != "broker" {
			home = t.TempDir()
			folders = append(folders, home)
		}
		h.moves.Add(1)
		b, err := local.NSQD(binary, home, append([]string{"--loaddistributor-address=" + c.RPC, fmt.Sprintf("--broker-id=b%d", i+1)}, flags...)...)
		c.Brokers[i] = localtest.Watch(t, b, err)
		within(t, "the broker joins", func() bool {
			n, err := localtest.Metric(b, "srtm_agent_connected")
			return err == nil && n > 0
		})
		flow()
		h.moves.Add(1)
	}
	stop()
	all.Wait()

	var traced []testkit.Release
	for _, home := range folders {
		traced = append(traced, testkit.ReadTrace(t, filepath.Join(home, "releases.csv"), "t")...)
	}
	eligible, _ := testkit.Times(traced)
	slack, err := testkit.Envelope(eligible, chaosRate*1000, chaosBurst)
	if err != nil {
		t.Errorf("the contract: %v", err)
	}
	span := slices.Max(eligible).Sub(slices.Min(eligible))
	t.Logf("killed: %v; %d releases in %v, %.0f %% of what the contract allows, worst slack %.1f messages",
		counts, len(eligible), span, 100*float64(len(eligible))/(chaosRate*span.Seconds()), slack)

	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		admin := srtmv1.NewAdminServiceClient(localtest.Dial(t, c.RPC))
		r, err := admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: "t"})
		t.Log(r.GetTopic().GetQuotas(), r.GetTopic().GetReason(), err)
		for i, b := range c.Brokers {
			text, _, err := localtest.Ask("GET", "http://"+b.HTTP+"/stats?format=json", "")
			t.Log(i+1, text[:min(1800, len(text))], err)
		}
		for _, m := range h.missing() {
			t.Logf("missing %s: %+v", m, h.sent[m])
		}
	})
	localtest.Srtm(t, c.RPC, "topic", "update", "t", "--rate=6000", "--burst=600") // for the backlog
	for left := len(h.missing()); left > 0; {                                      // each minute has to show progress
		within(t, "messages that were acknowledged come", func() bool { return len(h.missing()) < left })
		left = len(h.missing())
	}
	if missing := h.missing(); len(missing) > 0 {
		t.Errorf("%d are lost: %s", len(missing), strings.Join(missing[:min(10, len(missing))], ", "))
	}
	h.judge(t)
}
