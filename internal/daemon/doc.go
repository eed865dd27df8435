// Package daemon is the common part of daemons' main packages: flags and the
// configuration file, the log, exit codes. For control plane daemons it also has the gRPC
// and HTTP servers with TLS, tokens, metrics, profiles and health. It knows nothing of a
// daemon's purpose. See the main.go of tbadaptor for an example.
package daemon
