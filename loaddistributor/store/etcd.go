package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Etcd stores events in an etcd cluster that several loaddistributors share.
//
// Keys below the prefix:
//
//	leader/...           the election; the oldest key leads, its value is the
//	                     leader's advertised address
//	head                 the version of the last event
//	term                 the number of the newest term
//	log/<version>        an event, or "parts <n>" for a large event
//	part/<version>/<i>   the parts of a large event
//	snapshot             the version of the dump, and its number of parts
//	dump/<version>/<i>   the parts of a dump
//
// Versions and parts are sixteen hexadecimal digits. Every transaction of a leader checks
// that its election key exists and that head is the end of the log that the leader knows.
// So a leader that was suspended for longer than its lease cannot write after it resumes.
type Etcd struct {
	// Set by NewEtcd.
	cfg    clientv3.Config
	prefix string
	ttl    time.Duration

	// link has one entry. A goroutine that dials or looks takes the entry and puts it
	// back.
	link chan link
}

// link is the connection, if there is one. With a user there is no connection before etcd
// has accepted the password.
type link struct {
	client *clientv3.Client
	cancel context.CancelFunc // ends the client's background requests
	closed bool
}

// Bounds of one transaction. By default etcd accepts 1.5 MiB and 128 operations; it may
// be configured to accept less.
const (
	maxPart     = 1 << 18
	maxTxnBytes = 1 << 18
	maxTxnOps   = 100
	page        = 500 // keys per read
)

// etcd compacts its history before a dump only after historyAfter events or historyBytes
// bytes since that dump, because others may use the history too.
const (
	historyAfter = 1000
	historyBytes = 1 << 24
)

// EtcdConfig is fixed at start.
type EtcdConfig struct {
	Client clientv3.Config
	Prefix string // prefix of all keys, with a final slash
	// Lease is how long a leader that does not answer stays leader, in whole seconds. etcd
	// may add a few seconds to a lease of one or two.
	Lease time.Duration
}

// Validate returns all problems at once.
func (c EtcdConfig) Validate() error {
	var errs []error
	if len(c.Client.Endpoints) == 0 {
		errs = append(errs, errors.New("etcd: want an endpoint, --etcd-endpoint"))
	}
	if len(c.Prefix) < 2 || !strings.HasSuffix(c.Prefix, "/") {
		errs = append(errs, fmt.Errorf("etcd prefix %q: want a slash at its end and something before it", c.Prefix))
	}
	if c.Lease < time.Second || c.Lease > time.Hour || c.Lease%time.Second != 0 {
		errs = append(errs, fmt.Errorf("etcd lease %v: want 1s to 1h, in whole seconds", c.Lease))
	}
	if c.Client.Username != "" && c.Client.DialTimeout <= 0 {
		errs = append(errs, errors.New("etcd: a user's first connection needs a dial timeout"))
	}
	return errors.Join(errs...)
}

// NewEtcd returns a store, connected on first use. It fails if etcd refuses the user or
// ctx ends, but not while etcd is unavailable.
func NewEtcd(ctx context.Context, cfg EtcdConfig) (*Etcd, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Etcd{cfg: cfg.Client, prefix: cfg.Prefix, ttl: cfg.Lease, link: make(chan link, 1)}
	e.link <- link{}
	if _, err := e.client(ctx); err != nil && !unavailable(err) {
		return nil, err
	}
	return e, nil
}

// client returns the client and dials at the first call. It takes at most the dial
// timeout and ends with ctx.
func (e *Etcd) client(ctx context.Context) (*clientv3.Client, error) {
	var l link
	select {
	case l = <-e.link:
	case <-ctx.Done():
		return nil, fmt.Errorf("etcd: %w", context.Cause(ctx))
	}
	defer func() { e.link <- l }()
	if l.closed {
		return nil, errClosed
	}
	if l.client == nil {
		cfg := e.cfg
		cfg.Context, l.cancel = context.WithCancel(context.Background())
		stop := context.AfterFunc(ctx, l.cancel)
		client, err := clientv3.New(cfg)
		if !stop() && err == nil {
			err = client.Close()
		}
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		if err != nil {
			l.cancel()
			return nil, fmt.Errorf("etcd: %w", err)
		}
		l.client = client
	}
	return l.client, nil
}

