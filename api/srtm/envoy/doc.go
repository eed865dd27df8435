// Package envoy is what admission has of Envoy's rate limit service, generated from
// ratelimit.proto. A program that also links Envoy's own Go packages cannot import it:
// both register the same names.
package envoy
