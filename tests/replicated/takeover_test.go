package replicated_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/replicated"
	"github.com/srtm-io/srtm/tokenbucket"
)

const publishers = 6

// cluster is brokers with their logs in servers, and a topic t on all brokers, with channels c and d.
type cluster struct {
	*localtest.Cluster
	t     *testing.T
	flags []string
	pubs  []*client.Publisher

	mu    sync.Mutex
	acked []string
}

func startCluster(t *testing.T, s *servers, brokers int) *cluster {
	t.Helper()
	c := &cluster{t: t, flags: []string{"--durability=replicated", "--jetstream-url=" + s.url(), fmt.Sprint("--jetstream-replicas=", len(s.all))}}
	c.Cluster = localtest.Start(t, brokers, []string{"--evacuate-after=1s", "--takeover-after=1s"}, c.flags...)
	create := []string{"topic", "create", "t", "--policy=loadbalance", "--rate=6000", "--burst=600", "--channel=c", "--channel=d"}
	for i := range publishers {
		create = append(create, fmt.Sprintf("--publisher=g-%d:g:100", i))
	}
	localtest.Srtm(t, c.RPC, create...)
	cl, err := client.New(client.Config{Address: c.RPC})
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, cl.Close(context.Background())) })
	for i := range publishers {
		ctx, cancel := context.WithTimeout(t.Context(), local.Patience)
		p, err := cl.Publisher(ctx, "t", fmt.Sprintf("g-%d", i))
		cancel()
		testkit.Must(t, err)
		c.pubs = append(c.pubs, p)
	}
	return c
}

// wide is for consumers of several brokers: with the default, 1, the brokers take turns.
func wide(n *nsq.Config) { n.MaxInFlight, n.LookupdPollInterval = 100, 200*time.Millisecond }

// publish makes every publisher publish each messages, one after the other, and records the
// acknowledged messages.
func (c *cluster) publish(name string, each int) {
	var all sync.WaitGroup
	for i, p := range c.pubs {
		all.Go(func() {
			for n := range each {
				body := fmt.Sprintf("%s %d of %d", name, n, i)
				ctx, cancel := context.WithTimeout(c.t.Context(), local.Patience)
				err := p.Publish(ctx, []byte(body))
				cancel()
				c.mu.Lock()
				if err == nil {
					c.acked = append(c.acked, body)
				} else {
					c.t.Logf("%s: %v", body, err)
				}
				c.mu.Unlock()
			}
		})
	}
	all.Wait()
}

func (c *cluster) topic() *srtmv1.Topic {
	c.t.Helper()
	r, err := srtmv1.NewAdminServiceClient(localtest.Dial(c.t, c.RPC)).GetTopic(c.t.Context(), &srtmv1.GetTopicRequest{Name: "t"})
	testkit.Must(c.t, err)
	return r.GetTopic()
}

