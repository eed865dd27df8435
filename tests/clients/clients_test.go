package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

const (
	envClients = "SRTM_CLIENTS"
	envNSQD    = "SRTM_CLIENTS_NSQD"
	envLookupd = "SRTM_CLIENTS_NSQLOOKUPD"
)

// patience covers a library's own delay before it reconnects.
const patience = local.Patience

// programs are the programs under test. Set once, by TestMain.
type programs struct {
	nsqd    string // "": ours
	lookupd string // an nsqlookupd, for an nsqd from elsewhere
}

var under programs

type suite struct{ *testing.M }

func TestMain(m *testing.M) { localtest.Main(suite{m}) }

func (s suite) Run() int {
	under = programs{nsqd: os.Getenv(envNSQD), lookupd: os.Getenv(envLookupd)}
	defer results.print(os.Stdout)
	return s.M.Run()
}

// scenario is a way in which users use a library.
type scenario struct {
	name string
	run  func(t *testing.T, l library, s *site)
}

var scenarios = []scenario{
	{"publish", func(t *testing.T, l library, s *site) { produces(t, l, s, order{Method: "pub"}) }},
	{"publish many", func(t *testing.T, l library, s *site) { produces(t, l, s, order{Method: "mpub"}) }},
	{"publish deferred", deferred},
	{"consume", func(t *testing.T, l library, s *site) { consumes(t, l, s, start(t), order{}) }},
	{"lookup", looksUp},
	{"move", moves},
	{"any broker", anyBroker},
	{"requeue", requeues},
	{"touch", touches},
	{"back off", backsOff},
	{"reconnect consumer", reconnectsConsumer},
	{"reconnect producer", reconnectsProducer},
	{"TLS", func(t *testing.T, l library, s *site) { secured(t, l, s, "") }},
	{"snappy", func(t *testing.T, l library, s *site) { both(t, l, s, start(t), order{Compression: "snappy"}) }},
	{"deflate", func(t *testing.T, l library, s *site) { both(t, l, s, start(t), order{Compression: "deflate"}) }},
	{"TLS, snappy", func(t *testing.T, l library, s *site) { secured(t, l, s, "snappy") }},
	{"auth", authorises},
}

func TestLibraries(t *testing.T) {
	for _, l := range libraries {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel() // while a library is installed, others are tested
			t.Cleanup(func() { results.library(t, l.name) })
			s := l.prepare(t)
			lacks := map[string]string{}
			if l.lacks != nil {
				lacks = testkit.Result(l.lacks(s)).Must(t)
			}
			for name := range lacks {
				if !known(name) {
					t.Errorf("lacks: no scenario %q", name)
				}
			}
			for _, c := range scenarios {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					t.Cleanup(func() { results.scenario(t, l.name, c.name) })
					if why := lacks[c.name]; why != "" {
						results.skip(t, l.name, c.name, why)
					}
					c.run(t, l, s)
				})
			}
		})
	}
}

// known reports whether a scenario has this name.
func known(name string) bool {
	return slices.ContainsFunc(scenarios, func(c scenario) bool { return c.name == name })
}

// start runs an nsqd for as long as t lasts.
func start(t *testing.T, flags ...string) *local.Process {
	t.Helper()
	return localtest.NSQD(t, under.nsqd, flags...)
}

// bodies are texts of all kinds.
func bodies(prefix string, count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprintf("%s %03d ü ☃ \t\"\\", prefix, i))
	}
	all[0] += strings.Repeat("x", 200_000)
	return all
}

// send publishes over HTTP.
func send(t *testing.T, d *local.Process, topic string, bodies ...string) {
	t.Helper()
	for _, body := range bodies {
		post(t, d, "/pub?topic="+topic, body)
	}
}

func post(t *testing.T, d *local.Process, path, body string) {
	t.Helper()
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+path, body)
}

// channelStats are the stats of a channel.
type channelStats struct {
	Name     string `json:"channel_name"`
	Depth    int    `json:"depth"`
	InFlight int    `json:"in_flight_count"`
	Deferred int    `json:"deferred_count"`
	Messages int    `json:"message_count"`
	Requeues int    `json:"requeue_count"`
	Timeouts int    `json:"timeout_count"`
	Clients  []struct {
		Ready     int    `json:"ready_count"`
		UserAgent string `json:"user_agent"`
	}
}

