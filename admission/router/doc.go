// Package router is admission for programs that do not speak its datagrams: HTTP
// (http.go), Envoy's rate limit service (envoy.go) and, for operators, the gRPC service
// AdmissionAdmin (admin.go). It decides nothing: it asks by admission/client (asker.go).
package router
