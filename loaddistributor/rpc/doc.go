// Package rpc is the loaddistributor's gRPC service. It checks requests, reports all
// faults at once, converts, calls loaddistributor/controller, and maps errors to codes.
// It makes no decisions and keeps only the open streams. errors.go has the table of
// codes, check.go the requirements of a topic.
package rpc
