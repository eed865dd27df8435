// Package terminal records what an operator sees: --help of every program and command, and the
// sessions of a first afternoon, with real processes. The package contains only tests.
package terminal
