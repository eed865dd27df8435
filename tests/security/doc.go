// Package security drives a cluster whose programs trust each other by client
// certificates and tokens: what the right ones open, and what the wrong ones do
// not. It is all tests, on processes and loopback; the rules one by one are
// tested in internal/secure.
package security
