// Package rpc is the loaddistributor's gRPC side: it checks requests, all
// faults at once, converts, calls loaddistributor/controller, and gives errors
// their codes. It decides nothing and keeps nothing but the streams that are
// open. errors.go has the table of codes, check.go what a topic must be like.
package rpc
