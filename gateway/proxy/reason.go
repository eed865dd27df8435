package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
)

// Faults of a server.
var (
	errStalled  = errors.New("the server stopped in the middle of its answer")
	errNoStatus = errors.New("the server answered with a status below 100")
	errHungUp   = errors.New("the server has ended several connections without an answer")
)

// reasonOf describes a server's fault with one of a few texts, so that the log can be limited by text.
// status is the answer's status, or 0.
func reasonOf(err error, status int) string {
	dial, _ := errors.AsType[*net.OpError](err)
	timeout, _ := errors.AsType[net.Error](err)
	alert, _ := errors.AsType[tls.AlertError](err)
	dialed := dial != nil && dial.Op == "dial"
	switch dns, _ := errors.AsType[*net.DNSError](err); {
	case err == nil:
		return fmt.Sprintf("answered with status %d", status)
	case dns != nil:
		return "its name cannot be resolved"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused: nothing listens there"
	case dialed && timeout != nil && timeout.Timeout():
		return "no connection in 5 s: the host or a firewall drops it"
	case dialed:
		return "no connection"
	case isCertificate(err):
		return "its certificate is not trusted: see ca_file and host"
	case alert != 0 || strings.Contains(err.Error(), "tls: ") || strings.Contains(err.Error(), "TLS handshake"):
		return "TLS handshake failed"
	case errors.Is(err, errStalled), status != 0 && timeout != nil && timeout.Timeout():
		return "stopped in the middle of its answer: see timeouts.response"
	case timeout != nil && timeout.Timeout():
		return "no answer in time: see timeouts.response"
	case errors.Is(err, errHungUp):
		return errHungUp.Error()
	case strings.Contains(err.Error(), "response headers exceeded"):
		return "the header of its answer is too large"
	case errors.Is(err, errNoStatus), strings.Contains(err.Error(), "malformed HTTP"):
		return "its answer is no HTTP/1.1: is the URL's scheme right?"
	case status != 0:
		return "ended the connection in the middle of its answer"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, net.ErrClosed), strings.Contains(err.Error(), "server closed"):
		return "ended the connection without an answer"
	case strings.Contains(err.Error(), "http2"):
		return "HTTP/2 failed: does the server speak it?"
	case errors.Is(err, context.Canceled):
		return "the gateway ended the request"
	}
	return "request failed"
}

func isCertificate(err error) bool {
	unknown, _ := errors.AsType[x509.UnknownAuthorityError](err)
	host, _ := errors.AsType[x509.HostnameError](err)
	invalid, _ := errors.AsType[x509.CertificateInvalidError](err)
	return unknown.Cert != nil || host.Certificate != nil || invalid.Cert != nil
}
