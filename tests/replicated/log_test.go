package replicated_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

func TestReplicatedLogPassesTheLogSuite(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d replicas", n), func(t *testing.T) {
			c := startServers(t, n).connect("b.1")
			topics := 0
			logtest.Suite(t, func(t *testing.T) logtest.Subject {
				topics++
				topic := fmt.Sprintf("topic.%d", topics)
				var l *replicated.Log
				open := func() commitlog.Log {
					l = testkit.Result(c.Open(topic, 0)).Must(t)
					return l
				}
				t.Cleanup(func() { testkit.Must(t, l.Remove()) })
				return logtest.Subject{Log: open(), Reopen: func() commitlog.Log {
					testkit.Must(t, l.Close())
					return open()
				}}
			})
		})
	}
}

// Cursors that cannot be saved delay the topic's reader and writer for less than a second. Nothing
// else of the topic needs the cursors' stream.
func TestNoLeaderOfTheCursors(t *testing.T) {
	s := startServers(t, 1)
	l := testkit.Result(s.connect("b").Open("t", 1)).Must(t)
	nc := testkit.Result(nats.Connect(s.url())).Must(t)
	defer nc.Close()
	js := testkit.Result(jetstream.New(nc)).Must(t)
	testkit.Must(t, js.DeleteStream(t.Context(), "SRTM_CURSORS")) // no answers, as without a leader
	began := time.Now()
	testkit.ErrorIs(t, l.SaveCursors([]byte("cursors")), replicated.ErrUnavailable)
	if took := time.Since(began); took > 3*time.Second { // 0.5 s
		t.Errorf("gave up after %v", took)
	}
	testkit.Must(t, l.Close())
}

// An attempt with a lost acknowledgement may be stored later than the owner knows. The owner's next
// save comes behind the late attempt.
func TestASnapshotIsStoredLate(t *testing.T) {
	s := startServers(t, 1)
	c := s.connect("b")
	l := testkit.Result(c.Open("t", 1)).Must(t)
	testkit.Must(t, l.SaveCursors([]byte("the first")))
	nc := testkit.Result(nats.Connect(s.url())).Must(t)
	defer nc.Close()
	js := testkit.Result(jetstream.New(nc)).Must(t)
	stream := testkit.Result(js.Stream(t.Context(), "SRTM_CURSORS")).Must(t)
	first := testkit.Result(stream.GetLastMsgForSubject(t.Context(), "srtm.cursors.*.*.head")).Must(t)
	_, err := js.Publish(t.Context(), first.Subject, first.Data)
	testkit.Must(t, err)
	testkit.Must(t, l.SaveCursors([]byte("the second")))
	testkit.Must(t, l.Close())
	l, err = c.Open("t", 1)
	testkit.Must(t, err)
	if snapshot, err := l.LoadCursors(); err != nil || string(snapshot) != "the second" {
		t.Errorf("%q, %v", snapshot, err)
	}
	testkit.Must(t, l.Close())
}

