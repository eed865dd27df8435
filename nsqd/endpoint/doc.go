// Package endpoint listens where a flag says: at the host:port of TCP or the
// path of a Unix socket. It knows no protocol.
package endpoint
