package secure

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

// A certificate is checked at the handshake and during the lifetime of its connection.
// The connection ends when the certificate expires, or when a loaded list revokes the
// certificate. Lists are reloaded like certificates: at handshakes, and at ReadAgain.

// maxTimer is the maximum duration of a timer, because a clock that was set may bring the
// end nearer.
const maxTimer = time.Hour

// lifetimes are the connections of clients with verified certificates.
type lifetimes struct {
	// Set by loadTLS and Revoke.
	log  *atomic.Pointer[slog.Logger] // nil inside: not logged
	crls *fresh[*revocations]         // nil: no certificate is revoked

	// swept is the list of the last comparison with the connections. Written by the
	// goroutine that compares.
	swept atomic.Pointer[revocations]

	mu struct {
		sync.Mutex
		open map[*lifetime]struct{}
	}
}

// lifetime is one connection.
type lifetime struct {
	owner  *lifetimes
	chains [][]*x509.Certificate
	remote string
	end    func()

	timer *time.Timer // guarded by of.mu; nil: over
}

// verify refuses a connection with a revoked certificate.
func (l *lifetimes) verify(state tls.ConnectionState) error {
	if l.crls == nil {
		return nil
	}
	lists := l.crls.get()
	l.sweep(lists)
	if revoked := lists.revoked(state.VerifiedChains); revoked != nil {
		return fmt.Errorf("the client's certificate %q, serial number %v, is revoked", revoked.Subject, revoked.SerialNumber)
	}
	return nil
}

// watch calls end when the client's certificate becomes invalid, unless release is called
// before. A client without a verified certificate is not held.
func (l *lifetimes) watch(state tls.ConnectionState, remote string, end func()) (release func()) {
	if len(state.VerifiedChains) == 0 {
		return func() {}
	}
	h := &lifetime{owner: l, chains: state.VerifiedChains, remote: remote, end: end}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.open == nil {
		l.mu.open = map[*lifetime]struct{}{}
	}
	l.mu.open[h] = struct{}{}
	h.timer = time.AfterFunc(h.left(), h.endIfExpired)
	return func() { h.markEnded() }
}

func (h *lifetime) leaf() *x509.Certificate { return h.chains[0][0] }

func (h *lifetime) left() time.Duration {
	return min(maxTimer, time.Until(h.leaf().NotAfter.Add(time.Second))) // NotAfter is the last valid second
}

// endIfExpired ends the connection if its certificate has expired.
func (h *lifetime) endIfExpired() {
	if left := h.left(); left > 0 {
		h.owner.mu.Lock()
		defer h.owner.mu.Unlock()
		if h.timer != nil {
			h.timer.Reset(left)
		}
		return
	}
	h.finish("expired")
}

// finish ends the connection, once.
func (h *lifetime) finish(reason string) {
	if !h.markEnded() {
		return
	}
	if log := h.owner.log.Load(); log != nil {
		log.Warn("the client's certificate is no longer valid; the connection ends", obs.KeyRemote, h.remote,
			"certificate", h.leaf().Subject.String(), "serial", h.leaf().SerialNumber.String(), "reason", reason)
	}
	h.end()
}

// markEnded marks the connection as over and reports whether the mark is new.
func (h *lifetime) markEnded() bool {
	h.owner.mu.Lock()
	defer h.owner.mu.Unlock()
	if h.timer == nil {
		return false
	}
	h.timer.Stop()
	h.timer = nil
	delete(h.owner.mu.open, h)
	return true
}

// sweep ends the connections with certificates that lists revoke.
func (l *lifetimes) sweep(lists *revocations) {
	if l.swept.Swap(lists) == lists {
		return
	}
	l.mu.Lock()
	var revoked []*lifetime
	for h := range l.mu.open {
		if lists.revoked(h.chains) != nil {
			revoked = append(revoked, h)
		}
	}
	l.mu.Unlock()
	for _, h := range revoked {
		h.finish("revoked")
	}
}

// readAgain reloads the lists.
func (l *lifetimes) readAgain() {
	if l.crls != nil {
		l.sweep(l.crls.get())
	}
}

// revocations are the lists of one file. Immutable.
type revocations struct {
	lists []revocationList
}

type revocationList struct {
	*x509.RevocationList
	serials map[string]bool // serial numbers, in decimal
}

// readRevocations reads a file of lists in PEM. An authority of the other file must have
// signed each list. It returns all faults.
func readRevocations(path, authorities string) (*revocations, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	issuers, err := readCertificates(authorities)
	if err != nil {
		return nil, err
	}
	all := &revocations{}
	var errs []error
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "X509 CRL" {
			errs = append(errs, fmt.Errorf("%s: PEM block %q, want X509 CRL", path, block.Type))
			continue
		}
		list, err := x509.ParseRevocationList(block.Bytes)
		if err == nil {
			err = errors.New("none of the authorities has signed it")
			for _, issuer := range issuers {
				if list.CheckSignatureFrom(issuer) == nil {
					err = nil
				}
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: list %d: %w", path, len(all.lists)+1, err))
			continue
		}
		listed := revocationList{list, map[string]bool{}}
		for _, entry := range list.RevokedCertificateEntries {
			listed.serials[entry.SerialNumber.String()] = true
		}
		all.lists = append(all.lists, listed)
	}
	if len(all.lists) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("%s: no list of revoked certificates (PEM, X509 CRL)", path))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return all, nil
}

func readCertificates(path string) (all []*x509.Certificate, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, certificate)
	}
	return all, nil
}

// revoked returns a revoked certificate if each of the chains has one; nil: the chains
// are valid.
func (r *revocations) revoked(chains [][]*x509.Certificate) (first *x509.Certificate) {
	for _, chain := range chains {
		revoked := r.revokedIn(chain)
		if revoked == nil {
			return nil
		}
		first = revoked
	}
	return first
}

func (r *revocations) revokedIn(chain []*x509.Certificate) *x509.Certificate {
	for i, c := range chain[:len(chain)-1] {
		for _, list := range r.lists {
			if list.serials[c.SerialNumber.String()] && string(list.RawIssuer) == string(c.RawIssuer) && list.CheckSignatureFrom(chain[i+1]) == nil {
				return c
			}
		}
	}
	return nil
}
