// Package admission has the tests of admission with third-party clients, and with programs that are
// killed.
package admission
