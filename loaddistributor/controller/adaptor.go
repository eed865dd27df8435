package controller

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
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

// Remote is an adaptor in another process. While it is away, calls wait for it
// until their context ends.
type Remote struct{ Client srtmv1.GrantServiceClient }

// SetContract implements Adaptor.
func (r Remote) SetContract(ctx context.Context, in *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error) {
	return r.Client.SetContract(ctx, in, grpc.WaitForReady(true))
}

// RemoveContract implements Adaptor.
func (r Remote) RemoveContract(ctx context.Context, in *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error) {
	return r.Client.RemoveContract(ctx, in, grpc.WaitForReady(true))
}

// ListShares implements Adaptor.
func (r Remote) ListShares(ctx context.Context, in *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	return r.Client.ListShares(ctx, in, grpc.WaitForReady(true))
}

// ForgetBroker implements Adaptor.
func (r Remote) ForgetBroker(ctx context.Context, in *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error) {
	return r.Client.ForgetBroker(ctx, in, grpc.WaitForReady(true))
}

// ReportEnd implements Adaptor.
func (r Remote) ReportEnd(ctx context.Context, in *srtmv1.ReportEndRequest) (*srtmv1.ReportEndResponse, error) {
	return r.Client.ReportEnd(ctx, in, grpc.WaitForReady(true))
}

// ledger is an adaptor that is given so long to answer.
type ledger struct {
	Adaptor  // nil: there is none, of a follower of a leader that has it in its process
	patience time.Duration
}

// set requires a request of contractRequest. While the adaptor is away it is asked again.
func (l ledger) set(ctx context.Context, req *srtmv1.SetContractRequest) error {
	ctx, cancel := context.WithTimeoutCause(ctx, l.patience, ErrNoAnswer)
	defer cancel()
	for delay := 50 * time.Millisecond; ; delay *= 2 {
		_, err := l.SetContract(ctx, req)
		if err == nil {
			return nil
		}
		// A status without details is of gRPC itself: the connection broke. With
		// details the adaptor has decided, and will not decide otherwise.
		if s := status.Convert(err); s.Code() != codes.Unavailable || len(s.Details()) > 0 {
			return &AdaptorError{err}
		}
		if !clock.Sleep(ctx, delay) {
			return &AdaptorError{err}
		}
	}
}

// drop has the adaptor forget a contract.
func (l ledger) drop(topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), l.patience)
	defer cancel()
	_, err := l.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: topic})
	return err
}

// shares returns what is known of the brokers' shares of a topic, by broker.
func (l ledger) shares(ctx context.Context, topic string, patience time.Duration) (map[string]*srtmv1.MemberShare, error) {
	if l.Adaptor == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r, err := l.ListShares(ctx, &srtmv1.ListSharesRequest{Topic: topic})
	if err != nil {
		return nil, &AdaptorError{err}
	}
	by := map[string]*srtmv1.MemberShare{}
	for _, t := range r.Topics {
		for _, m := range t.Members {
			by[m.BrokerId] = m
		}
	}
	return by, nil
}
