package lookupd

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
)

const (
	// DefaultPingInterval is well below the 5 minutes after which nsqlookupd drops a node by
	// default.
	DefaultPingInterval = 15 * time.Second
	// DefaultRetryAfter is nsqd's Config.RetryAfter.
	DefaultRetryAfter = time.Second
)

// Config configures an Announcer. Immutable.
type Config struct {
	// Node is the node to announce.
	Node Node
	// Topics lists the node's topics. Called by several goroutines.
	Topics func() []Topic
	// ConnectTimeout bounds dialling and RequestTimeout bounds an answer, over TCP and HTTP.
	ConnectTimeout, RequestTimeout time.Duration
	// RetryAfter is the approximate pause before the first attempt to reconnect. The pause
	// doubles, up to 32 times RetryAfter.
	RetryAfter time.Duration
	// PingInterval is the time between pings to a daemon.
	PingInterval time.Duration
	// Seed of the jitter between attempts to connect.
	Seed uint64
	Log  *slog.Logger
}

// Validate reports all problems at once.
func (c Config) Validate() error {
	var errs faults.List
	for name, d := range map[string]time.Duration{"connect timeout": c.ConnectTimeout, "request timeout": c.RequestTimeout, "ping interval": c.PingInterval, "pause between attempts": c.RetryAfter} {
		errs.If(d <= 0, "%s %v is not positive", name, d)
	}
	errs.If(c.Topics == nil || c.Log == nil, "a list of topics and a log are needed")
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errs.Err()
}

// Flags defines the flag of the addresses.
func Flags(fs *flag.FlagSet, addresses *[]string) {
	const name = "lookupd-tcp-address"
	fs.Var((*daemon.List)(addresses), name, "`host:port` of an nsqlookupd to register with; may be repeated")
	daemon.Alias(fs, name, "nsqlookupd-tcp-addresses", daemon.NSQName)
}

// ValidateAddresses reports every address that is not host:port.
func ValidateAddresses(addresses []string) error {
	var errs faults.List
	for _, a := range addresses {
		_, port, err := net.SplitHostPort(a)
		errs.If(err != nil || port == "", "--lookupd-tcp-address %q is not host:port", a)
	}
	return errs.Err()
}

// Announcer keeps any number of nsqlookupd daemons informed. Safe for concurrent use.
type Announcer struct {
	// Set once.
	cfg     Config
	http    *http.Client
	updated chan struct{} // capacity 1: mu.addresses has changed

	mu struct {
		sync.Mutex
		addresses []string
		peers     []*peer // started by Run; sorted by address
	}
}

// New returns an Announcer, idle before Run.
func New(cfg Config, addresses []string) (*Announcer, error) {
	if err := errors.Join(cfg.Validate(), ValidateAddresses(addresses)); err != nil {
		return nil, fmt.Errorf("announce: %w", err)
	}
	a := &Announcer{cfg: cfg, updated: make(chan struct{}, 1)}
	a.mu.addresses = slices.Clone(addresses)
	dialer := &net.Dialer{Timeout: cfg.ConnectTimeout}
	a.http = &http.Client{
		Timeout:       cfg.RequestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext:       dialer.DialContext,
			DisableKeepAlives: true, // requests are rare: one for each new topic
		},
	}
	return a, nil
}

// Run informs the daemons until ctx ends. Then the daemons drop the node's registrations.
func (a *Announcer) Run(ctx context.Context) error {
	all := make(map[string]*peer)
	rng := rand.New(rand.NewPCG(a.cfg.Seed, 0))
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		addresses := a.Addresses()
		for address, p := range all {
			if !slices.Contains(addresses, address) {
				p.stop()
				delete(all, address)
			}
		}
		var added []func()
		for _, address := range addresses {
			if _, ok := all[address]; ok {
				continue
			}
			p := newPeer(&a.cfg, address, rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64())))
			peerCtx, stop := context.WithCancel(ctx)
			p.stop, all[address] = stop, p
			added = append(added, func() { p.run(peerCtx) })
		}
		peers := slices.SortedFunc(maps.Values(all), func(a, b *peer) int { return strings.Compare(a.address, b.address) })
		a.mu.Lock()
		a.mu.peers = peers
		a.mu.Unlock()
		for _, run := range added { // after mu.peers is set, so that no Notify is lost
			wg.Go(run)
		}
		select {
		case <-ctx.Done():
			for _, p := range peers {
				p.stop()
			}
			return nil
		case <-a.updated:
		}
	}
}

// Notify reports that topics or channels have changed. It does not block.
func (a *Announcer) Notify() {
	for _, p := range a.peers() {
		p.notify()
	}
}

// Addresses returns the daemons' addresses as given.
func (a *Announcer) Addresses() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.mu.addresses)
}

// SetAddresses replaces the daemons. New daemons get all registrations, and removed daemons lose
// the node's registrations. If an address is not host:port, SetAddresses changes nothing.
func (a *Announcer) SetAddresses(addresses []string) error {
	if err := ValidateAddresses(addresses); err != nil {
		return err
	}
	a.mu.Lock()
	a.mu.addresses = slices.Clone(addresses)
	a.mu.Unlock()
	select {
	case a.updated <- struct{}{}:
	default: // an update is pending already
	}
	return nil
}

func (a *Announcer) peers() []*peer {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.peers
}

// State is one daemon's state, for operators.
type State struct {
	Address    string `json:"address"`
	Connected  bool   `json:"connected"`
	Registered int64  `json:"registered"` // topics and channels registered for this node
	Failures   uint64 `json:"failures"`   // connections that ended or failed
}

// State returns the states of the daemons, by address.
func (a *Announcer) State() []State {
	states := []State{}
	for _, p := range a.peers() {
		states = append(states, State{p.address, p.web.Load() != nil, p.registered.Load(), p.failures.Load()})
	}
	return states
}

// Channels returns the topic's channels on all nodes known to the daemons, sorted. Channels
// queries all daemons at once. It logs and skips daemons that do not answer in time. Ephemeral channels
// are left out, because they live only as long as their consumers.
func (a *Announcer) Channels(ctx context.Context, topic string) []string {
	peers := a.peers()
	answers := make([][]string, len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		web := p.web.Load()
		if web == nil || *web == "" {
			continue
		}
		wg.Go(func() {
			channels, err := a.channelsOf(ctx, *web, topic)
			if err != nil {
				a.cfg.Log.Warn("cannot get a topic's channels from nsqlookupd", obs.KeyAddress, *web, obs.KeyTopic, topic, obs.KeyError, err)
				return
			}
			answers[i] = channels
		})
	}
	wg.Wait()
	all := slices.Concat(answers...)
	all = slices.DeleteFunc(all, func(c string) bool { return strings.HasSuffix(c, "#ephemeral") })
	slices.Sort(all)
	return slices.Compact(all)
}

// maxListing bounds an answer over HTTP, in bytes.
const maxListing = 4 << 20

func (a *Announcer) channelsOf(ctx context.Context, web, topic string) ([]string, error) {
	u := url.URL{Scheme: "http", Host: web, Path: "/channels", RawQuery: url.Values{"topic": {topic}}.Encode()}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Accept", "application/vnd.nsq; version=1.0")
	response, err := a.http.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, nil // the daemon does not know the topic
	default:
		return nil, fmt.Errorf("answers %s", response.Status)
	}
	body, err := bounded.Read(response.Body, maxListing)
	if err != nil {
		return nil, err
	}
	return parseChannels(body)
}
