package server_test

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A second server gets none of the first server's clients.
func TestTheAddressIsTaken(t *testing.T) {
	b := newBench(t)
	first, _ := b.start()
	b.cfg.Address = first.Addr().String()
	if s, err := server.New(t.Context(), b.cfg); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second server: %v, %v", s, err)
	}
}

// clock is a server's time. Only the test moves the clock.
type clock struct {
	mu  sync.Mutex
	now time.Duration
}

func (c *clock) Now() table.Now {
	c.mu.Lock()
	defer c.mu.Unlock()
	return table.Now{Mono: mono.Time(c.now), Wall: 1_700_000_000*time.Second + c.now}
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now += d
}

// bench is a store, the servers that run on it one after the other, and the servers' time.
type bench struct {
	t     *testing.T
	path  string // of the store
	store *store.Store
	clock clock
	cfg   server.Config
}

func newBench(t *testing.T, rules ...rule.Rule) *bench {
	t.Helper()
	path := filepath.Join(t.TempDir(), "admission.db")
	s := testkit.Result(store.Open(t.Context(), path)).Must(t)
	t.Cleanup(func() { s.Close() })
	b := &bench{t: t, path: path, store: s}
	b.set(rules...)
	b.cfg = server.Config{Address: "127.0.0.1:0", Loops: 2, Store: server.NewStore(s), Now: b.clock.Now, Checkpoint: time.Hour, Poll: time.Hour, Renew: time.Hour, Advertise: "one"}
	return b
}

func (b *bench) set(rules ...rule.Rule) {
	b.t.Helper()
	testkit.Result(b.store.SetRules(b.t.Context(), rules)).Must(b.t)
}

// start runs a server until stop is called, or the test ends.
func (b *bench) start() (s *server.Server, stop func()) {
	b.t.Helper()
	s = testkit.Result(server.New(b.t.Context(), b.cfg)).Must(b.t)
	return s, testkit.Run(b.t, s.Run)
}

func (b *bench) client(s *server.Server, keys ...wire.Key) *client.Client {
	b.t.Helper()
	c := testkit.Result(client.New(client.Config{Servers: []string{s.Addr().String()}, Keys: keys, Attempts: 10_000, Wait: testkit.Hang})).Must(b.t)
	b.t.Cleanup(c.Close)
	return c
}

// sure sends a question, and fails the test without an answer.
func sure(t *testing.T, c *client.Client, key string, cost uint32) client.Decision {
	t.Helper()
	d := c.Ask(t.Context(), key, cost)
	if d.Unanswered {
		t.Fatal("no answer")
	}
	return d
}

func share(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
	return tokenbucket.Share{Rate: rate * 1000, Burst: burst}
}

// A client in the server's process is answered without a datagram once the key is known, with the same
// answers as other clients, and until the server ends.
func TestLocalClientNeedsNoDatagram(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key", Share: share(1, 4)})
	s, stop := b.start()
	byLocal := 0
	c, err := client.New(client.Config{Servers: []string{s.Addr().String()}, Attempts: 10_000, Wait: testkit.Hang, Local: func(key string, cost uint32, peek bool) (wire.Answer, bool) {
		a, ok := s.Local(key, cost, peek)
		if ok {
			byLocal++
		}
		return a, ok
	}})
	testkit.Must(t, err)
	defer c.Close()
	other := b.client(s)
	for i, test := range []struct {
		by    *client.Client
		local int
		cost  uint32
		want  client.Decision
	}{
		{c, 0, 1, client.Decision{Admit: true, Left: 3, Full: time.Second}}, // the store looks up the key
		{c, 1, 1, client.Decision{Admit: true, Left: 2, Full: 2 * time.Second}},
		{other, 1, 1, client.Decision{Admit: true, Left: 1, Full: 3 * time.Second}},
		{c, 2, 1, client.Decision{Admit: true, Full: 4 * time.Second}},
		{c, 3, 1, client.Decision{RetryAfter: time.Second}},
		{c, 4, 5, client.Decision{RetryAfter: -1, Full: 4 * time.Second}},
	} {
		if got := sure(t, test.by, "key", test.cost); got != test.want || byLocal != test.local {
			t.Errorf("%d: %+v, %d without a datagram; want %+v, %d", i, got, byLocal, test.want, test.local)
		}
	}
	b.clock.pass(time.Second)
	for range 2 {
		if d := c.Peek(t.Context(), "key", 1); d != (client.Decision{Admit: true, Full: 4 * time.Second}) || byLocal < 5 {
			t.Errorf("peek: %+v", d)
		}
	}
	stop()
	if a, ok := s.Local("key", 1, false); ok {
		t.Errorf("after the last check-point: %+v", a)
	}
}

