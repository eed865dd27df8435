package server_test

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/lease"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// division is a key, those who hold it, and what they may admit together.
type division struct {
	*bench
	server  *server.Server
	link    *cable         // its
	other   *server.Server // that is asked as well, if there is one
	parts   []*lease.Part
	clients map[*server.Server]*client.Client
	referee tokenbucket.Bucket
}

func divide(t *testing.T, holders int, capacity int64) *division {
	t.Helper()
	r := rule.Rule{Key: "key", Share: share(100, capacity), Leased: true}
	d := &division{bench: newBench(t, r), referee: tokenbucket.NewFull(r.Share, 0), clients: map[*server.Server]*client.Client{}}
	d.cfg.Renew = 5 * time.Millisecond
	for i := range holders {
		d.parts = append(d.parts, lease.NewPart("key", uint64(i+1)))
	}
	return d
}

// begin starts a server.
func (d *division) begin() (stop func()) {
	d.link = &cable{Store: d.store}
	d.cfg.Store = d.link
	d.server, stop = d.start()
	return stop
}

// ask has a holder ask until nothing new is granted, and returns the last answer.
func (d *division) ask(s *server.Server, i int) (a wire.Answer) {
	d.t.Helper()
	conn := testkit.Result(net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(s.Addr()))).Must(d.t)
	defer conn.Close()
	conn.SetReadDeadline(time.Now().Add(testkit.Hang)) // against a hang
	sealer, err := wire.NewSealer(nil)
	testkit.Must(d.t, err)
	q := wire.Question{Kind: wire.Hello}
	for {
		q.Number++
		asked := d.now()
		if q.Kind == wire.Lease {
			q.Held, q.Cost = d.parts[i].Ask(asked)
		}
		testkit.Result(conn.Write(sealer.AppendQuestion(nil, q))).Must(d.t)
		var in [100]byte
		n := testkit.Result(conn.Read(in[:])).Must(d.t)
		a, g, err := sealer.ParseAnswer(in[:n])
		switch {
		case err != nil:
			d.t.Fatal(err)
		case a.Kind == wire.Issued:
			q.Kind, q.Session, q.Key = wire.Lease, a.Session, []byte("key")
		case a.Kind != wire.Granted || !d.parts[i].Take(asked, d.now(), g, time.Duration(a.Value)*time.Millisecond):
			return a
		}
	}
}

func (d *division) now() mono.Time { return d.clock.Now().Mono }

func (d *division) of(s *server.Server) *client.Client {
	if d.clients[s] == nil {
		d.clients[s] = d.client(s)
	}
	return d.clients[s]
}

// drain has all admit what they can, and returns how much that is of each holder, and last
// of the owner.
func (d *division) drain() (admitted []int) {
	d.t.Helper()
	c := d.of(d.server)
	other := c
	if d.other != nil {
		other = d.of(d.other)
	}
	for i := range len(d.parts) + 1 {
		admitted = append(admitted, 0)
		for {
			ok := false
			if i < len(d.parts) {
				ok, _, _ = d.parts[i].Admit(1, d.now())
			} else {
				ok = c.Ask(d.t.Context(), "key", 1).Admit || other.Ask(d.t.Context(), "key", 1).Admit
			}
			if !ok {
				break
			}
			admitted[i]++
			if good, _ := d.referee.Admit(1, d.now()); !good {
				d.t.Fatalf("above the rule at %v, by %d", time.Duration(d.now()), i)
			}
		}
	}
	return admitted
}

// live passes time, in which the holders that ask do so, and all admit what they can.
func (d *division) live(t time.Duration, asking ...int) (sum []int) {
	d.t.Helper()
	sum = make([]int, len(d.parts)+1)
	for i := range t / (200 * time.Millisecond) {
		if i%5 == 0 {
			d.link.renewed(d.t) // or it would stop deciding
		}
		for _, i := range asking {
			d.ask(d.server, i)
		}
		for i, n := range d.drain() {
			sum[i] += n
		}
		d.clock.pass(200 * time.Millisecond)
		d.server.LookAtLeases(d.t.Context())
	}
	return sum
}

// An owner that stands still in the middle of a decision until another may decide for the key admits
// nothing by what it had left of it.
func TestAnOwnerStandsStill(t *testing.T) {
	d := divide(t, 1, 60)
	var still, stood atomic.Bool
	d.cfg.Renew = time.Hour
	d.cfg.Boot = func() mono.Time {
		now := d.now()
		if stood.Load() {
			now = now.Add(time.Minute)
		}
		stood.Store(still.Load())
		return now
	}
	d.begin()
	c := d.of(d.server)
	sure(t, c, "key", 1)
	d.ask(d.server, 0)
	testkit.Equal(t, sure(t, c, "key", 1).Admit, true, "admitted before")
	still.Store(true)
	got := sure(t, c, "key", 1)
	got.Left = 0 // not what it is about
	testkit.Equal(t, got, client.Decision{Leased: true, RetryAfter: time.Second})
}

