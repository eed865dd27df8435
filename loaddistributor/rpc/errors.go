package rpc

import (
	"errors"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
)

// Reasons of ErrorInfo. They are part of the API; clients may depend on them.
const (
	ReasonBadRequest       = service.ReasonBadRequest
	ReasonTopicExists      = "TOPIC_EXISTS"
	ReasonTopicUnknown     = "TOPIC_UNKNOWN"
	ReasonTopicBusy        = "TOPIC_BUSY"
	ReasonTopicNotActive   = "TOPIC_NOT_ACTIVE"
	ReasonTopicChanged     = "TOPIC_CHANGED" // metadata "epoch": the present epoch
	ReasonChannelUnknown   = "CHANNEL_UNKNOWN"
	ReasonTooManyChannels  = "TOO_MANY_CHANNELS"
	ReasonPublisherUnknown = "PUBLISHER_UNKNOWN"
	ReasonNotPlaced        = "PUBLISHER_NOT_PLACED"
	ReasonKeyReused        = "IDEMPOTENCY_KEY_REUSED"
	ReasonInfeasible       = "INFEASIBLE"
	ReasonBrokerFailed     = "BROKER_FAILED"
	ReasonAdaptorFailed    = "ADAPTOR_FAILED"
	ReasonContractBusy     = "CONTRACT_BUSY" // with a Lowering, if known
	ReasonBrokersUnsteady  = "BROKERS_UNSTEADY"
	ReasonShuttingDown     = "SHUTTING_DOWN"
	ReasonBrokerUnknown    = "BROKER_UNKNOWN"
	ReasonBrokerConnected  = "BROKER_CONNECTED"
	ReasonBrokerInUse      = "BROKER_IN_USE"
	ReasonBrokerTooOld     = "BROKER_TOO_OLD"
	ReasonBrokerRemoved    = "BROKER_REMOVED"
	ReasonNotLeader        = "NOT_LEADER" // metadata "leader": its address, if known
	ReasonNotCommitted     = "NOT_COMMITTED"
	ReasonStoreFull        = "STORE_FULL"
	ReasonUnread           = "NOT_READ_YET"
	ReasonSessionReplaced  = "SESSION_REPLACED"
	ReasonNoHello          = "NO_HELLO"
	ReasonSlowReader       = "SLOW_READER"
	ReasonTooFewMessages   = "TOO_FEW_MESSAGES"
	ReasonNotOwner         = "NOT_OWNER"
	ReasonTooManyTopics    = "TOO_MANY_TOPICS"
	ReasonQuotaExceeded    = "QUOTA_EXCEEDED" // RetryInfo: when to retry, if known
)

// errNotOwner: only a topic's tenant and operators may change the topic.
var errNotOwner = errors.New("the topic belongs to another tenant, or to an operator")

