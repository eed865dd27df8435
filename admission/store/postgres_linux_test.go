package store_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestPostgreSQL(t *testing.T) {
	database, _, _ := testkit.PostgreSQL(t, "")
	t.Run("followers", func(t *testing.T) { followers(t, another(t, database, "followers")) })
	t.Run("owners", func(t *testing.T) { owners(t, database) })
	suite(t, database)
}

// A server that is cut off in the middle of a transaction does not block the transactions of others.
func TestAnAbandonedTransaction(t *testing.T) {
	t.Parallel()
	url, _, _ := testkit.PostgreSQL(t, "")
	one, other := open(t, url), open(t, url)
	locked, release, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		_, err := one.Join(context.Background(), store.Member{Address: "one", Instance: 1}, func() time.Duration {
			close(locked)
			<-release
			return 0
		})
		ended <- err
	}()
	<-locked
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	_, err := other.Join(ctx, store.Member{Address: "other", Instance: 2}, at(0))
	testkit.NoError(t, err)
	close(release)
	if err := <-ended; err == nil {
		t.Error("the transaction that was given up has succeeded")
	}
}

// An unreachable database is reported within the caller's time, and nothing changes.
func TestPostgreSQLIsAway(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if s, err := store.Open(ctx, "postgres:///postgres?user=srtm&host="+t.TempDir()); err == nil {
		s.Close()
		t.Error("a database was opened that is not there")
	}
}

// A credit takes 1000 s.
var (
	share = tokenbucket.Share{Rate: 1, Burst: 10}
	rules = []rule.Rule{{Key: "key", Share: share}, {Key: "strict", Share: share, Strict: true}}
)

// serve runs a server until stop, or the test's end. With ln the server replicates, and receives
// replication on ln.
func serve(t *testing.T, db *store.Store, name string, ln net.Listener) (s *server.Server, c *client.Client, stop func()) {
	t.Helper()
	cfg := server.Config{Address: "127.0.0.1:0", Advertise: name, Store: server.NewStore(db), Checkpoint: 20 * time.Millisecond, Renew: 100 * time.Millisecond}
	if ln != nil {
		cfg.Replicate = ln.Addr().String()
		cfg.Dial = func(address string) (srtmv1.AdmissionReplicationClient, func() error, error) {
			conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
			return srtmv1.NewAdmissionReplicationClient(conn), conn.Close, err
		}
	}
	s = testkit.Result(server.New(t.Context(), cfg)).Must(t)
	if ln != nil {
		rpc := grpc.NewServer()
		srtmv1.RegisterAdmissionReplicationServer(rpc, s)
		go func() { _ = rpc.Serve(ln) }()
		t.Cleanup(rpc.Stop)
	}
	end := testkit.Run(t, s.Run)
	c = testkit.Result(client.New(client.Config{Servers: []string{s.Addr().String()}, Attempts: 10_000, Wait: testkit.Hang})).Must(t)
	stop = sync.OnceFunc(func() {
		c.Close()
		end()
	})
	t.Cleanup(stop)
	return s, c, stop
}

// holds reports whether the store has saved these credits of both keys.
func holds(t *testing.T, db *store.Store, want tokenbucket.Tokens) func() bool {
	return func() bool {
		for _, key := range []string{"key", "strict"} {
			if c, err := savedOf(db, key); err != nil || c == nil || c.Credits/tokenbucket.Token != want {
				return false
			}
		}
		return true
	}
}

// kill -9 of PostgreSQL under a server. The server continues with its credits and saves them when the
// database is back. Over the whole time each key is admitted its capacity, and no more.
func TestPostgreSQLIsKilled(t *testing.T) {
	database, kill, start := testkit.PostgreSQL(t, "")
	db := testkit.Result(store.Open(t.Context(), database)).Must(t)
	t.Cleanup(func() { db.Close() }) // after the servers
	testkit.Result(db.SetRules(t.Context(), rules)).Must(t)
	_, c, stop := serve(t, db, "one", nil)
	admitted := func(key string, cost uint32) func() bool {
		return func() bool { return c.Ask(t.Context(), key, cost).Admit }
	}
	for _, key := range []string{"key", "strict"} {
		testkit.WaitFor(t, "a key is admitted", admitted(key, 3))
	}
	testkit.WaitFor(t, "they are saved", holds(t, db, 7))
	kill()
	if d := c.Ask(t.Context(), "key", 1); !d.Admit || d.Left != 6 {
		t.Errorf("without its store: %+v", d)
	}
	start()
	testkit.WaitFor(t, "a strict key, after the lease was renewed", admitted("strict", 1))
	testkit.WaitFor(t, "what was admitted meanwhile is saved", holds(t, db, 6))
	stop()
	kill()
	start()
	if _, c, _ = serve(t, db, "one", nil); !admitted("key", 6)() || !admitted("strict", 6)() {
		t.Error("less is left than was saved")
	}
	if admitted("key", 1)() || admitted("strict", 1)() {
		t.Error("more was admitted than the capacity")
	}
}

