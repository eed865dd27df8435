package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/topics"
)

// contractOf reads the fields of a contract, or returns all their faults. Without rate and
// burst, the contract follows what is measured.
func contractOf(form url.Values) (*srtmv1.Contract, error) {
	var faults []error
	number := func(field, text string) float64 {
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || !(v > 0 && v <= 1e9) {
			faults = append(faults, fmt.Errorf("%s: %.40q is not a number above 0, such as 100", field, text))
			return 0
		}
		return v
	}
	field := func(name string) string { return strings.TrimSpace(form.Get(name)) }
	contract := &srtmv1.Contract{Slo: &srtmv1.Slo{}}
	if field("rate") != "" || field("burst") != "" {
		burst := number("burst", field("burst"))
		contract.RateMilli, contract.Burst = int64(math.Round(1000*number("rate", field("rate")))), int64(burst)
		if burst != math.Trunc(burst) {
			faults = append(faults, fmt.Errorf("burst: %v is not a whole number", burst))
		}
	}
	if contract.Slo.Quantile = number("quantile", field("quantile")); contract.Slo.Quantile >= 1 {
		faults = append(faults, fmt.Errorf("quantile: %s is not a fraction below 1, such as 0.99", field("quantile")))
	}
	latency, err := time.ParseDuration(field("latency"))
	if err == nil {
		err = topics.CheckLatency(latency)
	} else {
		err = fmt.Errorf("%.40q is not a duration such as 100ms", field("latency"))
	}
	if err != nil {
		faults = append(faults, fmt.Errorf("latency: %w", err))
	}
	contract.Slo.Latency = durationpb.New(latency)
	if policy := field("over"); policy != "" {
		value, found := srtmv1.OverLimitPolicy_value["OVER_LIMIT_POLICY_"+strings.ToUpper(policy)]
		if contract.OverLimit = srtmv1.OverLimitPolicy(value); !found {
			faults = append(faults, fmt.Errorf("over-limit policy: %.40q is neither delay nor reject", policy))
		}
	}
	return contract, errors.Join(faults...)
}

// overLimit returns a policy as the form has it.
func overLimit(p srtmv1.OverLimitPolicy) string {
	if p == srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT {
		return "reject"
	}
	return "delay"
}

func checkContract(form url.Values) error {
	if _, err := contractOf(form); err != nil {
		return &problem{http.StatusBadRequest, err.Error()}
	}
	return nil
}

// changeContract changes the fields of a topic's contract that differ from the present
// ones, unless the topic has changed since the page was loaded.
func (o operator) changeContract(ctx context.Context, form url.Values) (string, error) {
	wanted, _ := contractOf(form) // checkContract has checked it
	reply, err := o.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: form.Get("topic"), OmitPublishers: true})
	if err != nil {
		return "", err
	}
	epoch, _ := strconv.ParseUint(form.Get("epoch"), 10, 64) // else whatever it is
	now, rule := reply.Topic.GetSpec().GetContract(), form.Get("rule")
	var paths []string
	for path, differs := range map[string]bool{
		"contract.rate_milli": wanted.RateMilli != now.GetRateMilli(), "contract.burst": wanted.Burst != now.GetBurst(),
		"contract.slo":        wanted.Slo.Quantile != now.GetSlo().GetQuantile() || wanted.Slo.Latency.AsDuration() != now.GetSlo().GetLatency().AsDuration(),
		"contract.over_limit": overLimit(wanted.OverLimit) != overLimit(now.GetOverLimit()), "share_rule": rule != "" && rule != reply.Topic.Spec.ShareRule,
	} {
		if differs {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 {
		return "The contract is so already.", nil
	}
	_, err = o.admin.UpdateTopic(ctx, &srtmv1.UpdateTopicRequest{
		Spec:       &srtmv1.TopicSpec{Name: form.Get("topic"), Contract: wanted, ShareRule: rule},
		UpdateMask: &fieldmaskpb.FieldMask{Paths: paths}, ExpectedEpoch: epoch,
	})
	return "The contract was changed.", err
}
