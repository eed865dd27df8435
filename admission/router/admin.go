package router

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	maxRules  = 1000
	someRules = 100
)

// Rules has the rules of keys, in store.Store.
type Rules interface {
	SetRules(ctx context.Context, rules []rule.Rule) (change uint64, err error)
	DeleteRule(ctx context.Context, key string) (change uint64, err error)
	Rule(ctx context.Context, key string) (rule.Rule, error)
	Rules(ctx context.Context, prefix, after string, n int) ([]rule.Rule, error)
	Defaults(ctx context.Context) ([]rule.Rule, error)
	LastChange(ctx context.Context) (uint64, error)
}

// Owners has the owners of partitions, in store.Store.
type Owners interface {
	Owners(ctx context.Context) (all []store.Partition, number uint64, err error)
	Move(ctx context.Context, first, last int, to string) error
}

// Admin serves AdmissionAdmin.
type Admin struct {
	srtmv1.UnimplementedAdmissionAdminServer
	rules  Rules
	owners Owners
	asker  *client.Client
}

// NewAdmin returns the service.
func NewAdmin(rules Rules, owners Owners, asker *client.Client) *Admin {
	return &Admin{rules: rules, owners: owners, asker: asker}
}

// SetRules implements the service.
func (a *Admin) SetRules(ctx context.Context, r *srtmv1.SetRulesRequest) (*srtmv1.SetRulesResponse, error) {
	if n := len(r.GetRules()); n < 1 || n > maxRules {
		return nil, invalid("rules", fmt.Sprintf("%d rules: want 1 to %d", n, maxRules))
	}
	rules := make([]rule.Rule, len(r.GetRules()))
	for i, p := range r.GetRules() {
		rules[i] = rule.Rule{
			Key: p.GetKey(), Share: tokenbucket.Share{Rate: tokenbucket.Rate(p.GetRefillMilli()), Burst: p.GetCapacity()}, Period: p.GetRefillPeriodS(),
			Strict: p.GetStrict(), Shadow: p.GetShadow(), FailOpen: p.GetFailOpen(),
		}
		if err := rules[i].Validate(); err != nil {
			return nil, invalid(fmt.Sprintf("rules[%d]", i), err.Error())
		}
	}
	change, err := a.rules.SetRules(ctx, rules)
	return &srtmv1.SetRulesResponse{Change: change}, failed(err)
}

// GetRule implements the service.
func (a *Admin) GetRule(ctx context.Context, r *srtmv1.GetRuleRequest) (*srtmv1.AdmissionRule, error) {
	got, err := a.rules.Rule(ctx, r.GetKey())
	return ruleProto(got), failed(err)
}

// DeleteRule implements the service.
func (a *Admin) DeleteRule(ctx context.Context, r *srtmv1.DeleteRuleRequest) (*srtmv1.DeleteRuleResponse, error) {
	change, err := a.rules.DeleteRule(ctx, r.GetKey())
	return &srtmv1.DeleteRuleResponse{Change: change}, failed(err)
}

// ListRules implements the service. A page token is the last key of the previous page.
func (a *Admin) ListRules(ctx context.Context, r *srtmv1.ListRulesRequest) (*srtmv1.ListRulesResponse, error) {
	n := int(r.GetPageSize())
	switch {
	case n == 0:
		n = someRules
	case n < 1 || n > maxRules:
		return nil, invalid("page_size", fmt.Sprintf("%d: want 1 to %d", n, maxRules))
	}
	rules, err := a.rules.Rules(ctx, r.GetPrefix(), r.GetPageToken(), n+1)
	if err != nil {
		return nil, failed(err)
	}
	reply := &srtmv1.ListRulesResponse{}
	if len(rules) > n {
		rules = rules[:n]
		reply.NextPageToken = rules[n-1].Key
	}
	for _, got := range rules {
		reply.Rules = append(reply.Rules, ruleProto(got))
	}
	return reply, nil
}

// Ask implements the service.
func (a *Admin) Ask(ctx context.Context, r *srtmv1.AskRequest) (*srtmv1.AskResponse, error) {
	if err := rule.ValidKey(r.GetKey()); err != nil {
		return nil, invalid("key", err.Error())
	}
	ask := a.asker.Ask
	if r.GetPeek() {
		ask = a.asker.Peek
	}
	d := ask(ctx, r.GetKey(), r.GetCost())
	return &srtmv1.AskResponse{
		Admit: d.Admit, ByDefault: d.ByDefault, Shadow: d.Shadow, Unanswered: d.Unanswered,
		Left: d.Left, RetryAfterMs: millis(d.RetryAfter),
	}, nil
}

// ListPartitions implements the service.
func (a *Admin) ListPartitions(ctx context.Context, _ *srtmv1.ListPartitionsRequest) (*srtmv1.ListPartitionsResponse, error) {
	all, _, err := a.owners.Owners(ctx)
	reply := &srtmv1.ListPartitionsResponse{}
	for i, p := range all {
		if i == 0 || p.Owner != all[i-1].Owner || p.Target != all[i-1].Target {
			reply.Partitions = append(reply.Partitions, &srtmv1.AdmissionPartitions{First: int32(i), Server: p.Owner, Target: p.Target})
		}
		reply.Partitions[len(reply.Partitions)-1].Last = int32(i)
	}
	return reply, failed(err)
}

// MovePartitions implements the service.
func (a *Admin) MovePartitions(ctx context.Context, r *srtmv1.MovePartitionsRequest) (*srtmv1.MovePartitionsResponse, error) {
	first, last := int(r.GetFirst()), int(r.GetLast())
	if first < 0 || last < first || last >= rule.Partitions {
		return nil, invalid("first", fmt.Sprintf("%d to %d: want 0 to %d", first, last, rule.Partitions-1))
	}
	return &srtmv1.MovePartitionsResponse{}, failed(a.owners.Move(ctx, first, last, r.GetServer()))
}

func ruleProto(r rule.Rule) *srtmv1.AdmissionRule {
	return &srtmv1.AdmissionRule{
		Key: r.Key, RefillMilli: int64(r.Share.Rate), RefillPeriodS: r.Period, Capacity: r.Share.Burst,
		Strict: r.Strict, Shadow: r.Shadow, FailOpen: r.FailOpen, Change: r.Change,
	}
}

func invalid(field, text string) error {
	return failed(service.Faults{{Field: field, Problem: text}})
}

var table = service.ErrorTable{
	service.ErrorIs(store.ErrNoRule, codes.NotFound, "RULE_UNKNOWN"),
	service.ErrorIs(store.ErrNoServer, codes.FailedPrecondition, "SERVER_UNKNOWN"),
}

// failed maps an error to a gRPC status. Unknown errors come from the store.
func failed(err error) error {
	if err = table.Status(err, nil); status.Code(err) == codes.Internal {
		return status.Errorf(codes.Unavailable, "the admission store: %s", status.Convert(err).Message())
	}
	return err
}