// table maps every error of the domain to its code. The first match counts. A test checks
// that table has all exported errors of the packages below.
var table = service.ErrorTable{
	service.ErrorAs[placement.FieldErrors](codes.InvalidArgument, ReasonBadRequest),
	service.ErrorAs[*controller.BadMessage](codes.InvalidArgument, ReasonBadRequest),
	service.ErrorAs[*placement.Infeasible](codes.ResourceExhausted, ReasonInfeasible),
	service.ErrorIs(catalog.ErrKeyReused, codes.FailedPrecondition, ReasonKeyReused),
	service.ErrorIs(catalog.ErrTopicExists, codes.AlreadyExists, ReasonTopicExists),
	service.ErrorIs(catalog.ErrTopicUnknown, codes.NotFound, ReasonTopicUnknown),
	service.ErrorIs(catalog.ErrChannelUnknown, codes.NotFound, ReasonChannelUnknown),
	service.ErrorAs[*catalog.ChannelsError](codes.ResourceExhausted, ReasonTooManyChannels),
	service.ErrorIs(catalog.ErrPublisherUnknown, codes.NotFound, ReasonPublisherUnknown),
	service.ErrorIs(catalog.ErrUnplaced, codes.FailedPrecondition, ReasonNotPlaced),
	service.ErrorIs(catalog.ErrNotActive, codes.FailedPrecondition, ReasonTopicNotActive),
	service.ErrorAs[*controller.EpochError](codes.Aborted, ReasonTopicChanged),
	service.ErrorIs(catalog.ErrTopicState, codes.FailedPrecondition, ReasonTopicBusy),
	service.ErrorIs(controller.ErrClosing, codes.Unavailable, ReasonShuttingDown),
	service.ErrorAs[*controller.NotLeaderError](codes.Unavailable, ReasonNotLeader),
	service.ErrorIs(controller.ErrStoreFull, codes.ResourceExhausted, ReasonStoreFull),
	service.ErrorIs(controller.ErrNotCommitted, codes.Unavailable, ReasonNotCommitted),
	service.ErrorIs(catalog.ErrUnread, codes.Unavailable, ReasonUnread),
	service.ErrorIs(controller.ErrReplaced, codes.Aborted, ReasonSessionReplaced),
	service.ErrorIs(identity.ErrReplaced, codes.Aborted, ReasonSessionReplaced),
	service.ErrorAs[*identity.InUse](codes.AlreadyExists, identity.ReasonInUse),
	service.ErrorAs[*identity.Lost](codes.Aborted, identity.ReasonLost),
	service.ErrorAs[*controller.BrokerError](codes.Unavailable, ReasonBrokerFailed),
	service.ErrorAs[*controller.RefusedError](codes.Unavailable, ReasonBrokerFailed),
	service.ErrorIs(controller.ErrBrokerGone, codes.Unavailable, ReasonBrokerFailed),
	service.ErrorIs(controller.ErrBrokerOld, codes.FailedPrecondition, ReasonBrokerTooOld),
	service.ErrorIs(controller.ErrNoAnswer, codes.Unavailable, ReasonBrokerFailed),
	service.ErrorIs(catalog.ErrBrokerConnected, codes.FailedPrecondition, ReasonBrokerConnected),
	service.ErrorIs(catalog.ErrBrokerInUse, codes.FailedPrecondition, ReasonBrokerInUse),
	service.ErrorIs(controller.ErrRemoving, codes.Unavailable, ReasonBrokersUnsteady),
	service.ErrorIs(controller.ErrRemoved, codes.FailedPrecondition, ReasonBrokerRemoved),
	service.ErrorIs(catalog.ErrBrokerUnknown, codes.NotFound, ReasonBrokerUnknown),
	service.ErrorAs[*catalog.NotReadyError](codes.Unavailable, ReasonBrokerFailed),
	service.ErrorAs[*controller.BusyError](codes.Unavailable, ReasonContractBusy),
	service.ErrorAs[*controller.AdaptorError](codes.Unavailable, ReasonAdaptorFailed),
	service.ErrorIs(controller.ErrUnsteady, codes.Unavailable, ReasonBrokersUnsteady),
	service.ErrorAs[*catalog.PlanError](codes.Unavailable, ReasonBrokersUnsteady),
	service.ErrorIs(errNotOwner, codes.PermissionDenied, ReasonNotOwner),
	service.ErrorAs[*TooManyTopicsError](codes.ResourceExhausted, ReasonTooManyTopics),
	service.ErrorAs[*controller.QuotaError](codes.ResourceExhausted, ReasonQuotaExceeded),
	service.ErrorIs(sizing.ErrShort, codes.FailedPrecondition, ReasonTooFewMessages),
	service.ErrorIs(service.ErrNoHello, codes.DeadlineExceeded, ReasonNoHello),
	service.ErrorIs(service.ErrSlow, codes.Unavailable, ReasonSlowReader),
}

// toStatus is the only place that maps errors to gRPC codes and details.
func toStatus(err error) error { return table.Status(err, describe) }

func describe(err error, info *errdetails.ErrorInfo) []protoadapt.MessageV1 {
	var (
		elsewhere  *controller.NotLeaderError
		epoch      *controller.EpochError
		fields     placement.FieldErrors
		message    *controller.BadMessage
		infeasible *placement.Infeasible
		quota      *controller.QuotaError
		busy       *controller.BusyError
		used       *identity.InUse
	)
	switch {
	case errors.As(err, &used):
		info.Metadata = used.Metadata()
	case errors.As(err, &elsewhere) && elsewhere.Leader != "":
		info.Metadata = map[string]string{"leader": elsewhere.Leader}
	case errors.As(err, &epoch):
		info.Metadata = map[string]string{"epoch": strconv.FormatUint(epoch.Present, 10)}
	case errors.As(err, &fields):
		return []protoadapt.MessageV1{fromPlacement(fields).Details()}
	case errors.As(err, &message):
		return []protoadapt.MessageV1{faults{{Field: message.Field, Problem: message.Problem}}.Details()}
	case errors.As(err, &quota) && quota.RetryAfter > 0:
		return []protoadapt.MessageV1{&errdetails.RetryInfo{RetryDelay: durationpb.New(quota.RetryAfter)}}
	case errors.As(err, &busy) && busy.Lowering != nil:
		return []protoadapt.MessageV1{busy.Lowering}
	case errors.As(err, &infeasible):
		return []protoadapt.MessageV1{infeasibleProto(infeasible)}
	}
	return nil
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

type faults = service.Faults

// fromPlacement converts the paths of a placement.Demand to the paths of a
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
		list = append(list, service.Fault{Field: path, Problem: f.Problem})
	}
	return list
}
