package replicated

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// Config says where the streams are. Immutable.
type Config struct {
	URL         string // of NATS servers, separated by commas
	Credentials string // file with a JWT and a key, made by nsc; empty: none
	TLS         *tls.Config
	Replicas    int    // of each stream, 1 to 5
	BrokerID    string // identity of this broker, the owner of its parts
	MaxBody     int    // maximum size of a message body, in bytes
	// MaxBytes is the maximum size of a topic's stream, in bytes. 0: only the server limits the
	// size.
	MaxBytes int64
	Log      *slog.Logger
}

// Flags defines the flags of JetStream.
func (c *Config) Flags(fs *flag.FlagSet) {
	fs.StringVar(&c.URL, "jetstream-url", "", "`url` of NATS servers with JetStream for --durability=replicated, of several with commas, as nats://a:4222,nats://b:4222")
	fs.IntVar(&c.Replicas, "jetstream-replicas", 3, "how many `servers` of NATS keep each message, 1 to 5")
	fs.StringVar(&c.Credentials, "jetstream-creds", "", "`file` with credentials for NATS, as nsc writes them")
	fs.Int64Var(&c.MaxBytes, "jetstream-max-bytes", 0, "size of a topic's stream, in `bytes`, at least 1 MiB; when seven eighths are full, retained messages are deleted, and then publishes are refused (E_QUEUE_FULL); 0: what NATS allows")
}

// CheckFlags returns all problems of the flags' values.
func (c *Config) CheckFlags() error {
	var errs faults.List
	errs.If(c.Replicas < 1 || c.Replicas > 5, "--jetstream-replicas %d is not 1 to 5", c.Replicas)
	errs.If(c.MaxBytes != 0 && c.MaxBytes < 1<<20, "--jetstream-max-bytes %d is neither 0 nor at least %d", c.MaxBytes, 1<<20)
	return errs.Err()
}

// Cluster is a connection to JetStream.
type Cluster struct {
	cfg     Config
	ctx     context.Context // context of every request and of the connection; ended by end
	end     context.CancelCauseFunc
	nc      *nats.Conn
	js      jetstream.JetStream
	cursors jetstream.Stream
	pending atomic.Int64 // bytes that wait to be stored, in all logs
	// blockSize is the size at which a block takes no further record; set once.
	blockSize int

	mu     sync.Mutex
	opened map[part]*Log
	// unremoved holds, for each part that this process could not remove, the possible nonces of the
	// newest block: the nonce of the part's owner, and the nonce of an owner that claimed the
	// part to remove it.
	unremoved map[part][2]uint64
	closes    chan struct{} // closed and replaced when a log is closed
	last      *time.Timer   // timer of EndAfter; nil: EndAfter was not called
}

const (
	cursorStream = "SRTM_CURSORS"
	connecting   = 10 * time.Second
	starting     = 30 * time.Second
)

// errConfig is an error that a retry cannot fix.
type errConfig struct{ error }

func (e errConfig) Unwrap() error { return e.error }

