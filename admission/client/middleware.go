package client

import (
	"net/http"
	"strconv"
	"time"
)

// Limit sends a question about each request before next gets the request. Limit answers a denied request with 429
// Too Many Requests and Retry-After. key returns the key to charge; a request with key "" passes.
func (c *Client) Limit(key func(*http.Request) string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if k := key(r); k != "" {
			if d := c.Ask(r.Context(), k, 1); !d.Admit {
				RetryAfter(w.Header(), d)
				http.Error(w, "too many requests", http.StatusTooManyRequests)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

// RateLimit sets the RateLimit header (draft-ietf-httpapi-ratelimit-headers-10) to the remaining
// credits and the time until more. For a denial RateLimit also sets Retry-After.
func RateLimit(h http.Header, d Decision) {
	limit := `"default";r=` + strconv.FormatInt(d.Left, 10)
	if reset := Reset(d); reset > 0 {
		limit += ";t=" + strconv.FormatInt(reset, 10)
	}
	if !d.Admit {
		RetryAfter(h, d)
	}
	h.Set("RateLimit", limit)
}

// Reset returns the time until the key has the cost of a denied question, or else all its credits. The
// unit is whole seconds, rounded up, at least 1. For a key without a rule, which never has any credits,
// Reset returns -1.
func Reset(d Decision) (seconds int64) {
	switch {
	case d.RetryAfter > 0:
		return wholeSeconds(d.RetryAfter)
	case !d.Admit && d.RetryAfter < 0 && d.Full <= 0 && d.Left <= 0:
		return -1
	}
	return wholeSeconds(d.Full)
}

// RetryAfter sets Retry-After (RFC 9110, section 10.2.3) for a denial, in whole seconds, at least 1. If
// the credits never come, RetryAfter sets nothing.
func RetryAfter(h http.Header, d Decision) {
	if d.RetryAfter >= 0 {
		h.Set("Retry-After", strconv.FormatInt(wholeSeconds(d.RetryAfter), 10))
	}
}

func wholeSeconds(d time.Duration) int64 {
	return max(1, int64((d-1)/time.Second)+1)
}