// A replaced owner stores nothing, and reports the replacement.
func TestReplacedOwnerStoresNothing(t *testing.T) {
	s := startServers(t, 3)
	a := testkit.Result(s.connect("b").Open("t", 1)).Must(t)
	at := testkit.Result(a.Append([]commitlog.Record{{Body: []byte("of the first")}})).Must(t)
	testkit.Must(t, a.Sync(at+1))
	testkit.Must(t, a.SaveCursors([]byte("cursors of the first")))

	other := s.connect("b") // the same part, in another process
	b, err := other.Open("t", 2)
	testkit.Must(t, err)
	if snapshot, err := b.LoadCursors(); err != nil || string(snapshot) != "cursors of the first" {
		t.Errorf("the next owner finds cursors %q, %v", snapshot, err)
	}
	// The next owner's record has the same offset as the first owner's refused record.
	at, err = b.Append([]commitlog.Record{{Body: []byte("of the second")}})
	testkit.Must(t, err)
	testkit.Must(t, b.Sync(at+1))
	if at, err = a.Append([]commitlog.Record{{Body: []byte("too late")}}); err == nil {
		err = a.Sync(at + 1)
	}
	testkit.ErrorIs(t, err, replicated.ErrFenced, "the first owner appends")
	testkit.ErrorIs(t, a.SaveCursors([]byte("too late")), replicated.ErrFenced, "the first owner saves cursors")
	testkit.Must(t, a.Close())
	_, err = s.connect("b").Open("t", 1)
	testkit.ErrorIs(t, err, replicated.ErrFenced, "an owner of an earlier epoch claims the part")
	var batch commitlog.Batch
	testkit.Must(t, b.Read(0, commitlog.Limit{Records: 10, Bytes: 1000}, &batch))
	if len(batch.Records) != 2 || string(batch.Records[0].Body) != "of the first" || string(batch.Records[1].Body) != "of the second" {
		t.Errorf("the next owner reads %+v", batch.Records)
	}
	testkit.Must(t, b.Remove())
}

// A broker claims its part while another broker takes the part over. The first broker's stored records
// stay, and the other broker gets an error. After a takeover the part is gone, also for the former owner.
func TestTakingAPartOver(t *testing.T) {
	s := startServers(t, 3)
	store := func(l *replicated.Log, body string) error {
		at, err := l.Append([]commitlog.Record{{Body: []byte(body)}})
		if err == nil {
			err = l.Sync(at + 1)
		}
		return err
	}
	own := func() *replicated.Log {
		return testkit.Result(s.connect("b").Open("t", 0)).Must(t)
	}
	bodies := func(l *replicated.Log) (all []string) {
		var batch commitlog.Batch
		for at := commitlog.Offset(0); ; at = batch.Next {
			testkit.Must(t, l.Read(at, commitlog.Limit{Records: 10, Bytes: 1000}, &batch))
			if batch.Next == at {
				return all
			}
			for _, r := range batch.Records {
				all = append(all, string(r.Body))
			}
		}
	}
	first := own()
	testkit.Must(t, store(first, "of the first"))
	testkit.Must(t, first.SaveCursors([]byte("cursors of the first")))
	testkit.Must(t, first.Close())

	other := s.connect("c")
	for _, trims := range []bool{true, false} {
		taker := testkit.Result(other.TakeOver("t", "b")).Must(t)
		back := own()
		testkit.Must(t, store(back, "of the broker that is back"))
		testkit.Must(t, back.SaveCursors([]byte("cursors of the broker that is back")))
		end, err := taker.Append(nil)
		testkit.Must(t, err)
		if trims {
			err = taker.Trim(end)
			testkit.Must(t, taker.Close())
		} else {
			err = taker.Remove()
		}
		testkit.ErrorIs(t, err, replicated.ErrFenced, "trimming %v: a part that another has claimed since", trims)
		if got := bodies(back); !slices.Contains(got, "of the broker that is back") {
			t.Errorf("trimming %v: the broker that is back has %q", trims, got)
		}
		testkit.Equal(t, back.Stats().Unreadable, 0, "messages that are said to be gone, and were taken over")
		testkit.Must(t, back.Close())
		back = own()
		if snapshot, err := back.LoadCursors(); err != nil || string(snapshot) != "cursors of the broker that is back" {
			t.Errorf("trimming %v: cursors %q, %v", trims, snapshot, err)
		}
		testkit.Must(t, back.Close())
	}

	stale := own()
	testkit.Must(t, store(stale, "one more"))
	testkit.Must(t, stale.SaveCursors([]byte("one more")))
	taker := testkit.Result(other.TakeOver("t", "b")).Must(t)
	if got := bodies(taker); !slices.Contains(got, "one more") {
		t.Errorf("to be taken over are %q", got)
	}
	testkit.Must(t, taker.Remove())
	_, err := other.TakeOver("t", "b")
	testkit.ErrorIs(t, err, replicated.ErrNoPart, "what was taken over is taken over again")
	again := s.connect("b")
	if topics, unavailable, err := again.Topics(); err != nil || len(topics)+len(unavailable) > 0 {
		t.Errorf("its broker finds topics %q, %q unavailable, %v", topics, unavailable, err)
	}
	l, err := again.Open("t", 0)
	testkit.Must(t, err)
	if snapshot, err := l.LoadCursors(); err != nil || snapshot != nil {
		t.Errorf("it finds cursors %q, %v", snapshot, err)
	}
	testkit.Must(t, store(l, "anew"))
	testkit.ErrorIs(t, stale.SaveCursors([]byte("too late")), replicated.ErrFenced, "who had it saves cursors")
	testkit.ErrorIs(t, store(stale, "too late"), replicated.ErrFenced, "who had it stores")
	testkit.Must(t, stale.Remove())
	testkit.Must(t, store(l, "and more"))
	testkit.Must(t, l.SaveCursors([]byte("anew")))
	if got := bodies(l); len(got) != 2 {
		t.Errorf("it has %q", got)
	}
	testkit.Must(t, l.Remove())
}

