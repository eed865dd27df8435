package router

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/api/srtm/envoy"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// The router refuses every request that Envoy might send, or questions keys that can have rules.
func FuzzDescriptors(f *testing.F) {
	for _, r := range []*envoy.RateLimitRequest{
		{}, {Domain: "d", Descriptors: []*envoy.RateLimitDescriptor{{Entries: []*envoy.RateLimitDescriptor_Entry{{Key: "k\x00=|", Value: "%é\x7f"}, {Value: string(make([]byte, 300))}}}}},
	} {
		seed := testkit.Result(proto.Marshal(r)).Must(f)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var r envoy.RateLimitRequest
		if proto.Unmarshal(data, &r) != nil {
			return
		}
		questions, err := readDescriptors(&r)
		if (err == nil) != (len(questions) == len(r.GetDescriptors()) && len(questions) > 0) {
			t.Fatalf("%d questions of %d descriptors, %v", len(questions), len(r.GetDescriptors()), err)
		}
		for _, q := range questions {
			if err := rule.ValidKey(q.key); err != nil {
				t.Errorf("%q: %v", q.key, err)
			}
		}
	})
}

// Different descriptors have different keys. The test tries all descriptors of up to two entries, with
// words that imitate the end of another word, and with long words.
func TestDescriptorsDoNotMeet(t *testing.T) {
	words := []string{"", "|", "=", "%", "|=", "%7C", "%3D", strings.Repeat("x", 300), strings.Repeat("x", 300) + "|"}
	var all []*envoy.RateLimitDescriptor_Entry
	for _, k := range words {
		for _, v := range words {
			all = append(all, &envoy.RateLimitDescriptor_Entry{Key: k, Value: v})
		}
	}
	seen := map[string]string{}
	check := func(domain string, entries ...*envoy.RateLimitDescriptor_Entry) {
		what := fmt.Sprintf("%q", domain)
		for _, e := range entries {
			what += fmt.Sprintf(" %q=%q", e.GetKey(), e.GetValue())
		}
		key := descriptorKey(domain, entries)
		if other, twice := seen[key]; twice {
			t.Fatalf("%s and %s are both %q", what, other, key)
		}
		seen[key] = what
	}
	// A descriptor whose value is the end of a long descriptor's key.
	long := []*envoy.RateLimitDescriptor_Entry{{Key: "k", Value: strings.Repeat("x", 300)}}
	check("d", &envoy.RateLimitDescriptor_Entry{Key: "k", Value: strings.TrimPrefix(descriptorKey("d", long), "d|k=")})
	check("d", long...)
	for _, domain := range words {
		check(domain)
		for _, one := range all {
			check(domain, one)
			for _, other := range all {
				check(domain, one, other)
			}
		}
	}
}

// A limit is the rule's refill, and at least the rule's capacity if any unit is long enough.
func TestLimitsHoldTheCapacity(t *testing.T) {
	for _, test := range []struct {
		milli, period, capacity int64
		want                    string
	}{
		{5000, 1, 5, "5 SECOND"}, {2000, 1, 10, "120 MINUTE"}, {100_000, 86_400, 100, "100 DAY"}, {1000, 3600, 1, "1 HOUR"}, {1000, 604_800, 1, "4 MONTH"},
		{1, 1, 1e9, "31536 YEAR"}, {1e12, 1, 1e9, "1000000000 SECOND"}, {1, 31_536_000, 1, "<nil>"}, {0, 1, 0, "<nil>"},
	} {
		r := rule.Rule{Share: tokenbucket.Share{Rate: tokenbucket.Rate(test.milli), Burst: test.capacity}, Period: test.period}
		got := "<nil>"
		if limit := perUnit(&r); limit != nil {
			got = fmt.Sprint(limit.GetRequestsPerUnit(), " ", limit.GetUnit())
		}
		testkit.Equal(t, got, test.want, "%+v", test)
	}
}
