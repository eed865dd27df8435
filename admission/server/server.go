package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// Store is what the server needs of store.Store.
type Store interface {
	RulesOf(ctx context.Context, keys []string) (map[string]rule.Rule, error)
	Credits(ctx context.Context, keys []string) (map[string]table.Credit, error)
	Defaults(ctx context.Context) ([]rule.Rule, error)
	Changes(ctx context.Context, after uint64, n int) ([]store.Change, error)
	LastChange(ctx context.Context) (uint64, error)
	SaveCredits(ctx context.Context, me store.Member, owners uint64, credits []table.Credit) error
	Saved(ctx context.Context, after string, n int) ([]store.Saved, error)
	Forget(ctx context.Context, credits []table.Credit) error
	Join(ctx context.Context, me store.Member, wall func() time.Duration) (time.Duration, error)
	Renew(ctx context.Context, me store.Member) (members []store.Member, owners uint64, err error)
	Claim(ctx context.Context, me, from, follower store.Member, wall time.Duration) (time.Duration, error)
	Members(ctx context.Context) ([]store.Member, error)
	Owners(ctx context.Context) (all []store.Partition, number uint64, err error)
	HandOver(ctx context.Context, me store.Member, to string, partitions []int, credits []table.Credit) error
	Leave(ctx context.Context, me store.Member) error
}

// Config is how a server is set up. Zero values are replaced by the defaults named.
type Config struct {
	Address     string        // UDP host:port
	Advertise   string        // where others reach that, and the server's name; Address, with the port it got
	Loops       int           // sockets and goroutines; 1
	Keys        []wire.Key    // of MACs; none: nothing is authenticated
	MaxKeys     int           // DefaultMaxKeys
	MaxSessions int           // of all loops; DefaultMaxSessions
	AdmitFull   bool          // what a key gets for which there is no room
	Checkpoint  time.Duration // between check-points; DefaultCheckpoint
	Poll        time.Duration // between looks for edited rules; DefaultPoll
	Renew       time.Duration // between renewals of the lease on partitions; DefaultRenew
	Lookup      time.Duration // that a question waits at most for its key to be looked up; DefaultLookup
	Store       Store
	Log         *slog.Logger
	Metrics     prometheus.Registerer // nil: none

	// Replicate is the address where others reach the service AdmissionReplication that is
	// this server, and Dial reaches another's. Without Dial nothing is replicated.
	Replicate string
	Send      time.Duration // between rounds of replication; DefaultSend
	Dial      func(address string) (client srtmv1.AdmissionReplicationClient, hangUp func() error, err error)

	// Times for tests; nil: the clocks. Boot goes on while the machine is suspended; nil
	// beside Now: as that.
	Now  func() table.Now
	Boot func() mono.Time
}

// Defaults of Config.
const (
	DefaultMaxKeys     = 10_000_000
	DefaultMaxSessions = 4096
	DefaultCheckpoint  = time.Second
	DefaultPoll        = time.Second
	DefaultRenew       = 2 * time.Second
	DefaultLookup      = time.Second
	DefaultSend        = 100 * time.Millisecond
)

const (
	lastDeadline = 5 * time.Second // of the last check-point
)

// Server decides. Make one with New, and Run it.
type Server struct {
	srtmv1.UnimplementedAdmissionReplicationServer

	cfg   Config
	loops []*loop
	wake  chan struct{} // of one: the table of owners may have changed

	owners atomic.Pointer[owners]
	ahead  atomic.Int64 // of the store's time before the wall clock, see now
	sure   atomic.Int64 // until when no other server can own what is here, by Boot and the store
	held   atomic.Int64 // partitions
	askers atomic.Int64 // sessions of all loops
	woken  atomic.Int64 // mono.Time

	saving  sync.Mutex // guards me; held where credits or owners are written
	me      store.Member
	watched watched // owned by reconcile, as what follows
	frozen  bool    // by a hand-over of which it is not known what came
	atOnce  int     // partitions of the next one

	shards     shards
	saved      atomic.Int64 // the same for check-points
	savedTo    atomic.Int64 // wall clock, ms: what changed before is in the store
	replicated atomic.Int64 // mono.Time: what changed before is with the follower, if there is one
	swept      string       // the last key that sweep looked at; keep's, as what follows
	unswept    int          // how many keys it is to look at
	batch      int          // credits of the next batch; guarded by saving
	rules      rules
	lookups    lookups
	replicas   replicas
	metrics    metrics
	outages    outages
	unrenewed  atomic.Pointer[unrenewed] // nil: the last renewal succeeded
	uncertain  bool                      // strict keys are denied, as the log has said; reconcile's
}

