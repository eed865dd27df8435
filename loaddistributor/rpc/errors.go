package rpc

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/duplex"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Domain is the ErrorInfo domain of SRTM's services.
const Domain = "srtm.io"

// Reasons of ErrorInfo. They are part of the API: clients may depend on them.
const (
	ReasonBadRequest       = "BAD_REQUEST"
	ReasonTopicExists      = "TOPIC_EXISTS"
	ReasonTopicUnknown     = "TOPIC_UNKNOWN"
	ReasonTopicBusy        = "TOPIC_BUSY"
	ReasonTopicNotActive   = "TOPIC_NOT_ACTIVE"
	ReasonTopicChanged     = "TOPIC_CHANGED" // metadata "epoch": the present one
	ReasonPublisherUnknown = "PUBLISHER_UNKNOWN"
	ReasonNotPlaced        = "PUBLISHER_NOT_PLACED"
	ReasonKeyReused        = "IDEMPOTENCY_KEY_REUSED"
	ReasonInfeasible       = "INFEASIBLE"
	ReasonBrokerFailed     = "BROKER_FAILED"
	ReasonAdaptorFailed    = "ADAPTOR_FAILED"
	ReasonBrokersUnsteady  = "BROKERS_UNSTEADY"
	ReasonShuttingDown     = "SHUTTING_DOWN"
	ReasonBrokerUnknown    = "BROKER_UNKNOWN"
	ReasonBrokerConnected  = "BROKER_CONNECTED"
	ReasonBrokerInUse      = "BROKER_IN_USE"
	ReasonBrokerRemoved    = "BROKER_REMOVED"
	ReasonNotLeader        = "NOT_LEADER" // metadata "leader": its address, if known
	ReasonNotCommitted     = "NOT_COMMITTED"
	ReasonUnread           = "NOT_READ_YET"
	ReasonSessionReplaced  = "SESSION_REPLACED"
	ReasonNoHello          = "NO_HELLO"
	ReasonSlowReader       = "SLOW_READER"
)

// table gives every error of the domain its code, the first that matches. A
// test goes through all exported errors of the packages below and fails when
// one is not here.
var table = []struct {
	is     func(error) bool
	code   codes.Code
	reason string
}{
	{as[faults], codes.InvalidArgument, ReasonBadRequest},
	{as[placement.FieldErrors], codes.InvalidArgument, ReasonBadRequest},
	{as[*controller.BadMessage], codes.InvalidArgument, ReasonBadRequest},
	{as[*placement.Infeasible], codes.ResourceExhausted, ReasonInfeasible},
	{is(catalog.ErrKeyReused), codes.FailedPrecondition, ReasonKeyReused},
	{is(catalog.ErrTopicExists), codes.AlreadyExists, ReasonTopicExists},
	{is(catalog.ErrTopicUnknown), codes.NotFound, ReasonTopicUnknown},
	{is(catalog.ErrPublisherUnknown), codes.NotFound, ReasonPublisherUnknown},
	{is(catalog.ErrUnplaced), codes.FailedPrecondition, ReasonNotPlaced},
	{is(catalog.ErrNotActive), codes.FailedPrecondition, ReasonTopicNotActive},
	{as[*controller.EpochError], codes.Aborted, ReasonTopicChanged},
	{is(catalog.ErrTopicState), codes.FailedPrecondition, ReasonTopicBusy},
	{is(controller.ErrClosing), codes.Unavailable, ReasonShuttingDown},
	{as[*controller.NotLeaderError], codes.Unavailable, ReasonNotLeader},
	{is(controller.ErrNotCommitted), codes.Unavailable, ReasonNotCommitted},
	{is(catalog.ErrUnread), codes.Unavailable, ReasonUnread},
	{is(controller.ErrReplaced), codes.Aborted, ReasonSessionReplaced},
	{as[*controller.BrokerError], codes.Unavailable, ReasonBrokerFailed},
	{as[*controller.RefusedError], codes.Unavailable, ReasonBrokerFailed},
	{is(controller.ErrBrokerGone), codes.Unavailable, ReasonBrokerFailed},
	{is(controller.ErrNoAnswer), codes.Unavailable, ReasonBrokerFailed},
	{is(catalog.ErrBrokerConnected), codes.FailedPrecondition, ReasonBrokerConnected},
	{is(catalog.ErrBrokerInUse), codes.FailedPrecondition, ReasonBrokerInUse},
	{is(controller.ErrRemoved), codes.FailedPrecondition, ReasonBrokerRemoved},
	{is(catalog.ErrBrokerUnknown), codes.NotFound, ReasonBrokerUnknown},
	{as[*catalog.NotReadyError], codes.Unavailable, ReasonBrokerFailed},
	{as[*controller.AdaptorError], codes.Unavailable, ReasonAdaptorFailed},
	{is(controller.ErrUnsteady), codes.Unavailable, ReasonBrokersUnsteady},
	{as[*catalog.PlanError], codes.Unavailable, ReasonBrokersUnsteady},
	{is(duplex.ErrNoHello), codes.DeadlineExceeded, ReasonNoHello},
	{is(duplex.ErrSlow), codes.Unavailable, ReasonSlowReader},
}