// Connect connects to JetStream and creates the stream of cursors. Connect retries for half a
// minute or until ctx is done, because servers that start together with the broker first elect a
// leader. An error in the configuration of either side fails at once.
func Connect(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.BrokerID == "" || cfg.Log == nil || cfg.Replicas < 1 || cfg.Replicas > 5 {
		return nil, fmt.Errorf("replicated log: part %q, %d replicas: want a name, and 1 to 5", cfg.BrokerID, cfg.Replicas)
	}
	ctx, cancel := context.WithTimeout(ctx, starting)
	defer cancel()
	pause := time.NewTicker(minWait)
	defer pause.Stop()
	for warned := false; ; {
		c, err := connect(ctx, cfg)
		var config errConfig
		if err == nil || errors.As(err, &config) {
			return c, err
		}
		if !warned && ctx.Err() == nil {
			cfg.Log.Warn("NATS JetStream is unavailable; retrying", "for", starting, obs.KeyError, err)
			warned = true
		}
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		switch ctx.Err() { // check ctx first: the pause may be over, too
		case context.Canceled: // the broker is stopping; no server failed
			return nil, ctx.Err()
		case context.DeadlineExceeded:
			return nil, fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// dialTimeout limits accepting a connection, and then the server's first answer.
const dialTimeout = 2 * time.Second

// dialer dials until its context ends. The end also closes the connections made. nats.Connect
// takes no context and waits dialTimeout for each silent server.
type dialer struct{ ctx context.Context }

func (d dialer) Dial(network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(d.ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &dialled{c, context.AfterFunc(d.ctx, func() { _ = c.Close() })}, nil
}

// dialled is a connection that no longer refers to the context after Close.
type dialled struct {
	net.Conn
	forget func() bool
}

func (d *dialled) Close() error {
	d.forget()
	return d.Conn.Close()
}

func connect(ctx context.Context, cfg Config) (*Cluster, error) {
	connCtx, end := context.WithCancelCause(context.WithoutCancel(ctx)) // connCtx outlives ctx: reconnects use it for the whole process
	connected := context.AfterFunc(ctx, func() { end(ctx.Err()) })
	defer connected()
	options := []nats.Option{
		nats.Name("nsqd " + cfg.BrokerID), nats.MaxReconnects(-1), nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond), nats.Timeout(dialTimeout), nats.SetCustomDialer(dialer{connCtx}),
		nats.PingInterval(2 * time.Second), nats.MaxPingsOutstanding(2), nats.ReconnectBufSize(-1),
		nats.FlusherTimeout(patience), // a write to a frozen server blocks all other requests
		nats.IgnoreAuthErrorAbort(),   // credentials may change on both sides, one after the other
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil && connCtx.Err() == nil {
				cfg.Log.Warn("connection to NATS lost", obs.KeyError, err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			cfg.Log.Info("connected to NATS again", "server", nc.ConnectedUrlRedacted())
		}),
	}
	if cfg.Credentials != "" {
		options = append(options, nats.UserCredentials(cfg.Credentials))
	}
	if cfg.TLS != nil {
		options = append(options, nats.Secure(cfg.TLS))
	}
	nc, err := nats.Connect(cfg.URL, options...)
	if err != nil {
		err = fmt.Errorf("connect to NATS: %w", err)
		var unknown *tls.CertificateVerificationError
		if errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, nats.ErrAuthRevoked) ||
			errors.Is(err, nats.ErrSecureConnRequired) || errors.Is(err, nats.ErrSecureConnWanted) || errors.As(err, &unknown) {
			err = errConfig{err}
		}
		return nil, err
	}
	c := &Cluster{cfg: cfg, ctx: connCtx, end: end, nc: nc, opened: make(map[part]*Log), unremoved: make(map[part][2]uint64), closes: make(chan struct{})}
	if err := c.begin(ctx); err != nil {
		c.Close()
		return nil, err
	}
	if !connected() { // ctx has just ended, and with it connCtx, so nc could not reconnect
		c.Close()
		return nil, ctx.Err()
	}
	return c, nil
}

// oldest is the oldest supported release of nats-server: major and minor number. Earlier releases
// are untested.
var oldest = [2]int{2, 10}

func tooOld(version string) bool {
	var v [2]int
	if n, err := fmt.Sscanf(version, "%d.%d", &v[0], &v[1]); n != 2 || err != nil {
		return false // unknown version format: accept
	}
	return slices.Compare(v[:], oldest[:]) < 0
}

func (c *Cluster) begin(ctx context.Context) (err error) {
	if v := c.nc.ConnectedServerVersion(); tooOld(v) {
		return errConfig{fmt.Errorf("nats-server at %s is release %s: want %d.%d or later", c.nc.ConnectedUrlRedacted(), v, oldest[0], oldest[1])}
	}
	need := int64(c.cfg.MaxBody + blockHeader + recordHeader + 1024)
	if most := c.nc.MaxPayload(); most < need {
		return errConfig{fmt.Errorf("NATS takes messages of %d bytes (max_payload), a message of %d needs %d: set max_payload there, or --max-msg-size here", most, c.cfg.MaxBody, need)}
	}
	c.blockSize = min(maxBlock, int(c.nc.MaxPayload())-1024)
	if c.js, err = jetstream.New(c.nc, jetstream.WithPublishAsyncTimeout(patience/2), jetstream.WithPublishAsyncMaxPending(1<<16)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience/2) // a server without a leader does not answer
	defer cancel()
	c.cursors, err = c.makeCursors(ctx)
	switch {
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount),
		errors.Is(err, nats.ErrNoResponders): // a server with JetStream but without a leader does not answer at all
		return errConfig{fmt.Errorf("NATS at %s has no JetStream (nats-server --jetstream): %w", c.nc.ConnectedUrlRedacted(), err)}
	case err != nil:
		return fmt.Errorf("make the stream of cursors with %d replicas: %w", c.cfg.Replicas, err)
	}
	return nil
}

// EndAfter makes every request fail with ErrEnded once d has passed, including requests under
// way. A stopping broker then waits no longer for JetStream. Only the first call counts.
func (c *Cluster) EndAfter(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil {
		c.last = time.AfterFunc(d, func() {
			c.cfg.Log.Warn("JetStream did not store all messages in time; stopping without them", "limit", d)
			c.end(ErrEnded)
			c.mu.Lock()
			c.notifyClosed() // wake the callers that wait for a log to be closed
			c.mu.Unlock()
		})
	}
}

// Close ends the connection. Requires: all logs are closed.
func (c *Cluster) Close() {
	c.mu.Lock()
	if c.last != nil {
		c.last.Stop()
	}
	c.mu.Unlock()
	c.end(ErrEnded) // closes the socket: nats.Conn.Close would first wait until a frozen server reads
	c.nc.Close()
}

// timeout returns a context for requests that may take d together.
func (c *Cluster) timeout(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.ctx, d)
}

