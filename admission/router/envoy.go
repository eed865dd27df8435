package router

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"net/http"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/api/srtm/envoy"
	"github.com/srtm-io/srtm/tokenbucket"
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
	var longest client.Decision // of the denials
	for i, d := range e.asker.askAll(ctx, questions) {
		s := &envoy.RateLimitResponse_DescriptorStatus{
			Code: envoy.RateLimitResponse_OK, LimitRemaining: uint32(min(d.Left, math.MaxUint32)),
			CurrentLimit: perUnit(e.asker.rule(ctx, questions[i].key).Share.Rate),
		}
		if !d.Admit {
			s.Code, reply.OverallCode = envoy.RateLimitResponse_OVER_LIMIT, envoy.RateLimitResponse_OVER_LIMIT
			if d.RetryAfter > 0 {
				s.DurationUntilReset = durationpb.New(d.RetryAfter)
			}
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
		questions[i] = question{descriptorKey(r.GetDomain(), d.GetEntries()), max(1, r.GetHitsAddend())}
		if own := d.GetHitsAddend(); own != nil {
			questions[i].cost = uint32(min(own.GetValue(), math.MaxUint32))
		}
	}
	return questions, nil
}

// descriptorKey is domain|k=v|..., with "%", "|", control characters and the "=" of a k
// as %XX: no value that a caller chooses makes the key of other entries. Of one that is
// too long the end gives way to a hash of all, after a "%" as no other key has one.
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

// perUnit is a rate in the shortest unit in which it is 1 or more.
func perUnit(rate tokenbucket.Rate) *envoy.RateLimitResponse_RateLimit {
	unit := envoy.RateLimitResponse_RateLimit_SECOND
	for _, seconds := range []int64{1, 60, 3600, 86_400} {
		if n := int64(rate) * seconds / 1000; n > 0 {
			return &envoy.RateLimitResponse_RateLimit{RequestsPerUnit: uint32(min(n, math.MaxUint32)), Unit: unit}
		}
		unit++
	}
	return nil
}
