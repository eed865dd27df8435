package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
)

// AutoCreate configures the creation of topics by their first publish or subscription.
type AutoCreate struct {
	Off bool
	// Topic is the topic's specification without a name. Missing fields are as in
	// CreateTopic.
	Topic *srtmv1.TopicSpec
	// MaxTopics and MaxTenantTopics bound the number of topics, in total and per tenant.
	// Beyond a bound, a publish or subscription creates no topic.
	MaxTopics, MaxTenantTopics int
}

const (
	// maxCreating is the maximum number of topics in creation. Further creations must be
	// retried.
	maxCreating = 1000
	// creators is the number of topics placed and prepared at a time. Other changes of
	// topics run in between.
	creators = 8
)

// ParseTopic parses an AutoCreate's topic, a TopicSpec in JSON, or returns all its
// faults. An empty text is an empty specification.
func ParseTopic(text string) (*srtmv1.TopicSpec, error) {
	spec := &srtmv1.TopicSpec{}
	if text != "" {
		if err := protojson.Unmarshal([]byte(text), spec); err != nil {
			return nil, fmt.Errorf("want a TopicSpec in JSON: %w", err)
		}
	}
	switch {
	case spec.Name != "":
		return nil, fmt.Errorf("has the name %q; its first publish names a topic", spec.Name)
	case len(spec.Publishers)+len(spec.Groups) > 0:
		return nil, errors.New("has publishers; a topic that any publisher creates is open to all")
	}
	_, err := checkCreate(withReservation(&srtmv1.CreateTopicRequest{Spec: named(spec, "t")}, DefaultReservation, DefaultReservation.Rate))
	return spec, err
}

// named returns a copy of a topic's specification with a name.
func named(spec *srtmv1.TopicSpec, name string) *srtmv1.TopicSpec {
	spec = proto.CloneOf(spec)
	spec.Name = name
	return spec
}

// TooManyTopicsError refuses the creation of a topic by its first publish.
type TooManyTopicsError struct {
	Topic, Tenant string // no tenant: all topics count
	Limit         int
}

func (e *TooManyTopicsError) Error() string {
	if e.Tenant != "" {
		return fmt.Sprintf("topic %s is not created: tenant %s has %d topics, the maximum for creation by publishing (--max-auto-tenant-topics)", e.Topic, e.Tenant, e.Limit)
	}
	return fmt.Sprintf("topic %s is not created: there are %d topics, the maximum for creation by publishing (--max-auto-topics)", e.Topic, e.Limit)
}

// errCreating: too many topics are in creation.
var errCreating = fmt.Errorf("%d topics are being created: %w", maxCreating, controller.ErrUnsteady)

// creations are the topics being created by their publishers or subscribers.
type creations struct {
	// Set by newCreations.
	cfg     AutoCreate
	slots   chan struct{}
	ctx     context.Context // of the creations
	cancel  context.CancelFunc
	running sync.WaitGroup // Add under mu, while not closed
	ended   *prometheus.CounterVec

	mu struct {
		sync.Mutex
		closed  bool
		running map[string]*creating
	}
}

// creating is a topic in creation.
type creating struct {
	tenant string        // set by creating
	placed bool          // the topic has a slot; guarded by creations.mu
	done   chan struct{} // closed when err is set
	err    error
}

func newCreations() *creations {
	c := &creations{cfg: AutoCreate{Off: true}, slots: make(chan struct{}, creators)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.mu.running = map[string]*creating{}
	return c
}

// CreateTopics enables the creation of topics by their first publish or subscription.
// Call it before Register. metrics may be nil.
func (s *Server) CreateTopics(cfg AutoCreate, metrics prometheus.Registerer) {
	s.creations.cfg = cfg
	s.creations.ended = promauto.With(metrics).NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_topics_auto_created_total",
		Help: "Topics to be created by a publish or subscription, by result: created, refused (the topic limit was reached), failed.",
	}, []string{"result"})
}

// close ends the creations and waits for them.
func (c *creations) close() {
	c.mu.Lock()
	c.mu.closed = true
	c.mu.Unlock()
	c.cancel()
	c.running.Wait()
}

