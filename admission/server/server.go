package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
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

// Store is what the server keeps outside its memory. NewStore makes a Store.
type Store struct {
	RuleStore
	CreditStore
	MemberStore
}

// NewStore returns a Store whose three parts are one database, as store.Store is.
func NewStore[Database interface {
	RuleStore
	CreditStore
	MemberStore
}](all Database) Store {
	return Store{all, all, all}
}

// RuleStore has the rules of keys and the log of their edits.
type RuleStore interface {
	RulesOf(ctx context.Context, keys []string) (map[string]rule.Rule, error)
	Defaults(ctx context.Context) ([]rule.Rule, error)
	Changes(ctx context.Context, after uint64, n int) ([]store.Change, error)
	LastChange(ctx context.Context) (uint64, error)
}

// CreditStore has the credits of keys at the last check-point.
type CreditStore interface {
	Credits(ctx context.Context, keys []string) (map[string]table.Credit, error)
	SaveCredits(ctx context.Context, me store.Member, owners uint64, credits []table.Credit) error
	Saved(ctx context.Context, after string, n int) ([]store.Saved, error)
	Forget(ctx context.Context, credits []table.Credit) error
}

// MemberStore has the servers, their leases, and the partitions that they own.
type MemberStore interface {
	Join(ctx context.Context, me store.Member, wall func() time.Duration) (time.Duration, error)
	Renew(ctx context.Context, me store.Member) (members []store.Member, owners uint64, err error)
	Claim(ctx context.Context, me, from, follower store.Member, wall time.Duration) (time.Duration, error)
	Members(ctx context.Context) ([]store.Member, error)
	Owners(ctx context.Context) (all []store.Partition, number uint64, err error)
	HandOver(ctx context.Context, me store.Member, to string, partitions []int, credits []table.Credit) error
	Leave(ctx context.Context, me store.Member) error
}

// Config configures a server. New replaces zero values by the defaults named.
type Config struct {
	Address     string        // UDP host:port
	Advertise   string        // the server's name, and where others reach Address; default: Address with its actual port
	Loops       int           // sockets and goroutines; default 1
	Keys        []wire.Key    // for MACs; none: questions are not authenticated
	MaxKeys     int           // DefaultMaxKeys
	MaxSessions int           // in all loops; DefaultMaxSessions
	AdmitFull   bool          // verdict for keys without room in memory
	Checkpoint  time.Duration // between check-points; DefaultCheckpoint
	Poll        time.Duration // between polls for rule edits; DefaultPoll
	Renew       time.Duration // between renewals of the lease on partitions; DefaultRenew
	Lookup      time.Duration // maximum wait of a question for its key's lookup; DefaultLookup
	Store       Store
	Log         *slog.Logger
	Metrics     prometheus.Registerer // nil: none

	// Replicate is the address of this server's AdmissionReplication service. Dial connects to another
	// server's service. Without Dial nothing is replicated.
	Replicate string
	Send      time.Duration // between rounds of replication; DefaultSend
	Dial      func(address string) (client srtmv1.AdmissionReplicationClient, hangUp func() error, err error)

	// Clocks for tests; nil: the real clocks. Boot also counts while the machine is suspended. If only
	// Now is set, Boot is Now's Mono.
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
	lastDeadline = 5 * time.Second // for the last check-point
)

// Server decides admission. Make a Server with New, then call Run.
type Server struct {
	srtmv1.UnimplementedAdmissionReplicationServer

	cfg   Config
	loops []*loop
	wake  chan struct{} // capacity 1: the owner table may have changed

	owners          atomic.Pointer[owners]
	storeOffset     atomic.Int64 // store's time minus wall clock, see now
	certainUntilNs  atomic.Int64 // Boot clock: until then the store lets no other server own these keys
	ownedPartitions atomic.Int64 // partitions owned
	askers          atomic.Int64 // sessions of all loops
	woken           atomic.Int64 // mono.Time of elsewhere's last wakeUp

	saving  sync.Mutex // guards me and batch; held while credits or owners are written
	me      store.Member
	watched watched // owned by reconcile, as are frozen and atOnce
	frozen  bool    // the result of the last hand-over is unknown
	atOnce  int     // partitions of the next hand-over

	shards     shards
	saved      atomic.Int64 // mono.Time of the last check-point
	savedTo    atomic.Int64 // wall clock, ms: changes before it are in the store
	replicated atomic.Int64 // mono.Time: the follower, if there is one, has all changes before it
	sweeper    sweeper      // owned by keep
	batch      int          // maximum credits of the next batch; guarded by saving
	rules      rules
	lookups    lookups
	replicas   replicas
	metrics    metrics
	outages    outages
	unrenewed  atomic.Pointer[unrenewed] // nil: the last renewal succeeded
	uncertain  bool                      // strict keys are denied, and this was logged; owned by reconcile
}

