package main

import (
	"cmp"
	"crypto/tls"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	admission "github.com/srtm-io/srtm/admission/client"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/lookupd"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/nsqd/replicated"
	"github.com/srtm-io/srtm/nsqd/statsd"
)

// options has the configuration. Each option is a flag, or a key of the same name in the TOML file,
// where _ may stand for -. A flag overrides the file. Flags that NSQ's nsqd has keep their NSQ names,
// meanings and defaults.
type options struct {
	// Configurations of the parts: most fields are flags, validate sets the rest.
	addresses addresses
	tls       encryption
	session   session.Config
	conn      conn.Config
	broker    broker.Config
	storage   broker.StorageConfig
	jetstream replicated.Config
	hook      hook.Config
	stamps    hook.Mode
	auth      auth.Config
	mqtt      mqtt.Config
	statsd    statsd.Config
	agent     agent.Config
	lookupds  []string
	api       httpapi.Config
	admission admission.Config
	ignored   ignored

	// Flags that several parts need.
	durability, dataPath    string
	forward                 string
	region, zone            string
	topologyAware           bool
	tokenFile               string
	control                 secure.ClientConfig // for the loaddistributor and the tbadaptor
	jetstreamTLS            secure.ClientConfig
	drainTimeout, e2eWindow time.Duration
	pinFor, releaseTrace    string
	memQueueSize            int
	memoryLimit             int64

	// Derived by validate.
	authServers *auth.Servers  // nil: clients need no authorization
	tokens      *secure.Tokens // nil: no --http-token-file
	maxForwards int            // connections to other brokers; 0: set by fit
}

func (o *options) program() *daemon.Program {
	return &daemon.Program{
		Name: "nsqd", About: "nsqd is SRTM's broker. It speaks the NSQ protocol and enforces rate contracts.",
		Examples: `  nsqd --data-path=/var/lib/nsqd
  nsqd --data-path=/var/lib/nsqd --topic-limit=orders:100:20
  nsqd --data-path=/var/lib/nsqd --loaddistributor-address=ld.example.com:4170`,
		Banner: program.Banner("nsqd"), Groups: o.groups(), Validate: o.validate, Run: o.run,
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
	devices    = "MQTT clients"
	statistics = "Statistics for NSQ and statsd"
)

// groups lists the flags. A part of the broker defines the flags that it alone needs. Flags that several
// parts need are defined here.
func (o *options) groups() []daemon.Group {
	o.session = session.DefaultConfig()
	o.conn.Session = &o.session
	return []daemon.Group{
		{Title: daemon.Listen, Flags: o.addresses.Flags},
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
		{Title: daemon.Limits, Flags: o.addresses.LimitFlags},
		{Title: daemon.Limits, Flags: o.conn.LimitFlags},
		{Title: daemon.Limits, Flags: o.broker.LimitFlags},
		{Title: daemon.Limits, Flags: o.api.Flags},
		{Title: daemon.Security, Flags: o.securityFlags},
		{Title: daemon.Security, Flags: o.tls.Flags},
		{Title: daemon.Security, Flags: o.auth.Flags},
		{Title: clients, Flags: o.conn.ClientFlags},
		{Title: devices, Flags: o.mqtt.Flags},
		{Title: statistics, Flags: o.statsFlags},
		{Title: statistics, Flags: o.statsd.Flags},
		{Title: daemon.Ask, Flags: func(fs *flag.FlagSet) {
			o.admission.Flags(fs, "for tenant/T/http, a credit a message, before /pub and /mpub of a caller of tenant T")
		}},
		{Title: daemon.Ignored, Flags: o.ignored.Flags},
	}
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
	fs.Int64Var(&o.memoryLimit, "memory-limit", 0, "soft limit of the memory of the Go runtime, in `bytes`: near it garbage is collected more often (default three quarters of what the machine or its cgroup has); GOMEMLIMIT in the environment takes precedence")
}

func (o *options) securityFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.tokenFile, "http-token-file", "", "`file` of tokens, each line a role and a token; administrative HTTP routes then require a token of role admin, at every address (default none: NSQ's routes are open to any client, and /topic/limit to clients on this host)")
	o.jetstreamTLS.TLSFlags(fs, "jetstream-", "NATS")
	o.control.Flags(fs, controlPrefix, "the loaddistributor and the tbadaptor")
}

func (o *options) statsFlags(fs *flag.FlagSet) {
	fs.Func("e2e-processing-latency-percentile", "`fraction` in (0, 1] of messages whose latency from arrival to FIN is shown and sent to statsd; may be repeated, or a list with commas (default none)", o.percentiles)
	daemon.Alias(fs, "e2e-processing-latency-percentile", "e2e-processing-latency-percentiles", daemon.NSQName)
	fs.DurationVar(&o.e2eWindow, "e2e-processing-latency-window-time", 10*time.Minute, "how far back those latencies go")
}