// outages are what the store may fail to do.
type outages struct {
	lookups, polls, checkpoints, sweeps, renewals, follower *obs.Outage
}

func newOutages(log *slog.Logger) outages {
	return outages{
		lookups:     obs.NewOutage(log, "keys could not be looked up; who asks for them gets the default reply"),
		polls:       obs.NewOutage(log, "rules could not be read; keeping those that are known"),
		checkpoints: obs.NewOutage(log, "a check-point failed; trying again with the next"),
		sweeps:      obs.NewOutage(log, "keys that are full could not be forgotten"),
		renewals:    obs.NewOutage(log, "the lease on the partitions could not be renewed; trying again"),
		follower:    obs.NewOutage(log, "the follower cannot be reached"),
	}
}

// unrenewed is why the lease is not being renewed.
type unrenewed struct {
	since mono.Time // by Boot: when the first renewal failed
	err   error     // of the last one
}

// New opens the sockets and becomes a member. Run must follow, or Close.
func New(ctx context.Context, cfg Config) (*Server, error) {
	if !rawfd.SharesPort {
		cfg.Loops = 1
	}
	cfg.Loops = cmp.Or(cfg.Loops, 1)
	cfg.MaxKeys = cmp.Or(cfg.MaxKeys, DefaultMaxKeys)
	cfg.MaxSessions = cmp.Or(cfg.MaxSessions, DefaultMaxSessions)
	cfg.Checkpoint = cmp.Or(cfg.Checkpoint, DefaultCheckpoint)
	cfg.Poll = cmp.Or(cfg.Poll, DefaultPoll)
	cfg.Renew = cmp.Or(cfg.Renew, DefaultRenew)
	cfg.Send = cmp.Or(cfg.Send, DefaultSend)
	cfg.Lookup = cmp.Or(cfg.Lookup, DefaultLookup)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Boot == nil {
		if cfg.Boot = clock.Boot; cfg.Now != nil {
			cfg.Boot = func() mono.Time { return cfg.Now().Mono }
		}
	}
	if cfg.Now == nil {
		start, wall := clock.Mono(), time.Duration(clock.Wall()) // which may be set, but not while we run
		cfg.Now = func() table.Now {
			now := clock.Mono()
			return table.Now{Mono: now, Wall: wall + now.Sub(start)}
		}
	}
	s := &Server{
		cfg: cfg, wake: make(chan struct{}, 1), watched: watched{since: make(map[store.Member]mono.Time)}, atOnce: movedAtOnce, batch: creditsAtOnce,
		lookups:  lookups{waiting: make(map[string][]pending), queue: make(chan string, maxLookups)},
		replicas: replicas{max: cfg.MaxKeys}, outages: newOutages(cfg.Log),
	}
	s.owners.Store(new(owners))
	for i := range s.shards {
		s.shards[i].keys = table.New((cfg.MaxKeys + shardCount - 1) / shardCount)
		s.shards[i].keys.Alone = s.alone
	}
	s.rules.store, s.rules.shards, s.rules.now, s.rules.edited = cfg.Store, &s.shards, cfg.Now, s.wakeUp
	now := cfg.Now()
	s.rules.polled.Store(int64(now.Mono))
	s.saved.Store(int64(now.Mono))
	s.replicated.Store(int64(now.Mono))
	secret := make([]byte, 32)
	rand.Read(secret)
	if err := s.listen(secret); err != nil {
		return nil, err
	}
	s.me = store.Member{Address: cmp.Or(cfg.Advertise, s.Addr().String()), Instance: newInstance(), Replicate: cfg.Replicate}
	if err := s.join(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("admission store: %w", err)
	}
	s.metrics.init(s, cfg.Metrics)
	return s, nil
}

