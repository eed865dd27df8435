package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"time"

	admission "github.com/srtm-io/srtm/admission/client"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/lookupd"
	"github.com/srtm-io/srtm/nsqd/replicated"
	"github.com/srtm-io/srtm/nsqd/statsd"
)

// options has the configuration. Each option is a flag, or a key of the same name in the TOML file,
// where _ may stand for -. A flag overrides the file. Flags that NSQ's nsqd has keep their NSQ names,
// meanings and defaults.
type options struct {
	// Configurations of the parts: most fields are flags, validate sets the rest.
	session session.Config
	conn    conn.Config
	broker  broker.Config
	storage broker.StorageConfig
	hook    hook.Config
	auth    auth.Config
	statsd  statsd.Config
	agent   agent.Config
	api     httpapi.Config

	// Addresses to listen on and to advertise.
	tcpAddress, httpAddress, httpsAddress, adminAddress string
	broadcastAddress                                    string
	broadcastTCPPort, broadcastHTTPPort                 int
	region, zone                                        string
	topologyAware                                       bool
	maxHTTPConnections                                  int // 0: set by fit, like conn.MaxConnections
	lookupds                                            []string

	// TLS, tokens and authorization.
	tlsCert, tlsKey, tlsRootCAs, tlsClients string
	tlsCRL                                  string
	tlsRequired                             tlsRequired
	tlsMinVersion                           tlsVersion
	console                                 bool
	tokenFile                               string
	control                                 secure.ClientConfig // for the loaddistributor and the tbadaptor

	durability, dataPath    string
	forward                 string
	jetstream               replicated.Config
	jetstreamTLS            secure.ClientConfig
	drainTimeout, e2eWindow time.Duration
	stamps                  hook.Mode
	pinFor, releaseTrace    string
	memQueueSize            int
	memoryLimit             int64
	syncEvery               int64
	syncTimeout             time.Duration
	nodeID                  int

	// Derived by validate.
	roots       *x509.CertPool // nil: the system's authorities
	authServers *auth.Servers  // nil: clients need no authorization
	admission   admission.Config
	tokens      *secure.Tokens    // nil: no --http-token-file
	tls         *secure.ServerTLS // nil: no --tls-cert
	maxForwards int               // connections to other brokers; 0: set by fit
}

// noEffect begins the help of an NSQ flag that has no effect in this nsqd.
const noEffect = "accepted for compatibility; ignored"

func (o *options) program() *daemon.Program {
	return &daemon.Program{
		Name: "nsqd", About: "nsqd is SRTM's broker. It speaks the NSQ protocol and enforces rate contracts.",
		Examples: `  nsqd --data-path=/var/lib/nsqd
  nsqd --data-path=/var/lib/nsqd --topic-limit=orders:100:20
  nsqd --data-path=/var/lib/nsqd --loaddistributor-address=ld.example.com:4170`,
		Banner: obs.Banner("nsqd"), Groups: o.groups(), Validate: o.validate, Run: o.run,
		First: []string{
			"tcp-address", "http-address", "broadcast-address", "loaddistributor-address", "broker-id", "mcap", "lookupd-tcp-address", "topic-limit",
			"data-path", "durability", "mem-queue-size", "max-msg-size", "tls-cert", "tls-key", "config",
		},
		Values: map[string]string{
			"topic-limit": "orders:100:20", "retain": "24h,10GB", "jetstream-url": "nats://127.0.0.1:4222", "enable-experiment": topologyAware,
			"e2e-processing-latency-percentile": "0.99", "tls-client-auth-policy": authVerify, "jetstream-max-bytes": "1073741824",
			"statsd-address": "127.0.0.1:8125", "auth-http-address": "http://127.0.0.1:8080/auth", "topology-region": "eu-west", "topology-zone": "a",
		},
	}
}

// Titles of flag groups that only nsqd has.
const (
	clients    = "NSQ clients"
	statistics = "Statistics for NSQ and statsd"
)

