package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"runtime"
	"time"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/settings"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/endpoint"
	"github.com/srtm-io/srtm/nsqd/lookupd"
)

// options are everything that can be configured: by flag, or by the same name
// in the TOML file, where _ may stand for -. A flag wins over the file. Flags
// that NSQ's nsqd has as well have its names, meanings and defaults.
type options struct {
	// Where to listen, and what to say of it.
	TCPAddress, HTTPAddress, HTTPSAddress string
	AdminHTTPAddress, HTTPTokenFile       string
	BroadcastAddress                      string
	BroadcastTCPPort                      int
	BroadcastHTTPPort                     int
	Experiments                           experiments
	TopologyRegion, TopologyZone          string

	// Clients.
	MaxMsgSize, MaxBodySize             int
	MsgTimeout, MaxMsgTimeout           time.Duration
	MaxReqTimeout                       time.Duration
	MaxDeferTimeout                     time.Duration
	MaxRdyCount                         int
	ClientTimeout, MaxHeartbeatInterval time.Duration
	OutputBuffering                     string
	OutputBufferTimeout                 time.Duration
	MinOutputBufferTimeout              time.Duration
	MaxOutputBufferTimeout              time.Duration
	MaxOutputBufferSize                 int
	NudgeAfter                          time.Duration
	MaxConnections                      int // 0: main sets it, and the next
	MaxHTTPConnections                  int
	WriteTimeout                        time.Duration
	IOLoops                             int
	ArrivalStamps, ArrivalStampsDir     string
	ArrivalStampsConnections            int
	PinArrivalStamps                    string
	ReleaseTrace                        string

	// TLS and compression.
	TLSCert, TLSKey, TLSRootCAFile string
	TLSRequired                    tlsRequired
	TLSMinVersion                  tlsVersion
	TLSClientAuthPolicy            string
	Snappy, Deflate                bool
	MaxDeflateLevel                int

	// Leave to publish and subscribe.
	AuthHTTPAddresses        list
	AuthHTTPRequestMethod    string
	HTTPClientConnectTimeout time.Duration
	HTTPClientRequestTimeout time.Duration

	// Daemons that consumers find this node by.
	LookupdTCPAddresses list

	// Queues.
	MemQueueSize        int
	MaxChannelConsumers int
	MaxTopics           int
	MaxTopicChannels    int
	MaxChannels         int
	TopicLimits         topicLimits
	RejectAfter         time.Duration
	MaxBackdating       time.Duration
	DrainTimeout        time.Duration
	MemoryLimit         int64
	MaxMemoryBytes      int64 // 0: main sets it

	// The cluster of SRTM.
	LoadDistributor string
	Control         secure.ClientConfig // towards it and the tbadaptor
	controlOptions  []grpc.DialOption   // of Control, once it is read
	BrokerID        string
	Mcap            int64
	Policy          string

	// Figures.
	E2EPercentiles quantiles
	E2EWindow      time.Duration

	StatsdAddress          string
	StatsdPrefix           string
	StatsdInterval         time.Duration
	StatsdMemStats         bool
	StatsdPacketSize       int
	StatsdExcludeEphemeral bool

	// Files of messages.
	DataPath        string
	MaxBytesPerFile int64
	MaxUnfinished   int
	MaxLogBytes     int64
	Durability      string
	SyncEvery       int64
	SyncTimeout     time.Duration

	// Of NSQ, without effect here.
	NodeID                  int
	LogPrefix               string
	QueueScanSelectionCount int
	QueueScanWorkerPoolMax  int
	Verbose                 bool
	WorkerID                workerID

	LogLevel  logLevel
	LogFormat string

	// Made of the above by validate.
	secure  *tls.Config    // nil without TLS
	roots   *x509.CertPool // nil: the system's
	porters *auth.Servers  // nil where clients need no leave
	tokens  *secure.Tokens // nil without --http-token-file
}

