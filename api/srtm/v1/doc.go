// Package srtmv1 is the control plane's public API: the .proto files in this
// folder and the Go code generated from the .proto files. `make generate` rewrites
// all Go files except this one.
package srtmv1
