package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// brokers holds data about brokers beside the catalog, by id. The controller's lock guards
// brokers, and the caller of a method holds the lock.
type brokers struct {
	cfg         *Config // set once
	sessions    map[string]*Session
	holders     map[string]*holder   // processes that own the ids
	lastRequest uint64               // number of the last request
	left        map[string]bool      // brokers whose session here has ended
	away        map[string]time.Time // disconnected brokers, since when
	drainers    map[string]string    // who requested the drain; unknown before this process led
	removing    map[string]bool      // brokers that RemoveBroker is removing
}

// Calibrate sets a broker's mcap, msg/s, overriding the mcap in the broker's hello. 0
// removes the override. Error: catalog.ErrBrokerUnknown.
func (c *Controller) Calibrate(id string, mcap int64) (catalog.Broker, error) {
	return c.setBroker(id, catalog.BrokerCalibrated{ID: id, Mcap: mcap}, nil)
}

// setBroker commits an event of a broker and returns the broker. If noted is not nil,
// setBroker calls it with the lock held, before the event is shown.
func (c *Controller) setBroker(id string, e catalog.Event, noted func()) (catalog.Broker, error) {
	if err := c.knowledge.following(); err != nil {
		return catalog.Broker{}, err
	}
	c.mu.Lock()
	t, err := c.cat.stage(e)
	if err == nil && noted != nil {
		noted()
	}
	c.mu.Unlock()
	if err == nil {
		err = t.wait()
	}
	if err != nil {
		return catalog.Broker{}, err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, _ := c.cat.shown.Broker(id)
	return b, nil
}

// Drain starts or ends the drain of a broker: no topic is placed on a draining broker,
// and its topics move away, if forced at any cost (srtmv1.DrainBrokerRequest). Drain
// returns at once. Error: catalog.ErrBrokerUnknown.
func (c *Controller) Drain(ctx context.Context, id string, on, forced bool) (catalog.Broker, error) {
	e := catalog.BrokerDraining{ID: id, Draining: on, Forced: forced}
	return c.setBroker(id, e, func() { c.brokers.drainers[id] = secure.Caller(ctx) })
}

// RemoveBroker removes a broker from the cluster, on the caller's word that the broker is
// dead. The broker may join anew later. RemoveBroker returns the freed shares and the
// topics whose messages may be lost. Errors: catalog.ErrBrokerUnknown,
// ErrBrokerConnected, ErrBrokerInUse; ErrRemoving; *AdaptorError.
func (c *Controller) RemoveBroker(ctx context.Context, id string) (freed []*srtmv1.FreedShare, left []string, err error) {
	if err := c.knowledge.following(); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	if c.life.closing {
		c.mu.Unlock()
		return nil, nil, ErrClosing
	}
	if c.brokers.removing[id] {
		c.mu.Unlock()
		return nil, nil, fmt.Errorf("remove broker %q: %w", id, ErrRemoving)
	}
	c.brokers.removing[id] = true // prevents the broker from joining meanwhile
	defer func() {
		c.mu.Lock()
		delete(c.brokers.removing, id)
		c.mu.Unlock()
	}()
	c.life.work.Add(1)
	defer c.life.work.Done()
	b, known := c.cat.next.Broker(id)
	var placed []string
	for _, name := range c.cat.next.Placed(id) {
		if topic, _ := c.cat.next.Topic(name); slices.Contains(topic.Retiring, id) {
			left = append(left, name)
		} else {
			placed = append(placed, name)
		}
	}
	c.mu.Unlock()
	switch {
	case !known:
		err = catalog.ErrBrokerUnknown
	case b.Connected:
		err = catalog.ErrBrokerConnected
	case placed != nil:
		err = fmt.Errorf("%w: %s", catalog.ErrBrokerInUse, strings.Join(placed, ", "))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("remove broker %q: %w", id, err)
	}
	limit, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	r, err := c.adaptor.ForgetBroker(limit, &srtmv1.ForgetBrokerRequest{BrokerId: id})
	switch status.Code(err) {
	case codes.OK, codes.NotFound:
	case codes.FailedPrecondition:
		return nil, nil, fmt.Errorf("remove broker %q: %w to the adaptor", id, catalog.ErrBrokerConnected)
	default:
		return nil, nil, &AdaptorError{err}
	}
	for _, name := range left {
		// A topic deleted meanwhile is left alone.
		op := operation{name: name, target: reconcile.Target{Retire: id, Dead: true}}
		if err := c.owners.request(ctx, op); err != nil {
			return nil, nil, err
		}
	}
	if err := c.cat.commit(catalog.BrokerRemoved{ID: id}); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	delete(c.brokers.holders, id) // the operator confirms that the process has ended
	c.mu.Unlock()
	c.cfg.Log.Warn("broker removed, on an operator's word", obs.KeyBroker, id, "topics", len(left))
	return r.GetFreed(), left, nil
}