// A broker is killed with its messages, and its disk is lost. The others have all acknowledged
// messages, and messages finished long before do not come again.
func TestAnotherBrokerTakesOver(t *testing.T) {
	t.Parallel()
	s := startServers(t, 3)
	c := startCluster(t, s, 3)
	testkit.Equal(t, c.topic().GetSpec().GetDurability(), srtmv1.Durability_DURABILITY_REPLICATED, "durability of a topic of brokers that replicate")
	c.publish("before", 100)

	finished := make(localtest.Bodies, 10_000)
	stop := localtest.Consume(t, "t", "d", finished, wide, "http://"+c.Web)
	finished.Want(t, c.acked...)
	stop()
	testkit.WaitFor(t, "cursors are saved", func() bool { // finished messages on d
		done := 0.
		for _, b := range c.Brokers {
			n := testkit.Result(localtest.Metric(b, "srtm_nsqd_topic_disk_needed_bytes")).Must(t)
			done += n
		}
		return done > 0
	})

	testkit.Must(t, c.Brokers[0].Kill())
	killed := time.Now()
	rest := make(chan string, 10_000)
	localtest.Consume(t, "t", "c", nsq.HandlerFunc(func(m *nsq.Message) error {
		rest <- string(m.Body)
		return nil
	}), wide, "http://"+c.Web)
	c.publish("after", 50)

	missing := map[string]bool{}
	for _, body := range c.acked {
		missing[body] = true
	}
	late, twice, seen := time.Duration(0), 0, map[string]bool{}
	limit := time.NewTimer(local.Patience)
	defer limit.Stop()
	for len(missing) > 0 {
		select {
		case body := <-rest:
			delete(missing, body)
			if seen[body] {
				twice++
			}
			seen[body], late = true, time.Since(killed)
		case <-limit.C:
			t.Fatalf("%d of %d acknowledged messages have not come, %d in log of the first broker:\n%s",
				len(missing), len(c.acked), len(seen), c.Brokers[0].Output())
		}
	}
	t.Logf("the last of %d messages came %v after the kill; %d came twice", len(c.acked), late, twice)

	again := make(localtest.Bodies, 10_000)
	localtest.Consume(t, "t", "d", again, wide, "http://"+c.Web)
	var after []string
	for _, body := range c.acked {
		if strings.HasPrefix(body, "after") {
			after = append(after, body)
		}
	}
	again.Want(t, after...)
	testkit.WaitFor(t, "the topic is gone from the broker", func() bool {
		for _, q := range c.topic().GetStatus().GetBrokers() {
			if q.GetBrokerId() == "b1" {
				return false
			}
		}
		return true
	})

	// The broker comes back without data, and without the topic.
	back := localtest.NSQD(t, "", append([]string{"--loaddistributor-address=" + c.RPC, "--broker-id=b1"}, c.flags...)...)
	testkit.WaitFor(t, "the broker joins", func() bool {
		n, err := localtest.Metric(back, "srtm_agent_connected")
		return err == nil && n > 0
	})
	text, _, err := localtest.Ask("GET", "http://"+back.HTTP+"/stats?format=json", "")
	testkit.Must(t, err)
	if strings.Contains(text, `"topic_name":"t"`) {
		t.Errorf("a broker that comes back has what was taken over:\n%s", text)
	}
}

// bodies is a publish of several messages.
type bodies []string

func (b bodies) Len() int { return len(b) }

func (b bodies) Bytes() (n int) {
	for _, one := range b {
		n += len(one)
	}
	return n
}

func (b bodies) Each(do func([]byte)) {
	for _, one := range b {
		do([]byte(one))
	}
}

// startBroker starts a broker in this process, with a connection to the servers, and a topic t with
// the channel c.
func startBroker(t *testing.T, s *servers, id string) (*broker.Broker, *broker.Topic, *replicated.Cluster) {
	t.Helper()
	c := s.connect(id)
	b, _ := restoredBroker(t, c, t.TempDir(), true)
	topic := testkit.Result(b.CreateTopic("t")).Must(t)
	testkit.Must(t, topic.CreateChannel("c"))
	return b, topic, c
}

// restoredBroker starts a broker in this process from the data in the folder and the cluster; alone:
// no loaddistributor sends the broker its topics.
func restoredBroker(t *testing.T, c *replicated.Cluster, dir string, alone bool) (b *broker.Broker, end func()) {
	t.Helper()
	storage, err := broker.OpenStorage(broker.StorageConfig{
		Path: filepath.Join(dir, "messages"), Metadata: filepath.Join(dir, "metadata.json"),
		Overflow: 1000, MaxRecord: 1 << 20, Replicated: c, Log: slog.New(slog.DiscardHandler),
	})
	testkit.Must(t, err)
	b, err = broker.New(broker.Config{Capacity: 100, MaxMsgTimeout: time.Minute, AutoCreate: alone, Storage: storage})
	testkit.Must(t, err)
	end = sync.OnceFunc(func() {
		_ = b.Close() // a broker without a connection cannot store its state
		testkit.NoError(t, storage.Close())
	})
	t.Cleanup(end)
	testkit.Must(t, b.Restore())
	return b, end
}

