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
	"strings"
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
	"github.com/srtm-io/srtm/nsqd/commitlog"
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

	// Addresses to listen on and to advertise.
	tcpAddress, httpAddress, httpsAddress, adminAddress string
	broadcastAddress                                    string
	broadcastTCPPort, broadcastHTTPPort                 int
	region, zone                                        string
	topologyAware                                       bool
	maxHTTPConnections                                  int // 0: set by fit, like conn.MaxConnections
	lookupds                                            daemon.List

	// TLS, tokens and authorization.
	tlsCert, tlsKey, tlsRootCAs, tlsClients string
	tlsCRL                                  string
	tlsRequired                             tlsRequired
	tlsMinVersion                           tlsVersion
	authAddresses                           daemon.List
	console                                 bool
	tokenFile                               string
	control                                 secure.ClientConfig // for the loaddistributor and the tbadaptor

	outputBuffering, durability, dataPath  string
	forward                                string
	jetstream                              replicated.Config
	jetstreamTLS                           secure.ClientConfig
	clientTimeout, drainTimeout, e2eWindow time.Duration
	stamps                                 hook.Mode
	pinFor, releaseTrace                   string
	memQueueSize                           int
	memoryLimit                            int64
	statsdExclude                          bool
	syncEvery                              int64
	syncTimeout                            time.Duration
	nodeID, maxWeight                      int

	// Derived by validate.
	roots       *x509.CertPool // nil: the system's authorities
	authServers *auth.Servers  // nil: clients need no authorization
	admission   admission.Config
	tokens      *secure.Tokens    // nil: no --http-token-file
	tls         *secure.ServerTLS // nil: no --tls-cert
	maxForwards int               // connections to other brokers; 0: set by fit
	maxSeries   int               // maximum number of topics and channels with their own metrics
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