// explain adds the connection's problem to err when etcd does not answer. The etcd client
// retries until its context ends and does not report the cause.
func explain(ctx context.Context, client *clientv3.Client, err error) error {
	limit, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, cause := healthv1.NewHealthClient(client.ActiveConnection()).Check(limit, &healthv1.HealthCheckRequest{})
	if status.Code(cause) == codes.Unavailable {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// unavailable reports whether err means that etcd does not answer.
func unavailable(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var coded interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &coded) {
		return false
	}
	code := coded.GRPCStatus().Code()
	return code == codes.Unavailable || code == codes.DeadlineExceeded
}

func (e *Etcd) key(parts ...string) string { return e.prefix + strings.Join(parts, "/") }
func hex(v uint64) string                  { return fmt.Sprintf("%016x", v) }

// election returns the key prefix for concurrency.Election.
func (e *Etcd) election() string { return e.prefix + "leader" }

// Close implements Store.
func (e *Etcd) Close() error {
	l := <-e.link
	e.link <- link{closed: true}
	if l.client == nil {
		return nil
	}
	defer l.cancel()
	return l.client.Close()
}

// Leader implements Store.
func (e *Etcd) Leader(ctx context.Context) (string, error) {
	client, err := e.client(ctx)
	if err != nil {
		return "", err
	}
	r, err := client.Get(ctx, e.election()+"/", clientv3.WithFirstCreate()...)
	if err != nil {
		return "", fmt.Errorf("etcd: leader: %w", err)
	}
	if len(r.Kvs) == 0 {
		return "", nil
	}
	return string(r.Kvs[0].Value), nil
}

// Lead implements Store.
func (e *Etcd) Lead(ctx context.Context, advertise string) (Term, *catalog.Catalog, error) {
	client, err := e.client(ctx)
	if err != nil {
		return nil, nil, err
	}
	requested := clock.Mono()
	lease, err := client.Grant(ctx, int64(e.ttl/time.Second))
	if err != nil {
		return nil, nil, fmt.Errorf("etcd: lease: %w", err)
	}
	// The session belongs to the term and outlives ctx.
	termCtx, cancel := context.WithCancel(context.Background())
	session, err := concurrency.NewSession(client, concurrency.WithLease(lease.ID), concurrency.WithContext(termCtx))
	if err != nil {
		cancel()
		return nil, nil, fmt.Errorf("etcd: session: %w", err)
	}
	t := &etcdTerm{
		store: e, client: client, session: session, cancel: cancel, election: concurrency.NewElection(session, e.election()),
		term: term{lost: make(chan struct{})}, keepLeaseDone: make(chan struct{}),
	}
	t.certainUntil.Store(int64(requested.Add(e.ttl)))
	go t.keepLease(termCtx)
	fail := func(step string, err error) (Term, *catalog.Catalog, error) {
		patience := e.ttl
		if ctx.Err() != nil {
			patience = endPatience
		}
		stop, done := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer done()
		return nil, nil, errors.Join(fmt.Errorf("etcd: %s: %w", step, err), t.Resign(stop))
	}
	if err := campaign(ctx, t.election, advertise); err != nil {
		return fail("campaign", err)
	}
	cat, _, err := e.load(ctx, client)
	if err != nil {
		return fail("load", err)
	}
	t.head = cat.Version()
	if t.number, err = e.lastTerm(ctx, client); err != nil {
		return fail("term", err)
	}
	t.number = numberAfter(t.number)
	if err := t.guarded(ctx, clientv3.OpPut(e.key("term"), hex(t.number))); err != nil {
		return fail("term", err)
	}
	return t, cat, nil
}

// endPatience is how long a cancelled attempt to lead waits for etcd.
const endPatience = 300 * time.Millisecond

// campaign runs election.Campaign and returns soon after ctx ends. Campaign itself then
// deletes its key and waits until the client is closed if etcd does not answer.
func campaign(ctx context.Context, election *concurrency.Election, advertise string) error {
	done := make(chan error, 1)
	go func() { done <- election.Campaign(ctx, advertise) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	limit := time.NewTimer(endPatience)
	defer limit.Stop()
	select {
	case err := <-done:
		return err
	case <-limit.C:
		return context.Cause(ctx) // the key expires with the lease
	}
}

// lastTerm returns the number of the newest term, or 0.
func (e *Etcd) lastTerm(ctx context.Context, client *clientv3.Client) (uint64, error) {
	r, err := client.Get(ctx, e.key("term"))
	if err != nil || len(r.Kvs) == 0 {
		return 0, err
	}
	return strconv.ParseUint(string(r.Kvs[0].Value), 16, 64)
}

// load reads the log at one revision and returns the revision.
func (e *Etcd) load(ctx context.Context, client *clientv3.Client) (*catalog.Catalog, int64, error) {
	revision, snapshot, err := e.snapshot(ctx, client)
	if err != nil {
		return nil, 0, err
	}
	var dump []byte
	if snapshot.Parts > 0 {
		if dump, err = e.parts(ctx, client, "dump", snapshot.Version, snapshot.Parts, revision); err != nil {
			return nil, 0, fmt.Errorf("snapshot: %w", err)
		}
	}
	cat, err := load(dump)
	if err != nil {
		return nil, 0, err
	}
	for {
		r, err := client.Get(ctx, e.key("log", hex(cat.Version()+1)),
			clientv3.WithRange(clientv3.GetPrefixRangeEnd(e.key("log", ""))), clientv3.WithLimit(page), clientv3.WithRev(revision))
		if err != nil {
			return nil, 0, err
		}
		for _, kv := range r.Kvs {
			if err := e.apply(ctx, client, string(kv.Key), kv.Value, cat.Version(), func(version uint64, record []byte) error {
				return replay(cat, version, record)
			}); err != nil {
				return nil, 0, err
			}
		}
		if !r.More {
			return cat, revision, nil
		}
	}
}

// snapshot reads the key of the present dump and the revision of the read. The zero
// snapshotKey means no dump.
func (e *Etcd) snapshot(ctx context.Context, client *clientv3.Client) (revision int64, snapshot snapshotKey, err error) {
	r, err := client.Get(ctx, e.key("snapshot"))
	if err != nil {
		return 0, snapshot, err
	}
	if len(r.Kvs) > 0 {
		if err := json.Unmarshal(r.Kvs[0].Value, &snapshot); err != nil {
			return 0, snapshot, fmt.Errorf("snapshot: %w", err)
		}
		if snapshot.Parts < 1 {
			return 0, snapshot, fmt.Errorf("snapshot: %d parts", snapshot.Parts)
		}
		snapshot.revision = r.Kvs[0].ModRevision
	}
	return r.Header.Revision, snapshot, nil
}

type snapshotKey struct {
	Version  uint64 `json:"version"`
	Parts    int    `json:"parts"`
	revision int64  // revision of the dump's snapshot key
}

// apply passes the event of a log key to f, if its version is greater than after.
func (e *Etcd) apply(ctx context.Context, client *clientv3.Client, key string, value []byte, after uint64, f func(version uint64, record []byte) error) error {
	version, err := strconv.ParseUint(strings.TrimPrefix(key, e.key("log", "")), 16, 64)
	if err != nil {
		return fmt.Errorf("key %q is no event's: %w", key, err)
	}
	if version <= after {
		return nil
	}
	if n, large := strings.CutPrefix(string(value), "parts "); large {
		count, err := strconv.Atoi(n)
		if err != nil {
			return fmt.Errorf("event %d: %w", version, err)
		}
		// Parts do not change once the event exists.
		if value, err = e.parts(ctx, client, "part", version, count, 0); err != nil {
			return fmt.Errorf("event %d: %w", version, err)
		}
	}
	return f(version, value)
}

// maxParts bounds the reads of a damaged count, and the size of an event.
const maxParts = 4096

func (e *Etcd) parts(ctx context.Context, client *clientv3.Client, kind string, version uint64, count int, revision int64) ([]byte, error) {
	if count < 1 || count > maxParts {
		return nil, fmt.Errorf("%d parts", count)
	}
	var all []byte
	for i := range count {
		r, err := client.Get(ctx, e.key(kind, hex(version), hex(uint64(i))), clientv3.WithRev(revision))
		if err != nil {
			return nil, err
		}
		if len(r.Kvs) == 0 {
			return nil, fmt.Errorf("part %d of %d: %w", i, count, errMissing)
		}
		all = append(all, r.Kvs[0].Value...)
	}
	return all, nil
}

var (
	errClosed  = errors.New("etcd: the store is closed")
	errCut     = errors.New("the watch ended")
	errMissing = errors.New("it is missing")
)

// followPause separates two attempts to follow, since etcd may be unavailable for long.
const followPause = 200 * time.Millisecond

// Follow implements Store. It retries while etcd does not answer, and fails on unreadable
// records.
func (e *Etcd) Follow(ctx context.Context, f Follower) error {
	for {
		err := e.follow(ctx, f)
		if ctx.Err() != nil {
			return nil
		}
		if errors.As(err, new(*FormatError)) {
			return fmt.Errorf("etcd: follow: %w", err)
		}
		f.Cut(err)
		clock.Sleep(ctx, followPause) // if ctx ends, the next attempt notices
	}
}

func (e *Etcd) follow(ctx context.Context, f Follower) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client, err := e.client(ctx)
	if err != nil {
		return err
	}
	// A request to an unavailable etcd waits, so each request has a time limit.
	answers := func() error {
		limit, cancel := context.WithTimeout(ctx, e.ttl/2)
		defer cancel()
		if _, err := client.Get(limit, e.key("log", "")); err != nil {
			return fmt.Errorf("etcd: no answer: %w", explain(ctx, client, err))
		}
		return nil
	}
	if err := answers(); err != nil {
		return err
	}
	cat, revision, err := e.load(ctx, client)
	if err != nil {
		return err
	}
	version := cat.Version()
	f.Reset(cat)
	watch := client.Watch(clientv3.WithRequireLeader(ctx), e.key("log", ""),
		clientv3.WithPrefix(), clientv3.WithRev(revision+1), clientv3.WithFilterDelete())
	// A watch is silent when etcd is unavailable or has no leader.
	ticker := time.NewTicker(e.ttl / 5)
	defer ticker.Stop()
	for {
		var r clientv3.WatchResponse
		select {
		case next, open := <-watch:
			if !open {
				return errCut
			}
			r = next
		case <-ticker.C:
			if err := answers(); err != nil {
				return err
			}
			continue
		}
		if err := r.Err(); err != nil {
			return err
		}
		for _, event := range r.Events {
			err := e.apply(ctx, client, string(event.Kv.Key), event.Kv.Value, version, func(v uint64, record []byte) error {
				if v != version+1 {
					return ErrGap
				}
				decoded, err := decodeEvent(record)
				if err != nil {
					return fmt.Errorf("event %d: %w", v, err)
				}
				version = v
				return f.Apply(decoded)
			})
			if err != nil {
				return err
			}
		}
	}
}

type etcdTerm struct {
	term          // keepLease closes lost
	store         *Etcd
	client        *clientv3.Client
	session       *concurrency.Session
	election      *concurrency.Election
	cancel        context.CancelFunc
	written       int           // bytes of events since the last dump
	keepLeaseDone chan struct{} // closed when keepLease has returned
	// certainUntil is a mono.Time, written by keepLease. A stale value is earlier, which is safe.
	certainUntil atomic.Int64
}

// keepLease renews the lease until ctx or the term ends. It records the time from which etcd
// may elect another leader. The session's own keep-alive does not report when its
// requests were made, and notices a loss seconds later.
func (t *etcdTerm) keepLease(ctx context.Context) {
	defer close(t.keepLeaseDone)
	for ctx.Err() == nil {
		remaining := t.Until().Sub(clock.Mono())
		if remaining <= 0 {
			close(t.lost)
			return
		}
		requested := clock.Mono()
		limit, cancel := context.WithTimeout(ctx, remaining)
		r, err := t.client.KeepAliveOnce(limit, t.session.Lease())
		cancel()
		switch {
		case err == nil && r.TTL > 0:
			t.certainUntil.Store(int64(requested.Add(time.Duration(r.TTL) * time.Second)))
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			t.certainUntil.Store(int64(min(t.Until(), requested)))
		}
		timer := time.NewTimer(min(t.store.ttl/5, max(0, t.Until().Sub(clock.Mono()))))
		select {
		case <-timer.C:
		case <-t.session.Done():
			timer.Stop()
			t.certainUntil.Store(int64(min(t.Until(), clock.Mono())))
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// Until implements Term.
func (t *etcdTerm) Until() mono.Time { return mono.Time(t.certainUntil.Load()) }

// Resign implements Term.
func (t *etcdTerm) Resign(ctx context.Context) error {
	if t.ended {
		return nil
	}
	t.ended = true
	t.cancel() // ends the keep-alives
	<-t.keepLeaseDone
	t.session.Orphan()
	if _, err := t.client.Revoke(ctx, t.session.Lease()); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("etcd: resign: %w", err) // the lease expires by itself
	}
	return nil
}

// guarded runs a transaction if this process is the leader and head is unchanged.
func (t *etcdTerm) guarded(ctx context.Context, ops ...clientv3.Op) error {
	if t.ended || !clock.Mono().Before(t.Until()) {
		return ErrLost
	}
	headUnchanged := clientv3.Compare(clientv3.Value(t.store.key("head")), "=", hex(t.head))
	if t.head == 0 {
		headUnchanged = clientv3.Compare(clientv3.CreateRevision(t.store.key("head")), "=", 0)
	}
	stillLeader := clientv3.Compare(clientv3.CreateRevision(t.election.Key()), "=", t.election.Rev())
	// After a lost answer the caller cannot know whether the transaction ran, so the time
	// limit is the lease and the term ends.
	ctx, cancel := context.WithTimeout(ctx, t.store.ttl)
	defer cancel()
	r, err := t.client.Txn(ctx).If(stillLeader, headUnchanged).Then(ops...).Else(clientv3.OpGet(t.election.Key())).Commit()
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("etcd: %w: %w", ErrFull, err) // etcd refused the whole transaction
	case err != nil:
		return fmt.Errorf("etcd: %w", err)
	case r.Succeeded:
		return nil
	case len(r.Responses) > 0 && len(r.Responses[0].GetResponseRange().GetKvs()) > 0:
		return fmt.Errorf("etcd: the log does not end at %d: %w", t.head, ErrGap)
	}
	return fmt.Errorf("etcd: %w", ErrLost)
}

// Append implements Term.
func (t *etcdTerm) Append(ctx context.Context, base uint64, events []catalog.Event) error {
	records, err := t.records(base, events)
	if err != nil {
		return err
	}
	var ops []clientv3.Op
	size, version := 0, t.head
	flush := func() error {
		if len(ops) == 0 {
			return nil
		}
		err := t.guarded(ctx, append(ops, clientv3.OpPut(t.store.key("head"), hex(version)))...)
		if err == nil {
			t.head, ops, size = version, nil, 0
		}
		return err
	}
	for _, record := range records {
		t.written += len(record)
		if len(ops) == maxTxnOps || size+len(record) > maxTxnBytes {
			if err := flush(); err != nil {
				return t.partly(base, err)
			}
		}
		if len(record) > maxPart {
			// The parts first, because readers ignore parts without their event.
			n, err := t.putParts(ctx, "part", version+1, record)
			if err != nil {
				return t.partly(base, err)
			}
			record = fmt.Appendf(nil, "parts %d", n)
		}
		version++
		size += len(record)
		ops = append(ops, clientv3.OpPut(t.store.key("log", hex(version)), string(record)))
	}
	return t.partly(base, flush())
}

// partly returns err, but hides ErrFull if some events after base are stored.
func (t *etcdTerm) partly(base uint64, err error) error {
	if errors.Is(err, ErrFull) && t.head != base {
		return fmt.Errorf("%v; %d events are kept", err, t.head-base)
	}
	return err
}

func (t *etcdTerm) putParts(ctx context.Context, kind string, version uint64, b []byte) (int, error) {
	if len(b) > maxParts*maxPart {
		return 0, fmt.Errorf("etcd: a record of %d bytes, at most %d", len(b), maxParts*maxPart)
	}
	n := 0
	for ; len(b) > 0; n++ {
		size := min(len(b), maxPart)
		err := t.guarded(ctx, clientv3.OpPut(t.store.key(kind, hex(version), hex(uint64(n))), string(b[:size])))
		if err != nil {
			return 0, err
		}
		b = b[size:]
	}
	return n, nil
}

// Compact implements Term.
func (t *etcdTerm) Compact(ctx context.Context, d catalog.Dump) error {
	dump, err := t.dump(d)
	if err != nil {
		return err
	}
	n, err := t.putParts(ctx, "dump", d.Version, dump)
	if err != nil {
		return err
	}
	encodedKey, err := json.Marshal(snapshotKey{Version: d.Version, Parts: n})
	if err != nil {
		return err
	}
	// One transaction, so a reader at one revision finds a dump and all events after the
	// dump. The transaction also deletes everything before the dump.
	next := hex(d.Version + 1)
	last, err := t.lastDump(ctx)
	if err != nil {
		return err
	}
	err = t.guarded(ctx,
		clientv3.OpPut(t.store.key("snapshot"), string(encodedKey)),
		clientv3.OpDelete(t.store.key("log", hex(0)), clientv3.WithRange(t.store.key("log", next))),
		clientv3.OpDelete(t.store.key("part", hex(0)), clientv3.WithRange(t.store.key("part", next))),
		clientv3.OpDelete(t.store.key("dump", hex(0)), clientv3.WithRange(t.store.key("dump", hex(d.Version)))),
	)
	if err != nil {
		return err
	}
	fewEvents := d.Version < last.Version+historyAfter && t.written < historyBytes
	t.written = 0
	if last.revision == 0 || fewEvents {
		return nil
	}
	// Deleted keys take room until etcd compacts its history. A follower that still reads
	// older history starts again.
	ctx, cancel := context.WithTimeout(ctx, t.store.ttl)
	defer cancel()
	if _, err := t.client.Compact(ctx, last.revision); err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
		return fmt.Errorf("etcd: forget what was before the last dump: %w", err)
	}
	return nil
}

// lastDump reads the key of the present dump within the lease, because an unavailable
// etcd would block appends for longer.
func (t *etcdTerm) lastDump(ctx context.Context) (snapshotKey, error) {
	ctx, cancel := context.WithTimeout(ctx, t.store.ttl)
	defer cancel()
	_, last, err := t.store.snapshot(ctx, t.client)
	return last, err
}
