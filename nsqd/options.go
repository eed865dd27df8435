package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/session"
	"github.com/srtm-io/srtm/nsqd/wire"
	"github.com/srtm-io/srtm/tokenbucket"
)

// options are everything that can be configured: by flag, or by the same name
// in the TOML file, where _ may stand for -. A flag wins over the file.
type options struct {
	TCPAddress, HTTPAddress         string
	BroadcastAddress                string
	BroadcastTCPPort                int
	BroadcastHTTPPort               int
	LoadDistributor                 string
	BrokerID                        string
	Mcap                            int64
	MemQueueSize                    int
	MaxMsgSize, MaxBodySize         int
	MsgTimeout, MaxMsgTimeout       time.Duration
	MaxReqTimeout                   time.Duration
	MaxRdyCount                     int
	ClientTimeout                   time.Duration
	MaxHeartbeatInterval            time.Duration
	OutputBuffering                 string
	OutputBufferTimeout             time.Duration
	MinOutputBufferTimeout          time.Duration
	MaxOutputBufferTimeout          time.Duration
	MaxOutputBufferSize             int
	MaxConnections                  int
	ArrivalStamps                   string
	TopicLimits                     topicLimits
	RejectAfter                     time.Duration
	WriteTimeout                    time.Duration
	DrainTimeout                    time.Duration
	LogLevel, LogFormat, ConfigFile string
	version                         bool
}

// errDone means that the answer was printed and there is nothing to run.
var errDone = errors.New("done")

func flags(o *options) *flag.FlagSet {
	d, w := session.DefaultConfig(), wire.DefaultLimits()
	fs := flag.NewFlagSet("nsqd", flag.ContinueOnError)
	fs.StringVar(&o.TCPAddress, "tcp-address", "0.0.0.0:4150", "`host:port` for NSQ clients")
	fs.StringVar(&o.HTTPAddress, "http-address", "0.0.0.0:4151", "`host:port` for HTTP")
	fs.StringVar(&o.BroadcastAddress, "broadcast-address", "", "`host` that clients are told to dial (default the hostname)")
	fs.IntVar(&o.BroadcastTCPPort, "broadcast-tcp-port", 0, "TCP `port` that clients are told to dial (default that of --tcp-address)")
	fs.IntVar(&o.BroadcastHTTPPort, "broadcast-http-port", 0, "HTTP `port` that clients are told to dial (default that of --http-address)")
	fs.StringVar(&o.LoadDistributor, "loaddistributor-address", "", "gRPC `host:port` of the loaddistributor to join (default none: a standalone broker)")
	fs.StringVar(&o.BrokerID, "broker-id", "", "`id` of this broker in its cluster, stable across restarts (default broadcast address and TCP port)")
	fs.Int64Var(&o.Mcap, "mcap", 20_000, "greatest rate, in `msg/s`, that this broker carries within the SLO")
	fs.IntVar(&o.MemQueueSize, "mem-queue-size", 10_000, "greatest number of `messages` held per topic and per channel")
	fs.IntVar(&o.MaxMsgSize, "max-msg-size", w.MaxMessageSize, "greatest size of a message, in `bytes`")
	fs.IntVar(&o.MaxBodySize, "max-body-size", w.MaxBodySize, "greatest size of a command's body, in `bytes`")
	fs.DurationVar(&o.MsgTimeout, "msg-timeout", d.MsgTimeout, "how long a subscriber may hold a message that it does not finish")
	fs.DurationVar(&o.MaxMsgTimeout, "max-msg-timeout", d.MaxMsgTimeout, "greatest message timeout a client may ask for")
	fs.DurationVar(&o.MaxReqTimeout, "max-req-timeout", w.MaxReqTimeout, "greatest delay of a requeue or deferred publish")
	fs.IntVar(&o.MaxRdyCount, "max-rdy-count", w.MaxRdy, "greatest RDY count of a client")
	fs.DurationVar(&o.ClientTimeout, "client-timeout", 2*d.HeartbeatInterval, "close a client that is silent for so long; heartbeats go out at half of it")
	fs.DurationVar(&o.MaxHeartbeatInterval, "max-heartbeat-interval", d.MaxHeartbeatInterval, "greatest heartbeat interval a client may ask for")
	fs.StringVar(&o.OutputBuffering, "output-buffering", "eager", "`policy` of writing to subscribers: eager (as soon as nothing more is ready) or strict (by the client's buffer and timeout, as upstream)")
	fs.DurationVar(&o.OutputBufferTimeout, "output-buffer-timeout", d.OutputBufferTimeout, "output buffer timeout of clients that name none")
	fs.DurationVar(&o.MinOutputBufferTimeout, "min-output-buffer-timeout", d.MinOutputBufferTimeout, "least output buffer timeout a client may ask for")
	fs.DurationVar(&o.MaxOutputBufferTimeout, "max-output-buffer-timeout", d.MaxOutputBufferTimeout, "greatest output buffer timeout a client may ask for")
	fs.IntVar(&o.MaxOutputBufferSize, "max-output-buffer-size", d.MaxOutputBufferSize, "greatest output buffer a client may ask for, in `bytes`")
	fs.IntVar(&o.MaxConnections, "max-connections", 0, "greatest number of client `connections` (default no limit)")
	fs.StringVar(&o.ArrivalStamps, "arrival-stamps", string(hook.Auto), "`source` of arrival times: auto, ebpf, sotimestamp or off")
	fs.Var(&o.TopicLimits, "topic-limit", "contract of a topic of a standalone broker, as `topic:rate:burst[:delay|reject]` in msg/s and messages; may be repeated")
	fs.DurationVar(&o.RejectAfter, "reject-after", 0, "with policy reject: refuse a message whose access delay would be longer")
	fs.DurationVar(&o.WriteTimeout, "write-timeout", 30*time.Second, "close a client that takes nothing for so long")
	fs.DurationVar(&o.DrainTimeout, "drain-timeout", 10*time.Second, "how long to go on delivering after SIGTERM")
	fs.StringVar(&o.LogLevel, "log-level", "info", "`level`: debug, info, warn or error")
	fs.StringVar(&o.LogFormat, "log-format", "text", "`format`: text or json")
	fs.StringVar(&o.ConfigFile, "config", "", "TOML `file` with any of these settings")
	fs.BoolVar(&o.version, "version", false, "print the version and exit")
	return fs
}

