package replicated_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// operator is an operator's connection, which may do anything with streams.
func (s *servers) operator() jetstream.JetStream {
	s.t.Helper()
	nc := testkit.Result(nats.Connect(s.url())).Must(s.t)
	s.t.Cleanup(nc.Close)
	return testkit.Result(jetstream.New(nc)).Must(s.t)
}

// store stores records in a separate block, and returns the offset of the first record.
func store(t *testing.T, l *replicated.Log, records ...commitlog.Record) commitlog.Offset {
	t.Helper()
	at := testkit.Result(l.Append(records)).Must(t)
	testkit.Must(t, l.Sync(at+commitlog.Offset(len(records))))
	return at
}

// contents returns the bodies of all records in a log.
func contents(t *testing.T, l *replicated.Log) []string {
	t.Helper()
	return contentsBy(t, l, 10)
}

// contentsBy reads a number of records at once.
func contentsBy(t *testing.T, l *replicated.Log, records int) (all []string) {
	t.Helper()
	var batch commitlog.Batch
	for at := commitlog.Offset(0); ; at = batch.Next {
		testkit.Must(t, l.Read(at, commitlog.Limit{Records: records, Bytes: 1 << 20}, &batch))
		if batch.Next == at {
			return all
		}
		for _, r := range batch.Records {
			all = append(all, string(r.Body))
		}
	}
}

func numbered(from, to int) (all []string) {
	for n := from; n < to; n++ {
		all = append(all, fmt.Sprint("message ", n))
	}
	return all
}

// A broker stood still, does not know of a takeover by another broker, and gets the order to delete the
// topic. The records not yet copied by the other broker stay.
func TestWhatIsTakenOverIsNotRemovedByWhoHadIt(t *testing.T) {
	s := startServers(t, 1)
	own := testkit.Result(s.connect("b").Open("t", 0)).Must(t)
	store(t, own, commitlog.Record{Body: []byte("accepted")})
	testkit.Must(t, own.SaveCursors([]byte("cursors")))
	taker := testkit.Result(s.connect("c").TakeOver("t", "b")).Must(t)
	testkit.Must(t, own.Remove())
	testkit.EqualSlices(t, contents(t, taker), []string{"accepted"}, "to be brought in")
	testkit.Must(t, taker.Remove())
}

// Blocks are no larger than NATS' maximum payload.
func TestBlocksFitIntoMaxPayload(t *testing.T) {
	s := startServers(t, 1, func(o *server.Options) { o.MaxPayload = 64 << 10 })
	c := testkit.Result(replicated.Connect(t.Context(), replicated.Config{
		URL: s.url(), Replicas: 1, BrokerID: "b", MaxBody: 10 << 10, Log: slog.New(slog.DiscardHandler),
	})).Must(t)
	t.Cleanup(c.Close)
	l := testkit.Result(c.Open("t", 0)).Must(t)
	var batch []commitlog.Record
	for range 100 {
		batch = append(batch, commitlog.Record{Body: bytes.Repeat([]byte("x"), 10<<10)})
	}
	store(t, l, batch...)
	testkit.Equal(t, len(contents(t, l)), 100, "messages")
	testkit.Must(t, l.Remove())
}

// Records with a wrong date, or with an old date after a carry-over or a takeover, neither end the
// retention of earlier records nor hide them from a seek.
func TestDatesThatMislead(t *testing.T) {
	s := startServers(t, 1)
	c := s.connect("b")
	for name, odd := range map[string]mono.Wall{"past": 1, "future": clock.Wall() + mono.Wall(1000*time.Hour)} {
		l := testkit.Result(c.Open(name, 0)).Must(t)
		began := clock.Wall()
		want := numbered(0, 33)
		for n, body := range want {
			date := clock.Wall()
			if n == 16 {
				date = odd
			}
			store(t, l, commitlog.Record{Body: []byte(body), Timestamp: date})
		}
		testkit.Equal(t, testkit.Result(l.At(began)).Must(t), 0, "the first message since the beginning, with one of the %s", name)
		l.SetRetain(commitlog.Retain{Age: time.Hour})
		testkit.Must(t, l.Trim(33))
		testkit.EqualSlices(t, contents(t, l), want, "retained, with one of the %s", name)
		testkit.Must(t, l.Remove())
	}
}

