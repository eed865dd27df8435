// Package daemon is what the main packages of daemons have in common: flags and
// the configuration file, the log, exit codes, and for those of the control plane
// the gRPC and HTTP servers with TLS, tokens, metrics, profiles and health. It
// knows nothing of what a daemon does. See the main.go of tbadaptor for its use.
package daemon
