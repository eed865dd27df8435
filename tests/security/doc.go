// Package security drives a cluster of programs with client certificates and tokens. The tests check
// the permissions of valid credentials, and the refusal of invalid credentials. The package contains
// only tests, on processes and loopback; internal/secure tests the single rules.
package security
