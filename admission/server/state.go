package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/table"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
)

// Bounds of the keys that GetServerState lists.
const (
	maxNearest  = 100
	someNearest = 20
	nearestAge  = time.Second // of a list that several callers get
)

// States serves AdmissionState.
type States struct {
	srtmv1.UnimplementedAdmissionStateServer

	server *Server
	name   string // of the server, in the store

	mu      sync.Mutex
	at      mono.Time    // guarded by mu; of nearest
	nearest []table.Near // guarded by mu; nil: none yet. Callers do not modify it.
}

// NewStates returns the service of a server.
func NewStates(s *Server) *States { return &States{server: s, name: s.me.Address} }

// list returns up to limit keys that are nearest their limit. A list visits every key, so all callers of
// a second get the same list.
func (t *States) list(limit int) []table.Near {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := t.server.cfg.Now().Mono; t.nearest == nil || now.Sub(t.at) >= nearestAge {
		keys := []table.Near{}
		t.server.shards.allInTurns(func(shard *table.Shard, from int32) (next int32) {
			keys, next = shard.Nearest(keys, maxNearest, from, slotsAtOnce, now)
			return next
		})
		t.nearest, t.at = keys, now
	}
	return t.nearest[:min(limit, len(t.nearest))]
}

// GetServerState implements AdmissionState.
func (t *States) GetServerState(_ context.Context, r *srtmv1.GetServerStateRequest) (*srtmv1.GetServerStateResponse, error) {
	limit := int(r.GetMaxKeys())
	switch {
	case limit == 0:
		limit = someNearest
	case limit < 0 || limit > maxNearest:
		return nil, status.Errorf(codes.InvalidArgument, "max_keys %d: want 1 to %d", limit, maxNearest)
	}
	s := t.server
	now := s.cfg.Now().Mono
	age := func(at int64) int64 { return now.Sub(mono.Time(at)).Milliseconds() }
	reply := &srtmv1.GetServerStateResponse{
		Server: t.name, Partitions: int32(s.ownedPartitions.Load()), Keys: int64(s.shards.len()), KeyLimit: int64(s.cfg.MaxKeys), CheckpointAgeMs: age(s.saved.Load()),
	}
	s.replicas.mu.Lock()
	reply.Follower = s.replicas.follower.Address
	s.replicas.mu.Unlock()
	if reply.Follower != "" {
		reply.ReplicationLagMs = age(s.replicated.Load())
	}
	if err := s.Healthy(); err != nil {
		reply.Problem = err.Error()
	}
	for _, k := range t.list(limit) {
		reply.Nearest = append(reply.Nearest, &srtmv1.AdmissionKey{Key: k.Key, Left: k.Left, Capacity: k.Capacity, Denied: k.Denied, ByDefault: k.Default, Shadow: k.Shadow})
	}
	return reply, nil
}