// outages tracks the failures of the store and of the follower, for the log.
type outages struct {
	lookups, polls, checkpoints, sweeps, renewals, follower *obs.Outage
}

func newOutages(log *slog.Logger) outages {
	return outages{
		lookups:     obs.NewOutage(log, "keys could not be looked up; their requests get the default reply"),
		polls:       obs.NewOutage(log, "rules could not be read; keeping those that are known"),
		checkpoints: obs.NewOutage(log, "a check-point failed; trying again with the next"),
		sweeps:      obs.NewOutage(log, "keys that are full could not be forgotten"),
		renewals:    obs.NewOutage(log, "the lease on the partitions could not be renewed; trying again"),
		follower:    obs.NewOutage(log, "the follower cannot be reached"),
	}
}

// unrenewed records why the lease is not being renewed.
type unrenewed struct {
	start mono.Time // Boot clock: when the first renewal failed
	err   error     // error of the last failed renewal
}

// New opens the sockets and makes the server a member. The caller must call Run or Close afterwards.
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
		start, wall := clock.Mono(), time.Duration(clock.Wall()) // the wall clock may be set later; the server keeps counting from this value
		cfg.Now = func() table.Now {
			now := clock.Mono()
			return table.Now{Mono: now, Wall: wall + now.Sub(start)}
		}
	}
	s := &Server{
		cfg: cfg, wake: make(chan struct{}, 1), watched: watched{silentSince: make(map[store.Member]mono.Time)}, atOnce: movedAtOnce, batch: creditsAtOnce,
		lookups:  lookups{waiting: make(map[string][]pending), queue: make(chan string, maxLookups)},
		replicas: replicas{max: cfg.MaxKeys}, outages: newOutages(cfg.Log),
	}
	s.owners.Store(new(owners))
	for i := range s.shards {
		s.shards[i].keys = table.New((cfg.MaxKeys + shardCount - 1) / shardCount)
		s.shards[i].keys.Alone = s.alone
	}
	s.rules.store, s.rules.shards, s.rules.now, s.rules.edited = cfg.Store, &s.shards, cfg.Now, s.wakeUp
	s.sweeper = sweeper{store: cfg.Store, rules: &s.rules, now: s.now, owned: func() *[rule.Partitions]bool { return &s.owners.Load().owned }}
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

// listen opens the sockets of all loops before any loop reads, because the kernel spreads askers over
// the open sockets.
func (s *Server) listen(secret []byte) error {
	address := s.cfg.Address
	// Loops share their port with any process that sets port sharing. Without this probe another
	// process could receive part of the datagrams unnoticed.
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
		conn, err := rawfd.ListenUDP(address, datagramsAtOnce, wire.MaxQuestion+1) // one more byte, to detect datagrams that are too long
		if err != nil {
			s.Close()
			return err
		}
		address = conn.Addr().String() // if the port is 0, all loops get the same port
		s.loops = append(s.loops, &loop{
			server: s, conn: conn, sealer: sealer, cookies: wire.NewSessions(secret),
			sessions: make(map[rawfd.Address]*session),
		})
	}
	return nil
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() netip.AddrPort {
	return s.loops[0].conn.Addr()
}

// Close closes the sockets. Run calls Close itself.
func (s *Server) Close() {
	for _, l := range s.loops {
		l.conn.Close()
	}
}

