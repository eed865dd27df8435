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

// Adaptor is the GrantService, embedded (tbadaptor/loop.Server is one) or
// Remote. Its errors are gRPC statuses.
type Adaptor interface {
	SetContract(context.Context, *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error)
	RemoveContract(context.Context, *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error)
	ListShares(context.Context, *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error)
	ForgetBroker(context.Context, *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error)
	ReportEnd(context.Context, *srtmv1.ReportEndRequest) (*srtmv1.ReportEndResponse, error)
}

// Remote is an adaptor in another process. While none is there that leads, calls wait for
// it until their context ends.
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

// await makes a call until an adaptor has decided, which is harmless to repeat. If ctx ends
// first, the error says what there was instead.
func await[In, Out any](ctx context.Context, in *In, call func(context.Context, *In, ...grpc.CallOption) (*Out, error)) (*Out, error) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		out, err := call(ctx, in, grpc.WaitForReady(true))
		if !absent(err) || !clock.Sleep(ctx, pause) {
			return out, err
		}
	}
}

// reasonBusy is the adaptor's ErrorInfo where brokers may still use the contract of a removed
// topic.
const reasonBusy = "CONTRACT_BUSY"

// absent reports whether err says that there is no adaptor that leads. A status without
// details is of gRPC itself: the connection broke. One that has just begun leads within
// seconds, once the loaddistributor may lend it the right to; after one that shuts down
// another comes. With other details an adaptor has decided, and will not decide otherwise.
func absent(err error) bool {
	s, reason := status.Convert(err), targets.Reason(err)
	return s.Code() == codes.Unavailable && (len(s.Details()) == 0 || reason == "NOT_LEADING" || reason == "SHUTTING_DOWN")
}

// ledger is an adaptor that is given so long to answer.
type ledger struct {
	Adaptor  // nil: there is none, of a follower of a leader that has it in its process
	patience time.Duration
	life     context.Context // ends every call, with its cause: the controller stops
}

// within bounds a call.
func (l ledger) within(ctx context.Context, patience time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	stop := context.AfterFunc(l.life, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// failed is the error of a call.
func (l ledger) failed(err error) error {
	if cause := context.Cause(l.life); cause != nil {
		err = fmt.Errorf("%w: no answer of the adaptor: %w", cause, err)
	}
	return &AdaptorError{err}
}

// set requires a request of contractRequest.
func (l ledger) set(ctx context.Context, req *srtmv1.SetContractRequest) error {
	ctx, cancel := l.within(ctx, l.patience)
	defer cancel()
	if _, err := l.SetContract(ctx, req); err != nil {
		return l.failed(err)
	}
	return nil
}

// drop has the adaptor end a contract, and returns the shares that brokers have not given up;
// nil: none. The awaited brokers may use shares of it, the strict ones until their lease ends.
func (l ledger) drop(topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	ctx, cancel := l.within(context.Background(), l.patience)
	defer cancel()
	r, err := l.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: topic, Awaited: awaited, Strict: strict})
	return r.GetShares(), err
}

// topic returns what the adaptor knows of a topic; nil: nothing.
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

// shares returns what is known of the brokers' shares of a topic, by broker.
func (l ledger) shares(ctx context.Context, topic string, patience time.Duration) (map[string]*srtmv1.MemberShare, error) {
	t, err := l.topic(ctx, topic, patience)
	by := map[string]*srtmv1.MemberShare{}
	for _, m := range t.GetMembers() {
		by[m.BrokerId] = m
	}
	return by, err
}
