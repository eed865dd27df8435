package controller

import (
	"errors"
	"fmt"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	texts "github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

var (
	// ErrClosing: the loaddistributor is shutting down.
	ErrClosing = errors.New("the loaddistributor is shutting down")
	// ErrNotCommitted: the journal failed, or another process leads. The request may be
	// durable; the next leader knows.
	ErrNotCommitted = errors.New("not known to be committed")
	// ErrStoreFull: the store has no room for the change. Nothing of the change is
	// stored.
	ErrStoreFull = store.ErrFull
	// ErrReplaced: a newer session has the broker's id.
	ErrReplaced = errors.New("a newer session has the broker's id")
	// ErrRemoved: the broker was removed from the cluster.
	ErrRemoved = errors.New("the broker was removed from the cluster, and what it held is others': it may join anew once it holds nothing")
	// ErrRemoving: the broker is being removed; the result is known soon.
	ErrRemoving = errors.New("the broker is just being removed from the cluster")
	// ErrBrokerGone: the broker's session ended before it answered.
	ErrBrokerGone = errors.New("the broker is gone")
	// ErrBrokerOld: the broker does not support the request.
	ErrBrokerOld = errors.New("the broker is of an older release, which does not know this request")
	// ErrNoAnswer: the broker did not answer in time.
	ErrNoAnswer = reconcile.ErrNoAnswer
	// ErrUnsteady: brokers came and went so fast that no plan fitted.
	ErrUnsteady = errors.New("the brokers change too fast to place the topic")
	// errAbandoned: no caller waits for the creation any more.
	errAbandoned = errors.New("the caller is gone")
)

// NotLeaderError: another loaddistributor leads; this process is read-only.
type NotLeaderError struct {
	// Leader is its gRPC address; empty when no leader is known.
	Leader string
}

func (e *NotLeaderError) Error() string {
	if e.Leader == "" {
		return "this loaddistributor does not lead, and none is known to"
	}
	return "this loaddistributor does not lead: " + e.Leader + " does"
}

// EpochError: a topic's placement does not have the epoch that a request expects.
type EpochError struct {
	Topic             string
	Expected, Present uint64
}

func (e *EpochError) Error() string {
	return fmt.Sprintf("topic %s has epoch %d, not %d: it has changed since it was read", e.Topic, e.Present, e.Expected)
}

// QuotaError: a tenant's limit forbids the request, perhaps only for now.
type QuotaError struct {
	Tenant, Problem string
	RetryAfter      time.Duration // 0: waiting does not help, or the time is unknown
}

func (e *QuotaError) Error() string { return "tenant " + e.Tenant + ": " + e.Problem }

// BrokerError: a broker failed a step of a topic's creation.
type BrokerError = reconcile.BrokerError

// RefusedError is a broker's refusal, safe to show to an operator.
type RefusedError struct{ Text string }

func (e *RefusedError) Error() string { return "refused: " + e.Text }

// AdaptorError: the adaptor did not accept the contract.
type AdaptorError struct{ Cause error }

func (e *AdaptorError) Error() string { return fmt.Sprintf("adaptor: %v", e.Cause) }
func (e *AdaptorError) Unwrap() error { return e.Cause }

// BusyError: brokers may still use the contract of a deleted topic of the same name.
type BusyError struct {
	Topic    string
	Lowering *srtmv1.Lowering // nil: the brokers are unknown
}

func (e *BusyError) Error() string {
	text := fmt.Sprintf("the contract of a deleted topic %s may still be in use", e.Topic)
	if e.Lowering != nil {
		text += ": " + texts.Lowering(e.Lowering)
	}
	return text
}

// errForgotten: the adaptor has restarted.
var errForgotten = errors.New("the adaptor does not know the contract")

// BadMessage: a broker's message has a fault.
type BadMessage = reports.Fault
