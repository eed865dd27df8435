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
	"github.com/srtm-io/srtm/internal/bidi"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/refusal"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
)

// Reasons of ErrorInfo. They are part of the API; clients may depend on them.
const (
	ReasonBadRequest       = refusal.BadRequest
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
var table = refusal.Table{
	refusal.As[placement.FieldErrors](codes.InvalidArgument, ReasonBadRequest),
	refusal.As[*controller.BadMessage](codes.InvalidArgument, ReasonBadRequest),
	refusal.As[*placement.Infeasible](codes.ResourceExhausted, ReasonInfeasible),
	refusal.Is(catalog.ErrKeyReused, codes.FailedPrecondition, ReasonKeyReused),
	refusal.Is(catalog.ErrTopicExists, codes.AlreadyExists, ReasonTopicExists),
	refusal.Is(catalog.ErrTopicUnknown, codes.NotFound, ReasonTopicUnknown),
	refusal.Is(catalog.ErrChannelUnknown, codes.NotFound, ReasonChannelUnknown),
	refusal.As[*catalog.ChannelsError](codes.ResourceExhausted, ReasonTooManyChannels),
	refusal.Is(catalog.ErrPublisherUnknown, codes.NotFound, ReasonPublisherUnknown),
	refusal.Is(catalog.ErrUnplaced, codes.FailedPrecondition, ReasonNotPlaced),
	refusal.Is(catalog.ErrNotActive, codes.FailedPrecondition, ReasonTopicNotActive),
	refusal.As[*controller.EpochError](codes.Aborted, ReasonTopicChanged),
	refusal.Is(catalog.ErrTopicState, codes.FailedPrecondition, ReasonTopicBusy),
	refusal.Is(controller.ErrClosing, codes.Unavailable, ReasonShuttingDown),
	refusal.As[*controller.NotLeaderError](codes.Unavailable, ReasonNotLeader),
	refusal.Is(controller.ErrStoreFull, codes.ResourceExhausted, ReasonStoreFull),
	refusal.Is(controller.ErrNotCommitted, codes.Unavailable, ReasonNotCommitted),
	refusal.Is(catalog.ErrUnread, codes.Unavailable, ReasonUnread),
	refusal.Is(controller.ErrReplaced, codes.Aborted, ReasonSessionReplaced),
	refusal.Is(identity.ErrReplaced, codes.Aborted, ReasonSessionReplaced),
	refusal.As[*identity.InUse](codes.AlreadyExists, identity.ReasonInUse),
	refusal.As[*identity.Lost](codes.Aborted, identity.ReasonLost),
	refusal.As[*controller.BrokerError](codes.Unavailable, ReasonBrokerFailed),
	refusal.As[*controller.RefusedError](codes.Unavailable, ReasonBrokerFailed),
	refusal.Is(controller.ErrBrokerGone, codes.Unavailable, ReasonBrokerFailed),
	refusal.Is(controller.ErrBrokerOld, codes.FailedPrecondition, ReasonBrokerTooOld),
	refusal.Is(controller.ErrNoAnswer, codes.Unavailable, ReasonBrokerFailed),
	refusal.Is(catalog.ErrBrokerConnected, codes.FailedPrecondition, ReasonBrokerConnected),
	refusal.Is(catalog.ErrBrokerInUse, codes.FailedPrecondition, ReasonBrokerInUse),
	refusal.Is(controller.ErrRemoving, codes.Unavailable, ReasonBrokersUnsteady),
	refusal.Is(controller.ErrRemoved, codes.FailedPrecondition, ReasonBrokerRemoved),
	refusal.Is(catalog.ErrBrokerUnknown, codes.NotFound, ReasonBrokerUnknown),
	refusal.As[*catalog.NotReadyError](codes.Unavailable, ReasonBrokerFailed),
	refusal.As[*controller.BusyError](codes.Unavailable, ReasonContractBusy),
	refusal.As[*controller.AdaptorError](codes.Unavailable, ReasonAdaptorFailed),
	refusal.Is(controller.ErrUnsteady, codes.Unavailable, ReasonBrokersUnsteady),
	refusal.As[*catalog.PlanError](codes.Unavailable, ReasonBrokersUnsteady),
	refusal.Is(errNotOwner, codes.PermissionDenied, ReasonNotOwner),
	refusal.As[*TooManyTopicsError](codes.ResourceExhausted, ReasonTooManyTopics),
	refusal.As[*controller.QuotaError](codes.ResourceExhausted, ReasonQuotaExceeded),
	refusal.Is(sizing.ErrShort, codes.FailedPrecondition, ReasonTooFewMessages),
	refusal.Is(bidi.ErrNoHello, codes.DeadlineExceeded, ReasonNoHello),
	refusal.Is(bidi.ErrSlow, codes.Unavailable, ReasonSlowReader),
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

type faults = refusal.Faults

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
		list = append(list, refusal.Fault{Field: path, Problem: f.Problem})
	}
	return list
}
