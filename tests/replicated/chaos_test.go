package replicated_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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
	got   map[string][]time.Time // deliveries of a body, each finished at once, in order
	ids   map[uint64]bool        // ids of the messages in order
	order []receipt              // first deliveries of messages
	kills []time.Time            // of brokers
	began time.Time
	ended atomic.Int64 // brokers that have ended
	acked atomic.Int64
}

// sending is an acknowledged publish.
type sending struct {
	publisher, n int
	ended        int64 // brokers that had ended before the publish
}

// receipt is the first delivery of a message. If a broker ends, its publisher may send a body again,
// as another message.
type receipt struct {
	body  string
	id    uint64
	from  string
	kills int64 // brokers that were killed before the delivery
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
		s := sending{publisher, n, h.ended.Load()}
		body := fmt.Sprintf("%d of %d", n, publisher)
		try, cancel := context.WithTimeout(context.WithoutCancel(ctx), local.Patience)
		err := p.Publish(try, []byte(body))
		cancel()
		if err == nil {
			h.mu.Lock()
			h.sent[body] = s
			h.mu.Unlock()
			h.acked.Add(1)
		}
	}
}

// HandleMessage records a delivery.
func (h *histories) HandleMessage(m *nsq.Message) error {
	id, err := strconv.ParseUint(string(m.ID[:]), 16, 64)
	h.mu.Lock()
	defer h.mu.Unlock()
	body := string(m.Body)
	h.got[body] = append(h.got[body], time.Now())
	if !h.ids[id] {
		h.ids[id] = true
		h.order = append(h.order, receipt{body, id, m.NSQDAddress, int64(len(h.kills))})
	}
	return err
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

// acceptedBy returns a number for the process that accepted a message. The ids of a process count up
// from the nanosecond of its start.
func (h *histories) acceptedBy() func(id uint64) int {
	var starts []uint64
	last := uint64(0)
	for _, id := range slices.Sorted(maps.Keys(h.ids)) {
		if id-last > uint64(time.Millisecond) {
			starts = append(starts, id)
		}
		last = id
	}
	return func(id uint64) int {
		n, _ := slices.BinarySearch(starts, id+1)
		return n
	}
}

// disorder describes messages that did not stay in order: messages of one publisher, accepted by one
// process, and delivered over one connection. It returns the number of judged messages.
//
// disorder judges a message if no broker ended between the publish and the delivery. After the end of
// a broker, older messages may come behind younger messages:
//   - The broker is started in the middle of a take-over, and keeps the younger messages. The other
//     broker has the older messages. A relay, or a second take-over, brings both parts together.
//   - The broker was a relay. The messages in its hands return to the end of their channel.
func (h *histories) disorder() (all []string, judged int) {
	type stream struct {
		publisher, acceptedBy int
		from                  string
	}
	acceptedBy, last := h.acceptedBy(), map[stream]int{}
	for _, r := range h.order {
		s, acked := h.sent[r.body]
		if !acked || r.kills > s.ended {
			continue
		}
		judged++
		key := stream{s.publisher, acceptedBy(r.id), r.from}
		if before, found := last[key]; found && before > s.n {
			all = append(all, fmt.Sprintf("publisher %d: message %d (id %x) came after message %d from %s", s.publisher, s.n, r.id, before, r.from))
		}
		last[key] = s.n
	}
	return all, judged
}

// Messages of a publisher are out of order if no end of a broker explains their order.
func TestHistoriesShowDisorder(t *testing.T) {
	const a, b, c = 1e9, 2e9, 3e9 // ids of the first messages of three processes
	type message struct {
		n     int
		id    uint64
		ended int64 // at the publish
		from  string
		kills int64 // at the delivery
	}
	for name, test := range map[string]struct {
		delivered []message
		want      int // messages out of order
	}{
		"in order": {[]message{{0, a, 0, "a", 0}, {1, a + 1, 0, "a", 0}}, 0},
		"a message comes after a younger message":                           {[]message{{1, a + 1, 0, "a", 0}, {0, a, 0, "a", 0}}, 1},
		"two brokers ended before the publish":                              {[]message{{1, c + 1, 2, "c", 2}, {0, c, 2, "c", 2}}, 1},
		"two brokers deliver":                                               {[]message{{1, a + 1, 0, "a", 0}, {0, a, 0, "b", 0}}, 0},
		"a relay delivers the messages of two brokers":                      {[]message{{1, b, 0, "c", 0}, {0, a, 0, "c", 0}}, 0},
		"a relay delivers a message of a broker after a younger message":    {[]message{{1, a + 1, 0, "c", 0}, {5, b, 0, "c", 0}, {0, a, 0, "c", 0}}, 1},
		"a broker accepts a message while it is killed":                     {[]message{{1, b, 0, "b", 1}, {2, b + 1, 1, "b", 1}, {0, a, 0, "b", 1}}, 0},
		"a broker ends, and its message is sent again":                      {[]message{{0, b, 0, "b", 1}, {1, b + 1, 1, "b", 1}, {0, a, 0, "b", 1}}, 0},
		"the parts of an interrupted take-over come together":               {[]message{{2, a + 2, 0, "c", 2}, {0, a, 0, "c", 2}, {1, a + 1, 0, "c", 2}}, 0},
		"the last of three messages is from after an end, and out of order": {[]message{{0, a, 0, "a", 1}, {2, a + 2, 1, "a", 1}, {1, a + 1, 1, "a", 1}}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			h := &histories{sent: map[string]sending{}, ids: map[uint64]bool{}}
			for _, m := range test.delivered {
				body := fmt.Sprint(m.n)
				h.sent[body], h.ids[m.id] = sending{0, m.n, m.ended}, true
				h.order = append(h.order, receipt{body, m.id, m.from, m.kills})
			}
			if got, _ := h.disorder(); len(got) != test.want {
				t.Errorf("%d messages out of order, want %d: %s", len(got), test.want, got)
			}
		})
	}
}

