package main

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// Without a mask, `topic update --rate --burst` removed 20 publishers and a channel, and changed an SLO of 10 ms to 1
// ms.
func TestAnUpdateNamesWhatItChanges(t *testing.T) {
	a := &admin{}
	address := serve(t, a)
	file := testkit.File(t, "part.json", `{"name":"sensors","contract":{"rateMilli":"5000","slo":{"latency":"1s"},"over_limit":null},"channels":[]}`)
	for flags, want := range map[string][]string{
		"--rate=5 --burst=7":                                   {"contract.burst", "contract.rate_milli"},
		"--slo-latency=10ms":                                   {"contract.slo.latency"},
		"--slo-quantile=0.9 --group=a:1:1":                     {"contract.slo.quantile", "groups"},
		"--publisher=a:b:1 --channel=x":                        {"channels", "publishers"},
		"--over-limit=delay --policy=conc --share-rule=static": {"contract.over_limit", "placement_policy", "share_rule"},
		"--ttl=1h --max-attempts=5 --dead-letter=d":            {"expiry.dead_letter_topic", "expiry.max_attempts", "expiry.ttl"},
		"--channel-expiry=c:ttl=10m,max-attempts=3":            {"channel_expiry"},
		"--file=" + file:                                       {"channels", "contract.rate_milli", "contract.slo.latency"},
	} {
		if _, _, err := srtm(t, address, append([]string{"topic", "update", "sensors", "--epoch=9"}, strings.Fields(flags)...)...); err != nil {
			t.Fatalf("%s: %v", flags, err)
		}
		got := slices.Sorted(slices.Values(a.updated.GetUpdateMask().GetPaths()))
		if !slices.Equal(got, want) || a.updated.ExpectedEpoch != 9 || a.updated.Spec.Name != "sensors" {
			t.Errorf("%s: sent %v, want %v", flags, a.updated, want)
		}
		// A server that knows no mask refuses the update, unless the flags set every field that could carry the refusal.
		refused := strings.Contains(a.updated.Spec.PlacementPolicy+a.updated.Spec.ShareRule, "update_mask")
		if refused == strings.Contains(flags, "--policy") {
			t.Errorf("%s: sent %v", flags, a.updated.Spec)
		}
	}
	a.updated = nil
	for _, args := range [][]string{
		{"topic", "update", "sensors"}, {"topic", "update", "sensors", "--epoch=3"}, {"topic", "update", "sensors", "--file", file, "--rate=1"},
	} {
		if _, _, err := srtm(t, address, args...); !errors.As(err, new(program.UsageError)) || a.updated != nil {
			t.Errorf("%v: %v, sent %v", args, err, a.updated)
		}
	}
}

func TestAReplacementSaysWhatItRemoves(t *testing.T) {
	contract := func(latency time.Duration) *srtmv1.Contract {
		return &srtmv1.Contract{RateMilli: 5000, Burst: 7, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(latency)}}
	}
	before := &srtmv1.TopicSpec{
		Name: "sensors", Contract: contract(10 * time.Millisecond), PlacementPolicy: "conc", ShareRule: "sqrt", Channels: []string{"a", "b"},
		Groups: []*srtmv1.PublisherGroup{{Key: "g", Count: 5}, {Key: "h", Count: 5}},
	}
	for _, id := range strings.Fields("p1 p2 p3 p4 p5 p6 p7") {
		before.Publishers = append(before.Publishers, &srtmv1.Publisher{Id: id})
	}
	before.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT
	after := &srtmv1.TopicSpec{
		Name: "sensors", Contract: contract(time.Millisecond), PlacementPolicy: "srtm", Channels: []string{"b", "c"},
		Publishers: []*srtmv1.Publisher{{Id: "p1"}}, Groups: []*srtmv1.PublisherGroup{{Key: "g", Count: 4}},
	}
	want := `
  publishers: 6 of 7: p2, p3, p4, p5, p6, ...
  publishers of group "g": 1 of 5
  publishers of group "h": 5 of 5
  channel a (it stays on brokers that have it)
  SLO 99 % within 10ms: becomes 99 % within 1ms
  over limit reject: becomes delay
  policy conc: becomes srtm
`
	testkit.Equal(t, removedFields(before, after), want, "it says")
	testkit.Equal(t, removedFields(before, before), " nothing\n", "it says")

	a := &admin{publishers: []string{"p1", "p2", "p3"}}
	_, said, err := srtm(t, serve(t, a), "topic", "update", "sensors", "--replace", "--rate=5", "--burst=7", "--slo-latency=2ms")
	if err != nil || a.updated.UpdateMask != nil || a.updated.ExpectedEpoch != 3 || a.updated.Spec.GetContract().GetBurst() != 7 || a.updated.Spec.PlacementPolicy != "srtm" {
		t.Errorf("%v, sent %v", err, a.updated)
	}
	for _, line := range []string{"--replace removes from topic sensors:\n", "replaced; removed:\n", "publishers: 3 of 3: p1, p2, p3\n", "SLO 99 % within 1ms: becomes 99 % within 2ms"} {
		if !strings.Contains(said, line) {
			t.Errorf("it says %q", said)
		}
	}
}