// publish stores a message in a topic.
func publish(t *broker.Topic, body string) error {
	var stored broker.Stored
	err := t.PublishBatch(clock.Mono(), clock.Wall(), broker.Published{Stored: &stored}, bodies{body})
	if err == nil {
		err = t.Sync(stored)
	}
	return err
}

// A broker ends in the middle of a takeover. The next broker takes over from both, and has everything,
// with at most one block of the log twice.
func TestATakeOverIsInterrupted(t *testing.T) {
	t.Parallel()
	s := startServers(t, 3)
	_, topic, a := startBroker(t, s, "a")
	const n = 20_000
	var all bodies
	for i := range n {
		all = append(all, fmt.Sprint("message ", i))
	}
	var stored broker.Stored
	testkit.Must(t, topic.PublishBatch(clock.Mono(), clock.Wall(), broker.Published{Stored: &stored}, all))
	testkit.Must(t, topic.Sync(stored))
	a.Close() // as if the machine were gone

	b, half, bc := startBroker(t, s, "b")
	taken := make(chan error, 1)
	go func() {
		_, err := b.TakeOver(&srtmv1.TakeOver{Topic: "t", FromBrokerId: "a"})
		taken <- err
	}()
	within(t, "something is taken over", func() bool { return half.Stats().Channels[0].Ready > 0 })
	bc.Close()
	testkit.Must(t, ended(b, taken))

	last, _, c := startBroker(t, s, "c")
	for _, from := range []string{"a", "b", "nobody"} {
		count := testkit.Result(last.TakeOver(&srtmv1.TakeOver{Topic: "t", FromBrokerId: from})).Must(t)
		t.Logf("%d messages from %s", count, from)
	}
	testkit.Must(t, last.Close())
	l := testkit.Result(c.Open("t", 0)).Must(t)
	t.Cleanup(func() { testkit.Must(t, l.Close()) })
	seen := map[string]int{}
	for _, body := range contentsBy(t, l, 1000) {
		seen[body]++
	}
	twice := 0
	for _, k := range seen {
		twice += k - 1
	}
	if len(seen) != n || twice > 8000 { // of 256 KiB
		t.Errorf("%d of %d messages are there, %d of them again", len(seen), n, twice)
	}
	t.Logf("%d came twice", twice)
}

// A broker is started again in the middle of a takeover. Each of the two brokers then has a part of the
// messages, in order. The other broker has the older messages. At most one block of the log is in both
// parts.
func TestABrokerReturnsInTheMiddleOfATakeOver(t *testing.T) {
	t.Parallel()
	s := startServers(t, 3)
	_, topic, lost := startBroker(t, s, "a")
	const n = 20_000
	var all bodies
	for i := range n {
		all = append(all, fmt.Sprint(i))
	}
	var stored broker.Stored
	testkit.Must(t, topic.PublishBatch(clock.Mono(), clock.Wall(), broker.Published{Stored: &stored}, all))
	testkit.Must(t, topic.Sync(stored))
	lost.Close() // as if the machine were gone

	b, half, _ := startBroker(t, s, "b")
	taken := make(chan error, 1)
	go func() {
		_, err := b.TakeOver(&srtmv1.TakeOver{Topic: "t", FromBrokerId: "a"})
		taken <- err
	}()
	within(t, "something is taken over", func() bool { return half.Stats().Channels[0].Ready > 0 })
	_, endA := restoredBroker(t, s.connect("a"), t.TempDir(), true)
	t.Logf("the take-over ends: %v", <-taken) // on a slow machine perhaps before the broker returns
	_ = b.Close()                             // the logs have all messages
	endA()
	numbers := func(broker string) (all []int) {
		t.Helper()
		l, err := s.connect("reader").TakeOver("t", broker)
		if errors.Is(err, replicated.ErrNoPart) {
			return nil
		}
		testkit.Must(t, err)
		for _, body := range contentsBy(t, l, 1000) {
			all = append(all, testkit.Result(strconv.Atoi(body)).Must(t))
		}
		testkit.Must(t, l.Close())
		return all
	}
	older, younger := numbers("b"), numbers("a")
	t.Logf("%d messages are in the older part, %d in the younger part", len(older), len(younger))
	for i, got := range [][]int{older, younger} {
		for j, m := range got {
			if m != got[0]+j {
				t.Fatalf("part %d has message %d after message %d", i, m, got[j-1])
			}
		}
	}
	both := slices.Concat(older, younger)
	if twice := len(both) - n; both[0] != 0 || both[len(both)-1] != n-1 || twice < 0 || twice > 8000 { // of 256 KiB
		t.Errorf("the first message is %d, the last message is %d, %d come twice", both[0], both[len(both)-1], twice)
	}
}

