// Package terminal records what an operator sees: --help of every program and command, and
// the sessions of a first afternoon, made by real processes. It is all tests.
package terminal