func TestDecisions(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "user/1", Share: share(1, 2)}, rule.Rule{Key: "ip/*", Share: share(10, 1)}, rule.Rule{Key: "new", Share: share(1, 1), Shadow: true})
	s, _ := b.start()
	c := b.client(s)
	for i, test := range []struct {
		key  string
		cost uint32
		want client.Decision
	}{
		{"user/1", 1, client.Decision{Admit: true, Left: 1, Full: time.Second}},
		{"user/1", 1, client.Decision{Admit: true, Full: 2 * time.Second}},
		{"user/1", 1, client.Decision{RetryAfter: time.Second}},
		{"user/1", 3, client.Decision{RetryAfter: -1, Full: 2 * time.Second}},
		{"ip/1", 1, client.Decision{Admit: true, ByDefault: true, Full: 100 * time.Millisecond}},
		{"ip/2", 1, client.Decision{Admit: true, ByDefault: true, Full: 100 * time.Millisecond}},
		{"ip/1", 1, client.Decision{ByDefault: true, RetryAfter: 100 * time.Millisecond}},
		{"stranger", 1, client.Decision{ByDefault: true, RetryAfter: -1}},
		{"new", 1, client.Decision{Admit: true, Full: time.Second}},
		{"new", 1, client.Decision{Admit: true, Shadow: true, Full: time.Second}},
		{"", 1, client.Decision{}},
	} {
		d := client.Decision{}
		if test.key != "" {
			d = sure(t, c, test.key, test.cost)
		} else {
			d = c.Ask(t.Context(), test.key, test.cost)
		}
		testkit.Equal(t, d, test.want, "question %d", i)
	}
	b.clock.pass(time.Second)
	if d := sure(t, c, "user/1", 1); !d.Admit {
		t.Errorf("a second later: %+v", d)
	}
	if state := s.State(); state.Keys != 5 || len(state.MostDenied) != 4 || state.MostDenied[0].Key != "user/1" {
		t.Errorf("%+v", state)
	}
	states := server.NewStates(s)
	shown := testkit.Result(states.GetServerState(t.Context(), &srtmv1.GetServerStateRequest{MaxKeys: 3})).Must(t)
	testkit.Equal(t, int(shown.Keys), 5, "keys")
	testkit.Equal(t, len(shown.Nearest), 3, "keys near their limit")
	testkit.Equal(t, shown.Server, "one", "the server's name")
	if shown.Nearest[0].Key != "user/1" || shown.Nearest[0].Left != 0 {
		t.Errorf("the nearest keys: %v", shown.Nearest)
	}
	if _, err := states.GetServerState(t.Context(), &srtmv1.GetServerStateRequest{MaxKeys: 101}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("101 keys: %v", err)
	}
}

// An edit takes effect immediately for new keys, and with the next poll for other keys.
func TestRuleEditsApplyByTheNextPoll(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "old", Share: share(1, 1)}, rule.Rule{Key: "d/*", Share: share(1, 1)})
	s, _ := b.start()
	c := b.client(s)
	for _, key := range []string{"old", "d/old", "d/*"} {
		if d := sure(t, c, key, 1); !d.Admit || d.ByDefault != (key != "old") {
			t.Fatalf("%s: %+v", key, d)
		}
	}
	b.set(rule.Rule{Key: "old", Share: share(1, 5)}, rule.Rule{Key: "d/*", Share: share(1, 5)}, rule.Rule{Key: "new", Share: share(1, 5)}, rule.Rule{Key: "e/*", Share: share(1, 7)},
		rule.Rule{Key: "f/*", Share: share(1, 1)}, rule.Rule{Key: "f/**", Share: share(1, 7)})
	for key, left := range map[string]int64{"new": 4, "e/new": 6, "d/new": 4, "f/*": 6} {
		if d := sure(t, c, key, 1); !d.Admit || d.Left != left {
			t.Errorf("%s, not asked for before: %+v", key, d)
		}
	}
	// The lookup of e/new has followed all edits. The keys keep their credits: none.
	b.clock.pass(5 * time.Second)
	for _, key := range []string{"old", "d/old", "d/*"} {
		if d := sure(t, c, key, 5); !d.Admit {
			t.Errorf("%s after the edit: %+v", key, d)
		}
	}
	testkit.Result(b.store.DeleteRule(t.Context(), "old")).Must(t)
	sure(t, c, "another", 1)
	if d := sure(t, c, "old", 1); d.Admit || !d.ByDefault || d.RetryAfter != -1 {
		t.Errorf("after its rule was deleted: %+v", d)
	}
}