func (o *options) groups() []daemon.Group {
	o.session, o.tlsMinVersion = session.DefaultConfig(), tls10
	_ = (*ioLoops)(&o.conn).Set(autoLoops)
	return []daemon.Group{
		{Title: daemon.Listen, Flags: o.addressFlags},
		{Title: daemon.Cluster, Flags: o.clusterFlags},
		{Title: daemon.Contract, Flags: o.contractFlags},
		{Title: daemon.Storage, Flags: o.storageFlags},
		{Title: daemon.Limits, Flags: o.limitFlags},
		{Title: daemon.Security, Flags: o.securityFlags},
		{Title: clients, Flags: o.clientFlags},
		{Title: statistics, Flags: o.statsFlags},
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
	fs.StringVar(&o.agent.LoadDistributor, "loaddistributor-address", "", "gRPC `host:port` of the loaddistributor to join, or of several with commas (default none: a standalone broker)")
	fs.StringVar(&o.agent.BrokerID, "broker-id", "", "`id` of this broker in its cluster, stable across restarts (default broadcast address and TCP port)")
	fs.StringVar(&o.forward, "forward", forwardOn, "in a cluster, treatment of publishes and subscriptions to topics on other brokers: `on` (the broker forwards publishes and relays messages) or off (it refuses both)")
	fs.Int64Var(&o.agent.Mcap, "mcap", 20_000, "maximum rate, in `msg/s`, that this broker carries within the SLO")
	fs.StringVar((*string)(&o.agent.Policy), "policy", string(agent.Available), "what to do when the lease on shares has ended: available (continue with the bases) or strict (stop)")
	fs.Var(&o.lookupds, "lookupd-tcp-address", "`host:port` of an nsqlookupd to register with; may be repeated")
	daemon.Alias(fs, "lookupd-tcp-address", "nsqlookupd-tcp-addresses", "its name in NSQ's configuration files")
	fs.DurationVar(&o.conn.NudgeAfter, "nudge-consumers-after", 20*time.Second, "how long a consumer must have been connected before the broker may end its connection when the topic moves, so that the consumer looks up the topic again; at least LookupdPollInterval x LookupdPollJitter of the consumer, because go-nsq does not look up earlier")
	fs.StringVar(&o.region, "topology-region", "", "`region` this broker runs in: with the experiment, messages go to the nearest consumers")
	fs.StringVar(&o.zone, "topology-zone", "", "`zone` of that region")
	fs.Func("enable-experiment", "`name` of an experiment of NSQ to take part in: "+topologyAware, o.experiment)
}

func (o *options) contractFlags(fs *flag.FlagSet) {
	fs.Func("topic-limit", "contract of a topic of a standalone broker, as `topic:rate:burst[:delay|reject]` in msg/s and messages; its bucket is empty at the start, and whenever the topic is created anew; may be repeated", o.topicLimit)
	fs.DurationVar(&o.broker.MaxBackdating, "max-backdating", 250*time.Millisecond, "how far before its release a message may have had its token, at most 1s: with rate r and burst b, at most b + r*(t + this) messages leave in any time t. A stall of the broker up to this long delays no conforming message; after a longer stall the contract in real time comes first")
	fs.DurationVar(&o.broker.RejectAfter, "reject-after", 0, "with policy reject: refuse a message whose access delay would be longer; 0: one that would have to wait at all")
	fs.StringVar((*string)(&o.broker.Pacing), "pacing", string(broker.PaceAdvise), "`mode` of topics with a contract and without a mode of their own: off (for all topics); advise (while more arrives than the contract allows, publishers that send PACE receive their rate, by weight); or police (the broker also refuses messages beyond this rate, from all publishers)")
	fs.IntVar(&o.maxWeight, "max-weight", 1, "maximum `weight`, 1 to 255, of a publisher without a weight from its topic")
	fs.StringVar((*string)(&o.stamps), "arrival-stamps", string(hook.Auto), "`source` of arrival times: auto, ebpf, sotimestamp or off")
	fs.IntVar(&o.hook.MaxConns, "arrival-stamps-connections", 0, "maximum number of `publishers` that ebpf follows at once (default 16384)")
	fs.StringVar(&o.hook.PinDir, "arrival-stamps-dir", "", "`folder` in a BPF file system with the program that --pin-arrival-stamps left there, which needs no privileges (default none: load it)")
	fs.StringVar(&o.pinFor, "pin-arrival-stamps", "", "as root: leave the program for `user` (name, uid or uid:gid) in --arrival-stamps-dir, and exit")
	fs.StringVar(&o.releaseTrace, "release-trace", "", "`file` to append a line to for every message that leaves a topic: topic, arrival, eligible, released, in ns of the monotonic clock (default none)")
}

func (o *options) storageFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.dataPath, "data-path", "", "`folder` of this broker alone: topics, channels, messages beyond --mem-queue-size, and the messages in memory at shutdown (default the working folder)")
	fs.StringVar(&o.durability, "durability", durabilityMemory, "durability `guarantee` of an OK: memory (the message survives a clean end of the broker), fsync (it is on stable storage), or replicated (it is on most of --jetstream-replicas servers of NATS JetStream)")
	fs.IntVar(&o.memQueueSize, "mem-queue-size", 10_000, "maximum number of `messages` held in memory per topic and per channel, further messages go to disk; 0: every message is written before it is accepted")
	fs.Int64Var(&o.storage.SegmentBytes, "max-bytes-per-file", commitlog.DefaultSegmentBytes, "size at which a file of messages is full, in `bytes`")
	fs.IntVar(&o.storage.MaxUnfinished, "max-unfinished", 1_000_000, "how far a channel continues past its oldest unfinished message, in `messages`; the channel then gets no more messages until that message is finished; other channels continue; 0: no limit")
	fs.Int64Var(&o.storage.MaxLogBytes, "max-log-bytes", 0, "size of a topic's log on disk, in `bytes`, from which publishes are refused (E_QUEUE_FULL, HTTP 503); messages that are only retained do not count; 0: no limit")
	fs.Var(&o.storage.Retain, "retain", "`time or size` of finished messages that stay on disk for channel/seek: a duration (24h), a size (10GB, or up to a file of --max-bytes-per-file more), or both with a comma, until either is exceeded; POST /topic/retain sets it for one topic. Unfinished messages stay in any case (default 0: nothing)")
	fs.IntVar(&o.storage.OpenFiles, "open-files-per-topic", commitlog.DefaultOpenFiles, "maximum number of a topic's message `files` that stay open for reading, beside the file being written; opening one more closes another")
	fs.IntVar(&o.storage.ReadAhead, "read-ahead-bytes", broker.DefaultReadAhead, "maximum size of the messages that are read from disk at a time for a topic or channel that is behind, and that stay in memory for channels close behind it, in `bytes`; a larger message is read alone")
	fs.StringVar(&o.jetstream.URL, "jetstream-url", "", "`url` of NATS servers with JetStream for --durability=replicated, of several with commas, as nats://a:4222,nats://b:4222")
	fs.IntVar(&o.jetstream.Replicas, "jetstream-replicas", 3, "how many `servers` of NATS keep each message, 1 to 5")
	fs.StringVar(&o.jetstream.Credentials, "jetstream-creds", "", "`file` with credentials for NATS, as nsc writes them")
	fs.Int64Var(&o.jetstream.MaxBytes, "jetstream-max-bytes", 0, "size of a topic's stream, in `bytes`, at least 1 MiB; when seven eighths are full, retained messages are deleted, and then publishes are refused (E_QUEUE_FULL); 0: what NATS allows")
	fs.DurationVar(&o.drainTimeout, "drain-timeout", 0, "how long delivery continues after SIGTERM, while the messages in memory are stored")
}

