package main

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/srtm/plan"
)

// explain turns a gRPC error into what an operator wants to read: the message,
// or every fault of the request.
func explain(err error) error {
	var remote interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &remote) {
		return err
	}
	s := remote.GRPCStatus()
	switch s.Code() {
	case codes.Unavailable:
		if _, dial, is := strings.Cut(s.Message(), "Error while dialing: "); is { // gRPC's words around it do not help
			return unanswered(strings.TrimSuffix(dial, `"`))
		}
		return fmt.Errorf("the server did not do it: %s", s.Message())
	case codes.Unimplemented:
		return fmt.Errorf("the server there does not offer this; is the address another program's? %s", s.Message())
	case codes.DeadlineExceeded:
		return fmt.Errorf("the server did not answer in time (see --timeout): %s", s.Message())
	}
	var faults []error
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				faults = append(faults, fmt.Errorf("%s: %s", v.GetField(), v.GetDescription()))
			}
		case *srtmv1.Infeasible:
			return lifecycle.ExitError{
				Code: plan.CodeInfeasible,
				Err:  fmt.Errorf("infeasible: %s: need %d, have %d%s", d.GetBound(), d.GetNeed(), d.GetHave(), wouldFit(d.GetFits())),
			}
		}
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	return errors.New(s.Message())
}

// unanswered says that nothing listens where dial failed.
func unanswered(dial string) error {
	return fmt.Errorf("no server answers there; is it running? %s", dial)
}

// wouldFit continues what is infeasible.
func wouldFit(f *srtmv1.Fits) string {
	fits := placement.Fits{
		Rate: f.GetRate(), Burst: f.GetBurst(), Publishers: f.GetPublishers(), MoreBrokers: f.GetMoreBrokers(), Mcap: f.GetBrokerMcap(),
	}.String()
	if fits == "" {
		return ""
	}
	return "; what would fit: " + fits
}
