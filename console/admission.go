package console

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Bounds of the page of admission.
const (
	peerAge    = seldom * tick // of answers of admission and gateways
	maxNearest = 100           // keys near their limit
)

// decider is a server of admission.
type decider struct {
	Address string // gRPC; "": the console does not know it
	*srtmv1.GetServerStateResponse
	Owned, Moving int    // partitions by the owner table
	Trouble       string // why there is no state
	Router        bool   // the process decides nothing
}

// nearKey is a key near its limit, with the server that decides for it.
type nearKey struct {
	*srtmv1.AdmissionKey
	By string
}

// Part returns what is left of the capacity, in percent.
func (k nearKey) Part() float64 { return 100 * float64(k.Left) / float64(max(1, k.Capacity)) }

type admissionData struct {
	Configured bool
	Cards      []card
	Deciders   []decider
	Nearest    []nearKey
	Rules      []*srtmv1.AdmissionRule
	Prefix     string // of the rules' keys
	From       string // page of rules
	Next       string // link to the next page; "": none
	Trouble    string // why there are no rules
}

// admissionPage shows the rules, the keys near their limit and the servers of admission.
func (c *Console) admissionPage(ctx context.Context, q url.Values, _ user) (view, error) {
	d := admissionData{Configured: len(c.cfg.Admission) > 0, Prefix: q.Get("q"), From: q.Get("from")}
	v := view{Template: "admission", Title: "Admission"}
	if !d.Configured {
		v.Data = d
		return v, nil
	}
	d.Deciders = c.deciders(ctx)
	rules, partitions := &srtmv1.ListRulesResponse{}, &srtmv1.ListPartitionsResponse{}
	ask := &srtmv1.ListRulesRequest{Prefix: d.Prefix, PageSize: perPage, PageToken: d.From}
	if err := c.askAdmission(ctx, d.Deciders, srtmv1.AdmissionAdmin_ListRules_FullMethodName, ask, rules); err != nil {
		d.Trouble = problemOf(err).text
	} else if err = c.askAdmission(ctx, d.Deciders, srtmv1.AdmissionAdmin_ListPartitions_FullMethodName, &srtmv1.ListPartitionsRequest{}, partitions); err != nil {
		d.Trouble = problemOf(err).text
	}
	d.Rules = rules.Rules
	if rules.NextPageToken != "" {
		d.Next = query("/ui/admission", "q", d.Prefix, "from", rules.NextPageToken)
	}
	d.Deciders = withOwners(d.Deciders, partitions.Partitions)
	d.add()
	v.Data = d
	return v, nil
}

// deciders requests the state of all servers.
func (c *Console) deciders(ctx context.Context) []decider {
	addresses := map[string]string{}
	for address := range c.cfg.Admission {
		addresses[address] = address
	}
	return each(addresses, func(address, _ string) decider {
		decider := decider{Address: address, GetServerStateResponse: &srtmv1.GetServerStateResponse{}}
		err := c.invoke(ctx, address, srtmv1.AdmissionState_GetServerState_FullMethodName, &srtmv1.GetServerStateRequest{MaxKeys: maxNearest}, decider.GetServerStateResponse)
		if decider.Router = status.Code(err) == codes.Unimplemented; err != nil && !decider.Router {
			decider.Trouble = problemOf(err).text
		}
		return decider
	})
}

// askAdmission calls a method that every router answers alike: at the first address that
// answers.
func (c *Console) askAdmission(ctx context.Context, all []decider, method string, request, reply proto.Message) (err error) {
	err = status.Error(codes.Unavailable, "No server of admission answers.")
	for _, decider := range all {
		if decider.Trouble != "" {
			continue
		}
		if err = c.invoke(ctx, decider.Address, method, request, reply); status.Code(err) != codes.Unimplemented {
			break // else the process is no router
		}
	}
	return err
}

// invoke calls a method of a server of admission, or decodes the answer of a recent call.
func (c *Console) invoke(ctx context.Context, address, method string, request, reply proto.Message) error {
	sent, err := proto.MarshalOptions{Deterministic: true}.Marshal(request)
	if err != nil {
		return err
	}
	body, err := c.requester.answers.get(ctx, address+" "+method+" "+string(sent), peerAge, func(ctx context.Context) ([]byte, error) {
		ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(ctx, nil), callTimeout) // the caller's name is for the loaddistributor alone
		defer cancel()
		answer := reply.ProtoReflect().New().Interface()
		if err := c.cfg.Admission[address].Invoke(ctx, method, request, answer, grpc.MaxCallRecvMsgSize(maxAnswer)); err != nil {
			return nil, err
		}
		return proto.Marshal(answer)
	})
	if err != nil {
		return err
	}
	return proto.Unmarshal(body, reply)
}

// withOwners adds the owner table to the servers, and the owners that are not configured.
func withOwners(all []decider, partitions []*srtmv1.AdmissionPartitions) []decider {
	for _, p := range partitions {
		i := slices.IndexFunc(all, func(decider decider) bool { return decider.Server == p.Server && decider.Server != "" })
		if i < 0 {
			i = len(all)
			all = append(all, decider{GetServerStateResponse: &srtmv1.GetServerStateResponse{Server: p.Server}})
		}
		count := int(p.Last - p.First + 1)
		if all[i].Owned += count; p.Target != "" {
			all[i].Moving += count
		}
	}
	return all
}

// add sums up the servers for the cards and merges their keys.
func (d *admissionData) add() {
	var keys int64
	healthy, servers, empty := 0, 0, 0
	for _, decider := range d.Deciders {
		if decider.Router {
			continue
		}
		servers++
		keys += decider.Keys
		if decider.Trouble == "" && decider.Problem == "" && decider.Address != "" {
			healthy++
		}
		for _, k := range decider.Nearest {
			d.Nearest = append(d.Nearest, nearKey{k, decider.Server})
		}
	}
	slices.SortStableFunc(d.Nearest, func(a, b nearKey) int {
		return cmp.Or(cmp.Compare(a.Part(), b.Part()), cmp.Compare(b.Denied, a.Denied))
	})
	d.Nearest = d.Nearest[:min(len(d.Nearest), maxNearest)]
	for _, k := range d.Nearest {
		if k.Left == 0 {
			empty++
		}
	}
	some, class := fmt.Sprint(empty), "good"
	if empty == maxNearest {
		some = fmt.Sprintf("%d or more", empty)
	}
	if empty > 0 {
		class = "warn"
	}
	health := "good"
	if healthy < servers {
		health = "bad"
	}
	d.Cards = []card{
		{Name: "Servers", Value: fmt.Sprint(healthy), Unit: fmt.Sprintf("of %d healthy", servers), Class: health},
		{Name: "Keys in memory", Value: thousands(fmt.Sprint(keys)), Unit: "keys"},
		{Name: "Keys without a credit", Value: some, Unit: "keys", Class: class},
	}
}

// refill formats the refill of a rule.
func refill(r *srtmv1.AdmissionRule) string {
	period := map[int64]string{0: "second", 1: "second", 60: "minute", 3600: "hour", 86400: "day", 7 * 86400: "week"}[r.RefillPeriodS]
	if period == "" {
		period = (time.Duration(r.RefillPeriodS) * time.Second).String()
	}
	return milli(r.RefillMilli) + " per " + period
}