// percentiles adds the fractions of a comma-separated list.
func (o *options) percentiles(list string) error {
	for text := range strings.SplitSeq(list, ",") {
		v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(v > 0 && v <= 1) {
			return fmt.Errorf("%q is not a fraction in (0, 1]", text)
		}
		o.statsd.Percentiles = append(o.statsd.Percentiles, v)
	}
	return nil
}

const topologyAware = "topology-aware-consumption"

// experiment accepts the name of an NSQ experiment that nsqd implements.
func (o *options) experiment(s string) error {
	if o.topologyAware = s == topologyAware; !o.topologyAware {
		return fmt.Errorf("%q is not %s, the only experiment there is", s, topologyAware)
	}
	return nil
}

// durabilityOf returns --durability for the loaddistributor.
func (o *options) durabilityOf() srtmv1.Durability {
	return map[string]srtmv1.Durability{
		durabilityMemory: srtmv1.Durability_DURABILITY_MEMORY, durabilityFsync: srtmv1.Durability_DURABILITY_FSYNC,
		durabilityReplicated: srtmv1.Durability_DURABILITY_REPLICATED,
	}[o.durability]
}

// Values of --durability and --forward.
const (
	durabilityMemory     = "memory"
	durabilityFsync      = "fsync"
	durabilityReplicated = "replicated"

	forwardOn  = "on"
	forwardOff = "off"
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
	errs.Add(o.tls.load())
	if o.conn.TLS = o.tls.config; o.conn.TLS != nil {
		o.conn.Hold = o.tls.server.Hold
	}
	errs.Add(lookupd.ValidateAddresses(o.lookupds))
	if o.tls.roots != nil {
		o.auth.TLS = &tls.Config{RootCAs: o.tls.roots}
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
	s.TLSRequired = s.TLS && o.tls.required != tlsOptional
	s.AuthRequired = o.authServers != nil
	s.Forwarded = o.forwards()
	s.Version, s.Limits.Pace = program.NSQ, o.broker.Pacing != broker.PaceOff
	errs.Add(s.Validate())
	if o.topologyAware {
		o.conn.Region, o.conn.Zone = o.region, o.zone
	}
	if o.authServers != nil {
		o.conn.Auth = o.authServers
	}
	errs.Add(o.conn.Validate())
	errs.Add(o.mqtt.CheckFlags())
	errs.If(o.addresses.mqtts != "" && !s.TLS, "--mqtts-address needs --tls-cert and --tls-key")
	errs.If(o.addresses.mqtt != "" && s.TLSRequired, "--mqtt-address: --tls-required refuses clients without TLS; use --mqtts-address")
	errs.If(o.mqtt.Session.MaxPacketSize > s.Limits.MaxMessageSize && o.servesMQTT(), "--mqtt-max-packet-size %d exceeds --max-msg-size %d", o.mqtt.Session.MaxPacketSize, s.Limits.MaxMessageSize)
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
	errs.Add(o.ignored.CheckFlags())
	errs.Add(o.addresses.CheckFlags(o.managed()))
	errs.Add(faults.OneOf("forward", o.forward, forwardOn, forwardOff))
	errs.If(o.memoryLimit < 0, "--memory-limit %d is negative", o.memoryLimit)
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
	}
	return errs.Err()
}

// managed reports whether a loaddistributor places this broker's topics.
func (o *options) managed() bool { return o.agent.LoadDistributor != "" }

// servesMQTT reports whether there is an address for MQTT clients.
func (o *options) servesMQTT() bool { return o.addresses.mqtt != "" || o.addresses.mqtts != "" }

// forwards reports whether publishes to topics on other brokers are forwarded.
func (o *options) forwards() bool { return o.managed() && o.forward == forwardOn }

// node returns the description of this process, once the process listens. web may be nil.
func (o *options) node(tcp, web net.Addr) httpapi.Node {
	n := httpapi.Node{
		Version:          program.NSQ,
		Release:          program.Version(),
		BroadcastAddress: cmp.Or(o.addresses.broadcast, hostname()),
		Hostname:         hostname(),
		TCPPort:          conn.Port(tcp),
		HTTPPort:         conn.Port(web),
		StartTime:        time.Now(),
	}
	n.BroadcastTCPPort, n.BroadcastHTTPPort = cmp.Or(o.addresses.broadcastTCPPort, n.TCPPort), cmp.Or(o.addresses.broadcastHTTPPort, n.HTTPPort)
	n.BrokerID = cmp.Or(o.agent.BrokerID, fmt.Sprintf("%s-%d", n.BroadcastAddress, n.BroadcastTCPPort))
	return n
}

// hostname returns the default name of this host.
func hostname() string {
	host, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return host
}