func (c *Cluster) makeCursors(ctx context.Context) (jetstream.Stream, error) {
	return c.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: cursorStream, Subjects: []string{"srtm.cursors.>"}, Description: "where the channels of SRTM's topics are",
		Replicas: c.cfg.Replicas, Storage: jetstream.FileStorage, MaxMsgsPerSubject: 1,
	})
}

// remakeCursors recreates the stream of cursors if an operator has deleted the stream.
func (c *Cluster) remakeCursors(ctx context.Context) {
	if _, err := c.js.Stream(ctx, cursorStream); !errors.Is(err, jetstream.ErrStreamNotFound) {
		return
	}
	if _, err := c.makeCursors(ctx); err == nil {
		c.cfg.Log.Warn("stream of cursors was deleted; created again", "stream", cursorStream)
	}
}

// Ready returns the reason why JetStream cannot store anything now, or nil.
func (c *Cluster) Ready() error {
	if !c.nc.IsConnected() {
		return fmt.Errorf("not connected to NATS: %v", c.nc.LastError())
	}
	return nil
}

// Stores returns the reason why appended records are not being stored, or nil.
func (c *Cluster) Stores() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.opened {
		if l == nil { // being opened
			continue
		}
		l.mu.Lock()
		err := l.failing
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// token converts a name of letters, digits, '.', '_' and '-' to a token of a subject and of a
// stream's name.
func token(name string) string { return strings.ReplaceAll(name, ".", "=") }

func untoken(t string) string { return strings.ReplaceAll(t, "=", ".") }

// part identifies a topic's part: what the named broker carries of the topic.
type part struct{ topic, broker string }

func (p part) String() string { return p.topic + " of broker " + p.broker }

// logStream is the prefix of the names of log streams.
const logStream = "SRTM_LOG="

func (p part) stream() string { return logStream + token(p.topic) + "=" + token(p.broker) }

func (p part) subject() string { return "srtm.log." + token(p.topic) + "." + token(p.broker) }

func (p part) cursors() string { return "srtm.cursors." + token(p.topic) + "." + token(p.broker) }

func (c *Cluster) logOf(p part) *slog.Logger { return c.cfg.Log.With(obs.KeyTopic, p.topic) }

// Topics returns the topics that have a part of this broker, and deletes the empty streams of
// parts that were taken over. Topics waits some seconds for each stream's leader, because only
// the leader knows whether the stream is empty. unavailable lists the topics whose leader
// does not answer.
func (c *Cluster) Topics() (topics, unavailable []string, err error) {
	ctx, cancel := c.timeout(connecting)
	defer cancel()
	names := c.js.StreamNames(ctx, jetstream.WithStreamListSubject("srtm.log.*."+token(c.cfg.BrokerID)))
	var parts []part
	for name := range names.Name() {
		topic := strings.TrimSuffix(strings.TrimPrefix(name, logStream), "="+token(c.cfg.BrokerID))
		if p := (part{untoken(topic), c.cfg.BrokerID}); name == p.stream() { // otherwise an operator's or another broker's stream
			parts = append(parts, p)
		}
	}
	if err := names.Err(); err != nil {
		return nil, nil, err
	}
	infos, errs := make([]*jetstream.StreamInfo, len(parts)), make([]error, len(parts))
	var all errgroup.Group
	all.SetLimit(readers)
	for i, p := range parts {
		all.Go(func() error {
			infos[i], errs[i] = c.partInfo(ctx, p)
			if info := infos[i]; info != nil && info.State.Msgs == 0 {
				infos[i], errs[i] = nil, c.delete(ctx, p.stream())
			}
			return nil
		})
	}
	_ = all.Wait()
	for i, p := range parts {
		switch {
		case errs[i] != nil:
			unavailable = append(unavailable, p.topic)
		case infos[i] != nil:
			topics = append(topics, p.topic)
		}
	}
	return topics, unavailable, nil
}

// Has reports whether this broker's part of a topic has anything stored. The error says why the
// answer is unknown now.
func (c *Cluster) Has(topic string) (bool, error) {
	ctx, cancel := c.timeout(time.Second)
	defer cancel()
	info, err := c.partInfo(ctx, part{topic, c.cfg.BrokerID})
	return info != nil && info.State.Msgs > 0, err
}

// partInfo returns the state of a part's stream; nil: the stream does not exist.
func (c *Cluster) partInfo(ctx context.Context, p part) (*jetstream.StreamInfo, error) {
	info, err := c.info(ctx, p.stream())
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("stream %s: %w", p.stream(), err)
	case !slices.Equal(info.Config.Subjects, []string{p.subject()}): // an operator's or another broker's stream
		return nil, nil
	}
	return info, nil
}