// Retention by size keeps at least this size, even with unequal blocks, and at most a block more.
func TestRetentionBySize(t *testing.T) {
	s := startServers(t, 1)
	c := s.connect("b")
	for _, reopened := range []bool{false, true} {
		l := testkit.Result(c.Open("t", 0)).Must(t)
		const large, small = 20, 100
		for n := range large + small {
			size := 100 << 10
			if n >= large {
				size = 100
			}
			store(t, l, commitlog.Record{Body: make([]byte, size)})
		}
		if reopened {
			testkit.Must(t, l.Close())
			l = testkit.Result(c.Open("t", 0)).Must(t)
			for range large {
				store(t, l, commitlog.Record{Body: make([]byte, 100<<10)})
			}
		}
		l.SetRetain(commitlog.Retain{Bytes: 1 << 20})
		testkit.Must(t, l.Trim(large+small+large))
		if size := l.Size(); size < 1<<20 || size > 1<<20+2*100<<10 {
			t.Errorf("%d bytes are left", size)
		}
		testkit.Must(t, l.Remove())
	}
}

// Topic a.b of broker c and topic a of broker b.c would share a stream.
func TestPartsOfOneName(t *testing.T) {
	s := startServers(t, 1)
	l := testkit.Result(s.connect("c").Open("a.b", 0)).Must(t)
	store(t, l, commitlog.Record{Body: []byte("accepted")})
	_, err := s.connect("b.c").Open("a", 0)
	testkit.ErrorHas(t, err, "SRTM_LOG=a=b=c")
	store(t, l, commitlog.Record{Body: []byte("and more")})
	testkit.EqualSlices(t, contents(t, l), []string{"accepted", "and more"}, "what the first has")
	testkit.Must(t, l.Remove())
}

// An operator's stream whose subjects include a broker's subject is not a topic of the broker, and the
// broker must not delete the stream.
func TestAStreamThatIsNoTopics(t *testing.T) {
	s := startServers(t, 1)
	for _, subjects := range [][]string{{"srtm.log.*.b"}, {"srtm.log.t.b", "audit"}} {
		testkit.Result(s.operator().CreateStream(t.Context(), jetstream.StreamConfig{Name: "AUDIT", Subjects: subjects})).Must(t)
		topics, unavailable, err := s.connect("b").Topics()
		testkit.Must(t, err)
		testkit.EqualSlices(t, append(topics, unavailable...), nil, "topics beside %q", subjects)
		testkit.NoError(t, s.operator().DeleteStream(t.Context(), "AUDIT"), "it is there")
	}
}

// Cursors deleted by an operator are saved again.
func TestCursorsAreDeleted(t *testing.T) {
	s := startServers(t, 1)
	c := s.connect("b")
	l := testkit.Result(c.Open("t", 0)).Must(t)
	testkit.Must(t, l.SaveCursors([]byte("cursors")))
	testkit.Must(t, s.operator().DeleteStream(t.Context(), "SRTM_CURSORS"))
	s.connect("c")
	testkit.Must(t, l.SaveCursors([]byte("more cursors")))
	store(t, l, commitlog.Record{Body: []byte("x")})
	testkit.Must(t, l.Close())
	l = testkit.Result(c.Open("t", 0)).Must(t)
	testkit.Equal(t, string(testkit.Result(l.LoadCursors()).Must(t)), "more cursors", "what is found")
	testkit.Must(t, l.Remove())
}

// A broker is not healthy while JetStream refuses publishes.
func TestAStreamRefuses(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	b, topic, _ := startBroker(t, s, "b")
	testkit.Must(t, publish(topic, "message"))
	js := s.operator()
	change := func(most int32) {
		stream := testkit.Result(js.Stream(t.Context(), "SRTM_LOG=t=b")).Must(t)
		config := stream.CachedInfo().Config
		config.MaxMsgSize = most
		_, err := js.UpdateStream(t.Context(), config)
		testkit.Must(t, err)
	}
	change(10)
	testkit.ErrorIs(t, publish(topic, "message"), broker.ErrStorage)
	if b.Health() == nil {
		t.Error("the broker is healthy")
	}
	change(-1)
	within(t, "the broker is healthy", func() bool { return b.Health() == nil })
	testkit.Must(t, publish(topic, "message"))
}

