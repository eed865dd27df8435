package server

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// records is a store with the operations of operators.
type records interface {
	RuleStore
	CreditStore
	MemberStore
	Move(ctx context.Context, first, last int, to string) error
	SetRules(ctx context.Context, rules []rule.Rule) (change uint64, err error)
	DeleteRule(ctx context.Context, key string) (change uint64, err error)
}

// world is servers on one store, and their clients. One goroutine drives all servers step by step in
// virtual time. Only answers to looked-up questions go through sockets. The clients read these answers
// immediately.
type world struct {
	t        *rapid.T
	now      time.Duration
	records  records
	nodes    []*node
	asker    *net.UDPConn
	from     rawfd.Address // the client's address
	sealer   *wire.Sealer
	number   uint64 // of the last question
	asked    map[uint64]datagram
	flight   []datagram
	requests []*request
	charges  map[string][]*charge // by key
	denied   map[uint64]bool      // numbers of questions that the client has denied and cancelled
	deep     bool                 // a step within a step
	late     []func()             // messages that were sent to a follower, and arrive again
}

// node is a server. Each of its store operations may take time, and fails while the node is cut off.
type node struct {
	*Server
	records
	w         *world
	name      string
	dead, cut bool
	isolated  bool // cut off from other servers
	unsaved   map[string][]*charge
	answers   map[uint64]wire.Answer // by number
	session   uint64
	recovered *node // the follower that saved what the previous server of this name had sent
	follows   int64 // instance of its follower, from its last renewal
}

// charge is what a server charged for an admitted request.
type charge struct {
	cost   int64
	at     time.Duration
	saved  bool
	node   *node
	epoch  uint32 // of the key's partition, as the node knew the epoch
	with   *node  // the follower that was sent the key's credit after the charge
	number uint64 // of the question
}

// request is a request that a client wants decided once. The client tries another server if a server
// answers that another server owns the key.
type request struct {
	key     string
	cost    uint32
	charged int
}

// datagram is a question in flight.
type datagram struct {
	request *request
	node    *node
	number  uint64
	session uint64
}

var errLink = errors.New("no answer of the store")

func (w *world) chance(one int, of string) bool { return rapid.IntRange(1, one).Draw(w.t, of) == one }

func (w *world) pass(most time.Duration) {
	w.now += time.Duration(rapid.Int64Range(0, int64(most)).Draw(w.t, "ns"))
}

func (n *node) do(what func() error) error {
	if n.w.chance(8, "slow store") {
		n.w.pass(2 * time.Second)
	}
	if n.cut {
		return errLink
	}
	err := what()
	if n.w.chance(6, "lost answer") {
		err = cmp.Or(err, errLink)
	}
	if n.w.chance(8, "slow answer") {
		n.w.pass(2 * time.Second)
	}
	return err
}

// epoch returns the epoch of the key's partition, as the server knows it.
func (n *node) epoch(key string) uint32 {
	return n.owners.Load().all[rule.Partition(key, rule.Partitions)].Epoch
}

func (n *node) saved(err error, credits []table.Credit) error {
	for _, c := range credits {
		if err == nil {
			for _, was := range n.unsaved[c.Key] {
				was.saved = was.epoch == n.epoch(c.Key) // or the charge was dropped before
			}
			delete(n.unsaved, c.Key)
		}
	}
	return err
}

func (n *node) SaveCredits(ctx context.Context, me store.Member, owners uint64, credits []table.Credit) error {
	return n.do(func() error { return n.saved(n.records.SaveCredits(ctx, me, owners, credits), credits) })
}

func (n *node) HandOver(ctx context.Context, me store.Member, to string, partitions []int, credits []table.Credit) error {
	for n.w.chance(2, "meanwhile") { // questions about the moving partition
		n.w.arrive()
	}
	return n.do(func() error { return n.saved(n.records.HandOver(ctx, me, to, partitions, credits), credits) })
}

func (n *node) Join(ctx context.Context, me store.Member, wall func() time.Duration) (floor time.Duration, err error) {
	err = n.do(func() error {
		n.w.now += time.Millisecond // the store's time advances by at least a millisecond
		floor, err = n.records.Join(ctx, me, wall)
		n.inherits(n.recovered)
		return err
	})
	n.recovered = nil
	return floor, err
}

func (n *node) Claim(ctx context.Context, me, from, follower store.Member, wall time.Duration) (floor time.Duration, err error) {
	err = n.do(func() error {
		n.w.now += time.Millisecond
		floor, err = n.records.Claim(ctx, me, from, follower, wall)
		if err == nil && from.Follower == me.Instance {
			n.inherits(n)
		}
		return err
	})
	return floor, err
}