// defaultLoops is what measured best: see docs/decisions.
func defaultLoops() int {
	if runtime.GOOS == "linux" {
		return 1
	}
	return 0
}

func flags(o *options) *flag.FlagSet {
	d, w := session.DefaultConfig(), wire.DefaultLimits()
	fs := flag.NewFlagSet("nsqd", flag.ContinueOnError)

	fs.StringVar(&o.TCPAddress, "tcp-address", "0.0.0.0:4150", "`host:port`, or path of a Unix socket, for NSQ clients")
	fs.StringVar(&o.HTTPAddress, "http-address", "0.0.0.0:4151", "`host:port`, or path of a Unix socket, for HTTP; empty: none")
	fs.StringVar(&o.HTTPSAddress, "https-address", "0.0.0.0:4152", "`host:port` for HTTPS, served if there is a --tls-cert; empty: none")
	fs.StringVar(&o.AdminHTTPAddress, "admin-http-address", "", "`host:port`, or path of a Unix socket, for HTTP with all routes; at the other addresses those that change something, other than by publishing, and /debug/ are then refused (default none: they serve all)")
	fs.StringVar(&o.HTTPTokenFile, "http-token-file", "", "`file` of tokens, lines of a role and a token: these HTTP routes then take one of role admin, at every address (default none: anybody may use NSQ's, and /topic/limit who is on this host)")
	fs.StringVar(&o.BroadcastAddress, "broadcast-address", "", "`host` that clients are told to dial (default the hostname)")
	fs.IntVar(&o.BroadcastTCPPort, "broadcast-tcp-port", 0, "TCP `port` that clients are told to dial (default that of --tcp-address)")
	fs.IntVar(&o.BroadcastHTTPPort, "broadcast-http-port", 0, "HTTP `port` that clients are told to dial (default that of --http-address)")

	fs.Var(&o.Experiments, "enable-experiment", "`name` of an experiment of NSQ to take part in: topology-aware-consumption")
	fs.StringVar(&o.TopologyRegion, "topology-region", "", "`region` this broker runs in: with the experiment, messages go to the nearest consumers")
	fs.StringVar(&o.TopologyZone, "topology-zone", "", "`zone` of that region")

	fs.IntVar(&o.MaxMsgSize, "max-msg-size", w.MaxMessageSize, "greatest size of a message, in `bytes`")
	fs.IntVar(&o.MaxBodySize, "max-body-size", w.MaxBodySize, "greatest size of an MPUB's body, in `bytes`; IDENTIFY and AUTH have at most 64 KiB of it")
	fs.DurationVar(&o.MsgTimeout, "msg-timeout", d.MsgTimeout, "how long a subscriber may hold a message that it does not finish")
	fs.DurationVar(&o.MaxMsgTimeout, "max-msg-timeout", d.MaxMsgTimeout, "greatest message timeout a client may ask for")
	fs.DurationVar(&o.MaxReqTimeout, "max-req-timeout", w.MaxReqTimeout, "greatest delay of a requeue")
	fs.DurationVar(&o.MaxDeferTimeout, "max-defer-timeout", 0, "greatest delay of a deferred publish (default --max-req-timeout)")
	fs.IntVar(&o.MaxRdyCount, "max-rdy-count", w.MaxRdy, "greatest RDY count of a client")
	fs.DurationVar(&o.ClientTimeout, "client-timeout", 2*d.HeartbeatInterval, "close a client that is silent for so long; heartbeats go out at half of it")
	fs.DurationVar(&o.MaxHeartbeatInterval, "max-heartbeat-interval", d.MaxHeartbeatInterval, "greatest heartbeat interval a client may ask for")
	fs.StringVar(&o.OutputBuffering, "output-buffering", "eager", "`policy` of writing to subscribers: eager (as soon as nothing more is ready) or strict (by the client's buffer and timeout, as upstream)")
	fs.DurationVar(&o.OutputBufferTimeout, "output-buffer-timeout", d.OutputBufferTimeout, "output buffer timeout of clients that name none")
	fs.DurationVar(&o.MinOutputBufferTimeout, "min-output-buffer-timeout", d.MinOutputBufferTimeout, "least output buffer timeout a client may ask for")
	fs.DurationVar(&o.MaxOutputBufferTimeout, "max-output-buffer-timeout", d.MaxOutputBufferTimeout, "greatest output buffer timeout a client may ask for")
	fs.IntVar(&o.MaxOutputBufferSize, "max-output-buffer-size", d.MaxOutputBufferSize, "greatest output buffer a client may ask for, in `bytes`")
	fs.DurationVar(&o.NudgeAfter, "nudge-consumers-after", 20*time.Second, "how long a consumer must have been connected before its connection may be ended for it to ask nsqlookupd again, when its topic moves; at least its LookupdPollInterval x LookupdPollJitter, for go-nsq does not ask before")
	fs.IntVar(&o.MaxConnections, "max-connections", 0, "greatest number of client `connections`; one more is closed (default what the descriptor limit leaves beside HTTP and files, and one for each 16 KiB of the memory limit)")
	fs.IntVar(&o.MaxHTTPConnections, "max-http-connections", 0, "greatest number of `connections` for HTTP and HTTPS together, and as many again at --admin-http-address; one more is answered 503 and closed (default an eighth of the descriptor limit, at most 5000)")
	fs.DurationVar(&o.WriteTimeout, "write-timeout", 30*time.Second, "close a client that takes nothing for so long")
	fs.IntVar(&o.IOLoops, "io-loops", defaultLoops(), "`number` of event loops that serve plain connections, on Linux; 0: a goroutine for each connection")
	fs.StringVar(&o.ArrivalStamps, "arrival-stamps", string(hook.Auto), "`source` of arrival times: auto, ebpf, sotimestamp or off")
	fs.IntVar(&o.ArrivalStampsConnections, "arrival-stamps-connections", 0, "greatest number of `publishers` that ebpf follows at once (default 16384)")
	fs.StringVar(&o.ArrivalStampsDir, "arrival-stamps-dir", "", "`folder` in a BPF file system with the program that --pin-arrival-stamps left there, which needs no privileges (default none: load it)")
	fs.StringVar(&o.PinArrivalStamps, "pin-arrival-stamps", "", "as root: leave the program for `user` (name, uid or uid:gid) in --arrival-stamps-dir, and exit")
	fs.StringVar(&o.ReleaseTrace, "release-trace", "", "`file` to append a line to for every message that leaves a topic: topic, arrival, eligible, released, in ns of the monotonic clock (default none)")

	fs.StringVar(&o.TLSCert, "tls-cert", "", "PEM `file` with the certificate for TLS; goes with --tls-key")
	fs.StringVar(&o.TLSKey, "tls-key", "", "PEM `file` with its private key")
	fs.StringVar(&o.TLSRootCAFile, "tls-root-ca-file", "", "PEM `file` with the authorities that clients' certificates are verified by (default the system's)")
	fs.Var(&o.TLSRequired, "tls-required", "refuse clients without TLS: `true`, false, or tcp-https (they may still use plain HTTP)")
	o.TLSMinVersion = tls10
	fs.Var(&o.TLSMinVersion, "tls-min-version", "least `version` of TLS: tls1.0, tls1.1, tls1.2, tls1.3 (ssl3.0 counts as tls1.0)")
	fs.StringVar(&o.TLSClientAuthPolicy, "tls-client-auth-policy", "", "`policy` on clients' certificates: require (any), require-verify; either one implies --tls-required")
	fs.BoolVar(&o.Snappy, "snappy", d.Snappy, "let clients have Snappy compression")
	fs.BoolVar(&o.Deflate, "deflate", d.Deflate, "let clients have DEFLATE compression")
	fs.IntVar(&o.MaxDeflateLevel, "max-deflate-level", d.MaxDeflateLevel, "greatest DEFLATE `level` a client can have, 1 to 9; more takes more CPU")

	fs.Var(&o.LookupdTCPAddresses, "lookupd-tcp-address", "`host:port` of an nsqlookupd to register with; may be repeated")
	alias(fs, "lookupd-tcp-address", "nsqlookupd-tcp-addresses")

	fs.Var(&o.AuthHTTPAddresses, "auth-http-address", "`host:port`, or URL, of an auth server that clients need permission of, over HTTP too (Authorization: Bearer SECRET); may be repeated, then any of them will do")
	alias(fs, "auth-http-address", "auth-http-addresses")
	fs.StringVar(&o.AuthHTTPRequestMethod, "auth-http-request-method", "get", "`method` of requests to auth servers: get or post")
	fs.DurationVar(&o.HTTPClientConnectTimeout, "http-client-connect-timeout", 2*time.Second, "how long to wait for a connection to an auth server or an nsqlookupd")
	fs.DurationVar(&o.HTTPClientRequestTimeout, "http-client-request-timeout", 5*time.Second, "how long to wait for its answer")

	fs.IntVar(&o.MemQueueSize, "mem-queue-size", 10_000, "greatest number of `messages` held in memory per topic and per channel, those beyond go to disk; 0: every message is written before it is accepted")
	fs.StringVar(&o.DataPath, "data-path", "", "`folder` of this broker alone: topics, channels, messages beyond --mem-queue-size and those held when it ends (default the working folder)")
	fs.IntVar(&o.MaxUnfinished, "max-unfinished", 1_000_000, "how far a channel goes on past the oldest message that it has not finished, in `messages`; 0: without end")
	fs.Int64Var(&o.MaxLogBytes, "max-log-bytes", 0, "size of a topic's log on disk from which on publishers are refused (E_QUEUE_FULL, HTTP 503), in `bytes`; 0: no limit")
	fs.Int64Var(&o.MaxBytesPerFile, "max-bytes-per-file", commitlog.DefaultSegmentBytes, "size at which a file of messages is full, in `bytes`")
	fs.StringVar(&o.Durability, "durability", durabilityMemory, "`promise` of an OK: memory (the message survives a clean end of the broker), or fsync (it is on stable storage)")
	fs.IntVar(&o.MaxChannelConsumers, "max-channel-consumers", 0, "greatest number of `consumers` of a channel (default no limit)")
	fs.IntVar(&o.MaxTopics, "max-topics", 50_000, "greatest number of `topics`, 0: no limit; one more is refused (E_PUB_FAILED or E_SUB_FAILED, HTTP 503), but none that is on disk at the start")
	fs.IntVar(&o.MaxTopicChannels, "max-topic-channels", 10_000, "greatest number of `channels` of a topic, 0: no limit; likewise")
	fs.IntVar(&o.MaxChannels, "max-channels", 100_000, "greatest number of `channels` of all topics, 0: no limit; likewise")
	fs.Var(&o.TopicLimits, "topic-limit", "contract of a topic of a standalone broker, as `topic:rate:burst[:delay|reject]` in msg/s and messages; its bucket is empty at the start, and whenever the topic is created anew; may be repeated")
	fs.DurationVar(&o.MaxBackdating, "max-backdating", 250*time.Millisecond, "how far before its release a message of a topic with a contract may have had its token, at most 1s: with rate r and burst b at most b + r*(t + this) messages leave in any time t. A broker's own stall is not the publishers' fault, so up to this one delays nothing that conforms; beyond, the contract in real time comes first")
	fs.DurationVar(&o.RejectAfter, "reject-after", 0, "with policy reject: refuse a message whose access delay would be longer")
	fs.DurationVar(&o.DrainTimeout, "drain-timeout", 0, "how long to go on delivering after SIGTERM before what is left is stored; whoever kills nsqd within that loses what memory holds")

	fs.Int64Var(&o.MemoryLimit, "memory-limit", 0, "soft limit of the memory of the Go runtime, in `bytes`: near it garbage is collected more often (default three quarters of what the machine or its cgroup has); GOMEMLIMIT in the environment goes before")

	fs.Int64Var(&o.MaxMemoryBytes, "max-memory-bytes", 0, "greatest size of all messages held in memory, in `bytes`, of each its body and 256; a topic that holds four times what is left goes on as one with --mem-queue-size messages (default half of the memory limit)")

	fs.StringVar(&o.LoadDistributor, "loaddistributor-address", "", "gRPC `host:port` of the loaddistributor to join, or of several with commas (default none: a standalone broker)")
	o.Control.Flags(fs, controlPrefix, "the loaddistributor and the tbadaptor")
	fs.StringVar(&o.BrokerID, "broker-id", "", "`id` of this broker in its cluster, stable across restarts (default broadcast address and TCP port)")
	fs.StringVar(&o.Policy, "policy", string(agent.Available), "what to do when the lease on shares is gone: available (go on with the bases) or strict (stop)")
	fs.Int64Var(&o.Mcap, "mcap", 20_000, "greatest rate, in `msg/s`, that this broker carries within the SLO")

	fs.Var(&o.E2EPercentiles, "e2e-processing-latency-percentile", "`fraction` in (0, 1] of messages whose latency from arrival to FIN is shown and sent to statsd; may be repeated, or a list with commas (default none)")
	alias(fs, "e2e-processing-latency-percentile", "e2e-processing-latency-percentiles")
	fs.DurationVar(&o.E2EWindow, "e2e-processing-latency-window-time", 10*time.Minute, "how far back those latencies go")

	fs.StringVar(&o.StatsdAddress, "statsd-address", "", "UDP `host:port` of a statsd daemon to push figures to (default none)")
	fs.StringVar(&o.StatsdPrefix, "statsd-prefix", "nsq.%s", "`prefix` of the figures' paths; %s stands for broadcast address and HTTP port")
	fs.DurationVar(&o.StatsdInterval, "statsd-interval", time.Minute, "how long between two pushes")
	fs.BoolVar(&o.StatsdMemStats, "statsd-mem-stats", true, "push figures of memory and garbage collection, too")
	fs.IntVar(&o.StatsdPacketSize, "statsd-udp-packet-size", 508, "greatest size of a packet to statsd, in `bytes`")
	fs.BoolVar(&o.StatsdExcludeEphemeral, "statsd-exclude-ephemeral", false, "do not push figures of ephemeral topics and channels")

	fs.Int64Var(&o.SyncEvery, "sync-every", 2500, "`messages`; of NSQ: here --durability says when they are on stable storage")
	fs.DurationVar(&o.SyncTimeout, "sync-timeout", 2*time.Second, "of NSQ; likewise")

	fs.IntVar(&o.NodeID, "node-id", nodeID(hostname()), "`number` in [0, 1024) for NSQ's message ids (default a hash of the hostname); ours do without")
	alias(fs, "node-id", "id")
	fs.StringVar(&o.LogPrefix, "log-prefix", "[nsqd] ", "of NSQ; log lines here are structured and have no prefix")
	fs.IntVar(&o.QueueScanSelectionCount, "queue-scan-selection-count", 20, "of NSQ; timeouts here need no scans")
	fs.IntVar(&o.QueueScanWorkerPoolMax, "queue-scan-worker-pool-max", 4, "of NSQ; timeouts here need no scans")
	fs.BoolVar(&o.Verbose, "verbose", false, "of NSQ, where it has no effect either; use --log-level")
	fs.Var(&o.WorkerID, "worker-id", "of NSQ, where it is called --node-id now")

	o.LogLevel = logLevel(slog.LevelInfo)
	fs.Var(&o.LogLevel, "log-level", "`level`: debug, info, warn, error, or fatal (nothing)")
	fs.StringVar(&o.LogFormat, "log-format", "text", "`format`: text or json")
	return fs
}