// isRunning reports whether a topic is in creation.
func (c *creations) isRunning(topic string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.running[topic] != nil
}

// create creates a missing topic, once for all concurrent callers, and returns when the
// topic is active.
func (s *Server) create(ctx context.Context, topic, tenant string) error {
	creation, err := s.creating(topic, tenant)
	if err != nil {
		return err
	}
	select {
	case <-creation.done:
		return creation.err
	case <-ctx.Done():
		return ctx.Err() // the creation continues
	}
}

// creating returns the creation of a topic, and starts a missing creation.
func (s *Server) creating(topic, tenant string) (*creating, error) {
	c := s.creations
	c.mu.Lock()
	defer c.mu.Unlock()
	creation := c.mu.running[topic]
	switch {
	case creation != nil:
		return creation, nil
	case c.mu.closed:
		return nil, controller.ErrClosing
	case len(c.mu.running) == maxCreating:
		return nil, errCreating
	}
	creation = &creating{tenant: tenant, done: make(chan struct{})}
	c.mu.running[topic] = creation
	c.running.Go(func() {
		creation.err = s.createTopic(topic, creation)
		c.mu.Lock()
		delete(c.mu.running, topic)
		c.mu.Unlock()
		close(creation.done)
	})
	return creation, nil
}

func (s *Server) createTopic(topic string, creation *creating) error {
	c := s.creations
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-c.ctx.Done():
		return controller.ErrClosing
	}
	spec, err := checkCreate(withReservation(s.limited(&srtmv1.CreateTopicRequest{Spec: named(c.cfg.Topic, topic)}), s.reservation, s.reservation.Rate))
	if err == nil {
		err = s.checkRoom(topic, creation)
	}
	if err == nil {
		spec.Tenant = creation.tenant
		_, err = s.controller.Create(c.ctx, spec, "", "", func(controller.Progress) error { return nil })
	}
	result := "created"
	switch {
	case errors.Is(err, catalog.ErrTopicExists): // created since the look-up
		return nil
	case errors.As(err, new(*TooManyTopicsError)):
		result = "refused"
	case err != nil:
		result = "failed"
	}
	c.ended.WithLabelValues(result).Inc()
	return err
}

// checkRoom returns an error if no further topic is allowed, counting the catalog's topics and
// the admitted topics that are not in the catalog yet.
func (s *Server) checkRoom(topic string, creation *creating) error {
	c := s.creations
	c.mu.Lock()
	defer c.mu.Unlock()
	total, ofTenant := s.controller.View().CountTopics(creation.tenant)
	for name, other := range c.mu.running {
		if !other.placed || s.controller.View().Exists(name) {
			continue
		}
		if total++; other.tenant == creation.tenant {
			ofTenant++
		}
	}
	switch {
	case total >= c.cfg.MaxTopics:
		return &TooManyTopicsError{Topic: topic, Limit: c.cfg.MaxTopics}
	case creation.tenant != "" && ofTenant >= c.cfg.MaxTenantTopics:
		return &TooManyTopicsError{Topic: topic, Tenant: creation.tenant, Limit: c.cfg.MaxTenantTopics}
	}
	creation.placed = true
	return nil
}

// Resolve implements srtmv1.PlacementServiceServer.
func (s *Server) Resolve(ctx context.Context, req *srtmv1.ResolveRequest) (*srtmv1.ResolveResponse, error) {
	a, err := s.controller.View().Resolve(req.Topic, req.PublisherId)
	if req.Create && !s.creations.cfg.Off && (errors.Is(err, catalog.ErrTopicUnknown) || errors.Is(err, catalog.ErrNotActive) && s.creations.isRunning(req.Topic)) {
		tenant := secure.Tenant(ctx)
		if tenant == "" { // a broker has no tenant and names the publisher's tenant
			tenant = req.Tenant
		}
		if err = s.controller.View().Elsewhere(); err == nil { // the leader creates
			err = s.create(ctx, req.Topic, tenant)
		}
		if err == nil {
			a, err = s.controller.View().Resolve(req.Topic, req.PublisherId)
		}
	}
	if err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.ResolveResponse{Assignment: assignmentProto(a)}, nil
}