func (n *node) Renew(ctx context.Context, me store.Member) (members []store.Member, owners uint64, err error) {
	err = n.do(func() error { members, owners, err = n.records.Renew(ctx, me); return err })
	if me.Follower != n.follows { // the previous follower may forget
		for _, unsaved := range n.unsaved {
			for _, c := range unsaved {
				c.with = nil
			}
		}
		n.follows = me.Follower
	}
	return members, owners, err
}

func (n *node) Owners(ctx context.Context) (all []store.Partition, number uint64, err error) {
	err = n.do(func() error { all, number, err = n.records.Owners(ctx); return err })
	return all, number, err
}

func (n *node) Leave(ctx context.Context, me store.Member) error {
	n.w.now += time.Millisecond
	return n.do(func() error { return n.records.Leave(ctx, me) })
}

func (n *node) Forget(ctx context.Context, credits []table.Credit) error {
	return n.do(func() error { return n.records.Forget(ctx, credits) })
}

// Anything may happen between reading credits and using them.
func (n *node) Credits(ctx context.Context, keys []string) (c map[string]table.Credit, err error) {
	err = n.do(func() error { c, err = n.records.Credits(ctx, keys); return err })
	if !n.w.deep && n.w.chance(3, "meanwhile") {
		n.w.deep = true
		for range rapid.IntRange(1, 4).Draw(n.w.t, "steps meanwhile") {
			n.w.step()
		}
		n.w.deep = false
	}
	return c, err
}

func (n *node) Changes(ctx context.Context, after uint64, most int) (changes []store.Change, err error) {
	err = n.do(func() error { changes, err = n.records.Changes(ctx, after, most); return err })
	return changes, err
}

// inherits makes a server answer for everything that a follower knew and saved, if it was admitted in
// the epoch before the server's epoch.
func (n *node) inherits(follower *node) {
	all, _, err := n.records.Owners(context.Background())
	testkit.Must(n.w.t, err)
	for key, charges := range n.w.charges {
		p := all[rule.Partition(key, rule.Partitions)]
		for _, c := range charges {
			if follower != nil && p.Owner == n.name && c.with == follower && c.epoch+1 == p.Epoch && !c.saved {
				c.node, c.epoch, c.saved = n, p.Epoch, true
			}
		}
	}
}

// link is a server's connection to another server. The link loses requests and answers.
type link struct {
	from    *node
	address string
}

// reach returns one of the processes that have the address. A request may be lost.
func (l link) reach() (*node, error) {
	w := l.from.w
	var at []*node
	for _, n := range w.nodes {
		if n.name == l.address && !n.dead {
			at = append(at, n)
		}
	}
	if w.chance(8, "slow link") {
		w.pass(2 * time.Second)
	}
	if len(at) == 0 || l.from.isolated || w.chance(5, "lost request") {
		return nil, errLink
	}
	to := at[rapid.IntRange(0, len(at)-1).Draw(w.t, "process")]
	if to.isolated {
		return nil, errLink
	}
	return to, nil
}

func (l link) Replicate(ctx context.Context, q *srtmv1.ReplicateRequest, _ ...grpc.CallOption) (*srtmv1.ReplicateResponse, error) {
	w := l.from.w
	to, err := l.reach()
	if err != nil {
		return nil, err
	}
	if w.chance(3, "again") {
		w.late = append(w.late, func() { _, _ = to.Server.Replicate(ctx, q) })
	}
	a, err := to.Server.Replicate(ctx, q)
	if err == nil {
		for _, credit := range q.GetCredits() {
			for _, c := range l.from.unsaved[credit.GetKey()] {
				if c.epoch == credit.GetEpoch() {
					c.with = to
				}
			}
		}
	}
	if w.chance(5, "lost answer") {
		err = cmp.Or(err, errLink)
	}
	if w.chance(8, "slow link") {
		w.pass(2 * time.Second)
	}
	return a, err
}

// sent is a stream of prepared messages.
type sent struct {
	grpc.ClientStream
	srtmv1.AdmissionReplication_RecoverServer
	all []*srtmv1.RecoverResponse
}

func (s *sent) Context() context.Context { return context.Background() }
func (s *sent) RecvMsg(any) error        { return nil }
func (s *sent) SendMsg(any) error        { return nil }
func (s *sent) Send(r *srtmv1.RecoverResponse) error {
	s.all = append(s.all, r)
	return nil
}

func (s *sent) Recv() (*srtmv1.RecoverResponse, error) {
	if len(s.all) == 0 {
		return nil, io.EOF
	}
	r := s.all[0]
	s.all = s.all[1:]
	return r, nil
}

