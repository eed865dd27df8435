// Package admission has the tests of admission by clients that are not ours.
package admission
