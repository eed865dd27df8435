package failover

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// The setting of an operator: three brokers, a topic of r = 5,000 and b = 100 on two of them, and
// publishers that send 80 % of r.
const (
	troubleRate  = 5000
	troubleBurst = 100
	troubleSLO   = 20 * time.Millisecond
	troubleWarm  = 4 * time.Second  // before the event
	troubleAfter = 15 * time.Second // measured from the event on
	troubleGrace = time.Second      // how late a message may be accepted
)

// sent is the fate of a message.
type sent struct {
	intended           time.Time
	accepted, received time.Time // zero: it was not
}

// trouble is a run of the experiment.
type trouble struct {
	*cluster
	mu  sync.Mutex
	all [][]sent // by publisher
}

func (y *trouble) HandleMessage(m *nsq.Message) error {
	at := time.Now()
	id, number, _ := strings.Cut(string(m.Body), "/")
	i, err := strconv.Atoi(id)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	if s := &y.all[i][n]; s.received.IsZero() {
		s.received = at
	}
	return nil
}

// publish sends at its scheduled times until the context ends, one message after the other.
func (y *trouble) publish(ctx context.Context, p *client.Publisher, i int, first time.Time, every time.Duration) {
	for n := 0; ; n++ {
		intended := first.Add(time.Duration(n) * every)
		timer := time.NewTimer(time.Until(intended))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		y.mu.Lock()
		y.all[i] = append(y.all[i], sent{intended: intended})
		y.mu.Unlock()
		within, cancel := context.WithDeadline(ctx, intended.Add(troubleGrace))
		if err := p.Publish(within, fmt.Appendf(nil, "%d/%d", i, n)); err == nil {
			y.mu.Lock()
			y.all[i][n].accepted = time.Now()
			y.mu.Unlock()
		}
		cancel()
	}
}

func (y *trouble) broker(i int) *local.Process { return y.brokers[i-1] }

// placed returns the publishers of each broker.
func (y *trouble) placed(publishers int) map[string][]string {
	of := map[string][]string{}
	placement := srtmv1.NewPlacementServiceClient(localtest.Dial(y.t, y.grpc[0]))
	ctx, cancel := context.WithTimeout(y.t.Context(), testkit.Hang)
	defer cancel()
	for i := range publishers {
		id := fmt.Sprint("g.", i)
		r := testkit.Result(placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: "t", PublisherId: id})).Must(y.t)
		of[r.GetAssignment().GetBrokerId()] = append(of[r.GetAssignment().GetBrokerId()], id)
	}
	return of
}

// row is the report of a run.
type row struct {
	p99, gap, again time.Duration
	refused         float64
}

// report returns the effects of an event on publishers; kept selects the unaffected publishers.
func (y *trouble) report(event time.Time, kept func(i int) bool) (r row) {
	y.mu.Lock()
	defer y.mu.Unlock()
	var latencies []time.Duration
	total, refused := 0, 0
	bins := make([]struct{ n, late int }, int(troubleAfter/time.Second))
	for i, all := range y.all {
		last := time.Time{}
		for _, s := range all {
			if !s.accepted.IsZero() {
				if !last.IsZero() && s.accepted.After(event) {
					r.gap = max(r.gap, s.accepted.Sub(last))
				}
				last = s.accepted
			}
			since := s.intended.Sub(event)
			if since < 0 || since >= troubleAfter-troubleGrace {
				continue
			}
			total++
			late := s.received.IsZero() || s.received.Sub(s.intended) > troubleSLO
			if s.accepted.IsZero() {
				refused++
				late = true
			}
			b := &bins[int(since/time.Second)]
			b.n++
			if late {
				b.late++
			}
			if kept(i) && !s.received.IsZero() {
				latencies = append(latencies, s.received.Sub(s.intended))
			}
		}
	}
	slices.Sort(latencies)
	r.p99 = latencies[len(latencies)*99/100]
	r.refused = float64(refused) / float64(total)
	for i, b := range bins {
		if b.late*100 > b.n {
			r.again = time.Duration(i+1) * time.Second
		}
	}
	return r
}