func (o *options) limitFlags(fs *flag.FlagSet) {
	s := &o.session
	fs.IntVar(&s.Limits.MaxMessageSize, "max-msg-size", s.Limits.MaxMessageSize, "maximum size of a message, in `bytes`")
	fs.IntVar(&s.Limits.MaxBodySize, "max-body-size", s.Limits.MaxBodySize, "maximum size of an MPUB's body, in `bytes`; IDENTIFY and AUTH have at most 64 KiB of it")
	fs.IntVar(&o.conn.MaxConnections, "max-connections", 0, "maximum number of client `connections`; one more is closed (default what the descriptor limit leaves beside HTTP and files, and one for each 16 KiB of the memory limit)")
	fs.IntVar(&o.maxHTTPConnections, "max-http-connections", 0, "maximum number of `connections` for HTTP and HTTPS together, and as many again at --admin-http-address; one more is answered 503 and closed (default an eighth of the descriptor limit, at most 5000)")
	fs.Int64Var(&o.memoryLimit, "memory-limit", 0, "soft limit of the memory of the Go runtime, in `bytes`: near it garbage is collected more often (default three quarters of what the machine or its cgroup has); GOMEMLIMIT in the environment takes precedence")
	fs.Int64Var(&o.broker.MaxMemory, "max-memory-bytes", 0, "maximum size of all messages held in memory, in `bytes`, counting each body plus 256; a topic that holds four times what is left continues as one with --mem-queue-size messages (default half of the memory limit)")
	fs.IntVar(&o.broker.MaxTopics, "max-topics", 50_000, "maximum number of `topics`, 0: no limit; one more is refused (E_PUB_FAILED or E_SUB_FAILED, HTTP 503); topics on disk at the start are always opened")
	fs.IntVar(&o.broker.MaxTopicChannels, "max-topic-channels", 10_000, "maximum number of `channels` of a topic, 0: no limit; as --max-topics")
	fs.IntVar(&o.broker.MaxChannels, "max-channels", 100_000, "maximum number of `channels` of all topics, 0: no limit; as --max-topics")
	fs.IntVar(&o.broker.MaxChannelConsumers, "max-channel-consumers", 0, "maximum number of `consumers` of a channel (default no limit)")
	fs.IntVar(&o.maxSeries, "max-series", 5000, "how many `topics` and channels, in the order of their names, have metrics of their own in /metrics, 0: all; a topic has about 90 lines, a channel 11")
	fs.DurationVar(&o.conn.WriteTimeout, "write-timeout", 30*time.Second, "close a client that reads nothing for so long")
	fs.Var((*ioLoops)(&o.conn), "io-loops", "`number` of event loops that serve connections, on Linux; auto: 1, and more, up to one per processor, while a loop is overloaded and a processor idle; 0: a goroutine for each connection")
}