func channel(t *testing.T, d *local.Process, topic, channel string) (f channelStats, exists bool) {
	t.Helper()
	text := localtest.MustAsk(t, http.MethodGet, "http://"+d.HTTP+"/stats?format=json&topic="+topic, "")
	var stats struct {
		Topics []struct{ Channels []channelStats }
	}
	testkit.Must(t, json.Unmarshal([]byte(text), &stats))
	for _, topic := range stats.Topics {
		for _, f := range topic.Channels {
			if f.Name == channel {
				return f, true
			}
		}
	}
	return f, false
}

// settle waits until a channel's stats are right.
func settle(t *testing.T, d *local.Process, topic, name string, right func(channelStats) bool) (s channelStats) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("%s/%s was last %+v", topic, name, s)
		}
	}()
	testkit.WaitFor(t, "such stats of "+topic+"/"+name, func() (exists bool) {
		s, exists = channel(t, d, topic, name)
		return exists && right(s)
	})
	return s
}

func finished(f channelStats) bool { return f.Depth == 0 && f.InFlight == 0 && f.Deferred == 0 }

// collector is a consumer of the test's own.
type collector struct {
	t    *testing.T
	stop func()
	got  chan string
}

func collect(t *testing.T, d *local.Process, topic string) *collector {
	t.Helper()
	k := &collector{t: t, got: make(chan string, 1000)}
	k.stop = localtest.Consume(t, topic, "collector", nsq.HandlerFunc(func(m *nsq.Message) error {
		k.got <- string(m.Body)
		return nil
	}), func(c *nsq.Config) { c.MaxInFlight = 100 }, d.TCP)
	return k
}

// take waits for count bodies and returns them sorted.
func (k *collector) take(count int) (got []string) {
	k.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for len(got) < count {
		select {
		case body := <-k.got:
			got = append(got, body)
		case <-timer.C:
			k.t.Fatalf("%d of %d messages", len(got), count)
		}
	}
	slices.Sort(got)
	return got
}

func same(t *testing.T, got, want []string) {
	t.Helper()
	got, want = slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))
	if slices.Equal(got, want) {
		return
	}
	t.Errorf("got %d bodies, not the %d of those sent", len(got), len(want))
	for i := range min(len(got), len(want)) {
		testkit.MustEqual(t, got[i], want[i], "the first that differs")
	}
}

func texts(events []event) (bodies []string) {
	for _, e := range events {
		bodies = append(bodies, e.Body)
	}
	return bodies
}

const topic, ch = "topic", "channel"

// produces: the messages that the library publishes arrive, once, byte by byte.
func produces(t *testing.T, l library, s *site, o order) {
	d := start(t)
	o.Mode, o.TCP, o.Topic = "produce", d.TCP, topic
	p := drive(t, l, s, o)
	want := bodies(l.name, 50)
	p.publish(want[:25]...)
	p.publish(want[25:]...)
	p.end()
	k := collect(t, d, topic)
	same(t, k.take(50), want)
	k.stop()
	if f := settle(t, d, topic, "collector", finished); f.Messages != 50 {
		t.Errorf("got %+v", f)
	}
}

func deferred(t *testing.T, l library, s *site) {
	const delay = 1500 * time.Millisecond
	d := start(t)
	k := collect(t, d, topic)
	p := drive(t, l, s, order{Mode: "produce", TCP: d.TCP, Topic: topic, Method: "dpub", DelayMS: int(delay.Milliseconds())})
	begin := time.Now()
	p.publish("first", "second")
	settle(t, d, topic, "collector", func(f channelStats) bool { return f.Messages == 2 })
	same(t, k.take(2), []string{"first", "second"})
	if waited := time.Since(begin); waited < delay {
		t.Errorf("came after %v, want %v", waited, delay)
	}
	p.end()
}

