package server_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// line is a server's connection to its follower.
type line struct {
	srtmv1.AdmissionReplicationClient
	cut    *atomic.Bool
	rounds *atomic.Int64 // rounds that arrived
}

func (l line) Replicate(ctx context.Context, q *srtmv1.ReplicateRequest, options ...grpc.CallOption) (*srtmv1.ReplicateResponse, error) {
	if l.cut.Load() {
		return nil, errCut
	}
	defer l.rounds.Add(1)
	return l.AdmissionReplicationClient.Replicate(ctx, q, options...)
}

// pair is two servers that follow each other.
type pair struct {
	*bench
	s      [2]*server.Server
	cables [2]*cable
	cut    [2]atomic.Bool // to the other server
	rounds [2]atomic.Int64
	stop   [2]func()
}

// start is bench.start for one server of the pair.
func (p *pair) start(i int) {
	p.t.Helper()
	ln := testkit.Listen(p.t)
	p.cables[i] = &cable{Store: p.store}
	p.cfg.Store, p.cfg.Replicate = server.NewStore(p.cables[i]), ln.Addr().String()
	p.cfg.Dial = func(address string) (srtmv1.AdmissionReplicationClient, func() error, error) {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		return line{srtmv1.NewAdmissionReplicationClient(conn), &p.cut[i], &p.rounds[i]}, conn.Close, err
	}
	p.s[i], p.stop[i] = p.bench.start()
	rpc := grpc.NewServer()
	srtmv1.RegisterAdmissionReplicationServer(rpc, p.s[i])
	testkit.ServeOn(p.t, ln, rpc)
}

func newPair(t *testing.T, rules ...rule.Rule) *pair { return newBench(t, rules...).pair() }

func (b *bench) pair() *pair {
	p := &pair{bench: b}
	p.cfg.Renew, p.cfg.Send, p.cfg.Advertise = 20*time.Millisecond, 5*time.Millisecond, ""
	for i := range p.s {
		p.start(i)
	}
	testkit.WaitFor(b.t, "each follows the other", func() bool { return p.s[0].State().Follower != "" && p.s[1].State().Follower != "" })
	p.replicated(0)
	return p
}

// replicated waits for a round of replication that begins after the call, and until the follower's
// lease is renewed.
func (p *pair) replicated(i int) {
	p.t.Helper()
	p.cables[1-i].renewed(p.t)
	before := p.rounds[i].Load()
	testkit.WaitFor(p.t, "replication", func() bool { return p.rounds[i].Load() > before+2 })
}

// An owner continues with strict keys while its follower answers, even without the store, and no
// longer. The follower does not take over while the owner answers. Then the follower begins with
// everything it was sent, and with empty strict keys.
func TestFollowerTakesOverWhenTheOwnerFails(t *testing.T) {
	p := newPair(t, rule.Rule{Key: "key", Share: share(1, 1000)}, rule.Rule{Key: "strict", Share: share(1, 1000), Strict: true})
	old, next := p.client(p.s[0]), p.client(p.s[1])
	for _, key := range []string{"key", "strict"} {
		if d := sure(t, old, key, 900); !d.Admit {
			t.Fatalf("%+v", d)
		}
	}
	p.cables[0].cutOff()
	for range 5 {
		p.clock.pass(4 * time.Second)
		p.replicated(0)
	}
	if d := sure(t, old, "strict", 10); !d.Admit {
		t.Errorf("without its store, and with its follower: %+v", d)
	}
	testkit.Equal(t, p.s[1].State().Partitions, 0, "its follower took partitions of an owner that still sends")
	if d := sure(t, old, "key", 20); !d.Admit {
		t.Errorf("%+v", d)
	}
	p.replicated(0)
	p.cut[0].Store(true)
	if d := sure(t, old, "key", 50); !d.Admit { // no other server receives this charge
		t.Errorf("%+v", d)
	}
	p.clock.pass(5100 * time.Millisecond)
	if d := sure(t, old, "strict", 1); d.Admit {
		t.Errorf("a strict key without store and follower: %+v", d)
	}
	p.passes(p.s[1], p.cables[1])
	now := int64(p.clock.Now().Mono) / int64(time.Second)
	if d := sure(t, next, "key", 0); d.Left < 80 || d.Left > 80+now {
		t.Errorf("%d left after %d s, and the owner had replicated 80", d.Left, now)
	}
	if d := sure(t, next, "strict", 0); d.Left > 20 {
		t.Errorf("a strict key begins with %d", d.Left)
	}
	p.cables[0].cut.Store(false)
}