// One answer of each kind is lost: a takeover, and a deletion, is sent again.
func TestAnswersAreLost(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	own, other := s.connect("b"), s.connect("c")
	nc := testkit.Result(nats.Connect(s.url())).Must(t)
	t.Cleanup(nc.Close)
	account := s.all[0].GlobalAccount()
	takeOver := func() {
		taker := testkit.Result(other.TakeOver("t", "b")).Must(t)
		testkit.EqualSlices(t, contents(t, taker), []string{"accepted"}, "to be taken over")
		testkit.Must(t, taker.Remove())
	}
	for subject, do := range map[string]func(){
		"$JS.API.STREAM.INFO.SRTM_LOG=t=b":    takeOver,
		"$JS.API.STREAM.UPDATE.SRTM_LOG=t=b":  takeOver,
		"$JS.API.STREAM.MSG.GET.SRTM_LOG=t=b": takeOver,
		"$JS.API.STREAM.MSG.GET.SRTM_CURSORS": takeOver,
		"srtm.log.t.b":                        takeOver,
		"srtm.cursors.t.b.head":               takeOver,
		"$JS.API.STREAM.PURGE.SRTM_LOG=t=b":   takeOver,
		"$JS.API.STREAM.PURGE.SRTM_CURSORS":   takeOver,
		"$JS.API.STREAM.DELETE.SRTM_LOG=t=b": func() {
			l := testkit.Result(own.Open("t", 0)).Must(t)
			testkit.Must(t, l.Remove())
		},
	} {
		l := testkit.Result(own.Open("t", 0)).Must(t)
		store(t, l, commitlog.Record{Body: []byte("accepted")})
		testkit.Must(t, l.Close())
		lost := make(chan struct{})
		found := sync.OnceFunc(func() {
			account.RemoveMapping(subject)
			close(lost)
		})
		sub := testkit.Result(nc.Subscribe("lost", func(*nats.Msg) { found() })).Must(t)
		testkit.Must(t, nc.Flush())
		testkit.Must(t, account.AddMapping(subject, "lost"))
		do()
		<-lost
		testkit.Must(t, sub.Unsubscribe())
		testkit.Must(t, nc.Flush())
	}
}

