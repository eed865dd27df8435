package controller

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/targets"
)

// Adaptor is the GrantService, embedded (tbadaptor/loop.Server) or Remote. Its errors are
// gRPC statuses.
type Adaptor interface {
	SetContract(context.Context, *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error)
	RemoveContract(context.Context, *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error)
	ListShares(context.Context, *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error)
	ForgetBroker(context.Context, *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error)
	ReportEnd(context.Context, *srtmv1.ReportEndRequest) (*srtmv1.ReportEndResponse, error)
}

// Remote is an adaptor in another process. While no adaptor leads, calls wait until their
// context ends.
type Remote struct{ Client srtmv1.GrantServiceClient }

// SetContract implements Adaptor.
func (r Remote) SetContract(ctx context.Context, in *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error) {
	return await(ctx, in, r.Client.SetContract)
}

// RemoveContract implements Adaptor.
func (r Remote) RemoveContract(ctx context.Context, in *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error) {
	return await(ctx, in, r.Client.RemoveContract)
}

// ListShares implements Adaptor.
func (r Remote) ListShares(ctx context.Context, in *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	return await(ctx, in, r.Client.ListShares)
}

// ForgetBroker implements Adaptor.
func (r Remote) ForgetBroker(ctx context.Context, in *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error) {
	return await(ctx, in, r.Client.ForgetBroker)
}

// ReportEnd implements Adaptor.
func (r Remote) ReportEnd(ctx context.Context, in *srtmv1.ReportEndRequest) (*srtmv1.ReportEndResponse, error) {
	return await(ctx, in, r.Client.ReportEnd)
}

// Pauses between two calls of an adaptor that does not lead.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = 400 * time.Millisecond
)

// await repeats a call until a leading adaptor has answered. The calls are idempotent. If
// ctx ends first, await returns the last error.
func await[In, Out any](ctx context.Context, in *In, call func(context.Context, *In, ...grpc.CallOption) (*Out, error)) (*Out, error) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		out, err := call(ctx, in, grpc.WaitForReady(true))
		if !absent(err) || !clock.Sleep(ctx, pause) {
			return out, err
		}
	}
}

// reasonBusy is the adaptor's ErrorInfo reason if brokers may still use the contract of a
// removed topic.
const reasonBusy = "CONTRACT_BUSY"

// absent reports whether err means that no adaptor leads. A status without details comes
// from gRPC: the connection broke. A new adaptor leads within seconds, after the
// loaddistributor has granted it leadership. An adaptor that shuts down has a successor.
// With other details an adaptor has decided, and a repetition would not change the
// decision.
func absent(err error) bool {
	s, reason := status.Convert(err), targets.Reason(err)
	return s.Code() == codes.Unavailable && (len(s.Details()) == 0 || reason == "NOT_LEADING" || reason == "SHUTTING_DOWN")
}

// ledger is an adaptor with a timeout.
type ledger struct {
	Adaptor  // nil on a follower whose leader embeds the adaptor
	patience time.Duration
	life     context.Context // ends every call when the controller stops, with the cause
}

// within limits a call by patience and by life.
func (l ledger) within(ctx context.Context, patience time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	stop := context.AfterFunc(l.life, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// failed wraps the error of a call.
func (l ledger) failed(err error) error {
	if cause := context.Cause(l.life); cause != nil {
		err = fmt.Errorf("%w: no answer of the adaptor: %w", cause, err)
	}
	return &AdaptorError{err}
}

// set sets a contract. Requires: req is from terms.request.
func (l ledger) set(ctx context.Context, req *srtmv1.SetContractRequest) error {
	ctx, cancel := l.within(ctx, l.patience)
	defer cancel()
	if _, err := l.SetContract(ctx, req); err != nil {
		return l.failed(err)
	}
	return nil
}

// drop removes a contract at the adaptor, and returns the shares that brokers still hold;
// nil: none. The awaited brokers may use shares of the contract. The strict brokers among
// them stop when their lease ends.
func (l ledger) drop(topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	ctx, cancel := l.within(context.Background(), l.patience)
	defer cancel()
	r, err := l.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: topic, Awaited: awaited, Strict: strict})
	return r.GetShares(), err
}

// topic returns the adaptor's shares of a topic, or nil.
func (l ledger) topic(ctx context.Context, topic string, patience time.Duration) (*srtmv1.TopicShares, error) {
	if l.Adaptor == nil {
		return nil, nil
	}
	ctx, cancel := l.within(ctx, patience)
	defer cancel()
	r, err := l.ListShares(ctx, &srtmv1.ListSharesRequest{Topic: topic})
	if err != nil {
		return nil, l.failed(err)
	}
	if len(r.Topics) == 0 {
		return nil, nil
	}
	return r.Topics[0], nil
}

// shares returns the adaptor's shares of a topic, by broker.
func (l ledger) shares(ctx context.Context, topic string, patience time.Duration) (map[string]*srtmv1.MemberShare, error) {
	t, err := l.topic(ctx, topic, patience)
	by := map[string]*srtmv1.MemberShare{}
	for _, m := range t.GetMembers() {
		by[m.BrokerId] = m
	}
	return by, err
}