// network is a namespace at the other end of a link.
type network struct {
	testkit.Namespace
	address string // address in the namespace
}

var networks atomic.Int64

func newNetwork(t *testing.T) network {
	t.Helper()
	n := network{Namespace: testkit.NewNamespace(t)}
	number := networks.Add(1)
	link := fmt.Sprintf("adm%d-%d", os.Getpid()%1_000_000, number)
	address := func(host int) string { // a different address for each parallel test
		return fmt.Sprintf("10.%d.%d.%d", 90+number, os.Getpid()/64%256, os.Getpid()%64*4+host)
	}
	n.address = address(2)
	testkit.IP(t, "link", "add", link, "type", "veth", "peer", "name", "veth0", "netns", n.Name)
	testkit.IP(t, "addr", "add", address(1)+"/30", "dev", link)
	testkit.IP(t, "link", "set", link, "up")
	n.IP("addr", "add", n.address+"/30", "dev", "veth0")
	n.heal()
	return n
}

func (n network) cut()  { n.IP("link", "set", "veth0", "down") }
func (n network) heal() { n.IP("link", "set", "veth0", "up") }

func open(t *testing.T, url string) *store.Store {
	t.Helper()
	db := testkit.Result(store.Open(t.Context(), url)).Must(t)
	t.Cleanup(func() { db.Close() })
	return db
}

// A database that accepts connections but does not answer does not block a caller for ever.
func TestPostgreSQLIsSilent(t *testing.T) {
	t.Parallel()
	far := newNetwork(t)
	far.Inside(func() { testkit.PostgreSQL(t, far.address) })
	db := open(t, "postgres://srtm@"+far.address+"/postgres?sslmode=disable")
	t.Cleanup(far.heal)
	read := func(ctx context.Context) error { _, err := db.Defaults(ctx); return err }
	write := func(ctx context.Context) error { _, err := db.SetRules(ctx, rules); return err }
	for _, do := range []func(context.Context) error{read, write} {
		far.heal()
		testkit.WaitFor(t, "an answer", func() bool { return do(t.Context()) == nil })
		far.cut()
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
		defer cancel()
		if err := do(ctx); err == nil || err.Error() != "the database has not answered within 10s" {
			t.Error(err)
		}
	}
}

