package replicated_test

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// operator is a connection of one who does with streams what he likes.
func (s *servers) operator() jetstream.JetStream {
	s.t.Helper()
	nc := testkit.Result(nats.Connect(s.url())).Must(s.t)
	s.t.Cleanup(nc.Close)
	return testkit.Result(jetstream.New(nc)).Must(s.t)
}

// store has records stored in a block of their own, and returns the offset of the first.
func store(t *testing.T, l *replicated.Log, records ...commitlog.Record) commitlog.Offset {
	t.Helper()
	at := testkit.Result(l.Append(records)).Must(t)
	testkit.Must(t, l.Sync(at+commitlog.Offset(len(records))))
	return at
}

// contents are the bodies of all that is in a log.
func contents(t *testing.T, l *replicated.Log) (all []string) {
	t.Helper()
	var batch commitlog.Batch
	for at := commitlog.Offset(0); ; at = batch.Next {
		testkit.Must(t, l.Read(at, commitlog.Limit{Records: 10, Bytes: 1 << 20}, &batch))
		if batch.Next == at {
			return all
		}
		for _, r := range batch.Records {
			all = append(all, string(r.Body))
		}
	}
}

// A broker that stood still is told to delete a topic that another is taking over from it,
// which it does not know: what the other has yet to bring in stays.
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

// A stream of which every server is away is not taken for an empty one.
func TestAllServersOfAStreamAreAway(t *testing.T) {
	t.Parallel()
	s := startServers(t, 3)
	config := replicated.Config{URL: s.url(), Replicas: 1, Part: "b", MaxBody: 1 << 20, Log: slog.New(slog.DiscardHandler)}
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
	for n := 0; at == "" || at == where("SRTM_CURSORS"); n++ { // a stream goes where most is free
		topic = fmt.Sprint("t", n)
		_, err := s.operator().CreateStream(t.Context(), jetstream.StreamConfig{Name: topic, MaxBytes: 1 << 28})
		testkit.Must(t, err)
		l := testkit.Result(c.Open(topic, 0)).Must(t)
		store(t, l, commitlog.Record{Body: []byte("accepted")})
		testkit.Must(t, l.Close())
		at = where("SRTM_LOG=" + topic + "=b")
	}
	c.Close()
	away := int(at[1] - '0')
	s.stop(away)
	s.ready()
	c = connect()
	if topics, err := c.Topics(); err == nil {
		t.Errorf("there are %v, with the servers away that %s is on", topics, topic)
	}
	s.start(away)
	s.ready()
	within(t, "the server is back", func() bool {
		l, err := c.Open(topic, 0)
		if err != nil {
			return false
		}
		testkit.EqualSlices(t, contents(t, l), []string{"accepted"}, "what there is of the topic")
		testkit.Must(t, l.Close())
		return true
	})
}
