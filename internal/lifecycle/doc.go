// Package lifecycle starts the parts of a daemon in order and stops them in reverse
// order, each before the next. It is the only place with a shutdown order. See the
// main.go of a daemon for an example.
package lifecycle