func (o *options) securityFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.tlsCert, "tls-cert", "", "PEM `file` with the certificate for TLS; goes with --tls-key")
	fs.StringVar(&o.tlsKey, "tls-key", "", "PEM `file` with its private key")
	fs.StringVar(&o.tlsRootCAs, "tls-root-ca-file", "", "PEM `file` with the authorities that clients' certificates are verified by (default the system's)")
	fs.StringVar(&o.tlsCRL, "tls-crl", "", "PEM `file` of lists of client certificates that are revoked, signed by the authorities of --tls-root-ca-file; read again at SIGHUP, which ends their connections")
	fs.Var(&o.tlsRequired, "tls-required", "`whether` clients without TLS are refused: true, false, or tcp-https (they may still use plain HTTP)")
	fs.Var(&o.tlsMinVersion, "tls-min-version", "minimum `version` of TLS: tls1.0, tls1.1, tls1.2, tls1.3 (ssl3.0 counts as tls1.0)")
	fs.StringVar(&o.tlsClients, "tls-client-auth-policy", "", "`policy` on clients' certificates: require (any), require-verify; either one implies --tls-required")
	fs.Var(&o.authAddresses, "auth-http-address", "`host:port`, or URL, of an auth server whose permission clients need, over HTTP too (Authorization: Bearer SECRET); may be repeated, then one permission suffices")
	daemon.Alias(fs, "auth-http-address", "auth-http-addresses", "its name in NSQ's configuration files")
	fs.StringVar(&o.auth.Method, "auth-http-request-method", "get", "`method` of requests to auth servers: get or post")
	fs.DurationVar(&o.auth.ConnectTimeout, "http-client-connect-timeout", 2*time.Second, "how long to wait for a connection to an auth server or an nsqlookupd")
	fs.DurationVar(&o.auth.RequestTimeout, "http-client-request-timeout", 5*time.Second, "how long to wait for its answer")
	fs.StringVar(&o.tokenFile, "http-token-file", "", "`file` of tokens, lines of a role and a token: these HTTP routes then take one of role admin, at every address (default none: any client may use NSQ's, and clients on this host /topic/limit)")
	o.jetstreamTLS.TLSFlags(fs, "jetstream-", "NATS")
	o.control.Flags(fs, controlPrefix, "the loaddistributor and the tbadaptor")
}