// parse reads the flags and the file. It prints --help and --version to out
// and then returns errDone.
func parse(args []string, out io.Writer) (*options, error) {
	o := &options{}
	fs := flags(o)
	fs.SetOutput(io.Discard) // lifecycle prints the error, once
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fs.SetOutput(out)
		fmt.Fprintln(out, "nsqd is SRTM's broker. It speaks the NSQ protocol and enforces rate contracts.\n\nUsage: nsqd [flags]")
		fs.PrintDefaults()
		return nil, errDone
	case err != nil:
		return nil, err
	case fs.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	case o.version:
		fmt.Fprintln(out, obs.Version())
		return nil, errDone
	}
	if o.ConfigFile != "" {
		if err := readFile(o.ConfigFile, fs); err != nil {
			return nil, err
		}
	}
	return o, o.validate()
}

// readFile sets the flags that the file names and the command line does not.
func readFile(path string, fs *flag.FlagSet) error {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var file map[string]any
	if _, err := toml.DecodeFile(path, &file); err != nil {
		return fmt.Errorf("--config %s: %w", path, err)
	}
	names := make([]string, 0, len(file))
	for name := range file {
		names = append(names, name)
	}
	slices.Sort(names)
	var errs []error
	for _, key := range names {
		name := strings.ReplaceAll(key, "_", "-")
		if name == "config" || name == "version" || fs.Lookup(name) == nil {
			errs = append(errs, fmt.Errorf("--config %s: unknown setting %q", path, key))
			continue
		}
		if given[name] {
			continue
		}
		values, isList := file[key].([]any)
		if !isList {
			values = []any{file[key]}
		}
		for _, v := range values {
			if err := fs.Set(name, fmt.Sprint(v)); err != nil {
				errs = append(errs, fmt.Errorf("--config %s: %s: %w", path, key, err))
			}
		}
	}
	return errors.Join(errs...)
}

