// Package rpc is the loaddistributor's gRPC service. It checks requests, reports all
// faults at once, converts, calls loaddistributor/controller, and maps errors to codes.
// It makes no decisions and keeps only the open streams. errors.go has the table of
// codes, create.go the requirements of a topic.
package rpc

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/client"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
)

// Server implements the AdminService, the PlacementService and the BrokerService. Make it
// with New, Register it, and Run it.
type Server struct {
	srtmv1.UnimplementedAdminServiceServer
	srtmv1.UnimplementedPlacementServiceServer
	srtmv1.UnimplementedBrokerServiceServer

	// Set by New.
	controller *controller.Controller
	view       *controller.View // of controller
	sessions   *service.Server
	admission  Admission // nil: no limit on tenants' changes

	reservation Reservation
	creations   *creations
}

// Admission is the part of admission/client that Server needs.
type Admission interface {
	Ask(ctx context.Context, key string, cost uint32) client.Decision
}

// Limit makes Server request admission from tenant/T/admin before it creates or updates
// topics or moves publishers. Call it before Register.
func (s *Server) Limit(admission Admission) { s.admission = admission }

// permit returns an error if the caller's tenant may not change anything now. A caller
// without a tenant is an operator.
func (s *Server) permit(ctx context.Context) error {
	tenant := secure.Tenant(ctx)
	if s.admission == nil || tenant == "" {
		return nil
	}
	if err := s.controller.View().Elsewhere(); err != nil { // the leader requests admission
		return err
	}
	d := s.admission.Ask(ctx, "tenant/"+tenant+"/admin", 1)
	if d.Admit {
		return nil
	}
	return &controller.QuotaError{Tenant: tenant, Problem: "too many changes", RetryAfter: d.RetryAfter}
}

// requireOwner returns an error if the caller may not change a topic. It does not refuse unknown
// topics.
func (s *Server) requireOwner(ctx context.Context, topic string) error {
	if secure.Tenant(ctx) == "" {
		return nil
	}
	if err := s.controller.View().Elsewhere(); err != nil { // the leader knows the topic
		return err
	}
	if t, err := s.controller.View().Topic(topic); err == nil {
		return mayChange(ctx, t.Spec)
	}
	return nil
}

// mayChange refuses changes by a tenant to a topic of another tenant or of an operator.
func mayChange(ctx context.Context, spec *catalog.Spec) error {
	if tenant := secure.Tenant(ctx); tenant != "" && tenant != spec.Tenant {
		return fmt.Errorf("tenant %s, topic %s: %w", tenant, spec.Name(), errNotOwner)
	}
	return nil
}

// New returns a Server in front of c.
func New(c *controller.Controller) *Server {
	return &Server{controller: c, view: c.View(), sessions: service.NewServer(), reservation: DefaultReservation, creations: newCreations()}
}

// Register adds the services to a gRPC server.
func (s *Server) Register(registrar grpc.ServiceRegistrar) {
	srtmv1.RegisterAdminServiceServer(registrar, s)
	srtmv1.RegisterPlacementServiceServer(registrar, s)
	srtmv1.RegisterBrokerServiceServer(registrar, s)
}

// Run waits for ctx to end, then ends creations and sessions and waits for them. If the
// controller is stopped first, the controller has already ended the sessions.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	s.creations.close()
	s.sessions.Close(controller.ErrClosing)
	return nil
}

// FindBrokers implements srtmv1.PlacementServiceServer.
func (s *Server) FindBrokers(_ context.Context, req *srtmv1.FindBrokersRequest) (*srtmv1.FindBrokersResponse, error) {
	nodes, err := s.controller.View().FindBrokers(req.Topic)
	if err != nil {
		return nil, toStatus(err)
	}
	resp := &srtmv1.FindBrokersResponse{}
	for _, node := range nodes {
		resp.TcpAddresses = append(resp.TcpAddresses, node.TCPAddress)
	}
	return resp, nil
}

// Elsewhere answers calls to a service that only the leader has. On a follower, gRPC calls
// Elsewhere for unknown services, and the answer names the leader.
func Elsewhere(service string, leader func() string) grpc.ServerOption {
	return grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		if strings.HasPrefix(method, "/"+service+"/") {
			return toStatus(&controller.NotLeaderError{Leader: leader()})
		}
		return status.Errorf(codes.Unimplemented, "unknown method %s", method)
	})
}

// Session implements srtmv1.BrokerServiceServer.
func (s *Server) Session(stream grpc.BidiStreamingServer[srtmv1.BrokerMessage, srtmv1.ControllerMessage]) error {
	remote := ""
	if p, ok := peer.FromContext(stream.Context()); ok {
		remote = p.Addr.String()
	}
	return toStatus(service.Serve(s.sessions, stream, func(m *srtmv1.BrokerMessage) (service.Session[srtmv1.BrokerMessage, srtmv1.ControllerMessage], error) {
		none := service.Session[srtmv1.BrokerMessage, srtmv1.ControllerMessage]{}
		hello := m.GetHello()
		if hello == nil {
			return none, faults{{Field: "hello", Problem: "the first message of a session is its hello"}}
		}
		if err := checkHello(hello); err != nil {
			return none, err
		}
		session, err := s.controller.Join(hello, remote)
		if err != nil {
			return none, err
		}
		return service.Session[srtmv1.BrokerMessage, srtmv1.ControllerMessage]{
			Out:    session.Out(),
			Handle: func(m *srtmv1.BrokerMessage) error { return s.controller.Handle(session, m) },
			Over:   func() { s.controller.Leave(session) },
		}, nil
	}))
}
