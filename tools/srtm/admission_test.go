package main

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// rules stores rules as an admission service does.
type rules struct {
	srtmv1.UnimplementedAdmissionAdminServer
	all   []*srtmv1.AdmissionRule
	calls int
	moved []*srtmv1.AdmissionPartitions
	reply *srtmv1.AskResponse
	asked *srtmv1.AskRequest
}

func (r *rules) SetRules(_ context.Context, q *srtmv1.SetRulesRequest) (*srtmv1.SetRulesResponse, error) {
	r.calls++
	r.all = append(r.all, q.GetRules()...)
	return &srtmv1.SetRulesResponse{}, nil
}

func (r *rules) GetRule(_ context.Context, q *srtmv1.GetRuleRequest) (*srtmv1.AdmissionRule, error) {
	for _, got := range r.all {
		if got.GetKey() == q.GetKey() {
			return got, nil
		}
	}
	return nil, status.Error(codes.NotFound, "no such rule")
}

func (r *rules) ListRules(_ context.Context, q *srtmv1.ListRulesRequest) (*srtmv1.ListRulesResponse, error) {
	if q.GetPageToken() == "" && len(r.all) > 1 {
		return &srtmv1.ListRulesResponse{Rules: r.all[:1], NextPageToken: "rest"}, nil
	}
	return &srtmv1.ListRulesResponse{Rules: r.all[1:]}, nil
}

func (r *rules) DeleteRule(_ context.Context, q *srtmv1.DeleteRuleRequest) (*srtmv1.DeleteRuleResponse, error) {
	r.all = r.all[1:]
	return &srtmv1.DeleteRuleResponse{}, nil
}

func (r *rules) Ask(_ context.Context, q *srtmv1.AskRequest) (*srtmv1.AskResponse, error) {
	r.asked = q
	return r.reply, nil
}

func (r *rules) MovePartitions(_ context.Context, q *srtmv1.MovePartitionsRequest) (*srtmv1.MovePartitionsResponse, error) {
	r.moved = append(r.moved, &srtmv1.AdmissionPartitions{First: q.GetFirst(), Last: q.GetLast(), Server: "here", Target: q.GetServer()})
	return &srtmv1.MovePartitionsResponse{}, nil
}

func (r *rules) ListPartitions(context.Context, *srtmv1.ListPartitionsRequest) (*srtmv1.ListPartitionsResponse, error) {
	return &srtmv1.ListPartitionsResponse{Partitions: r.moved}, nil
}

func TestAdmissionCommands(t *testing.T) {
	service := &rules{}
	server := grpc.NewServer()
	srtmv1.RegisterAdmissionAdminServer(server, service)
	address := testkit.Serve(t, server)
	do := func(want string, args ...string) {
		t.Helper()
		var out bytes.Buffer
		err := run(t.Context(), append(args, "--admission-address", address), strings.NewReader(out.String()), &out, &out)
		got := out.String()
		if err != nil {
			got += "error: " + err.Error()
		}
		if strings.TrimSpace(got) != want {
			t.Errorf("srtm %s:\n%s\nwant\n%s", strings.Join(args, " "), got, want)
		}
	}
	set := []string{"admission", "rule", "set"}
	do("", append(set, "user/1", "--refill", "0.5", "--capacity", "10", "--strict")...)
	do("", append(set, "--default", "ip/", "--refill", "100", "--capacity", "20", "--shadow")...)
	do("", append(set, "denied")...)
	do("", append(set, "free/1", "--refill", "100/day", "--capacity", "100")...)
	do("error: srtm admission rule set: want one key, got 0 arguments; for example:\n  srtm admission rule set user/17 --refill 100 --capacity 10", set...)
	do(`error: --refill: refill "1/month": want a period of 1s to 366 days after the /: second, minute, hour, day, week or a duration as 36h`, append(set, "k", "--refill", "1/month")...)
	const list = `KEY     REFILL   CAPACITY  OPTIONS
user/1  0.5      10        strict
ip/*    100      20        shadow
denied  0        0         
free/1  100/day  100`
	do(list, "admission", "rule", "list")
	do("KEY     REFILL  CAPACITY  OPTIONS\ndenied  0       0", "admission", "rule", "get", "denied")
	do("error: no such rule", "admission", "rule", "get", "other")
	do("", append(set, "tenant/a", "--default", "tenant/", "--refill", "1", "--capacity", "2")...)
	do("KEY       REFILL  CAPACITY  OPTIONS\ntenant/*  1       2", "admission", "rule", "get", "tenant/*")
	service.all = slices.DeleteFunc(service.all, func(r *srtmv1.AdmissionRule) bool { return strings.HasPrefix(r.GetKey(), "tenant/") })

	// import reads the output of list.
	var exported bytes.Buffer
	testkit.Must(t, run(t.Context(), []string{"admission", "rule", "list", "--output", "json", "--admission-address", address}, nil, &exported, &exported))
	service.all = nil
	var out bytes.Buffer
	if err := run(t.Context(), []string{"admission", "rule", "import", "-", "--admission-address", address}, &exported, &out, &out); err != nil || out.String() != "4 rules set\n" {
		t.Errorf("%s, %v", &out, err)
	}
	do(list, "admission", "rule", "list")
	do("", "admission", "rule", "delete", "user/1")
	service.calls = 0
	many := "[" + strings.Repeat(`{"key":"k"},`, 2500) + `{"key":"k"}]`
	if err := run(t.Context(), []string{"admission", "rule", "import", "-", "--admission-address", address}, strings.NewReader(many), &out, &out); err != nil || service.calls != 3 {
		t.Errorf("2501 rules in %d calls, %v", service.calls, err)
	}

	do("", "admission", "partition", "move", "7", "there:1")
	do("", "admission", "partition", "move", "8-4095", "there:1")
	do(`error: partitions "8-4096": want 0 to 4095, or two such with a - between`, "admission", "partition", "move", "8-4096", "there:1")
	do("PARTITIONS  SERVER  MOVES TO\n7-7         here    there:1\n8-4095      here    there:1", "admission", "partition", "list")

	for want, reply := range map[string]*srtmv1.AskResponse{
		"admitted, 7 credits left":                      {Admit: true, Left: 7},
		"admitted, though the rule would deny (shadow)": {Admit: true, Shadow: true},
		"denied, 0 credits left, retry after 20 ms":     {RetryAfterMs: 20},
		"denied, 0 credits left; at this cost it never is admitted (by default: the key has no rule of its own)": {RetryAfterMs: -1, ByDefault: true},
		"denied by --default-reply: no server answered":                                                          {Unanswered: true},
		"admitted by --default-reply: no server answered":                                                        {Unanswered: true, Admit: true},
	} {
		service.reply = reply
		do(want, "admission", "ask", "k", "--cost", "3", "--peek")
	}
	if service.asked.GetCost() != 3 || !service.asked.GetPeek() || service.asked.GetKey() != "k" {
		t.Errorf("asked %v", service.asked)
	}
}
