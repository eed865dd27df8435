// Package router serves admission to programs that do not use its datagrams: HTTP (http.go), Envoy's
// rate limit service (envoy.go) and, for operators, the gRPC service AdmissionAdmin (admin.go). The
// package decides nothing: it asks the servers with admission/client (asker.go).
package router
