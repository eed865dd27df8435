package secure

import (
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/api/srtm/envoy"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Role is what a token's bearer may do. Each includes the ones before it.
type Role uint8

// The roles; the zero value is that of a caller without a token.
const (
	// Unauthenticated may ask whether a server is healthy.
	Unauthenticated Role = iota
	// ReadOnly may look at everything, and publishers need it.
	ReadOnly
	// Node may also be a broker, an adaptor's broker, or a server of admission.
	Node
	// Admin may do everything.
	Admin
)

var roleNames = [...]string{Unauthenticated: "unauthenticated", ReadOnly: "read-only", Node: "node", Admin: "admin"}

// String returns the name, as in a token file.
func (r Role) String() string {
	if int(r) < len(roleNames) {
		return roleNames[r]
	}
	return fmt.Sprintf("role %d", r)
}

// parseRole is the reverse of String; Unauthenticated has no tokens.
func parseRole(name string) (Role, bool) {
	for r := ReadOnly; r <= Admin; r++ {
		if roleNames[r] == name {
			return r, true
		}
	}
	return Unauthenticated, false
}

// methods that need less than Admin, which is what any other takes: a method is
// not open because it was forgotten here.
var methods = map[string]Role{
	envoy.RateLimitService_ShouldRateLimit_FullMethodName: ReadOnly,
	srtmv1.AdmissionAdmin_GetRule_FullMethodName:          ReadOnly,
	srtmv1.AdmissionAdmin_ListRules_FullMethodName:        ReadOnly,
	srtmv1.AdmissionAdmin_Ask_FullMethodName:              ReadOnly,
	srtmv1.AdmissionAdmin_ListPartitions_FullMethodName:   ReadOnly,
	srtmv1.AdminService_GetTopic_FullMethodName:           ReadOnly,
	srtmv1.AdminService_ListTopics_FullMethodName:         ReadOnly,
	srtmv1.AdminService_ListBrokers_FullMethodName:        ReadOnly,
	srtmv1.AdminService_ListChannels_FullMethodName:       ReadOnly,
	srtmv1.AdminService_ListPublisherMoves_FullMethodName: ReadOnly,
	srtmv1.PlacementService_Resolve_FullMethodName:        ReadOnly,
	srtmv1.PlacementService_Watch_FullMethodName:          ReadOnly,
	srtmv1.PlacementService_FindBrokers_FullMethodName:    ReadOnly,
	srtmv1.GrantService_ListShares_FullMethodName:         ReadOnly,
	srtmv1.AdmissionReplication_Replicate_FullMethodName:  Node,
	srtmv1.AdmissionReplication_Recover_FullMethodName:    Node,
	srtmv1.BrokerService_Session_FullMethodName:           Node,
	srtmv1.GrantService_Session_FullMethodName:            Node,
}

// needs returns the role that a gRPC method takes.
func needs(method string) Role {
	if role, known := methods[method]; known {
		return role
	}
	switch {
	case strings.HasPrefix(method, "/grpc.health.v1.Health/"):
		return Unauthenticated
	case strings.HasPrefix(method, "/grpc.reflection."):
		return ReadOnly
	}
	return Admin
}