func (l link) Recover(_ context.Context, q *srtmv1.RecoverRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[srtmv1.RecoverResponse], error) {
	to, err := l.reach()
	if err != nil {
		return nil, err
	}
	all := &sent{}
	err = to.Server.Recover(q, all)
	if l.from.w.chance(5, "lost answer") {
		err = cmp.Or(err, errLink)
	}
	if err == nil {
		l.from.recovered = to
	}
	return all, err
}

const wallStart = 1_700_000_000 * time.Second

// start starts another server, or the next process of a name whose process has ended or is cut off.
func (w *world) start(name string) {
	n := &node{records: w.records, w: w, name: name, unsaved: map[string][]*charge{}, answers: map[uint64]wire.Answer{}}
	s, err := New(context.Background(), Config{
		Address: "127.0.0.1:0", Advertise: name, MaxKeys: 6400, Store: NewStore(n),
		Now:       func() table.Now { return table.Now{Mono: mono.Time(w.now), Wall: wallStart + w.now} },
		Replicate: name,
		Dial: func(address string) (srtmv1.AdmissionReplicationClient, func() error, error) {
			return link{n, address}, func() error { return nil }, nil
		},
	})
	if err == nil {
		n.Server = s
		w.nodes = append(w.nodes, n)
	} else if !errors.Is(err, errLink) {
		w.t.Fatal(err)
	}
}

// living picks a random working server, or nil if there is none.
func (w *world) living() *node {
	living := slices.DeleteFunc(slices.Clone(w.nodes), func(n *node) bool { return n.dead })
	if len(living) == 0 {
		return nil
	}
	return living[rapid.IntRange(0, len(living)-1).Draw(w.t, "server")]
}

func (n *node) end() {
	n.dead = true
	n.Close()
}

// got takes the answer to a question. The answer may be lost now and then, but the server gave it.
func (w *world) got(d datagram, a wire.Answer) {
	n := d.node
	before, again := n.answers[d.number]
	if a.Kind == wire.Reply || a.Kind == wire.Moved {
		if again && before != a {
			w.t.Fatalf("question %d: %+v, and then %+v", d.number, before, a)
		}
		n.answers[d.number] = a
	}
	switch {
	case again:
	case a.Kind == wire.Reply:
		if a.Flags&wire.Admit == 0 || d.request.cost == 0 {
			return
		}
		if w.denied[d.number] {
			w.t.Fatalf("question %d is admitted after its asker has denied it", d.number)
		}
		c := &charge{cost: int64(d.request.cost), at: w.now, node: n, epoch: n.epoch(d.request.key), number: d.number}
		w.charges[d.request.key] = append(w.charges[d.request.key], c)
		n.unsaved[d.request.key] = append(n.unsaved[d.request.key], c)
		d.request.charged++
	case a.Kind == wire.Issued:
		n.session = a.Session
		d.session = n.session
		w.flight = append(w.flight, d)
	case a.Kind == wire.Moved:
		if to := w.living(); to != nil && !w.chance(4, "lost answer") {
			w.ask(d.request, to)
		}
	}
}

func (w *world) ask(r *request, to *node) {
	w.number++
	w.asked[w.number] = datagram{r, to, w.number, to.session}
	w.flight = append(w.flight, w.asked[w.number])
}