func (o *options) validate() error {
	sc := o.sessionConfig()
	cc := o.connConfig()
	errs := []error{sc.Validate(), cc.Validate(), o.brokerConfig().Validate()}
	if _, err := hook.ParseMode(o.ArrivalStamps); err != nil {
		errs = append(errs, fmt.Errorf("--arrival-stamps: %w", err))
	}
	if o.OutputBuffering != "eager" && o.OutputBuffering != "strict" {
		errs = append(errs, fmt.Errorf("--output-buffering %q is neither eager nor strict", o.OutputBuffering))
	}
	for name, port := range map[string]int{"--broadcast-tcp-port": o.BroadcastTCPPort, "--broadcast-http-port": o.BroadcastHTTPPort} {
		if port < 0 || port > 65535 {
			errs = append(errs, fmt.Errorf("%s %d is outside [0, 65535]", name, port))
		}
	}
	if o.managed() {
		if o.Mcap <= 0 {
			errs = append(errs, fmt.Errorf("--mcap %d is not a positive rate", o.Mcap))
		}
		if len(o.TopicLimits) > 0 {
			errs = append(errs, errors.New("--topic-limit is for standalone brokers: in a cluster the loaddistributor gives the contracts"))
		}
	}
	if o.DrainTimeout < 0 {
		errs = append(errs, fmt.Errorf("--drain-timeout %v is negative", o.DrainTimeout))
	}
	return errors.Join(errs...)
}

// managed reports whether a loaddistributor places this broker's topics.
func (o *options) managed() bool { return o.LoadDistributor != "" }

func (o *options) sessionConfig() *session.Config {
	c := session.DefaultConfig()
	c.Limits = wire.Limits{
		MaxMessageSize: o.MaxMsgSize,
		MaxBodySize:    o.MaxBodySize,
		MaxReqTimeout:  o.MaxReqTimeout,
		MaxRdy:         o.MaxRdyCount,
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
	c.Version = obs.Release
	return &c
}

func (o *options) connConfig() conn.Config {
	return conn.Config{
		Session:         o.sessionConfig(),
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

// node is what this process says of itself, once it listens.
func (o *options) node(tcp, web net.Addr) httpapi.Node {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	n := httpapi.Node{
		Version:          obs.Version(),
		BroadcastAddress: o.BroadcastAddress,
		Hostname:         host,
		TCPPort:          o.BroadcastTCPPort,
		HTTPPort:         o.BroadcastHTTPPort,
		StartTime:        time.Now(),
		BrokerID:         o.BrokerID,
	}
	if n.BroadcastAddress == "" {
		n.BroadcastAddress = host
	}
	if n.TCPPort == 0 {
		n.TCPPort = tcp.(*net.TCPAddr).Port
	}
	if n.HTTPPort == 0 {
		n.HTTPPort = web.(*net.TCPAddr).Port
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

// topicLimit is a standalone broker's contract.
type topicLimit struct {
	Topic  string
	Rate   tokenbucket.Rate
	Burst  int64
	Reject bool
}

// topicLimits is a repeatable flag.
type topicLimits []topicLimit

func (t *topicLimits) String() string { return "" }

// Set adds "topic:rate:burst[:delay|reject]".
func (t *topicLimits) Set(s string) error {
	parts := strings.Split(s, ":")
	if len(parts) != 3 && len(parts) != 4 {
		return errors.New("want topic:rate:burst or topic:rate:burst:policy")
	}
	l := topicLimit{Topic: parts[0]}
	if !wire.ValidTopicName(l.Topic) {
		return fmt.Errorf("topic %q is not a valid name", l.Topic)
	}
	rate, err := strconv.ParseFloat(parts[1], 64)
	if err != nil {
		return fmt.Errorf("rate %q is not a number of messages per second", parts[1])
	}
	if l.Burst, err = strconv.ParseInt(parts[2], 10, 64); err != nil {
		return fmt.Errorf("burst %q is not a number of messages", parts[2])
	}
	l.Rate = tokenbucket.PerSecond(rate)
	share := tokenbucket.Share{Rate: l.Rate, Burst: l.Burst}
	if err := share.Validate(); err != nil {
		return err
	}
	if share.IsZero() {
		return errors.New("a rate and a burst of 0 would stop the topic")
	}
	if len(parts) == 4 {
		switch parts[3] {
		case "delay":
		case "reject":
			l.Reject = true
		default:
			return fmt.Errorf("policy %q is neither delay nor reject", parts[3])
		}
	}
	*t = append(*t, l)
	return nil
}
