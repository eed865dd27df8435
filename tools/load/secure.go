//go:build linux

package load

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Names of the certificate files in a broker's folder.
const (
	certFile = "cert.pem"
	keyFile  = "key.pem"
)

// certify creates a self-signed certificate.
func certify(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	write := func(name, kind string, der []byte) error {
		return os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
	}
	return errors.Join(write(certFile, "CERTIFICATE", cert), write(keyFile, "PRIVATE KEY", der))
}

// upgrade turns a new connection to an NSQ broker into a TLS connection. more holds
// additional members of the IDENTIFY object, and may be empty.
func upgrade(c net.Conn, more string) (net.Conn, error) {
	identity := `{"tls_v1":true,"feature_negotiation":true`
	if more != "" {
		identity += "," + more
	}
	if _, err := c.Write(wire.AppendIdentify(wire.AppendMagic(nil), []byte(identity+"}"))); err != nil {
		return nil, err
	}
	if err := expectFrame(c); err != nil {
		return nil, err
	}
	// The benchmark measures the cost of TLS and needs no authentication.
	t := tls.Client(c, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // our own child, on loopback
	if err := t.Handshake(); err != nil {
		return nil, err
	}
	return t, expectFrame(t)
}