// What a restart may grant: nothing if the server stopped. After kill -9, the admissions since the
// last checkpoint, and nothing of a strict key.
func TestRestartGrantsNoStrictKeyTwice(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key", Share: share(1, 10)}, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	admitted := func(c *client.Client, key string) (n int) {
		t.Helper()
		for sure(t, c, key, 1).Admit {
			if n++; n > 100 {
				t.Fatal("no end")
			}
		}
		return n
	}
	s, stop := b.start()
	c := b.client(s)
	testkit.MustEqual(t, admitted(c, "key")+admitted(c, "strict"), 20, "admitted of 20")
	stop()
	s, _ = b.start() // the server is not stopped but abandoned, as if killed
	c = b.client(s)
	testkit.Equal(t, admitted(c, "key")+admitted(c, "strict"), 0, "admitted after a stop")
	b.clock.pass(4 * time.Second)
	if n := admitted(c, "key") + admitted(c, "strict"); n != 8 { // 4 of each key, which are not saved
		t.Errorf("%d admitted in 4 s", n)
	}
	link := &cable{Store: b.store}
	b.cfg.Store, b.cfg.Renew = server.NewStore(link), 20*time.Millisecond
	s, _ = b.start()
	c = b.client(s)
	if n := admitted(c, "key"); n != 4 {
		t.Errorf("%d admitted again after kill -9, want the 4 that were not saved", n)
	}
	b.clock.pass(store.Lease + 2*time.Second)
	link.renewed(t)
	testkit.Equal(t, admitted(c, "strict"), 2, "of a strict key admitted 2 s after the lease of one that was killed")
}

// A server takes the place of a running server of the same name that is cut off from the store. A
// strict key has one owner at a time.
func TestNewServerReplacesACutOffServerOfItsName(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	old := &cable{Store: b.store}
	b.cfg.Store = server.NewStore(old)
	s, _ := b.start()
	before := b.client(s)
	if d := sure(t, before, "strict", 10); !d.Admit {
		t.Fatalf("%+v", d)
	}
	old.cutOff()
	link := &cable{Store: b.store}
	b.cfg.Store, b.cfg.Renew = server.NewStore(link), 20*time.Millisecond
	s, _ = b.start()
	asks := testkit.Result(client.New(client.Config{Servers: []string{s.Addr().String()}, Attempts: 20})).Must(t)
	t.Cleanup(asks.Close)
	b.clock.pass(4 * time.Second)
	if d := asks.Peek(t.Context(), "strict", 1); d.Admit { // a question may be decided late
		t.Error("a strict key was admitted while another may own it")
	}
	if d := sure(t, before, "strict", 4); !d.Admit {
		t.Errorf("an owner whose lease runs: %+v", d)
	}
	b.clock.pass(1100 * time.Millisecond)
	if d := sure(t, before, "strict", 1); d.Admit {
		t.Error("an owner whose lease is over admitted a strict key")
	}
	b.clock.pass(2910 * time.Millisecond) // 2 s since the end of the lease
	link.renewed(t)
	old.cut.Store(false)
	if d := sure(t, b.client(s), "strict", 2); !d.Admit || d.Left != 0 {
		t.Errorf("2 s after the lease: %+v", d)
	}
}

// The store forgets full keys, whatever other keys it has.
func TestFullKeysAreForgotten(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "d/*", Share: share(10, 1)}, rule.Rule{Key: "own", Share: share(10, 10)},
		rule.Rule{Key: "slow", Share: tokenbucket.Share{Rate: 1, Burst: 1}}, rule.Rule{Key: "strict", Share: share(10, 10), Strict: true})
	b.cfg.Checkpoint = 10 * time.Millisecond
	s, _ := b.start()
	c := b.client(s)
	keys := []string{"slow", "strict", "d/*", "own"}
	for i := range 100 { // and many others
		keys = append(keys, fmt.Sprint("d/", i))
	}
	for _, key := range keys {
		if d := sure(t, c, key, 1); !d.Admit {
			t.Fatalf("%+v", d)
		}
	}
	saved := func() (left []string) {
		all := testkit.Result(b.store.Saved(t.Context(), "", 1000)).Must(t)
		for _, k := range all {
			left = append(left, k.Key)
		}
		return left
	}
	testkit.WaitFor(t, "all are saved", func() bool { return len(saved()) == len(keys) })
	b.clock.pass(time.Second)
	testkit.WaitFor(t, "those that are full are forgotten", func() bool { return len(saved()) == 1 })
	testkit.EqualSlices(t, saved(), []string{"slow"}, "left")
	if d := sure(t, c, "own", 10); !d.Admit {
		t.Errorf("%+v", d)
	}
	testkit.WaitFor(t, "what is no longer full is saved again", func() bool { return len(saved()) == 2 })
}