// groups lists the flags. A part of the broker defines the flags that it alone needs. Flags that several
// parts need are defined here.
func (o *options) groups() []daemon.Group {
	o.session, o.tlsMinVersion = session.DefaultConfig(), tls10
	o.conn.Session = &o.session
	return []daemon.Group{
		{Title: daemon.Listen, Flags: o.addressFlags},
		{Title: daemon.Cluster, Flags: o.clusterFlags},
		{Title: daemon.Cluster, Flags: o.agent.Flags},
		{Title: daemon.Cluster, Flags: o.conn.ClusterFlags},
		{Title: daemon.Cluster, Flags: func(fs *flag.FlagSet) { lookupd.Flags(fs, &o.lookupds) }},
		{Title: daemon.Contract, Flags: o.contractFlags},
		{Title: daemon.Contract, Flags: o.broker.ContractFlags},
		{Title: daemon.Contract, Flags: func(fs *flag.FlagSet) { o.hook.Flags(fs, &o.stamps) }},
		{Title: daemon.Storage, Flags: o.storageFlags},
		{Title: daemon.Storage, Flags: o.storage.Flags},
		{Title: daemon.Storage, Flags: o.jetstream.Flags},
		{Title: daemon.Limits, Flags: o.limitFlags},
		{Title: daemon.Limits, Flags: o.conn.LimitFlags},
		{Title: daemon.Limits, Flags: o.broker.LimitFlags},
		{Title: daemon.Limits, Flags: o.api.Flags},
		{Title: daemon.Security, Flags: o.securityFlags},
		{Title: daemon.Security, Flags: o.auth.Flags},
		{Title: clients, Flags: o.conn.ClientFlags},
		{Title: statistics, Flags: o.statsFlags},
		{Title: statistics, Flags: o.statsd.Flags},
		{Title: daemon.Ask, Flags: func(fs *flag.FlagSet) {
			o.admission.Flags(fs, "for tenant/T/http, a credit a message, before /pub and /mpub of a caller of tenant T")
		}},
		{Title: daemon.Ignored, Flags: o.ignoredFlags},
	}
}

func (o *options) addressFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.tcpAddress, "tcp-address", "0.0.0.0:4150", "`host:port`, or path of a Unix socket, for NSQ clients")
	fs.StringVar(&o.httpAddress, "http-address", "0.0.0.0:4151", "`host:port`, or path of a Unix socket, for HTTP; empty: none")
	fs.StringVar(&o.httpsAddress, "https-address", "0.0.0.0:4152", "`host:port` for HTTPS, served if there is a --tls-cert; empty: none")
	fs.StringVar(&o.adminAddress, "admin-http-address", "", "`host:port`, or path of a Unix socket, for all HTTP routes; the other HTTP addresses then refuse /debug/ and the routes that change anything except publishing (default none: every address serves all routes)")
	fs.StringVar(&o.broadcastAddress, "broadcast-address", "", "`host` that clients are told to dial (default the hostname)")
	fs.IntVar(&o.broadcastTCPPort, "broadcast-tcp-port", 0, "TCP `port` that clients are told to dial (default the port of --tcp-address)")
	fs.IntVar(&o.broadcastHTTPPort, "broadcast-http-port", 0, "HTTP `port` that clients are told to dial (default the port of --http-address)")
	fs.BoolVar(&o.console, "console", true, "serve the web console of a standalone broker at /ui/ of --admin-http-address, or else of every HTTP address")
}

func (o *options) clusterFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.forward, "forward", forwardOn, "in a cluster, treatment of publishes and subscriptions to topics on other brokers: `on` (the broker forwards publishes and relays messages) or off (it refuses both)")
	fs.StringVar(&o.region, "topology-region", "", "`region` this broker runs in: with the experiment, messages go to the nearest consumers")
	fs.StringVar(&o.zone, "topology-zone", "", "`zone` of that region")
	fs.Func("enable-experiment", "`name` of an experiment of NSQ to take part in: "+topologyAware, o.experiment)
}

func (o *options) contractFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.pinFor, "pin-arrival-stamps", "", "as root: leave the program for `user` (name, uid or uid:gid) in --arrival-stamps-dir, and exit")
	fs.StringVar(&o.releaseTrace, "release-trace", "", "`file` to append a line to for every message that leaves a topic: topic, arrival, eligible, released, in ns of the monotonic clock (default none)")
}

