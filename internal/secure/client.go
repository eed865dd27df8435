package secure

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// SystemCA stands for the system's authorities in ClientConfig.CAFile.
const SystemCA = "system"

// ClientConfig selects a client's trusted authorities and its identity. The zero value
// uses no TLS.
type ClientConfig struct {
	CAFile            string // PEM, or SystemCA; enables TLS
	CertFile, KeyFile string // PEM; both or neither
	TokenFile         string // file with the client's token

	log *atomic.Pointer[slog.Logger] // made by TLSFlags; nil: none
}

// Log sets the logger for reloads of files and their failures. Requires: Flags or
// TLSFlags.
func (c *ClientConfig) Log(log *slog.Logger) { c.log.Store(log) }

// Flags adds the flags, each with a prefix, such as "control-".
func (c *ClientConfig) Flags(fs Flags, prefix, service string) {
	c.TLSFlags(fs, prefix, service)
	fs.StringVar(&c.TokenFile, prefix+"token-file", "", "`file` with the token for "+service)
}

// TLSFlags is Flags for a server that does not accept our tokens.
func (c *ClientConfig) TLSFlags(fs Flags, prefix, service string) {
	c.log = &atomic.Pointer[slog.Logger]{}
	fs.StringVar(&c.CAFile, prefix+"tls-ca", "", "PEM `file` of the authorities of the certificate of "+service+", or \""+SystemCA+"\": with TLS")
	fs.StringVar(&c.CertFile, prefix+"tls-cert", "", "PEM `file` of our certificate for "+service)
	fs.StringVar(&c.KeyFile, prefix+"tls-key", "", "PEM `file` of its key")
}

// Load reads the files and returns the options of a connection, or all problems, with the
// flags' names including prefix. Changed files are read again for the next handshake or
// call.
func (c ClientConfig) Load(prefix string) ([]grpc.DialOption, error) {
	var errs []error
	transport := Plain()
	if c.CAFile != "" {
		files := []string{c.CertFile, c.KeyFile}
		if c.CAFile != SystemCA {
			files = append(files, c.CAFile)
		}
		creds, err := newFresh(c.log, func() (credentials.TransportCredentials, error) {
			cfg, err := c.readTLS(prefix)
			return credentials.NewTLS(cfg), err
		}, files...)
		if err != nil {
			errs = append(errs, err)
		} else {
			transport = renewed(creds.get)
		}
	} else if _, err := c.readTLS(prefix); err != nil {
		errs = append(errs, err)
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(transport)}
	token, err := c.Token(prefix)
	if token != nil {
		options = append(options, grpc.WithPerRPCCredentials(token))
	}
	return options, errors.Join(append(errs, err)...)
}

// Token returns the token of TokenFile; nil without TokenFile.
func (c ClientConfig) Token(prefix string) (Bearer, error) {
	if c.TokenFile == "" {
		return nil, nil
	}
	token, err := freshToken(c.log, c.TokenFile)
	if err != nil {
		return nil, fmt.Errorf("--%stoken-file: %w", prefix, err)
	}
	return token, nil
}

// TLS is Load for protocols other than gRPC, without the token; nil: no TLS. A changed
// certificate is read again. Changed authorities are not, because crypto/tls does not
// report the address by which a nameless server is verified.
func (c ClientConfig) TLS(prefix string) (*tls.Config, error) {
	cfg, err := c.readTLS(prefix)
	if err != nil || c.CertFile == "" {
		return cfg, err
	}
	pair, err := newFresh(c.log, func() (*tls.Certificate, error) { return c.readPair(prefix) }, c.CertFile, c.KeyFile)
	if err != nil {
		return nil, err
	}
	cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair.get(), nil }
	return cfg, nil
}

func (c ClientConfig) readPair(prefix string) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("--%[1]stls-cert, --%[1]stls-key: %[2]w", prefix, err)
	}
	return &pair, nil
}

// readTLS reads the files as they are; nil: no TLS.
func (c ClientConfig) readTLS(prefix string) (*tls.Config, error) {
	var errs []error
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, fmt.Errorf("--%[1]stls-cert and --%[1]stls-key: want both or neither", prefix))
	}
	if c.CAFile == "" {
		if c.CertFile != "" {
			errs = append(errs, fmt.Errorf("--%[1]stls-cert needs --%[1]stls-ca", prefix))
		}
		return nil, errors.Join(errs...)
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != SystemCA {
		pool, err := readPool(c.CAFile)
		if err != nil {
			errs = append(errs, fmt.Errorf("--%stls-ca: %w", prefix, err))
		}
		cfg.RootCAs = pool
	}
	if c.CertFile != "" && c.KeyFile != "" {
		pair, err := c.readPair(prefix)
		if err == nil {
			cfg.Certificates = []tls.Certificate{*pair}
		}
		errs = append(errs, err)
	}
	return cfg, errors.Join(errs...)
}

// Plain returns the credentials of a connection without TLS. If the server closes the
// connection at the first bytes, as a TLS server does, the error explains the likely
// cause.
func Plain() credentials.TransportCredentials { return plain{insecure.NewCredentials()} }

type plain struct {
	credentials.TransportCredentials
}

func (p plain) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := p.TransportCredentials.ClientHandshake(ctx, authority, conn)
	if err != nil {
		return nil, nil, err
	}
	return &plainConn{Conn: conn}, info, nil
}

func (p plain) Clone() credentials.TransportCredentials {
	return plain{p.TransportCredentials.Clone()}
}

type plainConn struct {
	net.Conn
	received bool // owned by the reader
}

func (c *plainConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n == 0 && err != nil && !c.received && !errors.Is(err, net.ErrClosed) {
		return 0, fmt.Errorf("%w: spoken to in clear, the server ended the connection: it may take TLS", err)
	}
	c.received = true
	return n, err
}

// renewed returns new credentials for each handshake.
type renewed func() credentials.TransportCredentials

func (r renewed) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return r().ClientHandshake(ctx, authority, conn)
}

func (r renewed) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return r().ServerHandshake(conn)
}

func (r renewed) Info() credentials.ProtocolInfo { return r().Info() }

func (r renewed) Clone() credentials.TransportCredentials { return r }

// OverrideServerName is deprecated and never called: the authority belongs to the
// connection.
func (r renewed) OverrideServerName(string) error {
	return errors.New("the server's name is that of the connection")
}

// Bearer returns the token for each call. It also works without TLS: on loopback, or if
// an operator has forced this.
type Bearer func() string

// TokenFile returns a Bearer of the file's token. A changed file is read again.
func TokenFile(path string) (Bearer, error) { return freshToken(nil, path) }

func freshToken(log *atomic.Pointer[slog.Logger], path string) (Bearer, error) {
	token, err := newFresh(log, func() (string, error) { return readToken(path) }, path)
	if err != nil {
		return nil, err
	}
	return token.get, nil
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b Bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b()}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (Bearer) RequireTransportSecurity() bool { return false }
