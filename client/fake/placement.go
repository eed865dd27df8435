package fake

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
)

// Placement is a loaddistributor for publishers. The methods are safe for concurrent use.
type Placement struct {
	srtmv1.UnimplementedPlacementServiceServer

	// set once
	ln  net.Listener
	srv *grpc.Server
	all sync.WaitGroup

	mu struct {
		sync.Mutex
		topics   map[string]*topicState
		mqtt     map[string]string // by the broker's address
		watches  int               // opened so far
		watching int               // open now
	}
}

type topicState struct {
	epoch       uint64
	assignments map[string]*srtmv1.Assignment // by publisher
	active      bool
	gone        bool
	change      chan struct{} // closed and replaced on each change
}

// NewPlacement starts a server on a free port of 127.0.0.1.
func NewPlacement() (*Placement, error) {
	return NewPlacementAt("127.0.0.1:0")
}

// NewPlacementAt starts a server on the given address.
func NewPlacementAt(address string) (*Placement, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("placement: %w", err)
	}
	p := &Placement{ln: ln, srv: grpc.NewServer(service.ServerOptions()...)}
	p.mu.topics, p.mu.mqtt = map[string]*topicState{}, map[string]string{}
	srtmv1.RegisterPlacementServiceServer(p.srv, p)
	p.all.Go(func() {
		if err := p.srv.Serve(ln); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			panic(err) // only Close closes the listener
		}
	})
	return p, nil
}

// Address returns host:port.
func (p *Placement) Address() string { return p.ln.Addr().String() }

// Close ends all streams and waits.
func (p *Placement) Close() {
	p.srv.Stop()
	p.all.Wait()
}

// Watches returns the number of Watch streams opened so far, and the number of open
// streams.
func (p *Placement) Watches() (opened, open int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.watches, p.mu.watching
}

func (p *Placement) topicLocked(topic string) *topicState {
	t := p.mu.topics[topic]
	if t == nil {
		t = &topicState{assignments: map[string]*srtmv1.Assignment{}, change: make(chan struct{})}
		p.mu.topics[topic] = t
	}
	return t
}

// Place assigns publishers of a topic to the broker at the given address. It creates the
// topic if necessary, and makes it active.
func (p *Placement) Place(topic, address string, publishers ...string) {
	p.update(topic, func(t *topicState) {
		t.active, t.gone = true, false
		for _, id := range publishers {
			t.assignments[id] = &srtmv1.Assignment{PublisherId: id, BrokerId: "b-" + address, TcpAddress: address, MqttAddress: p.mu.mqtt[address], Epoch: t.epoch}
		}
	})
}

// ServeMQTT sets the MQTT address of the broker at the given address, for later placements.
func (p *Placement) ServeMQTT(address, mqtt string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.mqtt[address] = mqtt
}

// Pace marks a topic as paced, so publishers may request advice.
func (p *Placement) Pace(topic string) {
	p.update(topic, func(t *topicState) {
		for id, a := range t.assignments {
			t.assignments[id] = &srtmv1.Assignment{PublisherId: id, BrokerId: a.BrokerId, TcpAddress: a.TcpAddress, Epoch: t.epoch, Pacing: true}
		}
	})
}

// Displace leaves publishers of a topic without a broker.
func (p *Placement) Displace(topic string, publishers ...string) {
	p.update(topic, func(t *topicState) {
		for _, id := range publishers {
			t.assignments[id] = &srtmv1.Assignment{PublisherId: id, Epoch: t.epoch}
		}
	})
}

// Prepare creates an inactive topic.
func (p *Placement) Prepare(topic string) { p.update(topic, func(t *topicState) { t.active = false }) }

// Remove removes publishers from a topic.
func (p *Placement) Remove(topic string, publishers ...string) {
	p.update(topic, func(t *topicState) {
		for _, id := range publishers {
			delete(t.assignments, id)
		}
	})
}

