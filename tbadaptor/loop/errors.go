package loop

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/srtm-io/srtm/internal/duplex"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
)

// Domain is the ErrorInfo domain of SRTM's services.
const Domain = "srtm.io"

// Reasons of ErrorInfo. They are part of the API: clients may depend on them.
const (
	ReasonBadRequest  = "BAD_REQUEST"
	ReasonClosing     = "SHUTTING_DOWN"
	ReasonReplaced    = "SESSION_REPLACED"
	ReasonNoHello     = "NO_HELLO"
	ReasonSlow        = "SLOW_READER"
	ReasonConflict    = "CONTRACT_CONFLICT"
	ReasonBusy        = "CONTRACT_BUSY"
	ReasonUnsettled   = "SHARES_NOT_ACKNOWLEDGED"
	ReasonLapsed      = "LEASE_OVER"
	ReasonConnected   = "BROKER_CONNECTED"
	ReasonUnknown     = "BROKER_UNKNOWN"
	ReasonMayGoOn     = "BROKER_MAY_GO_ON"
	ReasonRemoved     = "CONTRACT_REMOVED"
	ReasonBadSequence = "BAD_SEQUENCE"
	ReasonNotLeading  = "NOT_LEADING"
	ReasonOldTerm     = "OLD_TERM"
)

var (
	errClosing  = errors.New("the adaptor is shutting down")
	errReplaced = errors.New("a newer session has the broker's id")
	errLapsed   = errors.New("the broker's lease is over: it was not renewed in time")
	errRemoved  = errors.New("the contract was removed meanwhile")

	errNotLeading = errors.New("this adaptor does not lead any more")
	errOwnTerm    = errors.New("this adaptor is a part of its loaddistributor, and leads with it")
	errOldTerm    = errors.New("the adaptor's term is over")
)

// badSequence: a peer said what it cannot say now, or what contradicts what
// the ledger knows. A new session brings both in line.
type badSequence struct{ err error }

func (e badSequence) Error() string { return e.err.Error() }
func (e badSequence) Unwrap() error { return e.err }

// unsettled: not every member acknowledged its share in time.
type unsettled struct {
	topic   string
	members []string // each with what is missing
	cause   error
}

func (e *unsettled) Error() string {
	return fmt.Sprintf("topic %s: no acknowledgement of its share from %s: %v", e.topic, strings.Join(e.members, ", "), e.cause)
}
func (e *unsettled) Unwrap() error { return e.cause }

// badRequest is every fault of a request.
type badRequest []*errdetails.BadRequest_FieldViolation

func (e *badRequest) add(field, format string, args ...any) {
	*e = append(*e, &errdetails.BadRequest_FieldViolation{Field: field, Description: fmt.Sprintf(format, args...)})
}

// err returns nil when there is no fault.
func (e badRequest) err() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

func (e badRequest) Error() string {
	var b strings.Builder
	for i, v := range e {
		if i > 0 {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "%s: %s", v.Field, v.Description)
	}
	return b.String()
}

// toStatus is the one place where errors get their gRPC codes.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	var (
		bad      badRequest
		sequence badSequence
		busy     *ledger.Busy
		conflict *ledger.Conflict
		late     *unsettled
	)
	switch {
	case errors.As(err, &bad):
		return coded(codes.InvalidArgument, ReasonBadRequest, err, &errdetails.BadRequest{FieldViolations: bad})
	case errors.Is(err, errClosing):
		return coded(codes.Unavailable, ReasonClosing, err)
	case errors.Is(err, errNotLeading):
		return coded(codes.Unavailable, ReasonNotLeading, err)
	case errors.Is(err, errOldTerm), errors.Is(err, errOwnTerm):
		return coded(codes.FailedPrecondition, ReasonOldTerm, err)
	case errors.Is(err, errReplaced), errors.Is(err, ledger.ErrReplaced):
		return coded(codes.Aborted, ReasonReplaced, err)
	case errors.Is(err, errLapsed):
		return coded(codes.Unavailable, ReasonLapsed, err)
	case errors.Is(err, ledger.ErrConnected):
		return coded(codes.FailedPrecondition, ReasonConnected, err)
	case errors.Is(err, ledger.ErrMayGoOn):
		return coded(codes.FailedPrecondition, ReasonMayGoOn, err)
	case errors.Is(err, ledger.ErrUnknownBroker):
		return coded(codes.NotFound, ReasonUnknown, err)
	case errors.Is(err, errRemoved):
		return coded(codes.Aborted, ReasonRemoved, err)
	case errors.Is(err, duplex.ErrNoHello):
		return coded(codes.DeadlineExceeded, ReasonNoHello, err)
	case errors.Is(err, duplex.ErrSlow):
		return coded(codes.Unavailable, ReasonSlow, err)
	case errors.As(err, &late):
		return coded(codes.Unavailable, ReasonUnsettled, err)
	case errors.As(err, &busy):
		return coded(codes.Unavailable, ReasonBusy, err)
	case errors.As(err, &conflict):
		return coded(codes.FailedPrecondition, ReasonConflict, err)
	case errors.As(err, &sequence):
		return coded(codes.Unavailable, ReasonBadSequence, err)
	case errors.Is(err, context.Canceled):
		return status.FromContextError(context.Canceled).Err()
	case errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(context.DeadlineExceeded).Err()
	}
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	return status.Error(codes.Internal, err.Error())
}

func coded(code codes.Code, reason string, err error, details ...protoadapt.MessageV1) error {
	s := status.New(code, err.Error())
	with, detailErr := s.WithDetails(append([]protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: reason, Domain: Domain}}, details...)...)
	if detailErr != nil {
		return s.Err() // the code and the text stand without them
	}
	return with.Err()
}
