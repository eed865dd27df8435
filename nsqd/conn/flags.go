package conn

import (
	"flag"
	"fmt"
	"runtime"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
)

// ClusterFlags defines the flag of connections in a cluster.
func (c *Config) ClusterFlags(fs *flag.FlagSet) {
	fs.DurationVar(&c.NudgeAfter, "nudge-consumers-after", 20*time.Second, "how long a consumer must have been connected before the broker may end its connection when the topic moves, so that the consumer looks up the topic again; at least LookupdPollInterval x LookupdPollJitter of the consumer, because go-nsq does not look up earlier")
}

// LimitFlags defines the flags of limits. c.Session holds the defaults.
func (c *Config) LimitFlags(fs *flag.FlagSet) {
	s := c.Session
	fs.IntVar(&s.Limits.MaxMessageSize, "max-msg-size", s.Limits.MaxMessageSize, "maximum size of a message, in `bytes`")
	fs.IntVar(&s.Limits.MaxBodySize, "max-body-size", s.Limits.MaxBodySize, "maximum size of an MPUB's body, in `bytes`; IDENTIFY and AUTH have at most 64 KiB of it")
	fs.IntVar(&c.MaxConnections, "max-connections", 0, "maximum number of client `connections`; one more is closed (default what the descriptor limit leaves beside HTTP and files, and one for each 16 KiB of the memory limit)")
	fs.DurationVar(&c.WriteTimeout, "write-timeout", 30*time.Second, "close a client that reads nothing for so long")
	loops := (*ioLoops)(c)
	_ = loops.Set(autoLoops)
	fs.Var(loops, "io-loops", "`number` of event loops that serve connections, on Linux; auto: 1, and more, up to one per processor, while a loop is overloaded and a processor idle; 0: a goroutine for each connection")
}

// ClientFlags defines the flags that bound the requests of NSQ clients. c.Session holds the defaults.
func (c *Config) ClientFlags(fs *flag.FlagSet) {
	s := c.Session
	fs.DurationVar(&s.MsgTimeout, "msg-timeout", s.MsgTimeout, "how long a subscriber may hold a message that it does not finish")
	fs.DurationVar(&s.MaxMsgTimeout, "max-msg-timeout", s.MaxMsgTimeout, "maximum message timeout a client may request")
	fs.DurationVar(&s.Limits.MaxReqTimeout, "max-req-timeout", s.Limits.MaxReqTimeout, "maximum delay of a requeue")
	fs.DurationVar(&s.Limits.MaxDeferTimeout, "max-defer-timeout", 0, "maximum delay of a deferred publish (default --max-req-timeout)")
	fs.IntVar(&s.Limits.MaxRdy, "max-rdy-count", s.Limits.MaxRdy, "maximum RDY count of a client")
	fs.DurationVar(&c.clientTimeout, "client-timeout", 2*s.HeartbeatInterval, "close a client that is silent for so long; heartbeats go out at half of it")
	fs.DurationVar(&s.MaxHeartbeatInterval, "max-heartbeat-interval", s.MaxHeartbeatInterval, "maximum heartbeat interval a client may request")
	fs.StringVar(&c.outputBuffering, "output-buffering", bufferEager, "`policy` of writing to subscribers: eager (as soon as nothing more is ready) or strict (by the client's buffer and timeout, as upstream)")
	fs.DurationVar(&s.OutputBufferTimeout, "output-buffer-timeout", s.OutputBufferTimeout, "output buffer timeout of clients that name none")
	fs.DurationVar(&s.MinOutputBufferTimeout, "min-output-buffer-timeout", s.MinOutputBufferTimeout, "minimum output buffer timeout a client may request")
	fs.DurationVar(&s.MaxOutputBufferTimeout, "max-output-buffer-timeout", s.MaxOutputBufferTimeout, "maximum output buffer timeout a client may request")
	fs.IntVar(&s.MaxOutputBufferSize, "max-output-buffer-size", s.MaxOutputBufferSize, "maximum output buffer a client may request, in `bytes`")
	fs.BoolVar(&s.Snappy, "snappy", s.Snappy, "let clients have Snappy compression")
	fs.BoolVar(&s.Deflate, "deflate", s.Deflate, "let clients have DEFLATE compression")
	fs.IntVar(&s.MaxDeflateLevel, "max-deflate-level", s.MaxDeflateLevel, "maximum DEFLATE `level` a client can have, 1 to 9; more takes more CPU")
}

// Values of --output-buffering.
const (
	bufferEager  = "eager"
	bufferStrict = "strict"
)

// Complete sets the fields that follow from several flags, and returns the problems of flags that
// Validate cannot see.
func (c *Config) Complete() error {
	s := c.Session
	s.HeartbeatInterval = min(c.clientTimeout/2, s.MaxHeartbeatInterval)
	s.OutputBufferSize = min(s.OutputBufferSize, s.MaxOutputBufferSize)
	c.StrictBuffering = c.outputBuffering == bufferStrict
	return faults.OneOf("output-buffering", c.outputBuffering, bufferEager, bufferStrict)
}

// ioLoops is the number of event loops, or autoLoops.
type ioLoops Config

const (
	autoLoops = "auto"
	maxLoops  = 1024 // each loop has its own memory
)

func (l *ioLoops) String() string {
	if l.MaxLoops > l.Loops {
		return autoLoops
	}
	return strconv.Itoa(l.Loops)
}

// Set takes a number or autoLoops. On systems without event loops autoLoops is 0.
func (l *ioLoops) Set(s string) error {
	n, err := strconv.Atoi(s)
	switch {
	case s == autoLoops && runtime.GOOS == "linux":
		l.Loops, l.MaxLoops = 1, runtime.GOMAXPROCS(0)
		return nil
	case s == autoLoops:
		n = 0
	case err != nil || n < 0:
		return fmt.Errorf("%q is neither a number of event loops nor %s", s, autoLoops)
	}
	l.Loops, l.MaxLoops = n, n
	return nil
}
