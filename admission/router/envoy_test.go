package router

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/api/srtm/envoy"
)

// Whatever Envoy was made to send is refused, or asks about keys that can have rules.
func FuzzDescriptors(f *testing.F) {
	for _, r := range []*envoy.RateLimitRequest{
		{}, {Domain: "d", Descriptors: []*envoy.RateLimitDescriptor{{Entries: []*envoy.RateLimitDescriptor_Entry{{Key: "k\x00=|", Value: "%é\x7f"}, {Value: string(make([]byte, 300))}}}}},
	} {
		seed, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
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

// Different descriptors have different keys.
func TestDescriptorsDoNotMeet(t *testing.T) {
	word := rapid.StringMatching(`[a%|=~]{0,3}|x{240}[a%|=]{8}`)
	entries := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) *envoy.RateLimitDescriptor_Entry {
		return &envoy.RateLimitDescriptor_Entry{Key: word.Draw(t, "key"), Value: word.Draw(t, "value")}
	}), 0, 3)
	rapid.Check(t, func(t *rapid.T) {
		one, other := entries.Draw(t, "one"), entries.Draw(t, "other")
		domain, second := word.Draw(t, "domain"), word.Draw(t, "second domain")
		same := domain == second && slices.EqualFunc(one, other, func(a, b *envoy.RateLimitDescriptor_Entry) bool {
			return a.GetKey() == b.GetKey() && a.GetValue() == b.GetValue()
		})
		if a, b := descriptorKey(domain, one), descriptorKey(second, other); (a == b) != same {
			t.Fatalf("keys %q and %q", a, b)
		}
	})
}