// If an operator purges a topic's stream, and its cursors, the topic continues, and reports how much
// is gone.
func TestAStreamIsPurged(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	c := testkit.Result(replicated.Connect(t.Context(), replicated.Config{
		URL: s.url(), Replicas: 1, BrokerID: "b", MaxBody: 1 << 20, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler),
	})).Must(t)
	t.Cleanup(c.Close)
	l := testkit.Result(c.Open("t", 0)).Must(t)
	js := s.operator()
	stream := testkit.Result(js.Stream(t.Context(), "SRTM_LOG=t=b")).Must(t)
	lost := 0
	check := func(gone int, want ...string) {
		t.Helper()
		lost += gone
		testkit.EqualSlices(t, contents(t, l), want, "what is read")
		testkit.Equal(t, l.Stats().Unreadable, uint64(lost), "messages that are gone")
	}
	for _, body := range numbered(0, 100) {
		store(t, l, commitlog.Record{Body: []byte(body)})
	}
	testkit.Must(t, stream.Purge(t.Context(), jetstream.WithPurgeKeep(2)))
	check(98, numbered(98, 100)...)

	testkit.Must(t, stream.Purge(t.Context()))
	check(2)
	testkit.Must(t, l.Trim(50)) // trims only purged records
	testkit.Must(t, l.SaveCursors([]byte("cursors")))
	cursors := testkit.Result(js.Stream(t.Context(), "SRTM_CURSORS")).Must(t)
	testkit.Must(t, cursors.Purge(t.Context()))
	testkit.Must(t, l.SaveCursors([]byte("more cursors")))
	store(t, l, commitlog.Record{Body: []byte("after")})
	check(0, "after")

	body := bytes.Repeat([]byte("x"), 100<<10)
	stored := 1 // messages stored so far
	var last commitlog.Offset
	var full error
	for full == nil {
		last = testkit.Result(l.Append([]commitlog.Record{{Body: body}})).Must(t)
		if full = l.Sync(last + 1); full == nil {
			stored++
		}
	}
	testkit.ErrorHas(t, full, "maximum bytes")
	testkit.Must(t, stream.Purge(t.Context()))
	within(t, "there is room", func() bool { return l.Sync(last+1) == nil })
	check(stored, string(body))
	testkit.Must(t, stream.Purge(t.Context()))
	testkit.Must(t, l.Close())
	l = testkit.Result(c.Open("t", 0)).Must(t)
	store(t, l, commitlog.Record{Body: []byte("the last")})
	lost = 0
	check(0, "the last")
	testkit.Must(t, l.Remove())
}

// A part of an owner with a fast clock can still be claimed after a purge that left the cursors.
func TestAStreamOfAnOwnerAheadIsPurged(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	c := s.connect("b")
	l := testkit.Result(c.Open("t", uint64(clock.Wall()+mono.Wall(time.Hour)))).Must(t)
	store(t, l, commitlog.Record{Body: []byte("purged")})
	testkit.Must(t, l.Close())
	testkit.Must(t, testkit.Result(s.operator().Stream(t.Context(), "SRTM_LOG=t=b")).Must(t).Purge(t.Context()))
	l = testkit.Result(c.Open("t", 0)).Must(t)
	store(t, l, commitlog.Record{Body: []byte("after")})
	testkit.EqualSlices(t, contents(t, l), []string{"after"}, "what there is")
	testkit.Must(t, l.Remove())
}

// Purged messages take no room, even without a reader.
func TestAFullStreamIsPurged(t *testing.T) {
	s := startServers(t, 1)
	l := testkit.Result(s.connect("b").Open("t", 0)).Must(t)
	store(t, l, commitlog.Record{Body: make([]byte, 1<<20)})
	testkit.Must(t, testkit.Result(s.operator().Stream(t.Context(), "SRTM_LOG=t=b")).Must(t).Purge(t.Context()))
	testkit.Must(t, l.Trim(0))
	testkit.Equal(t, l.Size(), 0, "bytes")
	testkit.Equal(t, l.Stats().Unreadable, 1, "messages that are gone")
	testkit.Must(t, l.Remove())
}

// A reader skips blocks that are deleted from the middle or from the end of a stream.
func TestBlocksAreDeleted(t *testing.T) {
	s := startServers(t, 1)
	c := s.connect("b")
	l := testkit.Result(c.Open("t", 0)).Must(t)
	for _, body := range numbered(0, 10) {
		store(t, l, commitlog.Record{Body: []byte(body)})
	}
	stream := testkit.Result(s.operator().Stream(t.Context(), "SRTM_LOG=t=b")).Must(t)
	info := testkit.Result(stream.Info(t.Context())).Must(t)
	testkit.Must(t, stream.DeleteMsg(t.Context(), info.State.LastSeq-5))
	testkit.EqualSlices(t, contents(t, l), append(numbered(0, 4), numbered(5, 10)...), "what is read")
	testkit.Must(t, stream.DeleteMsg(t.Context(), info.State.LastSeq))
	testkit.Must(t, l.Close())
	l = testkit.Result(c.Open("t", 0)).Must(t)
	store(t, l, commitlog.Record{Body: []byte("after")})
	testkit.EqualSlices(t, contents(t, l), append(append(numbered(0, 4), numbered(5, 9)...), "after"), "what is read")
	testkit.Must(t, l.Remove())
}