func (o *options) storageFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.dataPath, "data-path", "", "`folder` of this broker alone: topics, channels, messages beyond --mem-queue-size, and the messages in memory at shutdown (default the working folder)")
	fs.StringVar(&o.durability, "durability", durabilityMemory, "durability `guarantee` of an OK: memory (the message survives a clean end of the broker), fsync (it is on stable storage), or replicated (it is on most of --jetstream-replicas servers of NATS JetStream)")
	fs.IntVar(&o.memQueueSize, "mem-queue-size", 10_000, "maximum number of `messages` held in memory per topic and per channel, further messages go to disk; 0: every message is written before it is accepted")
	fs.DurationVar(&o.drainTimeout, "drain-timeout", 0, "how long delivery continues after SIGTERM, while the messages in memory are stored")
}

func (o *options) limitFlags(fs *flag.FlagSet) {
	fs.IntVar(&o.maxHTTPConnections, "max-http-connections", 0, "maximum number of `connections` for HTTP and HTTPS together, and as many again at --admin-http-address; one more is answered 503 and closed (default an eighth of the descriptor limit, at most 5000)")
	fs.Int64Var(&o.memoryLimit, "memory-limit", 0, "soft limit of the memory of the Go runtime, in `bytes`: near it garbage is collected more often (default three quarters of what the machine or its cgroup has); GOMEMLIMIT in the environment takes precedence")
}

func (o *options) securityFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.tlsCert, "tls-cert", "", "PEM `file` with the certificate for TLS; goes with --tls-key")
	fs.StringVar(&o.tlsKey, "tls-key", "", "PEM `file` with its private key")
	fs.StringVar(&o.tlsRootCAs, "tls-root-ca-file", "", "PEM `file` with the authorities that clients' certificates are verified by (default the system's)")
	fs.StringVar(&o.tlsCRL, "tls-crl", "", "PEM `file` of lists of client certificates that are revoked, signed by the authorities of --tls-root-ca-file; read again at SIGHUP, which ends their connections")
	fs.Var(&o.tlsRequired, "tls-required", "`whether` clients without TLS are refused: true, false, or tcp-https (they may still use plain HTTP)")
	fs.Var(&o.tlsMinVersion, "tls-min-version", "minimum `version` of TLS: tls1.0, tls1.1, tls1.2, tls1.3 (ssl3.0 counts as tls1.0)")
	fs.StringVar(&o.tlsClients, "tls-client-auth-policy", "", "`policy` on clients' certificates: require (any), require-verify; either one implies --tls-required")
	fs.StringVar(&o.tokenFile, "http-token-file", "", "`file` of tokens, lines of a role and a token: these HTTP routes then take one of role admin, at every address (default none: any client may use NSQ's, and clients on this host /topic/limit)")
	o.jetstreamTLS.TLSFlags(fs, "jetstream-", "NATS")
	o.control.Flags(fs, controlPrefix, "the loaddistributor and the tbadaptor")
}

func (o *options) statsFlags(fs *flag.FlagSet) {
	fs.Func("e2e-processing-latency-percentile", "`fraction` in (0, 1] of messages whose latency from arrival to FIN is shown and sent to statsd; may be repeated, or a list with commas (default none)", o.percentiles)
	daemon.Alias(fs, "e2e-processing-latency-percentile", "e2e-processing-latency-percentiles", daemon.NSQName)
	fs.DurationVar(&o.e2eWindow, "e2e-processing-latency-window-time", 10*time.Minute, "how far back those latencies go")
}

func (o *options) ignoredFlags(fs *flag.FlagSet) {
	fs.Int64Var(&o.syncEvery, "sync-every", 2500, "`messages`; "+noEffect+": --durability says when they are on stable storage")
	fs.DurationVar(&o.syncTimeout, "sync-timeout", 2*time.Second, noEffect+", as --sync-every")
	fs.IntVar(&o.nodeID, "node-id", nodeID(hostname()), "`number` in [0, 1024) for NSQ's message ids (default a hash of the hostname); "+noEffect)
	daemon.Alias(fs, "node-id", "id", daemon.NSQName)
	fs.String("log-prefix", "[nsqd] ", noEffect+": log lines are structured and have no prefix")
	fs.Int("queue-scan-selection-count", 20, noEffect+": timeouts need no scans")
	fs.Int("queue-scan-worker-pool-max", 4, noEffect+": timeouts need no scans")
	fs.Bool("verbose", false, noEffect+", as by NSQ: use --log-level")
	fs.BoolFunc("worker-id", noEffect+": NSQ calls it --node-id now", number)
}