// Run answers until ctx ends, then makes a last check-point and leaves the store.
func (s *Server) Run(ctx context.Context) error {
	var reading, working sync.WaitGroup
	for _, l := range s.loops {
		reading.Go(l.run)
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	for range lookupWorkers {
		working.Go(func() { s.lookUp(work) })
	}
	working.Go(func() {
		repeat(work, s.cfg.Poll, nil, func(ctx context.Context) { s.rules.follow(ctx, s.outages.polls, s.metrics.pollErrors) })
	})
	working.Go(func() { repeat(work, s.cfg.Checkpoint, nil, s.maintain) })
	working.Go(func() { repeat(work, s.cfg.Renew, s.wake, s.reconcile) })
	if s.cfg.Dial != nil {
		working.Go(func() { repeat(work, s.cfg.Send, nil, s.replicate) })
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
	stopped.owned = [rule.Partitions]bool{} // Local decides nothing from now on
	s.owners.Store(&stopped)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastDeadline)
	defer cancel()
	err := s.checkpoint(last, lastDeadline)
	if err == nil {
		err = s.cfg.Store.Leave(last, s.me)
	}
	if err != nil && !errors.Is(err, store.ErrFenced) { // ErrFenced: nothing is left to save
		return fmt.Errorf("the last check-point: %w", err)
	}
	return nil
}

// Healthy returns why clients should not use the server: strict keys are denied because the lease on
// the partitions is over, or the last rule poll or check-point was too long ago. While the lease cannot
// be renewed but is not over, Healthy returns an obs.Notice.
func (s *Server) Healthy() error {
	now := int64(s.cfg.Now().Mono)
	u, boot, certain := s.unrenewed.Load(), s.cfg.Boot(), s.certainUntil()
	if certain.Before(boot) {
		err := fmt.Errorf("strict keys are denied: decisions on them were certain until %s", s.cfg.wallAt(certain))
		if u != nil {
			err = fmt.Errorf("%w, and the lease on the partitions has not been renewed for %v: %w", err, boot.Sub(u.start).Round(time.Second), u.err)
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
			boot.Sub(u.start).Round(time.Second), s.cfg.wallAt(certain), u.err))
	}
	return nil
}

// certainUntil returns the Boot time until which the store or the follower guarantees that no other
// server decides.
func (s *Server) certainUntil() mono.Time {
	return mono.Time(max(s.certainUntilNs.Load(), s.replicas.certainUntil.Load()))
}

// wallAt formats an instant of the Boot clock as UTC wall time.
func (c *Config) wallAt(at mono.Time) string {
	return time.Unix(0, int64(c.Now().Wall+at.Sub(c.Boot()))).UTC().Format("15:04:05Z")
}

// cursor is the position of a pass over all shards.
type cursor struct {
	shard int
	slot  int32
}

// sendChanges sends up to n changed credits to a reader, starting at at, and advances at. If send
// fails, the credits count as changed again. If the owners change meanwhile, sendChanges resets at.
func (s *Server) sendChanges(reader table.Reader, n int, at *cursor, send func(*owners, []table.Credit) error) error {
	start, t := *at, s.owners.Load()
	var credits []table.Credit
	for at.shard < shardCount && len(credits) < n {
		s.shards.each(at.shard, func(keys *table.Shard) {
			credits, at.slot = keys.Changed(reader, credits, nil, at.slot, int32(n-len(credits)), s.now())
		})
		if at.slot == 0 {
			at.shard++
		}
	}
	err := store.ErrMoved
	if t == s.owners.Load() { // otherwise the epochs of the credits are unknown
		err = send(t, credits)
	}
	if err != nil {
		s.shards.unread(reader, credits)
	}
	if errors.Is(err, store.ErrMoved) {
		*at = start
		return nil
	}
	return err
}

// alone reports whether the store or the follower guarantees that no other server decides now.
func (s *Server) alone() bool {
	now := int64(s.cfg.Boot()) // read before the guarantees
	return now <= s.certainUntilNs.Load() || now <= s.replicas.certainUntil.Load()
}

// Local answers a question from this process. It returns false if another server decides for the key or
// the key needs a lookup. client.Config uses it.
func (s *Server) Local(key string, cost uint32, peek bool) (a wire.Answer, ok bool) {
	v, owned := s.decide([]byte(key), cost, s.cfg.Now().Mono, peek)
	if !owned || !v.Known {
		return wire.Answer{}, false
	}
	s.metrics.decided(&v)
	return answerOf(&v), true
}