func is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

func as[E error](err error) bool {
	var target E
	return errors.As(err, &target)
}

// toStatus is the only place where an error gets its gRPC code and details.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	for _, row := range table {
		if row.is(err) {
			return coded(row.code, row.reason, err)
		}
	}
	switch {
	case errors.Is(err, context.Canceled):
		return status.FromContextError(context.Canceled).Err()
	case errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(context.DeadlineExceeded).Err()
	}
	if s, ok := status.FromError(err); ok {
		return s.Err() // of the stream itself
	}
	return status.Error(codes.Internal, err.Error())
}

func coded(code codes.Code, reason string, err error) error {
	info := &errdetails.ErrorInfo{Reason: reason, Domain: Domain}
	details := []protoadapt.MessageV1{info}
	var (
		elsewhere  *controller.NotLeaderError
		epoch      *controller.EpochError
		bad        faults
		fields     placement.FieldErrors
		message    *controller.BadMessage
		infeasible *placement.Infeasible
	)
	if errors.As(err, &elsewhere) && elsewhere.Leader != "" {
		info.Metadata = map[string]string{"leader": elsewhere.Leader}
	}
	if errors.As(err, &epoch) {
		info.Metadata = map[string]string{"epoch": strconv.FormatUint(epoch.Present, 10)}
	}
	switch {
	case errors.As(err, &bad):
		details = append(details, bad.proto())
	case errors.As(err, &fields):
		details = append(details, fromPlacement(fields).proto())
	case errors.As(err, &message):
		details = append(details, faults{{message.Field, message.Problem}}.proto())
	case errors.As(err, &infeasible):
		details = append(details, infeasibleProto(infeasible))
	}
	s := status.New(code, err.Error())
	with, detailErr := s.WithDetails(details...)
	if detailErr != nil {
		return s.Err() // the code and the text stand without them
	}
	return with.Err()
}

func infeasibleProto(i *placement.Infeasible) *srtmv1.Infeasible {
	p := &srtmv1.Infeasible{Bound: i.Bound, Need: i.Need, Have: i.Have}
	if f := i.Fits; f != (placement.Fits{}) {
		p.Fits = &srtmv1.Fits{
			Rate: f.Rate, Burst: f.Burst, Publishers: f.Publishers, MoreBrokers: f.MoreBrokers, BrokerMcap: f.Mcap,
		}
	}
	return p
}

// fault is one thing wrong with a request. The field is a path in the request
// message, with the names of the .proto file.
type fault struct{ field, problem string }

// faults is everything wrong with a request, in the order of its fields.
type faults []fault

// maxFaults bounds the violations that one answer lists: a request of a
// million publishers can have as many faults.
const maxFaults = 100

func (f *faults) add(field, format string, args ...any) {
	*f = append(*f, fault{field, fmt.Sprintf(format, args...)})
}

// err returns nil when nothing is wrong.
func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	return f
}

func (f faults) Error() string {
	const shown = 10
	var b strings.Builder
	for i, one := range f {
		if i > 0 {
			b.WriteString("; ")
		}
		if i == shown {
			fmt.Fprintf(&b, "and %d more", len(f)-shown)
			break
		}
		b.WriteString(one.field + ": " + one.problem)
	}
	return b.String()
}

func (f faults) proto() *errdetails.BadRequest {
	p := &errdetails.BadRequest{}
	for i, one := range f {
		if i == maxFaults {
			p.FieldViolations = append(p.FieldViolations, &errdetails.BadRequest_FieldViolation{
				Field: "spec", Description: fmt.Sprintf("%d more faults", len(f)-maxFaults),
			})
			break
		}
		p.FieldViolations = append(p.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: one.field, Description: one.problem})
	}
	return p
}

// fromPlacement turns the paths of a placement.Demand into those of a
// CreateTopicRequest.
func fromPlacement(fields placement.FieldErrors) faults {
	names := map[string]string{
		"topic": "spec.name", "rate": "spec.contract.rate_milli", "burst": "spec.contract.burst",
		"policy": "spec.placement_policy", "publishers": "spec.publishers",
	}
	list := make(faults, 0, len(fields))
	for _, f := range fields {
		path, ok := names[f.Field]
		if !ok {
			path = "spec." + f.Field
			if strings.HasPrefix(f.Field, "publishers[") && strings.HasSuffix(f.Field, ".key") {
				path = strings.TrimSuffix(path, ".key") + ".correlation_key"
			}
		}
		list = append(list, fault{path, f.Problem})
	}
	return list
}