// Delete deletes a topic.
func (p *Placement) Delete(topic string) {
	p.update(topic, func(t *topicState) {
		t.gone = true
		t.assignments = map[string]*srtmv1.Assignment{}
	})
}

func (p *Placement) update(topic string, f func(*topicState)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.topicLocked(topic)
	t.epoch++
	f(t)
	close(t.change)
	t.change = make(chan struct{})
}

// lookup returns the requested assignments, with unknown publishers marked, and a channel
// that is closed on the next change.
func (p *Placement) lookup(topic string, ids []string) ([]*srtmv1.Assignment, uint64, <-chan struct{}, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.mu.topics[topic]
	switch {
	case t == nil || t.gone:
		return nil, 0, nil, status.Errorf(codes.NotFound, "topic %q is unknown", topic)
	case !t.active:
		return nil, 0, nil, status.Errorf(codes.FailedPrecondition, "topic %q is not active yet", topic)
	}
	if len(ids) == 0 {
		for id := range t.assignments {
			ids = append(ids, id)
		}
		slices.Sort(ids)
	}
	var found []*srtmv1.Assignment
	for _, id := range ids {
		a := t.assignments[id]
		if a == nil {
			a = &srtmv1.Assignment{PublisherId: id, Epoch: t.epoch, Unknown: true}
		}
		found = append(found, a)
	}
	return found, t.epoch, t.change, nil
}

// Resolve implements the service.
func (p *Placement) Resolve(_ context.Context, req *srtmv1.ResolveRequest) (*srtmv1.ResolveResponse, error) {
	found, _, _, err := p.lookup(req.Topic, []string{req.PublisherId})
	if err != nil {
		return nil, err
	}
	if found[0].Unknown {
		return nil, status.Errorf(codes.NotFound, "publisher %q of topic %q is unknown", req.PublisherId, req.Topic)
	}
	if found[0].BrokerId == "" {
		return nil, status.Errorf(codes.FailedPrecondition, "publisher %q of topic %q is not placed yet", req.PublisherId, req.Topic)
	}
	return &srtmv1.ResolveResponse{Assignment: found[0]}, nil
}

// FindBrokers implements the service. It returns the brokers that have publishers.
func (p *Placement) FindBrokers(_ context.Context, req *srtmv1.FindBrokersRequest) (*srtmv1.FindBrokersResponse, error) {
	found, _, _, err := p.lookup(req.Topic, nil)
	if err != nil {
		return nil, status.Error(codes.NotFound, status.Convert(err).Message())
	}
	resp := &srtmv1.FindBrokersResponse{}
	for _, a := range found {
		if a.TcpAddress != "" {
			resp.TcpAddresses = append(resp.TcpAddresses, a.TcpAddress)
		}
	}
	slices.Sort(resp.TcpAddresses)
	resp.TcpAddresses = slices.Compact(resp.TcpAddresses)
	return resp, nil
}

// Watch implements the service.
func (p *Placement) Watch(req *srtmv1.WatchRequest, stream grpc.ServerStreamingServer[srtmv1.WatchResponse]) error {
	p.mu.Lock()
	p.mu.watches++
	p.mu.watching++
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.mu.watching--
		p.mu.Unlock()
	}()
	sent := map[string]*srtmv1.Assignment{}
	for {
		found, epoch, change, err := p.lookup(req.Topic, req.PublisherIds)
		if err != nil {
			return err
		}
		first := len(sent) == 0
		resp := &srtmv1.WatchResponse{Epoch: epoch}
		for _, a := range found {
			if last := sent[a.PublisherId]; last == nil || last.Unknown != a.Unknown || last.Epoch != a.Epoch && !a.Unknown {
				sent[a.PublisherId] = a
				resp.Assignments = append(resp.Assignments, a)
			}
		}
		if first || len(resp.Assignments) > 0 {
			if err := stream.Send(resp); err != nil {
				return err
			}
		}
		select {
		case <-change:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}
