// Package srtmv1 is the control plane's public API: the .proto files in this
// folder and the Go generated from them. Nothing here is written by hand but
// this comment; `make generate` rewrites the rest.
package srtmv1