// listen opens a socket for each loop before any is read, since the kernel spreads
// askers over those that are open.
func (s *Server) listen(secret []byte) error {
	address := s.cfg.Address
	// Loops share their port with any process that asks for that: another process would get some of
	// the askers, unnoticed.
	probe, err := net.ListenPacket("udp", address)
	if err == nil {
		err = probe.Close()
	}
	if err != nil {
		return err
	}
	for range s.cfg.Loops {
		sealer, err := wire.NewSealer(s.cfg.Keys)
		if err != nil {
			s.Close()
			return err
		}
		conn, err := rawfd.ListenUDP(address, datagramsAtOnce, wire.MaxQuestion+1) // to see one that is longer
		if err != nil {
			s.Close()
			return err
		}
		address = conn.Addr().String() // so that port 0 is the same for all
		s.loops = append(s.loops, &loop{
			server: s, conn: conn, sealer: sealer, cookies: wire.NewSessions(secret),
			sessions: make(map[rawfd.Address]*session),
		})
	}
	return nil
}

// Addr is where the server listens.
func (s *Server) Addr() netip.AddrPort {
	return s.loops[0].conn.Addr()
}

// Close frees what New took. Run does so itself.
func (s *Server) Close() {
	for _, l := range s.loops {
		l.conn.Close()
	}
}

// Run answers until ctx ends, and then makes a last check-point.
func (s *Server) Run(ctx context.Context) error {
	var reading, working sync.WaitGroup
	for _, l := range s.loops {
		reading.Go(l.run)
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	for range lookupWorkers {
		working.Go(func() { s.lookUp(work) })
	}
	working.Go(func() { every(work, s.cfg.Poll, nil, s.follow) })
	working.Go(func() { every(work, s.cfg.Checkpoint, nil, s.keep) })
	working.Go(func() { every(work, s.cfg.Renew, s.wake, s.reconcile) })
	if s.cfg.Dial != nil {
		working.Go(func() { every(work, s.cfg.Send, nil, s.replicate) })
	}
	<-ctx.Done()
	for _, l := range s.loops {
		l.conn.Stop()
	}
	reading.Wait()
	stop()
	working.Wait()
	s.Close()
	s.replicas.become(0)
	stopped := *s.owners.Load()
	stopped.mine = [rule.Partitions]bool{} // for Local
	s.owners.Store(&stopped)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastDeadline)
	defer cancel()
	err := s.checkpoint(last, lastDeadline)
	if err == nil {
		err = s.cfg.Store.Leave(last, s.me)
	}
	if err != nil && !errors.Is(err, store.ErrFenced) { // where there is nothing left to save
		return fmt.Errorf("the last check-point: %w", err)
	}
	return nil
}

// Healthy says why the server should not be asked: strict keys are denied, since the lease on the
// partitions is over, or the server has heard nothing of its store for a while, so that it may miss
// edits. It returns an obs.Notice while the lease cannot be renewed and is not over.
func (s *Server) Healthy() error {
	now := int64(s.cfg.Now().Mono)
	u, boot, until := s.unrenewed.Load(), s.cfg.Boot(), s.certainUntil()
	if until.Before(boot) {
		err := fmt.Errorf("strict keys are denied: decisions on them were certain until %s", s.wallAt(until))
		if u != nil {
			err = fmt.Errorf("%w, and the lease on the partitions has not been renewed for %v: %w", err, boot.Sub(u.since).Round(time.Second), u.err)
		}
		return err
	}
	if age := time.Duration(now - s.rules.polled.Load()); age > 10*s.cfg.Poll+5*time.Second {
		return fmt.Errorf("rules were last read %v ago", age.Round(time.Second))
	}
	if age := time.Duration(now - s.saved.Load()); age > 10*s.cfg.Checkpoint+5*time.Second {
		return fmt.Errorf("the last check-point was %v ago", age.Round(time.Second))
	}
	if u != nil {
		return obs.Notice(fmt.Sprintf("the lease on the partitions has not been renewed for %v; decisions on strict keys are certain until %s, and then denied: %v",
			boot.Sub(u.since).Round(time.Second), s.wallAt(until), u.err))
	}
	return nil
}

