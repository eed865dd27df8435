package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/endpoint"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/memory"
	"github.com/srtm-io/srtm/nsqd/statsd"
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
	c.HeartbeatInterval = min(o.ClientTimeout/2, o.MaxHeartbeatInterval)
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
	c.AuthRequired = o.porters != nil
	c.Version = obs.NSQ
	return &c
}

func (o *options) hookConfig() hook.Config {
	return hook.Config{PinDir: o.ArrivalStampsDir, MaxConns: o.ArrivalStampsConnections}
}

func (o *options) connConfig(sc *session.Config) conn.Config {
	c := conn.Config{
		Session:         sc,
		TLS:             o.secure,
		StrictBuffering: o.OutputBuffering == "strict",
		WriteTimeout:    o.WriteTimeout,
		Loops:           o.IOLoops,
		MaxConnections:  o.MaxConnections,
		NudgeAfter:      o.NudgeAfter,
		MaxBodies:       o.MaxMemoryBytes / 4,
	}
	if o.Experiments.topology {
		c.Region, c.Zone = o.TopologyRegion, o.TopologyZone
	}
	if o.porters != nil {
		c.Auth = o.porters
	}
	return c
}

func (o *options) brokerConfig() broker.Config {
	c := broker.Config{
		Capacity:      cmp.Or(o.MemQueueSize, readAhead),
		MaxMemory:     o.MaxMemoryBytes,
		MaxMsgTimeout: o.MaxMsgTimeout,
		RejectAfter:   o.RejectAfter,
		MaxBackdating: o.MaxBackdating,
		AutoCreate:    !o.managed(),
		Presets:       o.TopicLimits,
		Seed:          uint64(time.Now().UnixNano()),

		MaxChannelConsumers: o.MaxChannelConsumers,
		MaxTopics:           o.MaxTopics,
		MaxTopicChannels:    o.MaxTopicChannels,
		MaxChannels:         o.MaxChannels,
	}
	if len(o.E2EPercentiles) > 0 {
		c.EndToEnd = o.E2EWindow
	}
	return c
}

// storageConfig is where messages go that memory does not hold.
func (o *options) storageConfig(log *slog.Logger) broker.StorageConfig {
	return broker.StorageConfig{
		Path:         filepath.Join(o.dataPath(), "messages"),
		Metadata:     filepath.Join(o.dataPath(), "metadata.json"),
		Data:         o.dataPath(),
		SegmentBytes: o.MaxBytesPerFile,
		MaxRecord:    o.MaxMsgSize,
		Overflow:     min(max(o.MemQueueSize, minOverflow), maxOverflow),
		Through:      o.MemQueueSize == 0,

		MaxUnfinished: o.MaxUnfinished,
		MaxLogBytes:   o.MaxLogBytes,
		Fsync:         o.Durability == durabilityFsync,
		Log:           log,
	}
}

// The messages of a line that are on their way to disk are bounded: enough for
// a write, at least, and at most little beside what memory holds.
const (
	minOverflow = 100
	maxOverflow = 2000
)

// readAhead is how many messages of a line are read from disk before somebody
// wants them, where memory is to hold none.
const readAhead = 8

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

// readTLS reads the files for roots and secure.
func (o *options) readTLS() error {
	if o.TLSRootCAFile != "" {
		pem, err := os.ReadFile(o.TLSRootCAFile)
		if err != nil {
			return fmt.Errorf("--tls-root-ca-file: %w", err)
		}
		o.roots = x509.NewCertPool()
		if !o.roots.AppendCertsFromPEM(pem) {
			return fmt.Errorf("--tls-root-ca-file: no certificate in %s", o.TLSRootCAFile)
		}
	}
	if !o.tlsOffered() {
		return nil
	}
	cert, err := tls.LoadX509KeyPair(o.TLSCert, o.TLSKey)
	if err != nil {
		return fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	o.secure = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: uint16(o.TLSMinVersion), ClientCAs: o.roots}
	switch o.TLSClientAuthPolicy {
	case authRequire:
		o.secure.ClientAuth = tls.RequireAnyClientCert
	case authVerify:
		o.secure.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return nil
}

func (o *options) authConfig() auth.Config {
	c := auth.Config{
		Addresses:      o.AuthHTTPAddresses,
		Method:         strings.ToUpper(o.AuthHTTPRequestMethod),
		ConnectTimeout: o.HTTPClientConnectTimeout,
		RequestTimeout: o.HTTPClientRequestTimeout,
	}
	if o.roots != nil {
		c.TLS = &tls.Config{RootCAs: o.roots}
	}
	return c
}

// node is what this process says of itself, once it listens. web may be nil.
func (o *options) node(tcp, web net.Addr) httpapi.Node {
	n := httpapi.Node{
		Version:           obs.NSQ,
		Release:           obs.Version(),
		BroadcastAddress:  o.BroadcastAddress,
		Hostname:          hostname(),
		TCPPort:           endpoint.Port(tcp),
		HTTPPort:          endpoint.Port(web),
		BroadcastTCPPort:  o.BroadcastTCPPort,
		BroadcastHTTPPort: o.BroadcastHTTPPort,
		StartTime:         time.Now(),
		BrokerID:          o.BrokerID,
	}
	if n.BroadcastAddress == "" {
		n.BroadcastAddress = n.Hostname
	}
	if n.BroadcastTCPPort == 0 {
		n.BroadcastTCPPort = n.TCPPort
	}
	if n.BroadcastHTTPPort == 0 {
		n.BroadcastHTTPPort = n.HTTPPort
	}
	if n.BrokerID == "" {
		n.BrokerID = fmt.Sprintf("%s-%d", n.BroadcastAddress, n.BroadcastTCPPort)
	}
	return n
}

// statsdConfig pushes under the name that NSQ gives a node: broadcast address and
// HTTP port.
func (o *options) statsdConfig(host string, topics func() []broker.Stats, log *slog.Logger) statsd.Config {
	return statsd.Config{
		Address:     o.StatsdAddress,
		Prefix:      statsd.Prefix(o.StatsdPrefix, host),
		Interval:    o.StatsdInterval,
		PacketSize:  o.StatsdPacketSize,
		Percentiles: o.E2EPercentiles,
		Memory:      o.StatsdMemStats,
		Ephemeral:   !o.StatsdExcludeEphemeral,
		Topics:      topics,
		Log:         log,
	}
}

func (o *options) agentConfig(n httpapi.Node, conns *conn.Server, log *slog.Logger, metrics prometheus.Registerer) agent.Config {
	return agent.Config{
		LoadDistributor: o.LoadDistributor,
		BrokerID:        n.BrokerID,
		TCPAddress:      net.JoinHostPort(n.BroadcastAddress, strconv.Itoa(n.BroadcastTCPPort)),
		HTTPAddress:     net.JoinHostPort(n.BroadcastAddress, strconv.Itoa(n.BroadcastHTTPPort)),
		Mcap:            o.Mcap,
		Policy:          agent.Policy(o.Policy),
		Version:         n.Release,
		DrainPublishers: conns.DrainPublishers,
		NudgeConsumers:  conns.NudgeConsumers,
		DialOptions:     o.controlOptions,
		Log:             log,
		Metrics:         metrics,
	}
}

// memoryLimit is the soft limit to set; 0: none, since it is set already or
// nobody knows how much memory there is.
func (o *options) memoryLimit(env string, root fs.FS) int64 {
	switch {
	case env != "": // the runtime has read it
		return 0
	case o.MemoryLimit > 0:
		return o.MemoryLimit
	}
	return memory.Default(root)
}
