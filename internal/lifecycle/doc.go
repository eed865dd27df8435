// Package lifecycle starts the parts of a daemon in order and stops them in
// the reverse order, each waited for before the next. It is the one place
// where a shutdown order is written. It knows nothing of what the parts do.
// See the main.go of a daemon for its use.
package lifecycle