// certainUntil returns until when no other server can decide, by Boot: so the store or the follower
// has said.
func (s *Server) certainUntil() mono.Time {
	return mono.Time(max(s.sure.Load(), s.replicas.word.Load()))
}

// wallAt returns an instant of Boot as people read it.
func (s *Server) wallAt(at mono.Time) string {
	return time.Unix(0, int64(s.cfg.Now().Wall+at.Sub(s.cfg.Boot()))).UTC().Format("15:04:05Z")
}

// cursor is where a pass over all shards goes on: slot of shard.
type cursor struct {
	shard int
	slot  int32
}

// tell has a reader told what changed of up to n keys, from at on, which it moves. What could not
// be told counts as changed again, and as not looked at if the owners changed meanwhile.
func (s *Server) tell(by table.Reader, n int, at *cursor, send func(*owners, []table.Credit) error) error {
	start, t := *at, s.owners.Load()
	var credits []table.Credit
	for at.shard < shardCount && len(credits) < n {
		s.shards.at(at.shard, func(keys *table.Shard) {
			credits, at.slot = keys.Changed(by, credits, nil, at.slot, int32(n-len(credits)), s.now())
		})
		if at.slot == 0 {
			at.shard++
		}
	}
	err := store.ErrMoved
	if t == s.owners.Load() { // else it is not known of which epoch they are
		err = send(t, credits)
	}
	if err != nil {
		s.shards.unread(by, credits)
	}
	if errors.Is(err, store.ErrMoved) {
		*at = start
		return nil
	}
	return err
}

// alone reports that no other can decide meanwhile: so the store or the follower has said.
func (s *Server) alone() bool {
	now := int64(s.cfg.Boot()) // before the rest is read
	return now <= s.sure.Load() || now <= s.replicas.word.Load()
}

// decide is the whole of a decision that needs no store. It reports false for a key
// that is not decided here. That is looked at under the shard's lock, so that what is
// handed over has all that was decided.
func (s *Server) decide(key []byte, cost uint32, now mono.Time, peek bool) (v table.Verdict, here bool) {
	p := rule.Partition(key, rule.Partitions)
	sh := &s.shards[p%shardCount]
	sh.Lock()
	if here = s.owners.Load().mine[p]; here {
		v = sh.keys.Ask(key, int64(cost), now, peek)
	}
	sh.Unlock()
	return v, here
}

// refund gives back what a question was charged at a time, if its key is here. A later failover may have
// restored the key without the charge, but none is over that soon.
func (s *Server) refund(key []byte, cost uint32, charged, now mono.Time) {
	age := now.Sub(charged)
	if cost == 0 || age > strictOver {
		return
	}
	p := rule.Partition(key, rule.Partitions)
	s.shards.at(p%shardCount, func(keys *table.Shard) {
		if s.owners.Load().mine[p] {
			keys.Refund(key, int64(cost), age, now)
		}
	})
}

// Local is an answer for who asks in this process, ok if the key is decided here and no
// store need be asked. It is for client.Config.
func (s *Server) Local(key string, cost uint32, peek bool) (a wire.Answer, ok bool) {
	v, here := s.decide([]byte(key), cost, s.cfg.Now().Mono, peek)
	if !here || !v.Known {
		return wire.Answer{}, false
	}
	s.metrics.decided(&v)
	return answerOf(&v), true
}

// answerOf returns the answer to a question that was decided.
func answerOf(v *table.Verdict) wire.Answer {
	var flags uint8
	if v.Default {
		flags |= wire.ByDefault
	}
	if v.Shadow && v.Denied {
		flags |= wire.Shadow
	}
	a := wire.Answer{Kind: wire.Reply, Value: uint32(max(0, v.Left))}
	switch {
	case v.Admit:
		flags |= wire.Admit
	case v.Retry == math.MaxInt64:
		flags |= wire.Never
	default:
		a.Wait = table.Millis(v.Retry)
	}
	if a.Flags = flags; flags&(wire.Admit|wire.Never) != 0 && v.Full != math.MaxInt64 {
		a.Wait = table.Millis(v.Full)
	}
	return a
}
