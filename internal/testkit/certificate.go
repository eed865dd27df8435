package testkit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// Authority signs certificates for a test. Make it with NewAuthority; the zero value is
// invalid.
type Authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey

	// File is the authority's own certificate, as PEM.
	File string
	// Pool holds the authority's certificate.
	Pool *x509.CertPool
}

// NewAuthority makes a certificate authority for the lifetime of t.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t, dir: t.TempDir(), Pool: x509.NewCertPool()}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "an authority of a test"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, key := a.sign(template)
	var err error
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatalf("certificate authority: %v", err)
	}
	a.key = key
	a.Pool.AddCert(a.cert)
	a.File = a.write("authority.pem", "CERTIFICATE", der)
	return a
}

// Certificate is a signed certificate, as files and in memory.
type Certificate struct {
	CertFile, KeyFile string
	TLS               tls.Certificate
}

// Certificate makes a certificate for a client, or for a server on loopback and the
// additional addresses. name is its common name and a DNS name.
func (a *Authority) Certificate(name string, more ...net.IP) Certificate {
	a.t.Helper()
	return a.certificate(name, time.Now().Add(24*time.Hour), append(more, net.IPv4(127, 0, 0, 1), net.IPv6loopback)...)
}

// Expired makes a certificate that expired a minute ago.
func (a *Authority) Expired(name string) Certificate {
	a.t.Helper()
	return a.certificate(name, time.Now().Add(-time.Minute), net.IPv4(127, 0, 0, 1), net.IPv6loopback)
}

// Until makes a certificate that is valid until the given time.
func (a *Authority) Until(name string, until time.Time) Certificate {
	a.t.Helper()
	return a.certificate(name, until, net.IPv4(127, 0, 0, 1), net.IPv6loopback)
}

// Revoke returns a PEM list of revoked certificates.
func (a *Authority) Revoke(certificates ...Certificate) []byte {
	a.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(time.Now().UnixNano()), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
	for _, c := range certificates {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.TLS.Leaf.SerialNumber, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)
	if err != nil {
		a.t.Fatalf("list of revoked certificates: %v", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
}

// Elsewhere makes a certificate for a server that is not on loopback.
func (a *Authority) Elsewhere(name string) Certificate {
	a.t.Helper()
	return a.certificate(name, time.Now().Add(24*time.Hour), net.IPv4(192, 0, 2, 1))
}

func (a *Authority) certificate(name string, until time.Time, addresses ...net.IP) Certificate {
	a.t.Helper()
	names := []string{name}
	if slices.ContainsFunc(addresses, net.IP.IsLoopback) {
		names = append(names, "localhost")
	}
	der, key := a.sign(&x509.Certificate{
		NotAfter:    until,
		Subject:     pkix.Name{CommonName: name},
		DNSNames:    names,
		IPAddresses: addresses,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatalf("private key: %v", err)
	}
	c := Certificate{
		CertFile: a.write(name+".pem", "CERTIFICATE", der),
		KeyFile:  a.write(name+"-key.pem", "PRIVATE KEY", pkcs8),
	}
	if c.TLS, err = tls.LoadX509KeyPair(c.CertFile, c.KeyFile); err != nil {
		a.t.Fatalf("certificate: %v", err)
	}
	return c
}

// sign signs template with the authority's key, or with its own key if there is no
// authority yet.
func (a *Authority) sign(template *x509.Certificate) (der []byte, key *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatalf("private key: %v", err)
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		a.t.Fatalf("serial number: %v", err)
	}
	template.NotBefore = time.Now().Add(-time.Hour)
	if template.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(24 * time.Hour)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	if der, err = x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer); err != nil {
		a.t.Fatalf("sign certificate: %v", err)
	}
	return der, key
}

func (a *Authority) write(name, kind string, der []byte) string {
	a.t.Helper()
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatalf("write certificate: %v", err)
	}
	return path
}