// durabilityOf returns --durability for the loaddistributor.
func (o *options) durabilityOf() srtmv1.Durability {
	return map[string]srtmv1.Durability{
		durabilityMemory: srtmv1.Durability_DURABILITY_MEMORY, durabilityFsync: srtmv1.Durability_DURABILITY_FSYNC,
		durabilityReplicated: srtmv1.Durability_DURABILITY_REPLICATED,
	}[o.durability]
}

// Values of --durability, --forward and --tls-client-auth-policy.
const (
	durabilityMemory     = "memory"
	durabilityFsync      = "fsync"
	durabilityReplicated = "replicated"

	forwardOn  = "on"
	forwardOff = "off"

	authRequire = "require"
	authVerify  = "require-verify"
)

// Bounds of a topic's messages that are on their way to disk: at least enough for a write, at most
// few compared to the messages in memory.
const (
	minOverflow = 100
	maxOverflow = 2000
)

// readAhead is how many messages of a topic are read from disk ahead of the channels if
// --mem-queue-size is 0.
const readAhead = 8

// maxDrain leaves time to end clients and HTTP requests.
const maxDrain = lifecycle.StopLimit - 3*lifecycle.Grace

// controlPrefix begins the flags for the credentials of the control plane. NSQ uses the names without
// the prefix.
const controlPrefix = "control-"

