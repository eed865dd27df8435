package rpc

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// domain lists every exported error of the packages that rpc imports, by "package.Name", with the
// expected code and reason.
var domain = map[string]struct {
	err    error
	code   codes.Code
	reason string
}{
	"catalog.ErrTopicExists":      {catalog.ErrTopicExists, codes.AlreadyExists, ReasonTopicExists},
	"catalog.ErrTopicUnknown":     {catalog.ErrTopicUnknown, codes.NotFound, ReasonTopicUnknown},
	"catalog.ErrTopicState":       {catalog.ErrTopicState, codes.FailedPrecondition, ReasonTopicBusy},
	"catalog.ErrChannelUnknown":   {catalog.ErrChannelUnknown, codes.NotFound, ReasonChannelUnknown},
	"catalog.ChannelsError":       {&catalog.ChannelsError{Topic: "t", Present: 1, New: 1}, codes.ResourceExhausted, ReasonTooManyChannels},
	"catalog.ErrPublisherUnknown": {catalog.ErrPublisherUnknown, codes.NotFound, ReasonPublisherUnknown},
	"catalog.ErrNotActive":        {catalog.ErrNotActive, codes.FailedPrecondition, ReasonTopicNotActive},
	"catalog.ErrUnplaced":         {catalog.ErrUnplaced, codes.FailedPrecondition, ReasonNotPlaced},
	"catalog.ErrKeyReused":        {catalog.ErrKeyReused, codes.FailedPrecondition, ReasonKeyReused},
	"catalog.ErrBrokerUnknown":    {catalog.ErrBrokerUnknown, codes.NotFound, ReasonBrokerUnknown},
	"catalog.ErrBrokerConnected":  {catalog.ErrBrokerConnected, codes.FailedPrecondition, ReasonBrokerConnected},
	"catalog.ErrBrokerInUse":      {catalog.ErrBrokerInUse, codes.FailedPrecondition, ReasonBrokerInUse},
	"controller.ErrRemoving":      {controller.ErrRemoving, codes.Unavailable, ReasonBrokersUnsteady},
	"controller.ErrRemoved":       {controller.ErrRemoved, codes.FailedPrecondition, ReasonBrokerRemoved},
	"catalog.PlanError":           {&catalog.PlanError{Broker: "b", Problem: "p"}, codes.Unavailable, ReasonBrokersUnsteady},
	"catalog.NotReadyError":       {&catalog.NotReadyError{Topic: "t", Reason: "r"}, codes.Unavailable, ReasonBrokerFailed},
	"controller.ErrClosing":       {controller.ErrClosing, codes.Unavailable, ReasonShuttingDown},
	"controller.ErrNotCommitted":  {controller.ErrNotCommitted, codes.Unavailable, ReasonNotCommitted},
	"controller.ErrStoreFull":     {controller.ErrStoreFull, codes.ResourceExhausted, ReasonStoreFull},
	"catalog.ErrUnread":           {catalog.ErrUnread, codes.Unavailable, ReasonUnread},
	"controller.NotLeaderError":   {&controller.NotLeaderError{Leader: "h:1"}, codes.Unavailable, ReasonNotLeader},
	"controller.EpochError":       {&controller.EpochError{Topic: "t", Expected: 1, Present: 2}, codes.Aborted, ReasonTopicChanged},
	"controller.ErrReplaced":      {controller.ErrReplaced, codes.Aborted, ReasonSessionReplaced},
	"controller.ErrBrokerGone":    {controller.ErrBrokerGone, codes.Unavailable, ReasonBrokerFailed},
	"controller.ErrBrokerOld":     {controller.ErrBrokerOld, codes.FailedPrecondition, ReasonBrokerTooOld},
	"controller.ErrNoAnswer":      {controller.ErrNoAnswer, codes.Unavailable, ReasonBrokerFailed},
	"controller.ErrUnsteady":      {controller.ErrUnsteady, codes.Unavailable, ReasonBrokersUnsteady},
	"controller.QuotaError":       {&controller.QuotaError{Tenant: "t", Problem: "p", RetryAfter: 1}, codes.ResourceExhausted, ReasonQuotaExceeded},
	"controller.BrokerError":      {&controller.BrokerError{Broker: "b", Cause: controller.ErrNoAnswer}, codes.Unavailable, ReasonBrokerFailed},
	"controller.RefusedError":     {&controller.RefusedError{Text: "t"}, codes.Unavailable, ReasonBrokerFailed},
	"controller.BusyError":        {&controller.BusyError{Topic: "t", Lowering: &srtmv1.Lowering{}}, codes.Unavailable, ReasonContractBusy},
	"controller.AdaptorError":     {&controller.AdaptorError{Cause: status.Error(codes.FailedPrecondition, "no")}, codes.Unavailable, ReasonAdaptorFailed},
	"reports.Fault":               {&controller.BadMessage{Field: "f", Problem: "p"}, codes.InvalidArgument, ReasonBadRequest},
	"placement.FieldError":        {placement.FieldErrors{{Field: "rate", Problem: "p"}}, codes.InvalidArgument, ReasonBadRequest},
	"placement.FieldErrors":       {placement.FieldErrors{{Field: "rate", Problem: "p"}}, codes.InvalidArgument, ReasonBadRequest},
	"placement.Infeasible":        {&placement.Infeasible{Bound: "rcap", Need: 2, Have: 1}, codes.ResourceExhausted, ReasonInfeasible},
	"service.ErrNoHello":          {service.ErrNoHello, codes.DeadlineExceeded, ReasonNoHello},
	"service.ErrSlow":             {service.ErrSlow, codes.Unavailable, ReasonSlowReader},
	"service.Faults":              {service.Faults{{Field: "f", Problem: "p"}}, codes.InvalidArgument, ReasonBadRequest},
}