// Any two of an owner, its follower and PostgreSQL can be cut off from each other. While the owner
// receives answers from one of the others, the owner continues with strict keys, and no server takes
// over. When the owner receives answers from neither, the follower takes over.
func TestWhoIsCutOff(t *testing.T) {
	t.Parallel()
	far, other := newNetwork(t), newNetwork(t)
	var near string
	far.Inside(func() { near, _, _ = testkit.PostgreSQL(t, far.address) })
	var at net.Listener
	other.Inside(func() { at = testkit.Result(net.Listen("tcp", other.address+":0")).Must(t) })
	db := open(t, near)
	testkit.Result(db.SetRules(t.Context(), rules)).Must(t)
	owner, c, _ := serve(t, open(t, "postgres://srtm@"+far.address+"/postgres?sslmode=disable"), "one", testkit.Listen(t))
	follower, next, _ := serve(t, db, "two", at)
	testkit.WaitFor(t, "each follows the other", func() bool { return owner.State().Follower == "two" && follower.State().Follower == "one" })
	admitted := 0
	ask := func(c *client.Client, cost uint32) bool {
		ok := c.Ask(t.Context(), "strict", cost).Admit
		if ok {
			admitted += int(cost)
		}
		return ok
	}
	testkit.WaitFor(t, "a strict key is admitted", func() bool { return ask(c, 1) })
	goesOn := func(what string, long time.Duration) {
		t.Helper()
		end := clock.Mono().Add(long)
		testkit.WaitFor(t, what, func() bool { return !clock.Mono().Before(end) })
		testkit.WaitFor(t, what+": a strict key", func() bool { return ask(c, 1) }) // the machine may have stopped for a while
		testkit.Equal(t, follower.State().Partitions, 0, "%s: the follower took over", what)
	}
	long := 7 * time.Second
	other.cut()
	if os.Getenv("SRTM_FAULTS") != "" {
		goesOn("the owner is cut off from its follower", long)
	} else {
		goesOn("the owner is cut off from its follower", 0)
	}
	other.heal()
	testkit.WaitFor(t, "it replicates again", func() bool { return owner.State().Lag < 0.3 })
	far.cut()
	heals := sync.OnceFunc(func() { far.heal(); other.heal() })
	t.Cleanup(heals) // before the servers stop
	goesOn("the owner is cut off from the store", long)
	other.cut()
	testkit.WaitFor(t, "the follower takes over", func() bool { return follower.State().Partitions == rule.Partitions })
	if ask(c, 1) {
		t.Error("an owner that was replaced admits a strict key")
	}
	for ask(next, 1) {
	}
	if admitted < 3 || admitted > 4 { // the follower begins empty, and earns one credit in 1000 s
		t.Errorf("%d admitted of a strict key", admitted)
	}
	heals()
	testkit.WaitFor(t, "the owner knows of the claim", func() bool { return owner.State().Partitions == 0 })
}

// PostgreSQL is in its own namespace. The network between an owner and PostgreSQL drops all packets
// silently, and another server takes over. Both servers together admit a strict key at most its
// capacity. Each server admits another key at most its capacity.
func TestTheNetworkIsCut(t *testing.T) {
	t.Parallel()
	far := newNetwork(t)
	var near string
	far.Inside(func() { near, _, _ = testkit.PostgreSQL(t, far.address) })
	db := open(t, near) // over its Unix socket, which no network cut affects
	_, err := db.SetRules(t.Context(), rules)
	testkit.Must(t, err)
	owner, c, _ := serve(t, open(t, "postgres://srtm@"+far.address+"/postgres?sslmode=disable"), "one", nil)
	heir, next, _ := serve(t, db, "two", nil)
	admitted := map[string]int{}
	ask := func(c *client.Client, key string, cost uint32) bool {
		ok := c.Ask(t.Context(), key, cost).Admit
		if ok {
			admitted[key] += int(cost)
		}
		return ok
	}
	for _, key := range []string{"key", "strict"} {
		testkit.WaitFor(t, "a key is admitted", func() bool { return ask(c, key, 3) })
	}
	testkit.WaitFor(t, "they are saved", holds(t, db, 7))
	far.cut()
	heals := sync.OnceFunc(far.heal)
	t.Cleanup(heals) // before the servers stop
	if !ask(c, "key", 2) {
		t.Error("an owner without its store denies a key that is not strict")
	}
	ask(c, "strict", 2) // within the lease, if the test machine is quick
	testkit.WaitFor(t, "another takes over", func() bool { return heir.State().Partitions == rule.Partitions })
	if ask(c, "strict", 1) {
		t.Error("an owner that was replaced admits a strict key")
	}
	for ask(next, "key", 1) || ask(next, "strict", 1) || ask(c, "key", 1) {
	}
	if admitted["strict"] > 5 || admitted["key"] != 17 { // 3 were saved; each server admitted the other 7
		t.Errorf("%v admitted, of a capacity of 10", admitted)
	}
	testkit.WaitFor(t, "the owner saves", func() bool {
		c, err := savedOf(db, "key")
		return err == nil && c != nil && c.Credits < tokenbucket.Token
	})
	heals()
	testkit.WaitFor(t, "the owner that was cut off knows of the claim", func() bool { return owner.State().Partitions == 0 })
	if c, err := savedOf(db, "key"); err != nil || c == nil || c.Credits >= tokenbucket.Token {
		t.Errorf("the owner has used up what is saved as %+v, %v", c, err)
	}
}
