// Package daemon builds and runs the programs that the tests below tests/
// speak to: as processes, on free loopback ports, ended in good order. It must
// not know what is tested. Read tests/conformance and tests/clients next, which
// use it.
package daemon
