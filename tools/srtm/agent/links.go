package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/obs"
)

// key is a publisher.
type key struct{ topic, id string }

// errTooMany: as many publishers are in use as there may be.
var errTooMany = errors.New("too many publishers")

// link is a publisher, or the attempt to open it.
type link struct {
	opened chan struct{} // closed when publisher or err is set

	// Set before opened is closed.
	publisher *client.Publisher
	err       error

	// Guarded by links.mu.
	users int
	idle  time.Time // since when there are none
}

// links are the publishers of an agent, shared by its connections.
type links struct {
	// set once
	client *client.Client
	cfg    Config
	ctx    context.Context // of openings and closings
	cancel context.CancelFunc
	all    sync.WaitGroup // openings and closings; Add under mu, while not closed

	mu struct {
		sync.Mutex
		closed bool
		links  map[key]*link
	}
}

func newLinks(c *client.Client, cfg Config) *links {
	l := &links{client: c, cfg: cfg}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.mu.links = map[key]*link{}
	return l
}

// use counts the caller among the publisher's users, and opens it if need be.
// A link whose opening failed is forgotten: the next use tries again.
func (l *links) use(k key) (*link, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.mu.links[k]
	switch {
	case l.mu.closed:
		return nil, client.ErrClosed
	case one != nil:
	case len(l.mu.links) >= l.cfg.MaxPublishers:
		return nil, errTooMany
	default:
		one = &link{opened: make(chan struct{})}
		l.mu.links[k] = one
		l.all.Go(func() { l.open(k, one) })
	}
	one.users++
	return one, nil
}

func (l *links) open(k key, one *link) {
	ctx, cancel := context.WithTimeout(l.ctx, l.cfg.PublishTimeout)
	defer cancel()
	p, err := l.client.Publisher(ctx, k.topic, k.id)
	l.mu.Lock()
	defer l.mu.Unlock()
	one.publisher, one.err = p, err
	if err != nil {
		delete(l.mu.links, k)
		l.cfg.Log.Warn("publisher cannot be opened", obs.KeyTopic, k.topic, obs.KeyPublisher, k.id, obs.KeyError, err)
	}
	close(one.opened)
}

// wait returns the publisher once it is open.
func (one *link) wait(ctx context.Context) (*client.Publisher, error) {
	select {
	case <-one.opened:
		return one.publisher, one.err
	case <-ctx.Done():
		return nil, fmt.Errorf("not sent: %w", ctx.Err())
	}
}

// release ends a use.
func (l *links) release(one *link) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		one.idle = time.Now()
	}
}

// clean closes what is idle, until ctx ends.
func (l *links) clean(ctx context.Context) {
	tick := time.NewTicker(max(l.cfg.IdleTimeout/4, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			l.closeIdle(now)
		}
	}
}

func (l *links) closeIdle(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, one := range l.mu.links {
		select {
		case <-one.opened:
		default:
			continue
		}
		if l.mu.closed || one.users > 0 || now.Sub(one.idle) < l.cfg.IdleTimeout {
			continue
		}
		delete(l.mu.links, k)
		l.all.Go(func() {
			// It has no user: there is no answer to lose.
			if err := one.publisher.Close(l.ctx); err != nil {
				l.cfg.Log.Warn("publisher does not close", obs.KeyTopic, k.topic, obs.KeyPublisher, k.id, obs.KeyError, err)
			}
		})
	}
}

// close ends what opens and closes just now; the client closes the rest.
func (l *links) close() {
	l.mu.Lock()
	l.mu.closed = true
	l.mu.Unlock()
	l.cancel()
	l.all.Wait()
}

// count returns how many there are.
func (l *links) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.links)
}

// linkState is a link in /debug/state.
type linkState struct {
	Topic     string `json:"topic"`
	Publisher string `json:"publisher"`
	Broker    string `json:"broker"`
	Users     int    `json:"connections"`
}

// state returns up to 1000 of them, by name.
func (l *links) state() []linkState {
	const most = 1000
	l.mu.Lock()
	all := []linkState{}
	for k, one := range l.mu.links {
		s := linkState{Topic: k.topic, Publisher: k.id, Users: one.users}
		if one.publisher != nil {
			s.Broker = one.publisher.Broker()
		}
		all = append(all, s)
	}
	l.mu.Unlock()
	slices.SortFunc(all, func(a, b linkState) int {
		return strings.Compare(a.Topic+" "+a.Publisher, b.Topic+" "+b.Publisher)
	})
	return all[:min(len(all), most)]
}