// TestMeasureFailureEffects prints the effects on publishers of a drain, a move, the crash of one of two brokers,
// and the broker's return after 8 s. The clock is this machine's, and the machine's own noise is the
// first row. TestMeasureFailureEffects asserts nothing, and runs with SRTM_TROUBLE publishers, for example 200; with
// SRTM_FAILOVER_BIN it uses the daemons there.
func TestMeasureFailureEffects(t *testing.T) {
	publishers, err := strconv.Atoi(os.Getenv("SRTM_TROUBLE"))
	if err != nil || publishers < 1 {
		t.Skip("a measurement, of 2 minutes: SRTM_TROUBLE says of how many publishers")
	}
	table := []string{"| event | p99 of those that it was not done to | longest without a broker | not accepted | SLO holds again after |", "|---|---|---|---|---|"}
	for _, e := range []struct {
		name  string
		do    func(y *trouble, admin srtmv1.AdminServiceClient, victims []string) error
		kills bool
	}{
		{"none", func(*trouble, srtmv1.AdminServiceClient, []string) error { return nil }, false},
		{"drain", func(y *trouble, admin srtmv1.AdminServiceClient, _ []string) error {
			_, err := admin.DrainBroker(y.t.Context(), &srtmv1.DrainBrokerRequest{BrokerId: "b1"})
			return err
		}, false},
		{"move", func(y *trouble, admin srtmv1.AdminServiceClient, victims []string) error {
			_, err := admin.MovePublishers(y.t.Context(), &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: victims, BrokerId: "b3"})
			return err
		}, false},
		{"crash", func(y *trouble, _ srtmv1.AdminServiceClient, _ []string) error { return y.broker(1).Kill() }, true},
		{"return", func(y *trouble, _ srtmv1.AdminServiceClient, _ []string) error {
			d := y.broker(1)
			if err := d.Kill(); err != nil {
				return err
			}
			y.t.Log("it returns in 8 s")
			timer := time.NewTimer(8 * time.Second)
			defer timer.Stop()
			<-timer.C
			again, err := local.NSQDAt(y.release.nsqd, d.Dir, d.TCP, d.HTTP, d.Flags...)
			y.brokers = append(y.brokers, localtest.Watch(y.t, again, err))
			return nil
		}, true},
	} {
		t.Run(e.name, func(t *testing.T) {
			y := &trouble{cluster: &cluster{t: t, release: current(t)}, all: make([][]sent, publishers)}
			y.add()
			y.flags[0] = append(y.flags[0][:2:2], "--tcp-address=", "--fitting=off")
			y.start(0)
			for range 3 {
				y.joinWith(y.grpc, "--mcap=3000")
			}
			y.connect(3)
			spec := contract("t", troubleRate, troubleBurst, int32(publishers))
			spec.Contract.Slo.Latency = durationpb.New(troubleSLO)
			spec.Groups[0].Rate = 0.8 * troubleRate / float64(publishers)
			y.create(spec)
			placed := y.placed(publishers)
			victims := placed["b1"]
			if len(placed["b1"]) == 0 || len(placed["b2"]) == 0 {
				t.Fatalf("the topic is not on b1 and b2: %d and %d publishers", len(placed["b1"]), len(placed["b2"]))
			}

			localtest.Consume(t, "t", "all", y, func(c *nsq.Config) { c.MaxInFlight, c.LookupdPollInterval = 5000, time.Second }, y.lookups()...)
			cl := testkit.Result(client.New(client.Config{Address: y.grpc[0]})).Must(t)
			ctx, stop := context.WithCancel(t.Context())
			var sending sync.WaitGroup
			every := time.Duration(float64(time.Second) / spec.Groups[0].Rate)
			first := time.Now().Add(2 * time.Second)
			for i := range publishers {
				p := publisher(t, cl, "t", i)
				sending.Go(func() { y.publish(ctx, p, i, first.Add(every*time.Duration(i)/time.Duration(publishers)), every) })
			}
			wait := time.NewTimer(time.Until(first) + troubleWarm)
			<-wait.C
			event := time.Now()
			admin := srtmv1.NewAdminServiceClient(localtest.Dial(t, y.grpc[0]))
			testkit.Must(t, e.do(y, admin, victims))
			if e.name == "return" {
				event = time.Now()
			}
			wait.Reset(time.Until(event.Add(troubleAfter)))
			<-wait.C
			stop()
			sending.Wait()
			_ = cl.Close(ctx) // the load has ended, so Close waits for nothing
			r := y.report(event, func(i int) bool { return !e.kills || !slices.Contains(victims, fmt.Sprint("g.", i)) })
			again := fmt.Sprintf("%v", r.again)
			if r.again >= troubleAfter-troubleGrace {
				again = fmt.Sprintf("not within %v", r.again)
			}
			table = append(table, fmt.Sprintf("| %s | %v | %v | %.2f %% | %s |", e.name, r.p99.Round(time.Millisecond), r.gap.Round(time.Millisecond), 100*r.refused, again))
		})
	}
	t.Logf("%d publishers, %.0f msg/s together\n%s", publishers, 0.8*troubleRate, strings.Join(table, "\n"))
}
