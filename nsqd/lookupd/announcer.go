package lookupd

import (
	"context"
	"errors"
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
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
)

const (
	// DefaultPingInterval is well below the 5 minutes after which nsqlookupd, by
	// default, takes a node to be gone.
	DefaultPingInterval = 15 * time.Second
	// DefaultRetryAfter is for Config.RetryAfter.
	DefaultRetryAfter = time.Second
)

// Config of an Announcer. Immutable.
type Config struct {
	// Node is what is announced.
	Node Node
	// Topics lists what there is. Called by several goroutines.
	Topics func() []Topic
	// ConnectTimeout bounds the dialling and RequestTimeout an answer, over TCP
	// and HTTP.
	ConnectTimeout, RequestTimeout time.Duration
	// RetryAfter is about how long to wait before the first new attempt to
	// connect. The pause doubles, up to 32 times that.
	RetryAfter time.Duration
	// PingInterval is how often a daemon hears of us that has nothing to hear.
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

// ValidateAddresses reports every address that is not host:port.
func ValidateAddresses(addresses []string) error {
	var errs faults.List
	for _, a := range addresses {
		_, port, err := net.SplitHostPort(a)
		errs.If(err != nil || port == "", "--lookupd-tcp-address %q is not host:port", a)
	}
	return errs.Err()
}

// Announcer keeps any number of nsqlookupd daemons informed. Its methods may be
// called by any goroutine.
type Announcer struct {
	// Set once.
	cfg     Config
	http    *http.Client
	updated chan struct{} // 1 deep: mu.addresses has changed

	mu struct {
		sync.Mutex
		addresses []string
		peers     []*peer // that Run has started; sorted by address
	}
}

// New returns an Announcer that is idle before Run.
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
			DisableKeepAlives: true, // it is asked rarely: when a topic is new
		},
	}
	return a, nil
}

// Run informs the daemons until ctx ends; their registrations end with it.
func (a *Announcer) Run(ctx context.Context) error {
	all := make(map[string]*peer)
	rng := rand.New(rand.NewPCG(a.cfg.Seed, 0))
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		want := a.Addresses()
		for address, p := range all {
			if !slices.Contains(want, address) {
				p.stop()
				delete(all, address)
			}
		}
		var fresh []func()
		for _, address := range want {
			if _, there := all[address]; there {
				continue
			}
			p := newPeer(&a.cfg, address, rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64())))
			own, stop := context.WithCancel(ctx)
			p.stop, all[address] = stop, p
			fresh = append(fresh, func() { p.run(own) })
		}
		peers := slices.SortedFunc(maps.Values(all), func(a, b *peer) int { return strings.Compare(a.address, b.address) })
		a.mu.Lock()
		a.mu.peers = peers
		a.mu.Unlock()
		for _, run := range fresh { // only now, so that no notice passes them by
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

// Notify says that topics or channels have changed. It does not block.
func (a *Announcer) Notify() {
	for _, p := range a.peers() {
		p.notify()
	}
}

// Addresses returns the daemons' addresses as they were given.
func (a *Announcer) Addresses() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.mu.addresses)
}

// SetAddresses replaces the daemons: new ones are told everything, the others
// lose our registrations. Addresses that are not host:port change nothing.
func (a *Announcer) SetAddresses(addresses []string) error {
	if err := ValidateAddresses(addresses); err != nil {
		return err
	}
	a.mu.Lock()
	a.mu.addresses = slices.Clone(addresses)
	a.mu.Unlock()
	select {
	case a.updated <- struct{}{}:
	default: // Run will see it anyway
	}
	return nil
}

func (a *Announcer) peers() []*peer {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.peers
}

// State is one daemon as operators see it.
type State struct {
	Address    string `json:"address"`
	Connected  bool   `json:"connected"`
	Registered int64  `json:"registered"` // topics and channels it knows of us
	Failures   uint64 `json:"failures"`   // connections that ended, or did not come about
}

// State returns the daemons by address.
func (a *Announcer) State() []State {
	states := []State{}
	for _, p := range a.peers() {
		states = append(states, State{p.address, p.web.Load() != nil, p.registered.Load(), p.failures.Load()})
	}
	return states
}

// Channels returns the channels that the topic has on any node the daemons
// know, sorted. All of them are asked at once; those that do not answer in time
// are logged and passed over. Ephemeral channels are left out: they live with
// their consumers.
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
				a.cfg.Log.Warn("nsqlookupd does not say a topic's channels", obs.KeyAddress, *web, obs.KeyTopic, topic, obs.KeyError, err)
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
		return nil, nil // it does not know the topic
	default:
		return nil, fmt.Errorf("answers %s", response.Status)
	}
	body, err := bounded.Read(response.Body, maxListing)
	if err != nil {
		return nil, err
	}
	return parseChannels(body)
}
