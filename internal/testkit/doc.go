// Package testkit has the common helpers of all tests: a leak check, seeds that are
// printed when a test fails, golden files, loopback listeners, and access to data beside
// the repository. Only _test files import it. It does not depend on the system under
// test; a helper that does belongs to the package's own tests. CONTRIBUTING.md explains
// its use.
package testkit
