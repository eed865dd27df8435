package secure

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/srtm-io/srtm/api/srtm/envoy"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Role is a token's permission. Each role includes the roles before it.
type Role uint8

// The roles. The zero value is the role of a caller without a token.
const (
	// Unauthenticated may ask whether a server is healthy.
	Unauthenticated Role = iota
	// ReadOnly may read everything. Publishers need it.
	ReadOnly
	// Node may also act as a broker, as an adaptor's broker, or as an admission server.
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

// parseRole is the reverse of String. Unauthenticated has no tokens.
func parseRole(name string) (Role, bool) {
	for r := ReadOnly; r <= Admin; r++ {
		if roleNames[r] == name {
			return r, true
		}
	}
	return Unauthenticated, false
}

// methods lists the methods that need less than Admin. All other methods need Admin, so a
// forgotten method is not open.
var methods = map[string]Role{
	envoy.RateLimitService_ShouldRateLimit_FullMethodName: ReadOnly,
	srtmv1.AdmissionAdmin_GetRule_FullMethodName:          ReadOnly,
	srtmv1.AdmissionAdmin_ListRules_FullMethodName:        ReadOnly,
	srtmv1.AdmissionAdmin_Ask_FullMethodName:              ReadOnly,
	srtmv1.AdmissionAdmin_ListPartitions_FullMethodName:   ReadOnly,
	srtmv1.AdmissionState_GetServerState_FullMethodName:   ReadOnly,
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

// tenantMethods are the Admin methods that a tenant may also call: the server checks that
// the topic belongs to the tenant. All other Admin methods are for operators only.
var tenantMethods = map[string]bool{
	srtmv1.AdminService_CreateTopic_FullMethodName:    true,
	srtmv1.AdminService_UpdateTopic_FullMethodName:    true,
	srtmv1.AdminService_DeleteTopic_FullMethodName:    true,
	srtmv1.AdminService_MovePublishers_FullMethodName: true,
	srtmv1.AdminService_ProfileTopic_FullMethodName:   true,
	srtmv1.AdminService_SeekChannel_FullMethodName:    true,
	srtmv1.AdminService_CreateChannel_FullMethodName:  true,
	srtmv1.AdminService_PauseChannel_FullMethodName:   true,
	srtmv1.AdminService_UnpauseChannel_FullMethodName: true,
	srtmv1.AdminService_DeleteChannel_FullMethodName:  true,
	srtmv1.AdminService_EmptyChannel_FullMethodName:   true,
}

// operatorsOnly explains why a tenant may not do what an operator may.
func operatorsOnly(tenant string) string {
	return fmt.Sprintf("only an operator may do this, and the caller is tenant %s", tenant)
}

// checkTenant refuses a tenant's call of an operator's method.
func checkTenant(ctx context.Context, method string) error {
	if tenant := Tenant(ctx); tenant != "" && needs(method) == Admin && !tenantMethods[method] {
		return refused(codes.PermissionDenied, "PERMISSION_DENIED", operatorsOnly(tenant))
	}
	return nil
}

// TenantUnary is an interceptor that refuses tenants' calls of operators' methods.
func TenantUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := checkTenant(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

// TenantStream is TenantUnary for streams.
func TenantStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := checkTenant(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return next(srv, stream)
}

// needs returns the role that a gRPC method needs.
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