func (o *options) clientFlags(fs *flag.FlagSet) {
	s := &o.session
	fs.DurationVar(&s.MsgTimeout, "msg-timeout", s.MsgTimeout, "how long a subscriber may hold a message that it does not finish")
	fs.DurationVar(&s.MaxMsgTimeout, "max-msg-timeout", s.MaxMsgTimeout, "maximum message timeout a client may ask for")
	fs.DurationVar(&s.Limits.MaxReqTimeout, "max-req-timeout", s.Limits.MaxReqTimeout, "maximum delay of a requeue")
	fs.DurationVar(&s.Limits.MaxDeferTimeout, "max-defer-timeout", 0, "maximum delay of a deferred publish (default --max-req-timeout)")
	fs.IntVar(&s.Limits.MaxRdy, "max-rdy-count", s.Limits.MaxRdy, "maximum RDY count of a client")
	fs.DurationVar(&o.clientTimeout, "client-timeout", 2*s.HeartbeatInterval, "close a client that is silent for so long; heartbeats go out at half of it")
	fs.DurationVar(&s.MaxHeartbeatInterval, "max-heartbeat-interval", s.MaxHeartbeatInterval, "maximum heartbeat interval a client may ask for")
	fs.StringVar(&o.outputBuffering, "output-buffering", "eager", "`policy` of writing to subscribers: eager (as soon as nothing more is ready) or strict (by the client's buffer and timeout, as upstream)")
	fs.DurationVar(&s.OutputBufferTimeout, "output-buffer-timeout", s.OutputBufferTimeout, "output buffer timeout of clients that name none")
	fs.DurationVar(&s.MinOutputBufferTimeout, "min-output-buffer-timeout", s.MinOutputBufferTimeout, "minimum output buffer timeout a client may ask for")
	fs.DurationVar(&s.MaxOutputBufferTimeout, "max-output-buffer-timeout", s.MaxOutputBufferTimeout, "maximum output buffer timeout a client may ask for")
	fs.IntVar(&s.MaxOutputBufferSize, "max-output-buffer-size", s.MaxOutputBufferSize, "maximum output buffer a client may ask for, in `bytes`")
	fs.BoolVar(&s.Snappy, "snappy", s.Snappy, "let clients have Snappy compression")
	fs.BoolVar(&s.Deflate, "deflate", s.Deflate, "let clients have DEFLATE compression")
	fs.IntVar(&s.MaxDeflateLevel, "max-deflate-level", s.MaxDeflateLevel, "maximum DEFLATE `level` a client can have, 1 to 9; more takes more CPU")
}

func (o *options) statsFlags(fs *flag.FlagSet) {
	fs.Func("e2e-processing-latency-percentile", "`fraction` in (0, 1] of messages whose latency from arrival to FIN is shown and sent to statsd; may be repeated, or a list with commas (default none)", o.percentiles)
	daemon.Alias(fs, "e2e-processing-latency-percentile", "e2e-processing-latency-percentiles", "its name in NSQ's configuration files")
	fs.DurationVar(&o.e2eWindow, "e2e-processing-latency-window-time", 10*time.Minute, "how far back those latencies go")
	fs.StringVar(&o.statsd.Address, "statsd-address", "", "UDP `host:port` of a statsd daemon to push metrics to (default none)")
	fs.StringVar(&o.statsd.Prefix, "statsd-prefix", "nsq.%s", "`prefix` of the metrics' paths; %s stands for broadcast address and HTTP port")
	fs.DurationVar(&o.statsd.Interval, "statsd-interval", time.Minute, "how long between two pushes")
	fs.BoolVar(&o.statsd.Memory, "statsd-mem-stats", true, "push metrics of memory and garbage collection, too")
	fs.IntVar(&o.statsd.PacketSize, "statsd-udp-packet-size", 508, "maximum size of a packet to statsd, in `bytes`")
	fs.BoolVar(&o.statsdExclude, "statsd-exclude-ephemeral", false, "do not push metrics of ephemeral topics and channels")
}