func (w *world) step() {
	ctx := context.Background()
	n := w.living()
	if n == nil {
		w.start(rapid.SampledFrom(names).Draw(w.t, "name"))
		return
	}
	switch what := rapid.IntRange(0, 26).Draw(w.t, "what"); {
	case what < 3:
		w.pass(4 * time.Second)
	case what < 8: // questions: some arrive, some arrive twice or late, some are lost
		w.questions(n)
	case what < 9:
		w.arrive()
		if w.chance(2, "cancel") {
			w.cancel()
		}
		w.lookUps(n)
	case what < 12:
		_ = n.reconcileOnce(ctx) // failures are tried again
	case what < 14:
		if n.checkpoint(ctx, time.Minute) == nil {
			_ = n.sweeper.sweep(ctx)
		}
	case what < 16:
		p := rule.Partition(rapid.SampledFrom(keys).Draw(w.t, "moved"), rule.Partitions)
		if err := w.records.Move(ctx, p, p, n.name); err != nil && !errors.Is(err, store.ErrNoServer) {
			w.t.Fatal(err)
		}
	case what == 16:
		n.cut = !n.cut
	case what == 18:
		n.isolated = !n.isolated
	case what == 17 && w.chance(2, "kill -9"):
		n.end()
	case what == 17: // a server stops in order
		if n.checkpoint(ctx, time.Minute) == nil {
			_ = n.Leave(ctx, n.me)
		}
		n.end()
	case what == 24 && len(w.late) > 0:
		w.late[rapid.IntRange(0, len(w.late)-1).Draw(w.t, "late")]()
	case what == 20: // all living servers look at the store, and at each other
		rounds := rapid.IntRange(1, 5).Draw(w.t, "rounds")
		if w.chance(12, "long") {
			rounds = 40
		}
		for range rounds {
			w.pass(3 * time.Second)
			for _, n := range w.nodes {
				if !n.dead && !w.chance(8, "late") {
					_ = n.reconcileOnce(ctx)
					_ = n.replicateOnce(ctx)
				}
			}
			if w.chance(2, "questions") {
				w.questions(n)
			}
		}
	case what == 25: // with the same share, whether the share is the key's own or a default
		r := rapid.SampledFrom(rulesOf()).Draw(w.t, "rule")
		var err error
		if r.Default() || w.chance(2, "own") {
			_, err = w.records.SetRules(ctx, []rule.Rule{r})
		} else {
			_, err = w.records.DeleteRule(ctx, r.Key)
		}
		if err != nil && !errors.Is(err, store.ErrNoRule) {
			w.t.Fatal(err)
		}
	case what == 26:
		_ = n.rules.poll(ctx)
	case what > 20 && what < 24:
		_ = n.replicateOnce(ctx)
	case len(w.nodes) < 8: // the name may belong to another server that is still running
		w.start(rapid.SampledFrom(names).Draw(w.t, "name"))
	}
}

// questions sends a client's questions to a server.
func (w *world) questions(n *node) {
	for range rapid.IntRange(1, 4).Draw(w.t, "questions") {
		r := &request{key: rapid.SampledFrom(keys).Draw(w.t, "key"), cost: uint32(rapid.IntRange(0, 5).Draw(w.t, "cost"))}
		w.requests = append(w.requests, r)
		w.ask(r, n)
		for !w.chance(3, "later") {
			w.arrive()
		}
	}
	w.lookUps(n)
}

// arrive delivers a question, most often the last question, and perhaps again later.
func (w *world) arrive() {
	if len(w.flight) == 0 {
		return
	}
	i := len(w.flight) - 1
	if w.chance(3, "out of order") {
		i = rapid.IntRange(0, i).Draw(w.t, "which")
	}
	d := w.flight[i]
	if !w.chance(4, "duplicate") {
		w.flight = slices.Delete(w.flight, i, i+1)
	}
	if d.node.dead {
		return
	}
	wait := uint32(rapid.SampledFrom([]int{0, 100, 10_000}).Draw(w.t, "wait"))
	q := wire.Question{Kind: wire.Ask, Session: d.session, Number: d.number, Cost: d.request.cost, Wait: wait, Key: []byte(d.request.key)}
	if a, _, ok := d.node.loops[0].handle(w.sealer.AppendQuestion(nil, q), w.from); ok {
		w.got(d, a)
	}
}

// cancel lets a client deny one of its last questions, as if no answer had come. The charge for the
// question counts as not admitted. The client reports this to the server, perhaps after other charges.
func (w *world) cancel() {
	first := max(1, w.number-min(w.number, 4))
	d := w.asked[rapid.Uint64Range(first, max(first, w.number)).Draw(w.t, "cancelled")]
	if d.node == nil || d.node.dead || d.node.session == 0 || w.denied[d.number] {
		return
	}
	w.denied[d.number] = true
	q := wire.Question{Kind: wire.Cancel, Session: d.node.session, Number: d.number, Cost: d.request.cost, Key: []byte(d.request.key)}
	if a, _, ok := d.node.loops[0].handle(w.sealer.AppendQuestion(nil, q), w.from); ok {
		w.t.Fatalf("%+v is the answer to a question that was cancelled", a)
	}
	delete(d.node.answers, d.number)
}

func (w *world) lookUps(n *node) {
	for {
		select {
		case key := <-n.lookups.queue:
			w.lookUp(n, key)
		default:
			return
		}
	}
}

// lookUp looks up a key and the keys that wait behind it, and the clients read their answers.
func (w *world) lookUp(n *node, key string) {
	n.lookUpAll(context.Background(), n.lookups.next(key), n.loops[0].sealer)
	raw, err := w.asker.SyscallConn()
	testkit.Must(w.t, err)
	for size := 1; size > 0; { // loopback has delivered everything that was sent
		var in [100]byte
		testkit.Must(w.t, raw.Control(func(fd uintptr) { size, _, _ = unix.Recvfrom(int(fd), in[:], unix.MSG_DONTWAIT) }))
		if size > 0 {
			a, err := w.sealer.ParseAnswer(in[:size])
			testkit.Must(w.t, err)
			w.got(w.asked[a.Number], a)
		}
	}
}