// parse reads the flags and the file. It prints --help and --version to out
// and then returns settings.ErrDone.
func parse(args []string, out io.Writer) (*options, error) {
	o := &options{}
	if err := settings.Parse(flags(o), args, "nsqd is SRTM's broker. It speaks the NSQ protocol and enforces rate contracts.", obs.Banner("nsqd"), out); err != nil {
		return nil, err
	}
	return o, o.validate()
}

// Values of --durability.
const (
	durabilityMemory = "memory"
	durabilityFsync  = "fsync"
)

// maxDrain leaves room for the ends of clients and of HTTP requests.
const maxDrain = lifecycle.StopLimit - 3*lifecycle.Grace

func (o *options) validate() error {
	var errs []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	if (o.TLSCert == "") != (o.TLSKey == "") {
		fault(true, "--tls-cert and --tls-key go together")
	} else {
		err := o.readTLS()
		fault(err != nil, "%w", err)
	}
	errs = append(errs, lookupd.ValidateAddresses(o.LookupdTCPAddresses))
	fault(o.HTTPClientConnectTimeout <= 0, "--http-client-connect-timeout %v is not positive", o.HTTPClientConnectTimeout)
	fault(o.HTTPClientRequestTimeout <= 0, "--http-client-request-timeout %v is not positive", o.HTTPClientRequestTimeout)
	if len(o.AuthHTTPAddresses) > 0 {
		var err error
		if o.porters, err = auth.New(o.authConfig()); err != nil {
			errs = append(errs, err)
		}
	}
	if o.HTTPTokenFile != "" {
		var err error
		o.tokens, err = secure.LoadTokens("--http-token-file", o.HTTPTokenFile)
		errs = append(errs, err)
	}
	sc := o.sessionConfig()
	errs = append(errs, sc.Validate(), o.connConfig(sc).Validate(), o.brokerConfig().Validate())

	_, err := hook.ParseMode(o.ArrivalStamps)
	fault(err != nil, "--arrival-stamps: %w", err)
	fault(o.ArrivalStampsConnections < 0, "--arrival-stamps-connections %d is below 0", o.ArrivalStampsConnections)
	err = o.hookConfig().Validate()
	fault(err != nil && o.ArrivalStampsConnections > 0, "--arrival-stamps-connections: %w", err)
	mode := hook.Mode(o.ArrivalStamps)
	fault(o.ArrivalStampsDir != "" && mode != hook.Auto && mode != hook.EBPF, "--arrival-stamps-dir is of no use with --arrival-stamps=%s", mode)
	fault(o.PinArrivalStamps != "" && o.ArrivalStampsDir == "", "--pin-arrival-stamps needs --arrival-stamps-dir")
	fault(o.OutputBuffering != "eager" && o.OutputBuffering != "strict", "--output-buffering %q is neither eager nor strict", o.OutputBuffering)
	fault(o.Durability != durabilityMemory && o.Durability != durabilityFsync, "--durability %q is neither %s nor %s", o.Durability, durabilityMemory, durabilityFsync)
	fault(o.TCPAddress == "", "--tcp-address is empty")
	fault(o.MemoryLimit < 0, "--memory-limit %d is negative", o.MemoryLimit)
	fault(o.MaxHTTPConnections < 0, "--max-http-connections %d is negative", o.MaxHTTPConnections)
	fault(o.MaxMemoryBytes < 0, "--max-memory-bytes %d is negative", o.MaxMemoryBytes)
	fault(endpoint.IsPath(o.HTTPSAddress), "--https-address %q is not a host:port", o.HTTPSAddress)
	fault(o.BroadcastTCPPort < 0 || o.BroadcastTCPPort > 65535, "--broadcast-tcp-port %d is outside [0, 65535]", o.BroadcastTCPPort)
	fault(o.BroadcastHTTPPort < 0 || o.BroadcastHTTPPort > 65535, "--broadcast-http-port %d is outside [0, 65535]", o.BroadcastHTTPPort)
	if o.StatsdAddress != "" {
		errs = append(errs, o.statsdConfig("", func() []broker.Stats { return nil }, slog.New(slog.DiscardHandler)).Validate())
	}
	info, err := os.Stat(o.dataPath())
	fault(err != nil, "--data-path: %w", err)
	fault(err == nil && !info.IsDir(), "--data-path %q is not a folder", o.DataPath)
	fault(o.MaxBytesPerFile < 1<<10, "--max-bytes-per-file %d is less than 1 KiB", o.MaxBytesPerFile)
	fault(o.MaxUnfinished < 0, "--max-unfinished %d is negative", o.MaxUnfinished)
	fault(o.MaxLogBytes < 0, "--max-log-bytes %d is negative", o.MaxLogBytes)
	fault(o.SyncEvery < 1, "--sync-every %d is less than 1 message", o.SyncEvery)
	fault(o.SyncTimeout <= 0, "--sync-timeout %v is not positive", o.SyncTimeout)
	fault(o.NodeID < 0 || o.NodeID >= nodeIDs, "--node-id %d is outside [0, %d)", o.NodeID, nodeIDs)
	fault(o.E2EWindow <= 0, "--e2e-processing-latency-window-time %v is not positive", o.E2EWindow)
	fault(o.NudgeAfter < 0, "--nudge-consumers-after %v is negative", o.NudgeAfter)
	fault(o.DrainTimeout < 0 || o.DrainTimeout > maxDrain, "--drain-timeout %v is outside [0, %v]: a daemon has %v to stop", o.DrainTimeout, maxDrain, lifecycle.StopLimit)

	fault(o.TLSRequired != tlsOptional && !o.tlsOffered(), "--tls-required needs --tls-cert and --tls-key")
	switch o.TLSClientAuthPolicy {
	case "", authRequire, authVerify:
		fault(o.TLSClientAuthPolicy != "" && !o.tlsOffered(), "--tls-client-auth-policy needs --tls-cert and --tls-key")
	default:
		fault(true, "--tls-client-auth-policy %q is neither %s nor %s", o.TLSClientAuthPolicy, authRequire, authVerify)
	}

	fault(o.Policy != string(agent.Available) && o.Policy != string(agent.Strict), "--policy %q is neither %s nor %s", o.Policy, agent.Available, agent.Strict)
	var controlErr error
	o.controlOptions, controlErr = o.Control.Load(controlPrefix)
	errs = append(errs, controlErr)
	if o.managed() {
		fault(o.Mcap <= 0, "--mcap %d is not a positive rate", o.Mcap)
		fault(len(o.TopicLimits) > 0, "--topic-limit is for standalone brokers: in a cluster the loaddistributor gives the contracts")
		fault(endpoint.IsPath(o.TCPAddress) && o.BroadcastTCPPort == 0, "--loaddistributor-address needs a TCP port to advertise, and --tcp-address has none")
		fault((o.HTTPAddress == "" || endpoint.IsPath(o.HTTPAddress)) && o.BroadcastHTTPPort == 0, "--loaddistributor-address needs an HTTP port to advertise, and --http-address has none")
	}
	return errors.Join(errs...)
}

// dataPath is the folder that --data-path means.
func (o *options) dataPath() string { return cmp.Or(o.DataPath, ".") }

// controlPrefix begins the flags of the control plane's credentials: those
// without are NSQ's own.
const controlPrefix = "control-"

// managed reports whether a loaddistributor places this broker's topics.
func (o *options) managed() bool { return o.LoadDistributor != "" }

// tlsOffered reports whether there are flags for TLS.
func (o *options) tlsOffered() bool { return o.TLSCert != "" && o.TLSKey != "" }

// nodeIDs is how many there are.
const nodeIDs = 1024

// nodeID is a host's by default.
func nodeID(host string) int {
	h := fnv.New32a()
	h.Write([]byte(host))
	return int(h.Sum32() % nodeIDs)
}

// hostname is what to say where nothing else is configured.
func hostname() string {
	host, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return host
}
