// Package router is admission for programs that do not speak its datagrams: HTTP
// (http.go) and, for operators, the gRPC service AdmissionAdmin (admin.go). It decides
// nothing: it asks by admission/client.
package router