func TestLeases(t *testing.T) {
	d := divide(t, 2, 60)
	stop := d.begin()
	if a := sure(t, d.client(d.server), "key", 10); !a.Leased || a.Left != 50 {
		t.Fatalf("%+v", a)
	}
	d.referee.Admit(10, d.now())
	d.ask(d.server, 0)
	if got := d.drain(); got[0]+got[2] != 50 || got[2] != 30 {
		t.Errorf("at first %v were admitted, of 50", got)
	}
	if got := d.live(10*time.Second, 0, 1); got[0]+got[1]+got[2] < 950 {
		t.Errorf("%v of 1000", got)
	}
	testkit.Equal(t, d.server.State().Leased, 1, "keys leased")

	// Stopped and started, holders go on with what they have; nothing grows for a while.
	stop()
	d.begin()
	if got := d.live(2*time.Second, 0, 1); got[2] != 0 || got[0]+got[1] < 100 {
		t.Errorf("%v in 2 s after a restart", got)
	}
	if got := d.live(10*time.Second, 0); got[2] < 50 || got[0]+got[1]+got[2] < 800 {
		t.Errorf("%v of 1000, after one of two died", got)
	}

	// An edit is followed, and one to another mode.
	edit := func(r rule.Rule) {
		t.Helper()
		d.set(r)
		testkit.Must(t, d.server.FollowRules(t.Context()))
		d.live(3*time.Second, 0, 1)
	}
	edit(rule.Rule{Key: "key", Share: share(10, 6), Leased: true})
	d.referee = tokenbucket.NewFull(share(10, 6), d.now())
	if got := d.live(10*time.Second, 0, 1); got[0]+got[1]+got[2] < 80 {
		t.Errorf("%v of 100", got)
	}
	edit(rule.Rule{Key: "key", Share: share(10, 6)})
	if got := d.live(10*time.Second, 0, 1); got[2] < 95 || d.server.State().Leased != 0 {
		t.Errorf("%v of 100, when the rule is not leased any more", got)
	}
	if a := d.ask(d.server, 0); a.Kind != wire.Reply || a.Flags&wire.Leased != 0 {
		t.Errorf("a holder is told %+v", a)
	}
}

// One of the server's name lives on, cut off from the store, and a holder is with it: the
// new one renews nothing before that one has ended, and grants nothing before its leases.
func TestLeasesOfAnotherOfTheName(t *testing.T) {
	d := divide(t, 2, 1000)
	d.begin()
	d.live(5*time.Second, 0, 1)
	before, old := d.server, d.link
	d.other = before
	old.cut.Store(true)
	d.begin()
	for range 9 * 5 {
		d.ask(before, 0)
		d.live(200*time.Millisecond, 1)
		before.LookAtLeases(t.Context())
	}
	if got := d.live(5*time.Second, 1); got[1] < 200 || got[0] != 0 {
		t.Errorf("%v then", got)
	}
	old.cut.Store(false)
}

// What holders had of a key that is not asked about after a crash is not known.
func TestALeasedKeyBeginsEmpty(t *testing.T) {
	d := divide(t, 0, 1000)
	d.begin()
	d.drain() // of which nothing is saved
	old := d.link
	old.cut.Store(true)
	defer old.cut.Store(false)
	d.begin()
	c := d.client(d.server)
	if a := sure(t, c, "key", 1); a.Admit {
		t.Errorf("at once: %+v", a)
	}
	for range 9 {
		d.clock.pass(time.Second)
		d.link.renewed(t)
	}
	if a := sure(t, c, "key", 1); !a.Admit || a.Left > 100 {
		t.Errorf("after 9 s, of which it is quiet for 8.2: %+v", a)
	}
}

// What a partition's owner lent the next one finds out from the holders.
func TestAPartitionMovesWithItsLeases(t *testing.T) {
	d := divide(t, 1, 60)
	s, cables := d.two()
	testkit.WaitFor(t, "the first server owns all", owns(s[0], rule.Partitions))
	d.server, d.link = s[0], cables[0]
	d.live(4*time.Second, 0)
	testkit.Must(t, d.store.Move(t.Context(), 0, rule.Partitions-1, s[1].Addr().String()))
	testkit.WaitFor(t, "the partitions move", owns(s[1], rule.Partitions))
	if a := d.ask(s[0], 0); a.Kind != wire.Moved {
		t.Errorf("the old owner says %+v", a)
	}
	d.server, d.link = s[1], cables[1]
	if got := d.live(2*time.Second, 0); got[0] < 50 || got[1] != 0 {
		t.Errorf("%v in 2 s after a move", got)
	}
	if got := d.live(5*time.Second, 0); got[0]+got[1] < 400 {
		t.Errorf("%v of 500 then", got)
	}
}