// info requests the stream's state from its leader, until a leader answers or ctx is done.
func (c *Cluster) info(ctx context.Context, stream string) (*jetstream.StreamInfo, error) {
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Second) // without a leader there may be no answer
		found, err := c.js.Stream(attempt, stream)
		cancel()
		if err == nil {
			return found.CachedInfo(), nil
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(minWait):
		}
	}
}

// delete deletes a stream. Before a retry, the caller must check the stream's owner again.
func (c *Cluster) delete(ctx context.Context, stream string) error {
	err := c.js.DeleteStream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	return err
}

// Open claims this broker's part of a topic with an epoch; 0 selects an epoch after the last
// owner's. Errors: commitlog.ErrInUse if this process has the part open, ErrFenced if an owner
// with a greater epoch has the part.
func (c *Cluster) Open(topic string, epoch uint64) (*Log, error) {
	return c.open(part{topic, c.cfg.BrokerID}, epoch)
}

// TakeOver claims another broker's part of a topic. The other broker can then store nothing more.
// Errors: ErrNoPart if the part is empty or missing, and the errors of Open.
func (c *Cluster) TakeOver(topic, broker string) (*Log, error) {
	p := part{topic, broker}
	ctx, cancel := c.timeout(patience)
	defer cancel()
	stream, err := c.stream(ctx, p.stream())
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound) || err == nil && stream.CachedInfo().State.Msgs == 0:
		return nil, fmt.Errorf("topic %s: %w", p, ErrNoPart)
	case err != nil:
		return nil, fmt.Errorf("topic %s: %w", p, err)
	}
	return c.open(p, 0)
}