// However many keys are new with each checkpoint, the store keeps only the keys that are not full, and
// a few more.
func TestTheStoreDoesNotGrowForEver(t *testing.T) {
	const keys = 500
	b := newBench(t, rule.Rule{Key: "*", Share: share(1, 1), Strict: true})
	s, _ := b.start()
	c := b.client(s)
	for round := range 5 {
		var asking sync.WaitGroup
		for i := range 50 {
			asking.Go(func() {
				for k := range keys / 50 {
					c.Ask(t.Context(), fmt.Sprint(round, "/", i, "/", k), 1)
				}
			})
		}
		asking.Wait()
		s.Checkpoint(t.Context())
		b.clock.pass(time.Second)
	}
	// A check-point that the store was too slow for removes nothing. The next one makes up for it.
	testkit.WaitUntil(t, func() string {
		left := len(testkit.Result(b.store.Saved(t.Context(), "", 5*keys)).Must(t))
		if left <= 2*keys {
			return ""
		}
		s.Checkpoint(t.Context())
		return fmt.Sprintf("the store has %d keys", left)
	})
}

func TestFullServerAdmitsByDefault(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "*", Share: share(1, 5)})
	b.cfg.MaxKeys, b.cfg.AdmitFull = 64, true // one key per shard
	s, _ := b.start()
	c := b.client(s)
	byRule, full := 0, 0
	for i := range 200 {
		switch d := sure(t, c, fmt.Sprint("k", i), 1); {
		case d.Admit && d.Left == 4:
			byRule++
		case d.Admit && d.ByDefault:
			full++
		}
	}
	if byRule > 64 || byRule < 40 || byRule+full != 200 {
		t.Errorf("%d by the rule and %d by --full-reply, of 200", byRule, full)
	}
	if n := s.State().Keys; n != byRule {
		t.Errorf("%d keys in memory, %d have been there", n, byRule)
	}
}

// raw is a socket that sends arbitrary datagrams.
type raw struct {
	t      *testing.T
	conn   net.Conn
	sealer *wire.Sealer
}

func newRaw(t *testing.T, s *server.Server, keys ...wire.Key) *raw {
	t.Helper()
	conn := testkit.Result(net.Dial("udp", s.Addr().String())).Must(t)
	t.Cleanup(func() { conn.Close() })
	sealer := testkit.Result(wire.NewSealer(keys)).Must(t)
	return &raw{t, conn, sealer}
}

// send sends each datagram and then a hello, and returns all answers up to the answer to the hello.
// The server sends immediate answers in order.
func (r *raw) send(datagrams ...[]byte) (answers []wire.Answer) {
	r.t.Helper()
	const last = 1<<64 - 1
	for _, d := range append(slices.Clip(datagrams), r.sealer.AppendQuestion(nil, wire.Question{Kind: wire.Hello, Number: last})) {
		testkit.Result(r.conn.Write(d)).Must(r.t)
	}
	var in [100]byte
	for {
		r.conn.SetReadDeadline(time.Now().Add(testkit.Hang)) // against a hang
		n := testkit.Result(r.conn.Read(in[:])).Must(r.t)
		if n > wire.MinQuestion {
			r.t.Fatalf("an answer of %d bytes", n)
		}
		a, err := r.sealer.ParseAnswer(in[:n])
		testkit.Must(r.t, err)
		answers = append(answers, a)
		if a.Number == last {
			return answers
		}
	}
}

func (r *raw) ask(session, number uint64, key string) []byte {
	return r.sealer.AppendQuestion(nil, wire.Question{Kind: wire.Ask, Session: session, Number: number, Cost: 1, Key: []byte(key)})
}