// A returning broker claims its part while the broker that took the part over empties the part.
func TestAPartIsClaimedWhileItIsEmptied(t *testing.T) {
	s := startServers(t, 1)
	own, other := s.connect("b"), s.connect("c")
	for range 100 {
		l := testkit.Result(own.Open("t", 0)).Must(t)
		testkit.Result(l.Append([]commitlog.Record{{Body: []byte("x")}})).Must(t)
		testkit.Must(t, l.Close())
		taker, err := other.TakeOver("t", "b")
		testkit.Must(t, err)
		var both sync.WaitGroup
		both.Go(func() {
			if err := taker.Remove(); err != nil && !errors.Is(err, replicated.ErrFenced) {
				t.Error(err)
			}
		})
		both.Go(func() {
			l, err := own.Open("t", 0)
			if err != nil {
				t.Error(err)
				return
			}
			testkit.NoError(t, l.Close())
		})
		both.Wait()
	}
}

// Many brokers claim a part at the same time: each claim succeeds, and the last claimant owns the
// part.
func TestManyClaimAPart(t *testing.T) {
	s := startServers(t, 3)
	first, err := s.connect("b").Open("t", 0)
	testkit.Must(t, err)
	testkit.Must(t, first.Close())
	var logs []*replicated.Log
	var mu sync.Mutex
	var all sync.WaitGroup
	for range 8 {
		c := s.connect("b")
		all.Go(func() {
			l, err := c.Open("t", 0)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			logs = append(logs, l)
			mu.Unlock()
		})
	}
	all.Wait()
	owners := 0
	for _, l := range logs {
		at, err := l.Append([]commitlog.Record{{Body: []byte("x")}})
		if err == nil {
			err = l.Sync(at + 1)
		}
		switch saved := l.SaveCursors([]byte("x")); {
		case err == nil && saved == nil:
			owners++
		case !errors.Is(err, replicated.ErrFenced) || !errors.Is(saved, replicated.ErrFenced):
			t.Errorf("stores: %v, saves: %v", err, saved)
		}
		testkit.Must(t, l.Close())
	}
	testkit.Equal(t, owners, 1, "owners")
}

// Everything reported as stored by Sync survives the loss of servers, each record at its offset.
func TestServersAreLost(t *testing.T) {
	s := startServers(t, 3)
	c := s.connect("b")
	l, err := c.Open("t", 0)
	testkit.Must(t, err)
	const writers, each = 4, 150
	var mu sync.Mutex
	acked := make(map[commitlog.Offset]string)
	var wg sync.WaitGroup
	progress := make(chan struct{}, writers*each)
	for w := range writers {
		wg.Go(func() {
			for n := range each {
				body := fmt.Sprintf("%d of %d", n, w)
				at, err := l.Append([]commitlog.Record{{Body: []byte(body)}})
				if err == nil {
					err = l.Sync(at + 1)
				}
				if err == nil {
					mu.Lock()
					acked[at] = body
					mu.Unlock()
				}
				progress <- struct{}{}
			}
		})
	}
	for i := range 3 { // one after the other, the leader among them
		for range writers * each / 6 {
			<-progress
		}
		s.stop(i)
		for range writers * each / 12 {
			<-progress
		}
		s.start(i)
		s.ready()
	}
	wg.Wait()
	if len(acked) < writers*each/10 { // more on an idle machine
		t.Errorf("of %d only %d were stored", writers*each, len(acked))
	}
	if err := l.Close(); err != nil {
		t.Logf("what was not acknowledged is not stored: %v", err)
	}
	within(t, "the stream has a leader again", func() bool {
		l, err = c.Open("t", 0)
		return err == nil
	})
	var batch commitlog.Batch
	for {
		from := batch.Next
		testkit.Must(t, l.Read(from, commitlog.Limit{Records: 100, Bytes: 1 << 20}, &batch))
		if batch.Next == from {
			break
		}
		for _, r := range batch.Records {
			if want, ok := acked[r.Offset]; ok && want != string(r.Body) {
				t.Errorf("offset %d: %q was stored, %q is read", r.Offset, want, r.Body)
			}
			delete(acked, r.Offset)
		}
	}
	if len(acked) > 0 {
		t.Errorf("%d that were stored are gone: %v", len(acked), acked)
	}
	testkit.Must(t, l.Remove())
}