// validate completes the configurations of the parts, or returns all errors.
func (o *options) validate() error {
	var errs faults.List
	var err error
	o.dataPath = cmp.Or(o.dataPath, ".")
	errs.Add(o.readTLS())
	errs.Add(lookupd.ValidateAddresses(o.lookupds))
	if o.roots != nil {
		o.auth.TLS = &tls.Config{RootCAs: o.roots}
	}
	if err = o.auth.Validate(); err == nil && len(o.auth.Addresses) > 0 {
		o.authServers, err = auth.New(o.auth)
	}
	errs.Add(err)
	if o.tokenFile != "" {
		o.tokens, err = secure.LoadTokens("--http-token-file", o.tokenFile)
		errs.Add(err)
	}
	s := &o.session
	errs.Add(o.conn.Complete())
	s.TLS = o.conn.TLS != nil
	s.TLSRequired = s.TLS && o.tlsRequired != tlsOptional
	s.AuthRequired = o.authServers != nil
	s.Forwarded = o.forwards()
	s.Version, s.Limits.Pace = obs.NSQ, o.broker.Pacing != broker.PaceOff
	errs.Add(s.Validate())
	if o.topologyAware {
		o.conn.Region, o.conn.Zone = o.region, o.zone
	}
	if o.authServers != nil {
		o.conn.Auth = o.authServers
	}
	errs.Add(o.conn.Validate())
	b := &o.broker
	b.Capacity, b.MaxMsgTimeout, b.AutoCreate = cmp.Or(o.memQueueSize, readAhead), s.MaxMsgTimeout, !o.managed()
	b.Seed = uint64(time.Now().UnixNano())
	if len(o.statsd.Percentiles) > 0 {
		b.EndToEnd = o.e2eWindow
	}
	errs.Add(b.CheckFlags())
	errs.Add(b.Validate())
	o.storage.Path, o.storage.Metadata, o.storage.Data = filepath.Join(o.dataPath, "messages"), filepath.Join(o.dataPath, "metadata.json"), o.dataPath
	o.storage.MaxRecord, o.storage.Overflow = s.Limits.MaxMessageSize, min(max(o.memQueueSize, minOverflow), maxOverflow)
	o.jetstream.BrokerID, o.jetstream.MaxBody = o.agent.BrokerID, s.Limits.MaxMessageSize
	if most := o.jetstream.MaxBytes - o.jetstream.MaxBytes/8; o.durability == durabilityReplicated && most > 0 {
		// nsqd refuses publishers before the stream is full: a full stream accepts no claims either.
		o.storage.MaxLogBytes = min(cmp.Or(o.storage.MaxLogBytes, most), most)
	}
	o.storage.WriteThrough, o.storage.Fsync = o.memQueueSize == 0, o.durability == durabilityFsync

	errs.Add(o.hook.CheckFlags(o.stamps))
	errs.If(o.pinFor != "" && o.hook.PinDir == "", "--pin-arrival-stamps needs --arrival-stamps-dir")
	errs.Add(faults.OneOf("durability", o.durability, durabilityMemory, durabilityFsync, durabilityReplicated))
	errs.If((o.durability == durabilityReplicated) != (o.jetstream.URL != ""), "--durability=replicated and --jetstream-url: want both or neither")
	errs.If(o.durability == durabilityReplicated && o.agent.BrokerID == "", "--durability=replicated needs --broker-id: what this broker carries is kept under that name")
	errs.Add(o.jetstream.CheckFlags())
	errs.Add(o.storage.CheckFlags())
	errs.Add(o.agent.CheckFlags())
	errs.Add(o.api.CheckFlags())
	errs.Add(faults.OneOf("forward", o.forward, forwardOn, forwardOff))
	errs.If(o.tcpAddress == "", "--tcp-address is empty")
	errs.If(conn.IsPath(o.httpsAddress), "--https-address %q is not a host:port", o.httpsAddress)
	errs.If(o.memoryLimit < 0, "--memory-limit %d is negative", o.memoryLimit)
	errs.If(o.maxHTTPConnections < 0, "--max-http-connections %d is negative", o.maxHTTPConnections)
	errs.Add(faults.Within("broadcast-tcp-port", o.broadcastTCPPort, 0, math.MaxUint16))
	errs.Add(faults.Within("broadcast-http-port", o.broadcastHTTPPort, 0, math.MaxUint16))
	errs.If(o.syncEvery < 1, "--sync-every %d is less than 1", o.syncEvery)
	errs.Add(faults.Within("node-id", o.nodeID, 0, nodeIDs-1))
	errs.If(o.syncTimeout <= 0, "--sync-timeout %v is not positive", o.syncTimeout)
	errs.If(o.e2eWindow <= 0, "--e2e-processing-latency-window-time %v is not positive", o.e2eWindow)
	errs.If(o.drainTimeout < 0 || o.drainTimeout > maxDrain, "--drain-timeout %v is outside [0, %v]: a daemon has %v to stop", o.drainTimeout, maxDrain, lifecycle.StopLimit)
	if o.statsd.Address != "" {
		pushed := o.statsd // open sets the other fields
		pushed.Topics, pushed.Log = func() []broker.Stats { return nil }, slog.New(slog.DiscardHandler)
		errs.Add(pushed.Validate())
	}
	info, err := os.Stat(o.dataPath)
	errs.If(err != nil, "--data-path: %w", err)
	errs.If(err == nil && !info.IsDir(), "--data-path %q is not a folder", o.dataPath)

	o.agent.DialOptions, err = o.control.Load(controlPrefix)
	errs.Add(err)
	if o.managed() {
		errs.If(len(b.Presets) > 0, "--topic-limit is for standalone brokers: in a cluster the loaddistributor gives the contracts")
		errs.If(conn.IsPath(o.tcpAddress) && o.broadcastTCPPort == 0, "--loaddistributor-address needs a TCP port to advertise, and --tcp-address has none")
		errs.If((o.httpAddress == "" || conn.IsPath(o.httpAddress)) && o.broadcastHTTPPort == 0, "--loaddistributor-address needs an HTTP port to advertise, and --http-address has none")
	}
	return errs.Err()
}

// readTLS reads the root authorities and the certificate for connections.
func (o *options) readTLS() error {
	var errs faults.List
	absent := o.tlsCert == "" && o.tlsKey == ""
	pair := o.tlsCert != "" && o.tlsKey != ""
	errs.If(!absent && !pair, "--tls-cert and --tls-key go together")
	var err error
	o.roots, err = o.readRoots()
	errs.Add(err)
	errs.If(absent && o.tlsRequired != tlsOptional, "--tls-required needs --tls-cert and --tls-key")
	switch o.tlsClients {
	case "":
	case authRequire, authVerify:
		errs.If(absent, "--tls-client-auth-policy needs --tls-cert and --tls-key")
		if o.tlsRequired == tlsOptional { // the policy has no effect on clients without TLS
			o.tlsRequired = tlsForAll
		}
	default:
		errs.Add(faults.OneOf("tls-client-auth-policy", o.tlsClients, authRequire, authVerify))
	}
	errs.If(o.tlsCRL != "" && (o.tlsClients != authVerify || o.tlsRootCAs == ""), "--tls-crl needs --tls-client-auth-policy=require-verify and --tls-root-ca-file")
	if pair && len(errs) > 0 {
		_, err = o.readPair()
		errs.Add(err)
	} else if pair {
		if o.tls, err = secure.LoadTLS(o.readServerTLS, o.tlsCert, o.tlsKey, o.tlsRootCAs); err == nil {
			o.conn.TLS, o.conn.Hold = o.tls.Config(), o.tls.Hold
			if o.tlsCRL != "" {
				errs.Add(o.tls.Revoke("--tls-crl", o.tlsCRL, o.tlsRootCAs))
			}
		}
		errs.Add(err)
	}
	return errs.Err()
}