func (o *options) ignoredFlags(fs *flag.FlagSet) {
	fs.Int64Var(&o.syncEvery, "sync-every", 2500, "`messages`; "+noEffect+": --durability says when they are on stable storage")
	fs.DurationVar(&o.syncTimeout, "sync-timeout", 2*time.Second, noEffect+", as --sync-every")
	fs.IntVar(&o.nodeID, "node-id", nodeID(hostname()), "`number` in [0, 1024) for NSQ's message ids (default a hash of the hostname); "+noEffect)
	daemon.Alias(fs, "node-id", "id", "its name in NSQ's configuration files")
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

// Values of --durability, --output-buffering, --forward and --tls-client-auth-policy.
const (
	durabilityMemory     = "memory"
	durabilityFsync      = "fsync"
	durabilityReplicated = "replicated"

	bufferEager  = "eager"
	bufferStrict = "strict"

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
	errs.If(o.auth.ConnectTimeout <= 0, "--http-client-connect-timeout %v is not positive", o.auth.ConnectTimeout)
	errs.If(o.auth.RequestTimeout <= 0, "--http-client-request-timeout %v is not positive", o.auth.RequestTimeout)
	if len(o.authAddresses) > 0 {
		o.auth.Addresses, o.auth.Method = o.authAddresses, strings.ToUpper(o.auth.Method)
		if o.roots != nil {
			o.auth.TLS = &tls.Config{RootCAs: o.roots}
		}
		o.authServers, err = auth.New(o.auth)
		errs.Add(err)
	}
	if o.tokenFile != "" {
		o.tokens, err = secure.LoadTokens("--http-token-file", o.tokenFile)
		errs.Add(err)
	}
	s := &o.session
	s.HeartbeatInterval = min(o.clientTimeout/2, s.MaxHeartbeatInterval)
	s.OutputBufferSize = min(s.OutputBufferSize, s.MaxOutputBufferSize)
	s.TLS = o.conn.TLS != nil
	s.TLSRequired = s.TLS && o.tlsRequired != tlsOptional
	s.AuthRequired = o.authServers != nil
	s.Forwarded = o.forwards()
	s.Version, s.Limits.Pace = obs.NSQ, o.broker.Pacing != broker.PaceOff
	errs.Add(s.Validate())
	o.conn.Session = s
	o.conn.StrictBuffering = o.outputBuffering == bufferStrict
	if o.topologyAware {
		o.conn.Region, o.conn.Zone = o.region, o.zone
	}
	if o.authServers != nil {
		o.conn.Auth = o.authServers
	}
	errs.Add(o.conn.Validate())
	b := &o.broker
	b.Capacity, b.MaxMsgTimeout, b.AutoCreate = cmp.Or(o.memQueueSize, readAhead), s.MaxMsgTimeout, !o.managed()
	b.MaxWeight = uint8(o.maxWeight)
	b.Seed = uint64(time.Now().UnixNano())
	if len(o.statsd.Percentiles) > 0 {
		b.EndToEnd = o.e2eWindow
	}
	errs.Add(b.Validate())
	o.storage.Path, o.storage.Metadata, o.storage.Data = filepath.Join(o.dataPath, "messages"), filepath.Join(o.dataPath, "metadata.json"), o.dataPath
	o.storage.MaxRecord, o.storage.Overflow = s.Limits.MaxMessageSize, min(max(o.memQueueSize, minOverflow), maxOverflow)
	o.jetstream.BrokerID, o.jetstream.MaxBody = o.agent.BrokerID, s.Limits.MaxMessageSize
	if most := o.jetstream.MaxBytes - o.jetstream.MaxBytes/8; o.durability == durabilityReplicated && most > 0 {
		// nsqd refuses publishers before the stream is full: a full stream accepts no claims either.
		o.storage.MaxLogBytes = min(cmp.Or(o.storage.MaxLogBytes, most), most)
	}
	o.storage.WriteThrough, o.storage.Fsync = o.memQueueSize == 0, o.durability == durabilityFsync

	_, err = hook.ParseMode(string(o.stamps))
	errs.If(err != nil, "--arrival-stamps: %w", err)
	errs.If(o.hook.MaxConns < 0, "--arrival-stamps-connections %d is below 0", o.hook.MaxConns)
	err = o.hook.Validate()
	errs.If(err != nil && o.hook.MaxConns > 0, "--arrival-stamps-connections: %w", err)
	errs.If(o.hook.PinDir != "" && o.stamps != hook.Auto && o.stamps != hook.EBPF, "--arrival-stamps-dir is of no use with --arrival-stamps=%s", o.stamps)
	errs.If(o.pinFor != "" && o.hook.PinDir == "", "--pin-arrival-stamps needs --arrival-stamps-dir")
	errs.Add(faults.OneOf("output-buffering", o.outputBuffering, bufferEager, bufferStrict))
	errs.Add(faults.OneOf("durability", o.durability, durabilityMemory, durabilityFsync, durabilityReplicated))
	errs.If((o.durability == durabilityReplicated) != (o.jetstream.URL != ""), "--durability=replicated and --jetstream-url: want both or neither")
	errs.If(o.durability == durabilityReplicated && o.agent.BrokerID == "", "--durability=replicated needs --broker-id: what this broker carries is kept under that name")
	errs.If(o.jetstream.Replicas < 1 || o.jetstream.Replicas > 5, "--jetstream-replicas %d is not 1 to 5", o.jetstream.Replicas)
	errs.If(o.jetstream.MaxBytes != 0 && o.jetstream.MaxBytes < 1<<20, "--jetstream-max-bytes %d is neither 0 nor at least %d", o.jetstream.MaxBytes, 1<<20)
	errs.Add(faults.OneOf("pacing", string(b.Pacing), string(broker.PaceOff), string(broker.PaceAdvise), string(broker.PacePolice)))
	errs.Add(faults.OneOf("forward", o.forward, forwardOn, forwardOff))
	errs.Add(faults.OneOf("policy", string(o.agent.Policy), string(agent.Available), string(agent.Strict)))
	errs.If(o.tcpAddress == "", "--tcp-address is empty")
	errs.If(conn.IsPath(o.httpsAddress), "--https-address %q is not a host:port", o.httpsAddress)
	for _, n := range []struct {
		flag     string
		n        int64
		min, max int64
	}{
		{"memory-limit", o.memoryLimit, 0, math.MaxInt64}, {"max-http-connections", int64(o.maxHTTPConnections), 0, math.MaxInt64},
		{"max-memory-bytes", b.MaxMemory, 0, math.MaxInt64}, {"max-bytes-per-file", o.storage.SegmentBytes, 1 << 10, math.MaxInt64},
		{"open-files-per-topic", int64(o.storage.OpenFiles), 1, 1000}, {"read-ahead-bytes", int64(o.storage.ReadAhead), 1 << 10, 1 << 30},
		{"max-unfinished", int64(o.storage.MaxUnfinished), 0, math.MaxInt64}, {"max-log-bytes", o.storage.MaxLogBytes, 0, math.MaxInt64},
		{"broadcast-tcp-port", int64(o.broadcastTCPPort), 0, 65535}, {"broadcast-http-port", int64(o.broadcastHTTPPort), 0, 65535},
		{"sync-every", o.syncEvery, 1, math.MaxInt64}, {"node-id", int64(o.nodeID), 0, nodeIDs - 1},
		{"max-weight", int64(o.maxWeight), 1, 255}, {"io-loops", int64(o.conn.Loops), 0, maxLoops},
		{"max-msg-size", int64(s.Limits.MaxMessageSize), math.MinInt64, commitlog.LargestBody}, // Limits checks the minimum
	} {
		errs.If(n.n < n.min, "--%s %d is less than %d", n.flag, n.n, n.min)
		errs.If(n.n > n.max, "--%s %d is more than %d", n.flag, n.n, n.max)
	}
	errs.If(o.syncTimeout <= 0, "--sync-timeout %v is not positive", o.syncTimeout)
	errs.If(o.e2eWindow <= 0, "--e2e-processing-latency-window-time %v is not positive", o.e2eWindow)
	errs.If(o.maxSeries < 0, "--max-series %d is negative", o.maxSeries)
	errs.If(o.conn.NudgeAfter < 0, "--nudge-consumers-after %v is negative", o.conn.NudgeAfter)
	errs.If(o.drainTimeout < 0 || o.drainTimeout > maxDrain, "--drain-timeout %v is outside [0, %v]: a daemon has %v to stop", o.drainTimeout, maxDrain, lifecycle.StopLimit)
	if o.statsd.Ephemeral = !o.statsdExclude; o.statsd.Address != "" {
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
		errs.If(o.agent.Mcap <= 0, "--mcap %d is not a positive rate", o.agent.Mcap)
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
