package router

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"math/bits"
	"net/http"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/api/srtm/envoy"
)

// Envoy serves RateLimitService.
type Envoy struct {
	envoy.UnimplementedRateLimitServiceServer
	asker *Asker
}

// NewEnvoy returns the service.
func NewEnvoy(a *Asker) *Envoy { return &Envoy{asker: a} }

// ShouldRateLimit implements the service.
func (e *Envoy) ShouldRateLimit(ctx context.Context, r *envoy.RateLimitRequest) (*envoy.RateLimitResponse, error) {
	questions, err := readDescriptors(r)
	if err != nil {
		return nil, err
	}
	reply := &envoy.RateLimitResponse{OverallCode: envoy.RateLimitResponse_OK}
	var longest client.Decision // the denial with the longest wait
	for i, d := range e.asker.askAll(ctx, questions) {
		s := &envoy.RateLimitResponse_DescriptorStatus{Code: envoy.RateLimitResponse_OK}
		rule := e.asker.rule(ctx, questions[i].key)
		if s.CurrentLimit = perUnit(&rule); s.CurrentLimit != nil {
			s.LimitRemaining = uint32(min(d.Left, int64(s.CurrentLimit.RequestsPerUnit)))
			s.DurationUntilReset = &durationpb.Duration{Seconds: client.Reset(d)} // Envoy ignores fractions of a second
		}
		if !d.Admit {
			s.Code, reply.OverallCode = envoy.RateLimitResponse_OVER_LIMIT, envoy.RateLimitResponse_OVER_LIMIT
			if longest.RetryAfter >= 0 && (d.RetryAfter < 0 || d.RetryAfter > longest.RetryAfter) {
				longest = d
			}
		}
		reply.Statuses = append(reply.Statuses, s)
	}
	if longest.RetryAfter > 0 {
		h := http.Header{}
		client.RetryAfter(h, longest)
		reply.ResponseHeadersToAdd = []*envoy.RateLimitResponse_Header{{Key: "Retry-After", Value: h.Get("Retry-After")}}
	}
	return reply, nil
}

func readDescriptors(r *envoy.RateLimitRequest) ([]question, error) {
	n := len(r.GetDescriptors())
	switch {
	case r.GetDomain() == "":
		return nil, invalid("domain", "is empty")
	case n < 1 || n > maxQuestions:
		return nil, invalid("descriptors", fmt.Sprintf("%d: want 1 to %d", n, maxQuestions))
	}
	questions := make([]question, n)
	for i, d := range r.GetDescriptors() {
		if d.GetIsNegativeHits() {
			return nil, invalid(fmt.Sprintf("descriptors[%d].is_negative_hits", i), "credits are not given back")
		}
		questions[i] = question{key: descriptorKey(r.GetDomain(), d.GetEntries()), cost: max(1, r.GetHitsAddend())}
		if own := d.GetHitsAddend(); own != nil {
			questions[i].cost = uint32(min(own.GetValue(), math.MaxUint32))
		}
	}
	return questions, nil
}

// descriptorKey returns domain|k=v|..., with "%", "|", control characters and "=" in a key escaped as
// %XX, so that a value never produces the key of other entries. If the key is too long, its end is
// replaced by "%~" and a hash of the whole key; no other key contains "%~".
func descriptorKey(domain string, entries []*envoy.RateLimitDescriptor_Entry) string {
	var b strings.Builder
	add := func(text, special string) {
		for i := range len(text) {
			if c := text[i]; c < ' ' || c == 0x7f || strings.IndexByte(special, c) >= 0 {
				fmt.Fprintf(&b, "%%%02X", c)
			} else {
				b.WriteByte(c)
			}
		}
	}
	add(domain, "%|")
	for _, e := range entries {
		b.WriteByte('|')
		add(e.GetKey(), "%|=")
		b.WriteByte('=')
		add(e.GetValue(), "%|")
	}
	key := b.String()
	if len(key) > rule.MaxKey {
		sum := sha256.Sum256([]byte(key))
		key = fmt.Sprintf("%s%%~%x", strings.ToValidUTF8(key[:rule.MaxKey-34], ""), sum[:16])
	}
	return key
}

// perUnit returns a rule's refill per unit of time. It chooses the shortest unit in which the refill is
// at least the capacity, so the remaining credits do not exceed the limit. It returns nil if the rule
// refills less than 1 credit a year.
func perUnit(r *rule.Rule) *envoy.RateLimitResponse_RateLimit {
	var limit *envoy.RateLimitResponse_RateLimit
	share, scale := r.Bucket()
	for _, u := range units {
		high, low := bits.Mul64(uint64(share.Rate), u.seconds)
		if high >= 1000*uint64(scale) {
			break
		}
		n, _ := bits.Div64(high, low, 1000*uint64(scale))
		if n == 0 {
			continue
		}
		limit = &envoy.RateLimitResponse_RateLimit{RequestsPerUnit: uint32(min(n, math.MaxUint32)), Unit: u.unit}
		if n >= uint64(r.Share.Burst) {
			break
		}
	}
	return limit
}

var units = []struct {
	unit    envoy.RateLimitResponse_RateLimit_Unit
	seconds uint64
}{
	{envoy.RateLimitResponse_RateLimit_SECOND, 1}, {envoy.RateLimitResponse_RateLimit_MINUTE, 60}, {envoy.RateLimitResponse_RateLimit_HOUR, 3600},
	{envoy.RateLimitResponse_RateLimit_DAY, 86_400}, {envoy.RateLimitResponse_RateLimit_MONTH, 30 * 86_400}, {envoy.RateLimitResponse_RateLimit_YEAR, 365 * 86_400},
}