// A repeated question gets the same answer and is charged once, also after an hour. A question that is
// replayed from elsewhere, or after a restart, is not charged.
func TestNothingIsChargedTwice(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key", Share: tokenbucket.Share{Rate: 1, Burst: 1000}})
	s, stop := b.start()
	sure(t, b.client(s), "key", 1) // the key is in memory from now on, and has 999
	left := func(want int64) {
		t.Helper()
		if d := b.client(s).Peek(t.Context(), "key", 0); d.Left != want {
			t.Errorf("%d credits left, want %d", d.Left, want)
		}
	}
	r := newRaw(t, s)
	session := r.send()[0].Session
	first := r.ask(session, 100, "key")
	answers := r.send(first, first, r.ask(session, 101, "key"), first)
	if len(answers) != 5 || answers[0] != answers[1] || answers[0] != answers[3] || answers[0].Value != 998 || answers[2].Value != 997 {
		t.Fatalf("%+v", answers)
	}
	left(997)
	// A window further, the first is old.
	newest := r.ask(session, 100+table.WindowSize, "key")
	if answers = r.send(newest, first); len(answers) != 2 {
		t.Errorf("%+v", answers)
	}
	before := answers[0]
	left(996)
	// An hour later, other clients get another session and the client keeps its own session, even
	// after a copy of a question that the client sent without a session.
	b.clock.pass(time.Hour)
	issued := r.send(r.ask(0, 100+table.WindowSize, "key"))[0].Session
	if answers = r.send(r.ask(issued, 100+table.WindowSize, "key"), newest, first); len(answers) != 3 || answers[0] != before || answers[1] != before {
		t.Errorf("%+v, and an hour before %+v", answers, before)
	}
	r.send(r.ask(issued, 5000, "key"), r.ask(issued, 5001, "key"))
	left(997) // an hour at 0.001/s, less two
	other := newRaw(t, s)
	if answers = other.send(r.ask(session, 2, "key")); len(answers) != 2 || answers[0].Kind != wire.Issued || answers[0].Session == session {
		t.Errorf("from another address: %+v", answers)
	}
	left(997)
	stop()
	b.cfg.Address = s.Addr().String()
	s, _ = b.start()
	if answers = r.send(r.ask(session, 3, "key")); len(answers) != 2 || answers[0].Kind != wire.Issued {
		t.Errorf("after a restart: %+v", answers)
	}
	left(997)
}

// Garbage, wrong MACs and questions without a session change nothing. The server answers nothing, or
// no more bytes than the datagram had.
func TestHostileDatagrams(t *testing.T) {
	key := wire.Key{ID: 3, Secret: []byte("0123456789abcdef")}
	b := newBench(t, rule.Rule{Key: "key", Share: tokenbucket.Share{Rate: 1, Burst: 1000}})
	b.cfg.Keys = []wire.Key{key}
	s, _ := b.start()
	c := b.client(s, key)
	sure(t, c, "key", 1)
	r := newRaw(t, s, key)
	session := r.send()[0].Session
	good := r.ask(session, 1, "key")
	var hostile [][]byte
	for i := range good {
		hostile = append(hostile, good[:i])
		changed := append([]byte(nil), good...)
		changed[i] ^= 0x40
		hostile = append(hostile, changed)
	}
	unsigned := testkit.Result(wire.NewSealer(nil)).Must(t)
	hostile = append(hostile, unsigned.AppendQuestion(nil, wire.Question{Kind: wire.Ask, Session: session, Number: 2, Cost: 1, Key: []byte("key")}), make([]byte, 9000))
	for len(hostile) > 0 { // a few at a time: a socket's buffer is finite
		n := min(8, len(hostile))
		if answers := r.send(hostile[:n]...); len(answers) != 1 {
			t.Fatalf("answered: %+v", answers)
		}
		hostile = hostile[n:]
	}
	if answers := r.send(good); len(answers) != 2 || answers[0].Kind != wire.Reply || answers[0].Value != 998 {
		t.Errorf("%+v", answers)
	}
}

func TestSessionsAreBounded(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key", Share: share(1, 1000)})
	b.cfg.Loops, b.cfg.MaxSessions = 1, 3
	s, _ := b.start()
	sure(t, b.client(s), "key", 1)
	decided := func(r *raw) bool { return r.send(r.ask(r.send()[0].Session, 1, "key"))[0].Kind == wire.Reply }
	two := []*raw{newRaw(t, s), newRaw(t, s)}
	for i, r := range two {
		if !decided(r) {
			t.Errorf("asker %d of those that there is room for was refused", i)
		}
	}
	late := newRaw(t, s)
	if decided(late) {
		t.Error("there is room for 3 askers, and 4 were known")
	}
	b.clock.pass(3 * time.Minute) // the other sessions, which may have ended, have sent nothing in this time
	if !decided(late) {
		t.Error("no room after the others were silent")
	}

	// The server has room for as many sessions if the kernel gives one loop more clients than another.
	b.cfg.Loops, b.cfg.MaxSessions, b.cfg.Advertise = 2, 16, "two"
	b.cfg.Address = "127.0.0.1:0"
	s, _ = b.start()
	known := 0
	for range b.cfg.MaxSessions + 5 {
		r := newRaw(t, s)
		if r.send(r.ask(r.send()[0].Session, 1, "key"))[0].Kind != wire.Busy {
			known++
		}
	}
	testkit.Equal(t, known, b.cfg.MaxSessions, "askers known")
}