func (c *Cluster) open(p part, epoch uint64) (*Log, error) {
	c.mu.Lock()
	if c.ctx.Err() != nil { // checked first: after the end, a log in use may not close before the caller continues
		c.mu.Unlock()
		return nil, fmt.Errorf("topic %s: %w", p, context.Cause(c.ctx))
	}
	if _, open := c.opened[p]; open {
		c.mu.Unlock()
		return nil, fmt.Errorf("topic %s: %w", p, commitlog.ErrInUse)
	}
	c.opened[p] = nil
	c.mu.Unlock()
	l, err := open(c, p, epoch)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.removeOpened(p)
		return nil, err
	}
	c.opened[p] = l
	return l, nil
}

func (c *Cluster) closed(l *Log) {
	l.mu.Lock()
	l.countBytes(-l.bytes)
	l.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeOpened(l.part)
}

// removeOpened requires mu held.
func (c *Cluster) removeOpened(p part) {
	delete(c.opened, p)
	c.notifyClosed()
}

// notifyClosed wakes the callers of Closes. Requires: mu held.
func (c *Cluster) notifyClosed() {
	close(c.closes)
	c.closes = make(chan struct{})
}

// Closes implements commitlog.Dir. The end of the cluster also closes the channel.
func (c *Cluster) Closes() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closes
}

// Remove closes the log and deletes its stream and cursors, unless another owner has claimed
// them. If the part belongs to another broker, Remove only empties the stream up to the newest
// block. So if the other broker claims the part meanwhile, its later blocks stay, and Remove
// returns ErrFenced.
func (l *Log) Remove() error {
	fenced := l.Fenced()
	l.fail(commitlog.ErrClosed)
	select {
	case <-l.stop:
		return commitlog.ErrClosed
	default:
		close(l.stop)
	}
	<-l.done
	l.detach()
	defer l.cluster.closed(l)
	if fenced {
		return nil
	}
	ctx, cancel := l.cluster.timeout(patience)
	defer cancel()
	l.keeping.Lock()
	defer l.keeping.Unlock()
	if !l.foreign() {
		deleted, err := ask(ctx, func(ctx context.Context) (bool, error) {
			h, _, err := l.newest(ctx)
			switch {
			case errors.Is(err, jetstream.ErrStreamNotFound):
				return true, nil
			case err != nil || h.owner != l.owner && h.owner != owner{}:
				return false, err
			}
			return true, l.cluster.delete(ctx, l.part.stream())
		})
		if deleted {
			err = errors.Join(err, l.cursors.remove(ctx))
		}
		if err != nil {
			l.cluster.recordUnremoved(l.part, l.owner, l.owner)
		} else {
			l.cluster.mu.Lock()
			delete(l.cluster.unremoved, l.part)
			l.cluster.mu.Unlock()
		}
		return err
	}
	l.mu.Lock()
	newest := l.marks.last
	l.mu.Unlock()
	if err := purge(ctx, l.stream, jetstream.WithPurgeSequence(newest+1)); err != nil {
		return err
	}
	info, err := infoOf(ctx, l.stream)
	if err == nil && info.State.LastSeq > newest {
		err = ErrFenced
	}
	return errors.Join(err, l.cursors.remove(ctx))
}

// recordUnremoved records that removal of a part failed. The part's newest block is then from one
// of the two owners, unless another owner has claimed the part since.
func (c *Cluster) recordUnremoved(p part, claimed, created owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unremoved[p] = [2]uint64{claimed.nonce, created.nonce}
}

// unremovedBy reports whether removal of a part failed and the part's newest block is from the given
// owner.
func (c *Cluster) unremovedBy(p part, newest owner) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	nonces, ok := c.unremoved[p]
	return ok && slices.Contains(nonces[:], newest.nonce)
}

// Unremoved reports whether the claimed part held only a log that this process had failed to remove.
func (l *Log) Unremoved() bool { return l.unremoved }

// foreign reports whether the part was taken over from another broker.
func (l *Log) foreign() bool { return l.part.broker != l.cluster.cfg.BrokerID }