// Another broker takes a topic over while its broker stops. The stop succeeds: all messages are stored,
// and the other broker owns the topic and its cursors.
func TestABrokerStopsWhileItsTopicIsTakenOver(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	b, topic, _ := startBroker(t, s, "b")
	testkit.Must(t, publish(topic, "message"))
	taken := testkit.Result(s.connect("c").TakeOver("t", "b")).Must(t)
	testkit.Must(t, b.Close())
	testkit.EqualSlices(t, contents(t, taken), []string{"message"}, "what the other broker has")
	testkit.Must(t, taken.Close())
}

// A broker is gone. Meanwhile one of the topic's channels is deleted, and another is deleted and
// created again. Neither the broker that takes over nor the first broker, which returns with an empty
// disk, has messages of the deleted channels.
func TestAChannelThatWasDeletedDoesNotComeBack(t *testing.T) {
	t.Parallel()
	identity := &srtmv1.TopicIdentity{Log: 1, Created: 1}
	created := func(name string, version uint64) *srtmv1.TopicChannel {
		return &srtmv1.TopicChannel{Name: name, Created: version}
	}
	now := []*srtmv1.TopicChannel{created("anew", 9), created("kept", 2)}
	prepare := func(t *testing.T, b *broker.Broker, of *srtmv1.TopicIdentity, version uint64, channels ...*srtmv1.TopicChannel) (unknown []string) {
		t.Helper()
		left := testkit.Result(b.Node().Prepare("t", channels, version, time.Second, 0.9, 0, of)).Must(t)
		for _, c := range left {
			unknown = append(unknown, c.Name)
		}
		return unknown
	}
	held := func(t *testing.T, b *broker.Broker) map[string]int {
		t.Helper()
		topic := testkit.Result(b.Topic([]byte("t"))).Must(t)
		depths := map[string]int{}
		for _, c := range topic.Stats().Channels {
			depths[c.Name] = c.Ready + c.InFlight + c.Deferred
		}
		return depths
	}
	// gone is a broker with two messages for each channel. Its machine is lost.
	gone := func(t *testing.T, s *servers) {
		t.Helper()
		c := s.connect("a")
		a, _ := restoredBroker(t, c, t.TempDir(), false)
		prepare(t, a, identity, 4, created("anew", 3), created("deleted", 4), created("kept", 2))
		topic := testkit.Result(a.Topic([]byte("t"))).Must(t)
		testkit.Must(t, topic.CreateChannel("own")) // while the control plane was unavailable
		share := tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 10}
		testkit.Result(a.Node().Grant("t", share, share, mono.Never, mono.Never, 10*tokenbucket.Token)).Must(t)
		for i := range 2 {
			testkit.Must(t, publish(topic, fmt.Sprint(i)))
		}
		want := map[string]int{"anew": 2, "deleted": 2, "kept": 2, "own": 2}
		within(t, "messages have their tokens", func() bool { return maps.Equal(held(t, a), want) })
		a.Close()
		c.Close()
	}

	for name, c := range map[string]struct {
		of   *srtmv1.TopicIdentity
		want map[string]int
	}{
		"taken over":                         {identity, map[string]int{"anew": 0, "kept": 2, "own": 2}},
		"taken over after the store is lost": {&srtmv1.TopicIdentity{Log: 2, Created: 1}, map[string]int{"anew": 2, "deleted": 2, "kept": 2, "own": 2}},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServers(t, 1)
			gone(t, s)
			b, _ := restoredBroker(t, s.connect("b"), t.TempDir(), false)
			prepare(t, b, c.of, 10, now...)
			order := &srtmv1.TakeOver{Topic: "t", FromBrokerId: "a", Identity: c.of, Channels: now, ChannelsVersion: 10}
			testkit.Result(b.TakeOver(order)).Must(t)
			if got := held(t, b); !maps.Equal(got, c.want) {
				t.Errorf("the channels hold %v, and have to hold %v", got, c.want)
			}
		})
	}
	t.Run("back with an empty disk", func(t *testing.T) {
		s := startServers(t, 1)
		gone(t, s)
		a, _ := restoredBroker(t, s.connect("a"), t.TempDir(), false)
		if unknown := prepare(t, a, identity, 10, now...); !slices.Equal(unknown, []string{"own"}) {
			t.Errorf("the broker reports the channels %v as new, and has only own", unknown)
		}
		if got, want := held(t, a), map[string]int{"anew": 0, "kept": 2, "own": 2}; !maps.Equal(got, want) {
			t.Errorf("the channels hold %v, and have to hold %v", got, want)
		}
	})
}