// consumes: sent messages reach the library, once, and are finished.
func consumes(t *testing.T, l library, s *site, d *local.Process, o order) {
	o.Mode, o.Topic, o.Channel, o.InFlight, o.Handle = "consume", topic, ch, 10, "finish"
	if o.Lookup == "" {
		o.TCP = d.TCP
	}
	c := drive(t, l, s, o)
	settle(t, d, topic, ch, func(f channelStats) bool { return len(f.Clients) == 1 })
	want := bodies(l.name, 50)
	send(t, d, topic, want...)
	got := c.messages(50)
	same(t, texts(got), want)
	for _, e := range got {
		testkit.Equal(t, e.Attempts, 1, "attempt")
	}
	f := settle(t, d, topic, ch, finished)
	if f.Messages != 50 || f.Requeues != 0 || f.Timeouts != 0 || len(f.Clients) != 1 || f.Clients[0].UserAgent == "" {
		t.Errorf("got %+v", f)
	}
	testkit.Equal(t, len(c.end()), 0, "messages came again")
	settle(t, d, topic, ch, func(f channelStats) bool { return len(f.Clients) == 0 })
}

// looksUp: a consumer finds the broker through loaddistributor, which answers as nsqlookupd does.
func looksUp(t *testing.T, l library, s *site) {
	if under.nsqd != "" {
		if under.lookupd == "" {
			results.skip(t, l.name, "lookup", "no "+envLookupd)
		}
		at := localtest.Ports(t, 2)
		rpc, web := at[0], at[1]
		localtest.Run(t, under.lookupd, web+"/ping", "--tcp-address="+rpc, "--http-address="+web, "--broadcast-address=127.0.0.1")
		d := start(t, "--lookupd-tcp-address="+rpc)
		post(t, d, "/topic/create?topic="+topic, "")
		listed(t, web)
		consumes(t, l, s, d, order{Lookup: web})
		return
	}
	c := cluster(t)
	consumes(t, l, s, c.Brokers[0], order{Lookup: c.Web})
}

// anyBroker: in a cluster of three brokers producers publish to a topic that does not exist yet, the
// first producer to one broker, the others to the brokers without the topic. A consumer that looks the
// topic up gets all messages.
func anyBroker(t *testing.T, l library, s *site) {
	if under.nsqd != "" {
		results.skip(t, l.name, "any broker", "no cluster")
	}
	site := localtest.Start(t, 3, []string{"--fitting=off"}, "--mcap=20000")
	want := bodies(l.name, 30)
	first := drive(t, l, s, order{Mode: "produce", TCP: site.Brokers[0].TCP, Topic: topic, Method: "pub"})
	first.publish(want[:10]...)
	first.end()
	listed(t, site.Web)
	text := localtest.MustAsk(t, http.MethodGet, "http://"+site.Web+"/lookup?topic="+topic, "")
	wrong := slices.DeleteFunc(slices.Clone(site.Brokers), func(b *local.Process) bool {
		_, port, _ := net.SplitHostPort(b.TCP)
		return strings.Contains(text, `"tcp_port":`+port)
	})
	testkit.MustEqual(t, len(wrong), 2, "brokers without the topic, by %s", text)
	for i, b := range wrong {
		p := drive(t, l, s, order{Mode: "produce", TCP: b.TCP, Topic: topic, Method: []string{"pub", "mpub"}[i]})
		p.publish(want[10+10*i : 20+10*i]...)
		p.end()
	}
	c := drive(t, l, s, order{Mode: "consume", Lookup: site.Web, Topic: topic, Channel: ch, InFlight: 10, Handle: "finish"})
	same(t, texts(c.messages(30)), want)
	if rest := c.end(); len(rest) > 0 {
		t.Errorf("again: %+v", rest)
	}
}

// cluster has a topic on the single broker of a loaddistributor.
func cluster(t *testing.T) *localtest.Cluster {
	t.Helper()
	c := localtest.Start(t, 1, []string{"--fitting=off"}, "--mcap=20000")
	localtest.Srtm(t, c.RPC, "topic", "create", topic, "--rate=10000", "--burst=1000", "--group=g:100:10")
	listed(t, c.Web)
	return c
}

