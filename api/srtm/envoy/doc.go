// Package envoy is admission's part of Envoy's rate limit service, generated from
// ratelimit.proto. A program that links Envoy's own Go packages cannot import package
// envoy: both register the same names.
package envoy