// ended returns the result of a takeover whose broker closes.
func ended(b *broker.Broker, taken <-chan error) error {
	_ = b.Close()
	if err := <-taken; err == nil {
		return errors.New("the take-over was over before it was interrupted")
	}
	return nil
}

// A broker that stood still during a takeover stores nothing more, and gives the topic up. Once it knows the
// new owner, it forwards what is published to it.
func TestABrokerThatWasTakenOverYields(t *testing.T) {
	t.Parallel()
	c := startCluster(t, startServers(t, 1), 2)
	c.publish("before", 20)
	frozen := c.Brokers[0]
	stock := localtest.Producer(t, frozen.TCP, "g-0")
	testkit.Must(t, stock.Publish("t", []byte("by a stock producer")))
	testkit.Must(t, frozen.Signal(syscall.SIGSTOP))
	thaw := sync.OnceFunc(func() { testkit.Must(t, frozen.Signal(syscall.SIGCONT)) })
	t.Cleanup(thaw)
	testkit.WaitFor(t, "the other has all of it", func() bool {
		n, err := localtest.Metric(c.Brokers[1], "srtm_nsqd_channel_ready_messages")
		return err == nil && int(n) == 2*(len(c.acked)+1) // on two channels
	})
	thaw()
	stored := append(c.acked, "by a stock producer")
	err := stock.Publish("t", []byte("late"))
	if err == nil { // it knew already, and the new owner answered
		stored = append(stored, "late")
	}
	unknown := err != nil && !strings.Contains(err.Error(), "E_QUEUE_FULL") // the connection ended before the answer
	testkit.WaitFor(t, "the topic is gone there", func() bool {
		text, _, err := localtest.Ask("GET", "http://"+frozen.HTTP+"/stats?format=json", "")
		return err == nil && !strings.Contains(text, `"topic_name":"t"`)
	})
	all := make(localtest.Bodies, 1000)
	localtest.Consume(t, "t", "c", all, wide, "http://"+c.Web)
	all.Want(t, stored...)
	select {
	case body := <-all:
		if body != "late" || !unknown {
			t.Errorf("%q came, which was refused, or again", body)
		}
	default:
	}
}

// deletedWithoutServers returns a broker and its connection. The broker's topic t had one message. The
// broker got the order to delete the topic while no server was there.
func deletedWithoutServers(t *testing.T, s *servers, alone bool) (*broker.Broker, *replicated.Cluster) {
	t.Helper()
	c := s.connect("b")
	b, _ := restoredBroker(t, c, t.TempDir(), alone)
	testkit.Must(t, publish(testkit.Result(b.CreateTopic("t")).Must(t), "old"))
	s.stop(0)
	testkit.ErrorIs(t, b.DeleteTopic("t"), broker.ErrStorage, "the log is not removed")
	s.start(0)
	s.ready()
	other := testkit.Result(b.CreateTopic("other")).Must(t)
	within(t, "another topic takes messages", func() bool { return publish(other, "x") == nil })
	return b, c
}