// moves drains the broker that a consumer reads from, while our own publisher follows to another
// broker. Each message arrives, none twice. The test logs how late the latest message was.
func moves(t *testing.T, l library, s *site) {
	if under.nsqd != "" {
		results.skip(t, l.name, "move", "no cluster")
	}
	site := cluster(t)
	c := drive(t, l, s, order{Mode: "consume", Lookup: site.Web, Topic: topic, Channel: ch, InFlight: 50, Handle: "finish"})
	to := site.Join(t, "--mcap=20000")
	cl := testkit.Result(client.New(client.Config{Address: site.RPC})).Must(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	defer func() { _ = cl.Close(ctx) }() // all was answered
	p := testkit.Result(cl.Publisher(ctx, topic, "g.1")).Must(t)
	const few = 200
	latest, moved, total := time.Duration(0), 0, few // published after the drain began; until the publisher has followed, and a while
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	seen := map[string]bool{}
	for n := 0; n < total; n++ {
		began := time.Now()
		testkit.Must(t, p.Publish(ctx, []byte(fmt.Sprint(n))))
		for _, e := range c.messages(1) {
			if seen[e.Body] || e.Attempts != 1 {
				t.Errorf("%s came again, attempt %d", e.Body, e.Attempts)
			}
			seen[e.Body] = true
		}
		if n == few/2 {
			localtest.Srtm(t, site.RPC, "broker", "drain", "b1")
		}
		if n > few/2 {
			latest = max(latest, time.Since(began))
		}
		if p.Broker() == to.TCP {
			moved++
		}
		if moved < few {
			total = n + 2
		}
		<-ticker.C
	}
	t.Logf("%s: through a move the latest of %d messages took %v", l.name, total-few/2, latest.Round(time.Millisecond))
	if rest := c.end(); len(rest) > 0 {
		t.Errorf("again: %+v", rest)
	}
}

// listed waits until a lookup service knows the topic.
func listed(t *testing.T, web string) {
	t.Helper()
	testkit.WaitFor(t, "topic in /lookup", func() bool {
		text, status, err := localtest.Ask(http.MethodGet, "http://"+web+"/lookup?topic="+topic, "")
		return err == nil && status == http.StatusOK && strings.Contains(text, "tcp_port")
	})
}

func requeues(t *testing.T, l library, s *site) {
	d := start(t)
	c := drive(t, l, s, order{Mode: "consume", TCP: d.TCP, Topic: topic, Channel: ch, InFlight: 5, Handle: "requeue"})
	want := bodies(l.name, 10)
	send(t, d, topic, want...)
	byAttempt := map[int][]string{}
	for _, e := range c.messages(20) {
		byAttempt[e.Attempts] = append(byAttempt[e.Attempts], e.Body)
	}
	same(t, byAttempt[1], want)
	same(t, byAttempt[2], want)
	if f := settle(t, d, topic, ch, finished); f.Requeues != 10 || f.Timeouts != 0 {
		t.Errorf("got %+v", f)
	}
	c.end()
}

// touches: a handler that takes longer than the timeout keeps its messages.
func touches(t *testing.T, l library, s *site) {
	const timeout = 2 * time.Second
	d := start(t, "--msg-timeout="+timeout.String())
	c := drive(t, l, s, order{Mode: "consume", TCP: d.TCP, Topic: topic, Channel: ch, InFlight: 2, Handle: "touch", HoldMS: int(2 * timeout.Milliseconds())})
	begin := time.Now()
	send(t, d, topic, "first", "second")
	same(t, texts(c.messages(2)), []string{"first", "second"})
	f := settle(t, d, topic, ch, finished)
	if f.Timeouts != 0 || f.Requeues != 0 {
		t.Errorf("got %+v", f)
	}
	if took := time.Since(begin); took < 2*timeout {
		t.Errorf("finished after %v: the handler did not take longer than the timeout", took)
	}
	testkit.Equal(t, len(c.end()), 0, "messages came again")
}

// backsOff: messages whose handler fails come again and end. A library that pauses sets its RDY to 0.
func backsOff(t *testing.T, l library, s *site) {
	d := start(t)
	c := drive(t, l, s, order{Mode: "consume", TCP: d.TCP, Topic: topic, Channel: ch, InFlight: 4, Handle: "fail"})
	settle(t, d, topic, ch, func(f channelStats) bool { return len(f.Clients) == 1 && f.Clients[0].Ready > 0 })
	want := bodies(l.name, 5)
	send(t, d, topic, want...)
	if l.backoff {
		settle(t, d, topic, ch, func(f channelStats) bool { return f.Requeues > 0 && len(f.Clients) == 1 && f.Clients[0].Ready == 0 })
	}
	f := settle(t, d, topic, ch, finished)
	if f.Requeues < 5 || f.Timeouts != 0 {
		t.Errorf("got %+v", f)
	}
	settle(t, d, topic, ch, func(f channelStats) bool { return len(f.Clients) == 1 && f.Clients[0].Ready > 0 })
	c.messages(10)
	c.end()
}

// again stops a broker and starts it again in the same folder.
func again(t *testing.T, d *local.Process) *local.Process {
	t.Helper()
	testkit.Must(t, d.Stop())
	program := under.nsqd
	if program == "" {
		program = localtest.Program(t, "nsqd")
	}
	fresh, err := local.NSQDAt(program, d.Dir, d.TCP, d.HTTP, d.Flags...)
	return localtest.Watch(t, fresh, err)
}

func reconnectsConsumer(t *testing.T, l library, s *site) {
	d := start(t)
	c := drive(t, l, s, order{Mode: "consume", TCP: d.TCP, Topic: topic, Channel: ch, InFlight: 10, Handle: "finish"})
	before, after := bodies("before", 10), bodies("after", 10)
	settle(t, d, topic, ch, func(f channelStats) bool { return len(f.Clients) == 1 })
	send(t, d, topic, before...)
	same(t, texts(c.messages(10)), before)
	settle(t, d, topic, ch, finished)
	d = again(t, d)
	settle(t, d, topic, ch, func(f channelStats) bool { return len(f.Clients) == 1 })
	send(t, d, topic, after...)
	same(t, texts(c.messages(10)), after)
	settle(t, d, topic, ch, finished)
	c.end()
}

func reconnectsProducer(t *testing.T, l library, s *site) {
	d := start(t)
	p := drive(t, l, s, order{Mode: "produce", TCP: d.TCP, Topic: topic, Method: "pub"})
	before, after := bodies("before", 10), bodies("after", 10)
	p.publish(before...)
	k := collect(t, d, topic)
	same(t, k.take(10), before)
	k.stop()
	settle(t, d, topic, "collector", finished)
	d = again(t, d)
	p.publish(after...)
	same(t, collect(t, d, topic).take(10), after)
	p.end()
}

// both publishes and consumes over connections of the same kind.
func both(t *testing.T, l library, s *site, d *local.Process, o order) {
	c, p := o, o
	c.Mode, c.TCP, c.Topic, c.Channel, c.InFlight, c.Handle = "consume", d.TCP, topic, ch, 10, "finish"
	p.Mode, p.TCP, p.Topic, p.Method = "produce", d.TCP, topic, "mpub"
	consumer, producer := drive(t, l, s, c), drive(t, l, s, p)
	want := bodies(l.name, 50)
	producer.publish(want...)
	same(t, texts(consumer.messages(50)), want)
	settle(t, d, topic, ch, finished)
	producer.end()
	consumer.end()
}

func secured(t *testing.T, l library, s *site, compression string) {
	a := testkit.NewAuthority(t)
	c := a.Certificate("nsqd")
	d := start(t, "--tls-cert="+c.CertFile, "--tls-key="+c.KeyFile, "--https-address=", "--tls-required=tcp-https")
	both(t, l, s, d, order{TLSCA: a.File, Compression: compression})
}

// authorises: an auth server that knows one secret and grants one topic for it.
func authorises(t *testing.T, l library, s *site) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.FormValue("secret") != "open sesame" {
			http.Error(w, "unknown secret", http.StatusForbidden)
			return
		}
		fmt.Fprintf(w, `{"ttl":3600,"identity":"tester","authorizations":[{"topic":"^%s$","channels":[".*"],"permissions":["subscribe","publish"]}]}`, topic)
	}))
	defer server.Close()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(server.URL, "http://"))
	testkit.Must(t, err)
	d := start(t, "--auth-http-address=127.0.0.1:"+port)
	both(t, l, s, d, order{AuthSecret: "open sesame"})
}
