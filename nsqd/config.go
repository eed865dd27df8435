package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/endpoint"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/session"
	"github.com/srtm-io/srtm/nsqd/wire"
)

func (o *options) sessionConfig() *session.Config {
	c := session.DefaultConfig()
	c.Limits = wire.Limits{
		MaxMessageSize:  o.MaxMsgSize,
		MaxBodySize:     o.MaxBodySize,
		MaxReqTimeout:   o.MaxReqTimeout,
		MaxDeferTimeout: o.MaxDeferTimeout,
		MaxRdy:          o.MaxRdyCount,
	}
	c.HeartbeatInterval = o.ClientTimeout / 2
	c.MaxHeartbeatInterval = o.MaxHeartbeatInterval
	c.MsgTimeout = o.MsgTimeout
	c.MaxMsgTimeout = o.MaxMsgTimeout
	c.OutputBufferTimeout = o.OutputBufferTimeout
	c.MinOutputBufferTimeout = o.MinOutputBufferTimeout
	c.MaxOutputBufferTimeout = o.MaxOutputBufferTimeout
	c.MaxOutputBufferSize = o.MaxOutputBufferSize
	c.OutputBufferSize = min(c.OutputBufferSize, o.MaxOutputBufferSize)
	c.TLS = o.secure != nil
	c.TLSRequired = c.TLS && o.tlsRequiredFor() != tlsOptional
	c.Snappy = o.Snappy
	c.Deflate = o.Deflate
	c.MaxDeflateLevel = o.MaxDeflateLevel
	c.Version = obs.Release
	return &c
}

func (o *options) connConfig(sc *session.Config) conn.Config {
	return conn.Config{
		Session:         sc,
		TLS:             o.secure,
		StrictBuffering: o.OutputBuffering == "strict",
		WriteTimeout:    o.WriteTimeout,
		MaxConnections:  o.MaxConnections,
	}
}

func (o *options) brokerConfig() broker.Config {
	return broker.Config{
		Capacity:      o.MemQueueSize,
		MaxMsgTimeout: o.MaxMsgTimeout,
		RejectAfter:   o.RejectAfter,
		AutoCreate:    !o.managed(),
		Seed:          uint64(time.Now().UnixNano()),
	}
}

// tlsRequiredFor is --tls-required with what else implies it: a policy on
// certificates would mean nothing to clients that need not show any.
func (o *options) tlsRequiredFor() tlsRequired {
	if o.TLSRequired == tlsOptional && o.TLSClientAuthPolicy != "" {
		return tlsForAll
	}
	return o.TLSRequired
}

// The policies on clients' certificates.
const (
	authRequire = "require"
	authVerify  = "require-verify"
)

// rootCAs returns the pool of --tls-root-ca-file; nil, the system's, without.
func (o *options) rootCAs() (*x509.CertPool, error) {
	if o.TLSRootCAFile == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(o.TLSRootCAFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-root-ca-file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--tls-root-ca-file: no certificate in %s", o.TLSRootCAFile)
	}
	return pool, nil
}

// tlsConfig reads the files; nil if no TLS is offered.
func (o *options) tlsConfig() (*tls.Config, error) {
	roots, err := o.rootCAs()
	if err != nil || !o.tlsOffered() {
		return nil, err
	}
	cert, err := tls.LoadX509KeyPair(o.TLSCert, o.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: uint16(o.TLSMinVersion), ClientCAs: roots}
	switch o.TLSClientAuthPolicy {
	case authRequire:
		c.ClientAuth = tls.RequireAnyClientCert
	case authVerify:
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return c, nil
}

// node is what this process says of itself, once it listens. web may be nil.
func (o *options) node(tcp, web net.Addr) httpapi.Node {
	n := httpapi.Node{
		Version:          obs.Version(),
		BroadcastAddress: o.BroadcastAddress,
		Hostname:         hostname(),
		TCPPort:          o.BroadcastTCPPort,
		HTTPPort:         o.BroadcastHTTPPort,
		StartTime:        time.Now(),
		BrokerID:         o.BrokerID,
	}
	if n.BroadcastAddress == "" {
		n.BroadcastAddress = n.Hostname
	}
	if n.TCPPort == 0 {
		n.TCPPort = endpoint.Port(tcp)
	}
	if n.HTTPPort == 0 {
		n.HTTPPort = endpoint.Port(web)
	}
	if n.BrokerID == "" {
		n.BrokerID = fmt.Sprintf("%s-%d", n.BroadcastAddress, n.TCPPort)
	}
	return n
}

func (o *options) agentConfig(n httpapi.Node, log *slog.Logger, metrics prometheus.Registerer) agent.Config {
	return agent.Config{
		LoadDistributor: o.LoadDistributor,
		BrokerID:        n.BrokerID,
		TCPAddress:      net.JoinHostPort(n.BroadcastAddress, strconv.Itoa(n.TCPPort)),
		HTTPAddress:     net.JoinHostPort(n.BroadcastAddress, strconv.Itoa(n.HTTPPort)),
		Mcap:            o.Mcap,
		Version:         n.Version,
		Log:             log,
		Metrics:         metrics,
	}
}