// A new topic has nothing of an old topic of the same name, deleted while the stream was unavailable.
func TestATopicIsDeletedWithoutServers(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	b, c := deletedWithoutServers(t, s, true)
	anew := testkit.Result(b.CreateTopic("t")).Must(t)
	within(t, "it takes messages", func() bool { return publish(anew, "new") == nil })
	testkit.Must(t, b.Close())
	l := testkit.Result(c.Open("t", 0)).Must(t)
	testkit.EqualSlices(t, contents(t, l), []string{"new"}, "what it has")
	testkit.Must(t, l.Remove())
}

// What another process of the same broker has claimed since then is not removed.
func TestWhatWasDeletedWithoutServersIsAnothers(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	b, _ := deletedWithoutServers(t, s, true)
	other := s.connect("b")
	l := testkit.Result(other.Open("t", 0)).Must(t)
	store(t, l, commitlog.Record{Body: []byte("of another")})
	anew := testkit.Result(b.CreateTopic("t")).Must(t)
	for range 2 {
		testkit.ErrorIs(t, publish(anew, "new"), broker.ErrStorage)
	}
	testkit.Must(t, l.Close())
	l = testkit.Result(other.Open("t", 0)).Must(t)
	testkit.EqualSlices(t, contents(t, l), []string{"old", "of another"}, "what the other has")
	testkit.Must(t, l.Remove())
}

// A broker of a cluster gets the order to delete a topic while no server is there. The broker does not remove
// the topic later, because another broker may be about to take the topic over.
func TestWhatWasDeletedWithoutServersIsLeft(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	b, _ := deletedWithoutServers(t, s, false)
	anew := testkit.Result(b.CreateTopic("t")).Must(t)
	for range 2 {
		testkit.ErrorIs(t, publish(anew, "new"), broker.ErrStorage)
	}
	taker := testkit.Result(s.connect("c").TakeOver("t", "b")).Must(t)
	testkit.EqualSlices(t, contents(t, taker), []string{"old"}, "to be brought in")
	testkit.Must(t, taker.Remove())
}

// fail requeues each delivery of a channel for which fails is true and keeps the others. fail returns
// the attempts of all deliveries, by body.
func fail(t *testing.T, topic *broker.Topic, fails func(body string, attempts uint16) bool) func() map[string][]uint16 {
	t.Helper()
	var mu sync.Mutex
	got := map[string][]uint16{}
	wake := make(chan struct{}, 1)
	sub := testkit.Result(topic.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})).Must(t)
	testkit.Must(t, sub.Ready(1000))
	stop, done := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		<-done
		sub.Close()
	})
	go func() {
		defer close(done)
		for {
			var out broker.Outgoing
			if !sub.Take(&out, 1<<20) {
				return
			}
			if out.Messages() == 0 {
				select {
				case <-wake:
					continue
				case <-stop:
					return
				}
			}
			sub.Wrote(&out)
			for in := out.Frames; len(in) > 0; {
				_, data, n, err := wire.ParseFrame(in, 1<<20)
				m, fault := wire.ParseMessage(data)
				if err := errors.Join(err, fault); err != nil {
					t.Error(err)
					return
				}
				in = in[n:]
				mu.Lock()
				got[string(m.Body)] = append(got[string(m.Body)], m.Attempts)
				mu.Unlock()
				if fails(string(m.Body), m.Attempts) {
					_ = sub.Requeue(m.ID, 0) // the broker may have ended
				}
			}
		}
	}()
	return func() map[string][]uint16 {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(got)
	}
}

func deliveries(attempts map[string][]uint16) (n int) {
	for _, of := range attempts {
		n += len(of)
	}
	return n
}