func TestEveryDomainErrorHasACode(t *testing.T) {
	root := testkit.Root(t)
	declared := 0
	for _, dir := range []string{"loaddistributor/catalog", "loaddistributor/controller", "loaddistributor/placement", "loaddistributor/reports", "internal/service"} {
		for _, name := range exportedErrors(t, filepath.Join(root, dir)) {
			declared++
			if _, ok := domain[name]; !ok {
				t.Errorf("%s has no code: add it to the table, and here", name)
			}
		}
	}
	if declared != len(domain) {
		t.Errorf("%d errors are declared, %d are tested", declared, len(domain))
	}
	for name, want := range domain {
		t.Run(name, func(t *testing.T) {
			for _, err := range []error{want.err, fmt.Errorf("doing it: %w", want.err), errors.Join(errors.New("other"), want.err)} {
				s := status.Convert(toStatus(err))
				if s.Code() != want.code || reasonOf(s) != want.reason {
					t.Errorf("%v: %v %s, want %v %s", err, s.Code(), reasonOf(s), want.code, want.reason)
				}
				if s.Message() != err.Error() {
					t.Errorf("the text is %q, want %q", s.Message(), err)
				}
			}
		})
	}
}

// exportedErrors returns, as "package.Name", the exported variables that begin with Err, and the
// exported types that have an Error method or alias such a type of another package.
func exportedErrors(t *testing.T, dir string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no Go files in %s: %v", dir, err)
	}
	var names []string
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file := testkit.Result(parser.ParseFile(token.NewFileSet(), path, nil, 0)).Must(t)
		add := func(name string) {
			if ast.IsExported(name) {
				names = append(names, file.Name.Name+"."+name)
			}
		}
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.ValueSpec:
						for _, name := range s.Names {
							if d.Tok == token.VAR && strings.HasPrefix(name.Name, "Err") {
								add(name.Name)
							}
						}
					case *ast.TypeSpec:
						if s.Assign.IsValid() && strings.HasSuffix(s.Name.Name, "Error") { // another package's
							add(s.Name.Name)
						}
					}
				}
			case *ast.FuncDecl:
				if d.Name.Name == "Error" && d.Recv != nil {
					kind := d.Recv.List[0].Type
					if star, ok := kind.(*ast.StarExpr); ok {
						kind = star.X
					}
					add(kind.(*ast.Ident).Name)
				}
			}
		}
	}
	slices.Sort(names)
	return names
}

func reasonOf(s *status.Status) string {
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			if info.Domain != service.ErrorDomain {
				return "a reason of the domain " + info.Domain
			}
			return info.Reason
		}
	}
	return ""
}

func TestOtherErrors(t *testing.T) {
	if toStatus(nil) != nil {
		t.Error("no error became one")
	}
	for _, test := range []struct {
		err  error
		want codes.Code
	}{
		{context.Canceled, codes.Canceled},
		{fmt.Errorf("waiting: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{status.Error(codes.Unauthenticated, "who"), codes.Unauthenticated},
		{errors.New("an unforeseen one"), codes.Internal},
	} {
		testkit.Equal(t, status.Code(toStatus(test.err)), test.want, "%v", test.err)
	}
}

func TestInfeasibleCarriesItsBound(t *testing.T) {
	details := func(i placement.Infeasible) *srtmv1.Infeasible {
		for _, d := range status.Convert(toStatus(&i)).Details() {
			if p, ok := d.(*srtmv1.Infeasible); ok {
				return p
			}
		}
		t.Fatal("no Infeasible among the details")
		return nil
	}
	i := details(placement.Infeasible{
		Bound: "rcap", Need: 80, Have: 50, Fits: placement.Fits{Rate: 1, Burst: 2, Publishers: 3, MoreBrokers: 4, Mcap: 5},
	})
	want := &srtmv1.Infeasible{
		Bound: "rcap", Need: 80, Have: 50, Fits: &srtmv1.Fits{Rate: 1, Burst: 2, Publishers: 3, MoreBrokers: 4, BrokerMcap: 5},
	}
	if !proto.Equal(i, want) {
		t.Errorf("got %v, want %v", i, want)
	}
	if i := details(placement.Infeasible{Bound: "brokers", Need: 1}); i.Fits != nil {
		t.Errorf("got %v, where nothing fits", i)
	}
}

func TestManyFaultsAreBounded(t *testing.T) {
	var bad faults
	for i := range 1000 {
		bad.Add(fmt.Sprintf("spec.publishers[%d].id", i), "is empty")
	}
	s := status.Convert(toStatus(bad))
	for _, d := range s.Details() {
		if b, ok := d.(*errdetails.BadRequest); ok {
			if n := len(b.FieldViolations); n != service.MaxFaults+1 {
				t.Errorf("%d violations, want %d", n, service.MaxFaults+1)
			}
			if last := b.FieldViolations[service.MaxFaults]; last.Description != "900 more faults" {
				t.Errorf("the last is %v", last)
			}
		}
	}
	if len(s.Message()) > 1000 {
		t.Errorf("a text of %d bytes", len(s.Message()))
	}
}