// While the store is unavailable to all servers, a follower's lease lasts less than a minute.
func TestTheStoreIsAway(t *testing.T) {
	p := newPair(t, rule.Rule{Key: "strict", Share: share(1, 1000), Strict: true})
	ask := p.client(p.s[0])
	if d := sure(t, ask, "strict", 1); !d.Admit {
		t.Fatalf("%+v", d)
	}
	p.cables[0].cutOff()
	p.cables[1].cutOff()
	gone := 0
	for ; gone < 70; gone++ {
		p.clock.pass(time.Second)
		before := p.rounds[0].Load()
		testkit.WaitFor(t, "replication", func() bool { return p.rounds[0].Load() > before+2 })
		if !sure(t, ask, "strict", 1).Admit {
			break
		}
	}
	if gone < 57 || gone > 60 {
		t.Errorf("strict keys were admitted for another %d s", gone)
	}
	p.cables[0].cut.Store(false)
	p.cables[1].cut.Store(false)
	testkit.WaitFor(t, "the store is back", func() bool { return sure(t, ask, "strict", 1).Admit })
	testkit.Equal(t, p.s[0].State().Partitions, rule.Partitions, "the owner has partitions when the store is back")
}

// The next process of an owner's name gets everything that the owner had sent from the follower. After this
// the follower takes nothing more from the previous process.
func TestAnOwnerStartsAgain(t *testing.T) {
	p := newPair(t, rule.Rule{Key: "key", Share: share(1, 10)}, rule.Rule{Key: "strict", Share: share(1, 10), Strict: true})
	old := p.client(p.s[0])
	if d := sure(t, old, "key", 7); !d.Admit {
		t.Fatalf("%+v", d)
	}
	p.replicated(0)
	before := p.cables[0]
	before.cutOff()
	p.cfg.Advertise = p.s[0].Addr().String()
	was := p.s[0]
	p.start(0)
	ask := p.client(p.s[0])
	testkit.Equal(t, sure(t, ask, "key", 0).Left, 3, "left, where the one before had replicated 3")
	p.clock.pass(5900 * time.Millisecond)
	busy := testkit.Result(client.New(client.Config{Servers: []string{p.s[0].Addr().String()}})).Must(t)
	defer busy.Close()
	if sure(t, p.client(was), "strict", 1).Admit || busy.Ask(t.Context(), "strict", 1).Admit {
		t.Error("a strict key before the lease of the one before is over")
	}
	p.clock.pass(4 * time.Second)
	testkit.WaitFor(t, "the lease of the one before is over", func() bool { return ask.Ask(t.Context(), "strict", 1).Admit })
	before.cut.Store(false)
}

// A follower that does not know the owner's epoch yet reads the owners before it saves, and does not
// take the credits for credits of an earlier epoch.
func TestAFollowerIsBehind(t *testing.T) {
	p := newPair(t, rule.Rule{Key: "key", Share: share(1, 10)})
	follower, reads := p.cables[1], p.cables[1].reads.Load()
	follower.behind.Store(true)
	follower.unaware.Store(true)
	testkit.WaitFor(t, "the follower has old owners", func() bool { return follower.reads.Load() > reads })
	follower.renewed(t)
	if d := sure(t, p.client(p.s[0]), "key", 7); !d.Admit {
		t.Fatalf("%+v", d)
	}
	p.replicated(0)
	p.cables[0].cutOff()
	follower.behind.Store(false)
	p.cfg.Advertise = p.s[0].Addr().String()
	before := p.cables[0]
	p.start(0)
	testkit.Equal(t, sure(t, p.client(p.s[0]), "key", 0).Left, 3, "left of 10 of which the follower was sent that 7 are used")
	before.cut.Store(false)
}

// A successor sends a request to the follower, and the follower saves. Then the store's answer to the successor is
// lost. The next process loses nothing that the follower was sent. A strict key is denied until the
// lease of the previous process is over, as always.
func TestASuccessorIsLost(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key", Share: share(1, 100)}, rule.Rule{Key: "strict", Share: share(1, 100), Strict: true})
	b.cfg.Checkpoint = 5 * time.Millisecond
	p := b.pair()
	old, saves := p.client(p.s[0]), p.cables[0].saves.Load()
	if d := sure(t, old, "key", 30); !d.Admit {
		t.Fatalf("%+v", d)
	}
	testkit.WaitFor(t, "a check-point", func() bool { return p.cables[0].saves.Load() > saves })
	p.cables[0].unsaved.Store(true)
	if d := sure(t, old, "key", 40); !d.Admit {
		t.Fatalf("%+v", d)
	}
	p.replicated(0)
	before := p.cables[0]
	before.cutOff()
	p.cfg.Advertise = p.s[0].Addr().String()
	cfg := p.cfg
	lost := &cable{Store: p.store}
	lost.lost.Store(true)
	cfg.Store = server.NewStore(lost)
	if _, err := server.New(t.Context(), cfg); err == nil || !lost.cut.Load() {
		t.Fatalf("a server whose join has no answer: %v", err)
	}
	was := p.s[0]
	p.start(0)
	testkit.Equal(t, sure(t, p.client(p.s[0]), "key", 0).Left, 30, "left of 30 that the follower had been sent")
	p.clock.pass(5900 * time.Millisecond)
	if sure(t, p.client(was), "strict", 1).Admit {
		t.Error("a strict key by the process that was cut off")
	}
	before.unsaved.Store(false)
	before.cut.Store(false)
}
