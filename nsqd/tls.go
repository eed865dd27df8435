package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/secure"
)

// encryption has the TLS of connections from clients and to other brokers.
type encryption struct {
	cert, key, rootCAs, clients, crl string
	required                         tlsRequired
	minVersion                       tlsVersion

	// Set by load.
	roots  *x509.CertPool    // nil: the system's authorities
	server *secure.ServerTLS // nil: no --tls-cert
	config *tls.Config       // of server; nil: no TLS
}

// Values of --tls-client-auth-policy.
const (
	authRequire = "require"
	authVerify  = "require-verify"
)

// Flags defines the flags of TLS.
func (t *encryption) Flags(fs *flag.FlagSet) {
	t.minVersion = tls10
	fs.StringVar(&t.cert, "tls-cert", "", "PEM `file` with the certificate for TLS; goes with --tls-key")
	fs.StringVar(&t.key, "tls-key", "", "PEM `file` with its private key")
	fs.StringVar(&t.rootCAs, "tls-root-ca-file", "", "PEM `file` with the authorities that clients' certificates are verified by (default the system's)")
	fs.StringVar(&t.crl, "tls-crl", "", "PEM `file` of lists of client certificates that are revoked, signed by the authorities of --tls-root-ca-file; read again at SIGHUP, which ends their connections")
	fs.Var(&t.required, "tls-required", "`whether` clients without TLS are refused: true, false, or tcp-https (they may still use plain HTTP)")
	fs.Var(&t.minVersion, "tls-min-version", "minimum `version` of TLS: tls1.0, tls1.1, tls1.2, tls1.3 (ssl3.0 counts as tls1.0)")
	fs.StringVar(&t.clients, "tls-client-auth-policy", "", "`policy` on clients' certificates: require (any), require-verify; either one implies --tls-required")
}

// load reads the root authorities and the certificate for connections.
func (t *encryption) load() error {
	var errs faults.List
	absent := t.cert == "" && t.key == ""
	pair := t.cert != "" && t.key != ""
	errs.If(!absent && !pair, "--tls-cert and --tls-key go together")
	var err error
	t.roots, err = t.readRoots()
	errs.Add(err)
	errs.If(absent && t.required != tlsOptional, "--tls-required needs --tls-cert and --tls-key")
	switch t.clients {
	case "":
	case authRequire, authVerify:
		errs.If(absent, "--tls-client-auth-policy needs --tls-cert and --tls-key")
		if t.required == tlsOptional { // the policy has no effect on clients without TLS
			t.required = tlsForAll
		}
	default:
		errs.Add(faults.OneOf("tls-client-auth-policy", t.clients, authRequire, authVerify))
	}
	errs.If(t.crl != "" && (t.clients != authVerify || t.rootCAs == ""), "--tls-crl needs --tls-client-auth-policy=require-verify and --tls-root-ca-file")
	if pair && len(errs) > 0 {
		_, err = t.readPair()
		errs.Add(err)
	} else if pair {
		if t.server, err = secure.LoadTLS(t.readServerTLS, t.cert, t.key, t.rootCAs); err == nil {
			t.config = t.server.Config()
			if t.crl != "" {
				errs.Add(t.server.Revoke("--tls-crl", t.crl, t.rootCAs))
			}
		}
		errs.Add(err)
	}
	return errs.Err()
}

// readPair reads the certificate and its key.
func (t *encryption) readPair() (cert tls.Certificate, err error) {
	if cert, err = tls.LoadX509KeyPair(t.cert, t.key); err != nil {
		err = fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	return cert, err
}

func (t *encryption) readServerTLS() (*tls.Config, error) {
	roots, err := t.readRoots()
	if err != nil {
		return nil, err
	}
	cert, err := t.readPair()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, MinVersion: uint16(t.minVersion), ClientCAs: roots,
		ClientAuth: map[string]tls.ClientAuthType{authRequire: tls.RequireAnyClientCert, authVerify: tls.RequireAndVerifyClientCert}[t.clients],
	}, nil
}

// readRoots reads the authorities for clients and auth servers; nil: the system's.
func (t *encryption) readRoots() (*x509.CertPool, error) {
	if t.rootCAs == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(t.rootCAs)
	if err != nil {
		return nil, fmt.Errorf("--tls-root-ca-file: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--tls-root-ca-file: no certificate in %s", t.rootCAs)
	}
	return roots, nil
}

// brokers returns the configuration for connections to other brokers; nil: no TLS. The brokers of a
// cluster are assumed to be configured alike. If this broker requires TLS or has its own root
// authorities, the other brokers offer TLS. A broker presents its server certificate as a client too.
func (t *encryption) brokers() *tls.Config {
	if t.config == nil || t.required == tlsOptional && t.roots == nil {
		return nil
	}
	return &tls.Config{RootCAs: t.roots, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		present, err := t.config.GetConfigForClient(nil) // the file may have changed
		if err != nil {
			return nil, err
		}
		return &present.Certificates[0], nil
	}}
}

// forced reports whether nsqd refuses HTTP without TLS.
func (t *encryption) forced() bool { return t.config != nil && t.required == tlsForAll }

// tlsRequired says which clients must use TLS. The flag needs no value.
type tlsRequired int

const (
	tlsOptional tlsRequired = iota
	tlsForTCP               // not for HTTP clients
	tlsForAll
)

func (t *tlsRequired) String() string {
	return [...]string{tlsOptional: "false", tlsForTCP: "tcp-https", tlsForAll: "true"}[*t]
}

// IsBoolFlag makes the flag alone mean true.
func (t *tlsRequired) IsBoolFlag() bool { return true }

// Set takes a boolean or tcp-https.
func (t *tlsRequired) Set(s string) error {
	if strings.EqualFold(s, "tcp-https") {
		*t = tlsForTCP
		return nil
	}
	required, err := strconv.ParseBool(s)
	if err != nil {
		return fmt.Errorf("%q is none of true, false, tcp-https", s)
	}
	*t = tlsOptional
	if required {
		*t = tlsForAll
	}
	return nil
}

// tlsVersion is a version of TLS.
type tlsVersion uint16

const tls10 tlsVersion = tls.VersionTLS10

var tlsVersions = map[string]tlsVersion{
	"ssl3.0": tls10, // Go has no SSL 3.0; TLS 1.0 is the lowest version
	"tls1.0": tls10,
	"tls1.1": tls.VersionTLS11,
	"tls1.2": tls.VersionTLS12,
	"tls1.3": tls.VersionTLS13,
}

func (v *tlsVersion) String() string {
	return strings.ToLower(strings.ReplaceAll(tls.VersionName(uint16(cmp.Or(*v, tls10))), " ", ""))
}

// Set takes the name of a version. An empty name leaves the default, as NSQ's example configuration
// file has one.
func (v *tlsVersion) Set(s string) error {
	if s == "" {
		return nil
	}
	version, ok := tlsVersions[strings.ToLower(s)]
	if !ok {
		return fmt.Errorf("%q is none of tls1.0, tls1.1, tls1.2, tls1.3", s)
	}
	*v = version
	return nil
}