// The output of describe is a specification for update, and equals the topic's specification.
func TestDescribeAndUpdateInACluster(t *testing.T) {
	c := realCluster(t, 1000)
	out := func(stdin string, args ...string) string {
		t.Helper()
		var stdout, stderr bytes.Buffer
		if err := run(t.Context(), append(args, "--loaddistributor-address", c.GRPC), strings.NewReader(stdin), &stdout, &stderr); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, stderr.String())
		}
		return stdout.String()
	}
	out("", "topic", "create", "sensors", "--rate=250.5", "--burst=9", "--slo-latency=10ms", "--slo-quantile=0.9", "--over-limit=reject",
		"--policy=maxmin", "--group=north:10:0.1:4", "--group=:2:1", "--publisher=p1:south:0.3", "--channel=a", "--channel=b")
	described := out("", "topic", "describe", "sensors", "--output=json")
	describe := func() string { return out("", "topic", "describe", "sensors", "--output=json") }
	specOf := func(text string) string { return text[:strings.Index(text, `"status"`)] }

	out(described, "topic", "update", "sensors", "--file=-")
	if now := describe(); specOf(now) != specOf(described) {
		t.Errorf("it was\n%s\nand is\n%s", described, now)
	}

	out("", "topic", "update", "sensors", "--rate=300", "--burst=12")
	want := strings.NewReplacer(`"250500"`, `"300000"`, `"burst": "9"`, `"burst": "12"`).Replace(described)
	only := func(text string) string { return text[:strings.Index(text, `"state"`)] }
	if now := describe(); only(now) != only(want) {
		t.Errorf("it is\n%s\nwant\n%s", now, want)
	}

	// The earlier output of describe is out of date.
	var stdout, stderr bytes.Buffer
	err := run(t.Context(), []string{"topic", "update", "sensors", "--file=-", "--loaddistributor-address", c.GRPC}, strings.NewReader(described), &stdout, &stderr)
	testkit.ErrorHas(t, err, "it has changed since it was read")
	out(described, "topic", "update", "sensors", "--file=-", "--epoch=0")
	if now := describe(); only(now) != only(described) {
		t.Errorf("it is\n%s\nwant\n%s", now, described)
	}
}

// realCluster runs the daemons with one broker, "broker1", which gets the flags.
func realCluster(t *testing.T, mcap int64, flags ...string) *local.Cluster {
	t.Helper()
	dir := t.TempDir()
	c, err := local.StartCluster(t.Context(), local.ClusterConfig{Brokers: 1, Mcap: mcap, BrokerFlags: flags, BinDir: localtest.Folder(t, "nsqd", "loaddistributor", "tbadaptor"), LogDir: dir, StartTimeout: time.Minute})
	testkit.Must(t, err)
	t.Cleanup(func() {
		testkit.NoError(t, c.Stop())
	})
	return c
}

func TestAnUpdateSaysWhichBrokersMayUseMore(t *testing.T) {
	const why = "broker b1 may use 50 msg/s and burst 5 until 2026-11-18 11:06:40 UTC (policy strict), at most 1234 messages; " +
		"broker b2 may use 2.5 msg/s and burst 1, with no end: policy available; reach it, restart it, or `srtm share forget b2`"
	a := &admin{}
	address := serve(t, a)
	update := func(lowering int, flags ...string) (out, said string, err error) {
		a.lowering = lowering
		return srtm(t, address, append([]string{"topic", "update", "sensors", "--rate=5"}, flags...)...)
	}
	out, said, err := update(1)
	if err != nil || !strings.Contains(out, "state     lowering ("+why+")") || !strings.Contains(said, "--wait waits for it") {
		t.Errorf("%v\n%s%s", err, out, said)
	}
	out, said, err = update(3, "--wait")
	if err != nil || !strings.Contains(out, "state     active") || strings.Contains(said, "--wait") || a.lowering != 0 {
		t.Errorf("%v, %d\n%s%s", err, a.lowering, out, said)
	}
	out, _, err = update(1000, "--wait=1ms")
	if err == nil || !strings.Contains(err.Error(), "topic sensors is updated, and its contract is not in force on all brokers") || !strings.Contains(out, why) {
		t.Errorf("%v\n%s", err, out)
	}
	if _, _, err = update(0, "--wait=-1s"); !errors.As(err, new(program.UsageError)) {
		t.Error(err)
	}
	a.lowering = 1
	out, _, err = srtm(t, address, "topic", "delete", "sensors")
	if want := "topic sensors is deleted\nits contract may still be in use, and no topic of the name can be created before that ends: " + why + "\n"; err != nil || out != want {
		t.Errorf("%v\n%s, want\n%s", err, out, want)
	}
	a.lowering = 1
	out, _, err = srtm(t, address, "topic", "delete", "sensors", "--output=json")
	if err != nil || !strings.Contains(out, `"broker_id": "b2"`) {
		t.Errorf("%v\n%s", err, out)
	}
}
