// Package policy has the operator's configuration of the gateway: the classes and their rules, the
// servers, the costs of requests, and the trusted headers and peers. Parse (parse.go) reads a policy
// from TOML, or returns all faults with their lines. The package is pure: the caller reads the file,
// and decides when to read the file again.
package policy
