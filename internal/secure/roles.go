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

// tenantMethods are the methods that take Admin and that a tenant may call, too: the server checks
// that the topic is the tenant's. All others that take Admin are an operator's.
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

// operatorsOnly is why a tenant may not do what an operator may.
func operatorsOnly(tenant string) string {
	return fmt.Sprintf("only an operator may do this, and the caller is tenant %s", tenant)
}

// checkTenant refuses a tenant's call of a method that is an operator's.
func checkTenant(ctx context.Context, method string) error {
	if tenant := Tenant(ctx); tenant != "" && needs(method) == Admin && !tenantMethods[method] {
		return refused(codes.PermissionDenied, "PERMISSION_DENIED", operatorsOnly(tenant))
	}
	return nil
}

// TenantUnary is an interceptor that lets tenants call what is not an operator's.
func TenantUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := checkTenant(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

// TenantStream is TenantUnary of streams.
func TenantStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := checkTenant(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return next(srv, stream)
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