// A stream without any live server does not count as empty. Its topic accepts nothing until the stream
// is back with all its messages, and other topics continue.
func TestAllServersOfAStreamAreAway(t *testing.T) {
	t.Parallel()
	s := startServers(t, 3)
	config := replicated.Config{URL: s.url(), Replicas: 1, BrokerID: "b", MaxBody: 1 << 20, Log: slog.New(slog.DiscardHandler)}
	connect := func() (c *replicated.Cluster) {
		within(t, "JetStream takes streams", func() (ok bool) {
			var err error
			c, err = replicated.Connect(t.Context(), config)
			return err == nil
		})
		t.Cleanup(c.Close)
		return c
	}
	c := connect()
	where := func(stream string) string {
		found := testkit.Result(s.operator().Stream(t.Context(), stream)).Must(t)
		return found.CachedInfo().Cluster.Leader
	}
	topic, at := "", ""
	for n := 0; at == "" || at == where("SRTM_CURSORS"); n++ { // NATS places a stream where most space is free
		topic = fmt.Sprint("t", n)
		_, err := s.operator().CreateStream(t.Context(), jetstream.StreamConfig{Name: topic, MaxBytes: 1 << 28})
		testkit.Must(t, err)
		l := testkit.Result(c.Open(topic, 0)).Must(t)
		store(t, l, commitlog.Record{Body: []byte("accepted")})
		testkit.Must(t, l.Close())
		at = where("SRTM_LOG=" + topic + "=b")
	}
	dir := t.TempDir()
	b, end := restoredBroker(t, c, dir, true)
	testkit.Must(t, testkit.Result(b.Topic([]byte(topic))).Must(t).CreateChannel("c"))
	server := int(at[1] - '0')
	again := func(folder string, alone bool) {
		c.Close()
		s.stop(server)
		s.ready()
		c = connect()
		b, end = restoredBroker(t, c, folder, alone)
	}
	want := 1
	for life, folder := range []string{dir, t.TempDir()} { // the second life begins without the disk
		end()
		again(folder, true)
		it := testkit.Result(b.CreateTopic(topic)).Must(t)
		testkit.ErrorIs(t, publish(it, "meanwhile"), broker.ErrUnavailable)
		testkit.ErrorIs(t, b.Health(), broker.ErrStorage)
		testkit.ErrorIs(t, b.DeleteTopic(topic), broker.ErrUnavailable)
		testkit.ErrorIs(t, b.DeleteUnused(topic), broker.ErrInUse)
		waiting := testkit.Result(it.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(t)
		testkit.Must(t, waiting.Ready(1))
		other := testkit.Result(b.CreateTopic("other")).Must(t)
		within(t, "another topic takes messages", func() bool { return publish(other, "meanwhile") == nil })
		s.start(server)
		s.ready()
		within(t, "the broker is healthy", func() bool { return b.Health() == nil })
		within(t, "a consumer that waited gets a message", func() bool {
			_, held := waiting.Holds()
			return held == 1
		})
		channels := it.Stats().Channels
		if len(channels) != 1 || channels[0].Ready+channels[0].InFlight != want {
			t.Errorf("life %d: %+v is back, want %d messages", life, channels, want)
		}
		waiting.Close()
		testkit.Must(t, publish(it, "after"))
		want++
	}
	end()
	l := testkit.Result(c.Open(topic, 0)).Must(t)
	testkit.EqualSlices(t, contents(t, l), []string{"accepted", "after", "after"}, "what there is of the topic")
	testkit.Must(t, l.Close())

	again(dir, false)
	testkit.Result(b.Topic([]byte(topic))).Must(t)
	js := s.operator()
	within(t, "its stream is gone", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return errors.Is(js.DeleteStream(ctx, "SRTM_LOG="+topic+"=b"), jetstream.ErrStreamNotFound)
	})
	within(t, "a broker of a cluster has the topic no longer", func() bool {
		_, err := b.Topic([]byte(topic))
		return errors.Is(err, broker.ErrUnknownTopic)
	})
}
