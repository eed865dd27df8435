// Package admission has the tests of admission by clients that are not ours, and by programs
// that are killed.
package admission