// readPair reads the certificate and its key.
func (o *options) readPair() (cert tls.Certificate, err error) {
	if cert, err = tls.LoadX509KeyPair(o.tlsCert, o.tlsKey); err != nil {
		err = fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	return cert, err
}

func (o *options) readServerTLS() (*tls.Config, error) {
	roots, err := o.readRoots()
	if err != nil {
		return nil, err
	}
	cert, err := o.readPair()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, MinVersion: uint16(o.tlsMinVersion), ClientCAs: roots,
		ClientAuth: map[string]tls.ClientAuthType{authRequire: tls.RequireAnyClientCert, authVerify: tls.RequireAndVerifyClientCert}[o.tlsClients],
	}, nil
}

// readRoots reads the authorities for clients and auth servers; nil: the system's.
func (o *options) readRoots() (*x509.CertPool, error) {
	if o.tlsRootCAs == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(o.tlsRootCAs)
	if err != nil {
		return nil, fmt.Errorf("--tls-root-ca-file: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--tls-root-ca-file: no certificate in %s", o.tlsRootCAs)
	}
	return roots, nil
}

// managed reports whether a loaddistributor places this broker's topics.
func (o *options) managed() bool { return o.agent.LoadDistributor != "" }

// forwards reports whether publishes to topics on other brokers are forwarded.
func (o *options) forwards() bool { return o.managed() && o.forward == forwardOn }

// brokerTLS returns the configuration for connections to other brokers; nil: no TLS. The brokers of a
// cluster are assumed to be configured alike. If this broker requires TLS or has its own root
// authorities, the other brokers offer TLS. A broker presents its server certificate as a client too.
func (o *options) brokerTLS() *tls.Config {
	if o.conn.TLS == nil || o.tlsRequired == tlsOptional && o.roots == nil {
		return nil
	}
	serverTLS := o.conn.TLS
	return &tls.Config{RootCAs: o.roots, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		present, err := serverTLS.GetConfigForClient(nil) // the file may have changed
		if err != nil {
			return nil, err
		}
		return &present.Certificates[0], nil
	}}
}

// encrypted reports whether nsqd refuses HTTP without TLS.
func (o *options) encrypted() bool { return o.conn.TLS != nil && o.tlsRequired == tlsForAll }

// node returns the description of this process, once the process listens. web may be nil.
func (o *options) node(tcp, web net.Addr) httpapi.Node {
	n := httpapi.Node{
		Version:          obs.NSQ,
		Release:          obs.Version(),
		BroadcastAddress: cmp.Or(o.broadcastAddress, hostname()),
		Hostname:         hostname(),
		TCPPort:          conn.Port(tcp),
		HTTPPort:         conn.Port(web),
		StartTime:        time.Now(),
	}
	n.BroadcastTCPPort, n.BroadcastHTTPPort = cmp.Or(o.broadcastTCPPort, n.TCPPort), cmp.Or(o.broadcastHTTPPort, n.HTTPPort)
	n.BrokerID = cmp.Or(o.agent.BrokerID, fmt.Sprintf("%s-%d", n.BroadcastAddress, n.BroadcastTCPPort))
	return n
}

// nodeIDs is the number of NSQ node ids.
const nodeIDs = 1024

// nodeID returns the default node id of a host.
func nodeID(host string) int {
	h := fnv.New32a()
	h.Write([]byte(host))
	return int(h.Sum32() % nodeIDs)
}

// hostname returns the default name of this host.
func hostname() string {
	host, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return host
}
