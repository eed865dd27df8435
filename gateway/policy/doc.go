// Package policy has what an operator tells the gateway: the classes and who is of
// which, the servers, what requests cost, and whom to trust. Parse (parse.go) reads it
// from TOML, all of it or, with every fault and its line, nothing. It is pure: who
// reads the file, and when again, is its caller's business.
package policy
