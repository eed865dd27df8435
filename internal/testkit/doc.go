// Package testkit is what tests of every package share: a leak check, seeds
// that are printed when a test fails, golden files, loopback listeners, and
// the way to data that lives beside the repository. Only _test files import
// it. It knows nothing of the system under test; a helper that does belongs
// to that package's own tests. CONTRIBUTING.md says how it is used.
package testkit