// within fails if more was admitted in any interval than the share allows.
func within(t *rapid.T, key string, share tokenbucket.Share, all []*charge) {
	for i := range all {
		sum := int64(0)
		for _, c := range all[i:] {
			sum += c.cost
			most := big.NewRat(int64(share.Rate)*int64(c.at-all[i].at), 1e12)
			if most.Add(most, big.NewRat(share.Burst, 1)); big.NewRat(sum, 1).Cmp(most) > 0 {
				t.Fatalf("key %s, %v: %d admitted from %v to %v", key, share, sum, all[i].at, c.at)
			}
		}
	}
}

// check verifies the guarantees. A strict key is never above its rule, over all servers. Any other key
// is never above its rule, apart from a server's admissions after its last checkpoint before it ended
// or was replaced, and its admissions after that. No request is charged more than once, however many
// servers get the question.
func (w *world) check() {
	owners, _, err := w.records.Owners(context.Background())
	testkit.Must(w.t, err)
	for key, share := range shares {
		p := owners[rule.Partition(key, rule.Partitions)]
		known := slices.DeleteFunc(slices.Clone(w.charges[key]), func(c *charge) bool { return w.denied[c.number] })
		if strings.HasPrefix(key, "loose") {
			known = slices.DeleteFunc(slices.Clone(known), func(c *charge) bool {
				return !c.saved && (c.node.dead || p.Owner != c.node.name || p.Epoch != c.epoch)
			})
		}
		within(w.t, key, share, known)
	}
	for _, r := range w.requests {
		if r.charged > 1 {
			w.t.Fatalf("a request for key %s was charged %d times", r.key, r.charged)
		}
	}
}

func run(t *rapid.T, records records) {
	asker := testkit.Result(net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})).Must(t)
	defer asker.Close()
	from := testkit.Result(addressOf(asker)).Must(t)
	w := &world{t: t, records: records, asker: asker, from: from, charges: map[string][]*charge{}, asked: map[uint64]datagram{}, denied: map[uint64]bool{}}
	w.sealer = testkit.Result(wire.NewSealer(nil)).Must(t)
	defer func() {
		for _, n := range w.nodes {
			n.Close()
		}
	}()
	for range rapid.IntRange(20, 150).Draw(t, "steps") {
		w.step()
	}
	w.check()
}

func rulesOf() (all []rule.Rule) {
	for _, key := range keys {
		r := rule.Rule{Key: key, Share: shares[key], Strict: strings.HasPrefix(key, "strict")}
		all = append(all, r)
		r.Key += "*"
		all = append(all, r)
	}
	return all
}

// The guarantee of the package holds for servers that are started, stopped, killed, replaced and cut
// off. The store's answers are late or lost, partitions move, datagrams are lost, repeated and
// reordered, and rules are edited.
func TestGuaranteeHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { run(t, newMemory(rulesOf())) })
}

// Runs the same property on a real store, once, because a run takes long.
func TestGuaranteeHoldsOnSQLite(t *testing.T) {
	checks := flag.Lookup("rapid.checks")
	before := checks.Value.String()
	defer func() { _ = checks.Value.Set(before) }()
	testkit.Must(t, checks.Value.Set("1"))
	dir, i := t.TempDir(), 0
	rapid.Check(t, func(t *rapid.T) {
		i++
		s := testkit.Result(store.Open(context.Background(), filepath.Join(dir, fmt.Sprint(i)))).Must(t)
		defer s.Close()
		testkit.Result(s.SetRules(context.Background(), rulesOf())).Must(t)
		run(t, s)
	})
}

var (
	names  = []string{"a", "b", "c"}
	keys   = []string{"strict", "loose"}
	shares = map[string]tokenbucket.Share{keys[0]: {Rate: 300, Burst: 5}, keys[1]: {Rate: 300, Burst: 5}}
)

// addressOf finds the address of a socket from a datagram that the socket sends.
func addressOf(conn *net.UDPConn) (from rawfd.Address, err error) {
	to, err := rawfd.ListenUDP("127.0.0.1:0", 1, 1)
	if err != nil {
		return from, err
	}
	if _, err = conn.WriteToUDPAddrPort([]byte{0}, to.Addr()); err == nil {
		_, err = to.Receive(0)
	}
	_, from = to.Datagram(0)
	return from, errors.Join(err, to.Close())
}