// Messages fail on a broker that loses its servers or stops, and then on the next broker. No message
// is delivered after its TTL or more often than the maximum attempts. Each message becomes a dead
// letter: once after a stop, at most twice after a crash.
func TestTTLAndDeadLettersAreTakenOver(t *testing.T) {
	t.Parallel()
	const most, n = 3, 200
	settings := expiry.Settings{TTL: time.Hour, MaxAttempts: most, DeadLetter: "t.dead"}
	rng := testkit.Rand(t)
	for _, stops := range []bool{false, true} {
		t.Run(fmt.Sprintf("stops %v", stops), func(t *testing.T) {
			s := startServers(t, 3)
			a, topic, cluster := startBroker(t, s, "a")
			testkit.Must(t, topic.SetExpiry(settings))
			testkit.Must(t, testkit.Result(a.CreateTopic("t.dead")).Must(t).CreateChannel("c"))
			old := map[string]bool{}
			held := map[string]uint16{} // the delivery that a's consumer keeps; 0: none, the message is given up
			givenUp := uint64(0)
			for i := range n {
				body, arrival := fmt.Sprint("message ", i), stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
				if old[body] = rng.IntN(3) == 0; old[body] {
					arrival.At = arrival.At.Add(-2 * time.Hour)
				} else {
					if held[body] = uint16(rng.IntN(most + 1)); held[body] == 0 {
						givenUp++
					}
				}
				var stored broker.Stored
				testkit.Must(t, topic.Publish(clock.Mono(), clock.Wall(), broker.Published{Body: []byte(body), Arrival: arrival, Stored: &stored}))
				testkit.Must(t, topic.Sync(stored))
			}
			before := fail(t, topic, func(body string, attempts uint16) bool { return attempts != held[body] })
			within(t, "all are held or given up", func() bool {
				seen := before()
				for body, at := range held {
					if !slices.Contains(seen[body], cmp.Or(at, most)) {
						return false
					}
				}
				return topic.Stats().Channels[0].Counters.DeadLettered == givenUp
			})
			if stops {
				testkit.Must(t, a.Close())
			}
			cluster.Close()

			b, topic, _ := startBroker(t, s, "b")
			testkit.Must(t, topic.SetExpiry(settings))
			dead := testkit.Result(b.CreateTopic("t.dead")).Must(t)
			testkit.Must(t, dead.CreateChannel("c"))
			testkit.Result(b.TakeOver(&srtmv1.TakeOver{Topic: "t", FromBrokerId: "a"})).Must(t)
			testkit.Result(b.TakeOver(&srtmv1.TakeOver{Topic: "t.dead", FromBrokerId: "a"})).Must(t)
			after := fail(t, topic, func(string, uint16) bool { return true })
			within(t, "none is left", func() bool {
				c := topic.Stats().Channels[0]
				return c.Ready+c.Beyond+c.InFlight+c.Deferred == 0
			})
			letters := fail(t, dead, func(string, uint16) bool { return false })
			within(t, "all dead letters are there", func() bool {
				c := dead.Stats().Channels[0]
				return c.Ready+c.Beyond+c.Deferred == 0 && deliveries(letters()) == c.InFlight
			})
			count := map[string]int{}
			for text, copies := range letters() {
				var l struct {
					Body     string
					Attempts uint16
				}
				testkit.Must(t, json.Unmarshal([]byte(text), &l))
				if count[l.Body] += len(copies); l.Attempts != most {
					t.Errorf("got the dead letter %s, want %d attempts", text, most)
				}
			}
			for body, at := range held {
				if count[body] < 1 || count[body] > 2 || stops && count[body] > 1 {
					t.Errorf("%s has %d dead letters", body, count[body])
				}
				if got := after()[body]; stops && at > 0 && len(got) > 0 && got[0] < at {
					t.Errorf("%s was delivered %d times before the stop, and then with attempts %d", body, at, got)
				}
			}
			for name, seen := range map[string]map[string][]uint16{"before": before(), "after": after()} {
				for body, attempts := range seen {
					if old[body] || slices.Max(attempts) > most {
						t.Errorf("%s: %s was delivered with attempts %d; it expired: %v", name, body, attempts, old[body])
					}
				}
			}
			t.Logf("%d messages, %d expired, %d deliveries before and %d after, %d dead letters", n, n-len(held), deliveries(before()), deliveries(after()), deliveries(letters()))
		})
	}
}
