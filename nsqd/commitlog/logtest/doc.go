// Package logtest has a Log in memory, and the tests that each Log must pass. No
// binary contains it.
package logtest