// judge fails the test for redeliveries without a reason, and for messages that did not stay in order.
func (h *histories) judge(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	twice, unexplained := 0, 0
	for body, all := range h.got {
		for i := 1; i < len(all); i++ {
			twice++
			if !slices.ContainsFunc(h.kills, func(k time.Time) bool {
				return all[i].After(k) && all[i-1].After(k.Add(-unsaved))
			}) {
				if unexplained++; unexplained < 10 {
					t.Errorf("%s: delivered and finished %v after the start, and again %v later", body, all[i-1].Sub(h.began), all[i].Sub(all[i-1]))
				}
			}
		}
	}
	disordered, judged := h.disorder()
	for _, text := range disordered[:min(10, len(disordered))] {
		t.Error(text)
	}
	t.Logf("%d acknowledged, %d delivered, %d came again after a crash, %d without one; order of %d judged, %d out of it",
		len(h.sent), len(h.got), twice-unexplained, unexplained, judged, len(disordered))
}

// Brokers and NATS servers are killed, and brokers' disks lost, at twice the contract. No acknowledged
// message is lost, and a finished message comes again only after a crash right behind it. While no
// broker ends, publishers' messages keep their order. The contract holds. SRTM_CHAOS=10m sets the time;
// make chaos-replicated.
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

	h := &histories{began: time.Now(), sent: map[string]sending{}, got: map[string][]time.Time{}, ids: map[uint64]bool{}}
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
		within(t, "publishers continue", func() bool { return h.acked.Load() >= until })
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
		testkit.Must(t, b.Kill())
		h.ended.Add(1)
		flow()
		home := b.Dir
		if what != "broker" {
			home = t.TempDir()
			folders = append(folders, home)
		}
		b, err := local.NSQD(binary, home, append([]string{"--loaddistributor-address=" + c.RPC, fmt.Sprintf("--broker-id=b%d", i+1)}, flags...)...)
		c.Brokers[i] = localtest.Watch(t, b, err)
		within(t, "the broker joins", func() bool {
			n, err := localtest.Metric(b, "srtm_agent_connected")
			return err == nil && n > 0
		})
		flow()
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
