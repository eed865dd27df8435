//go:build linux

package load

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/local"
)

// Broker describes a broker that can be measured. A Broker is immutable.
type Broker struct {
	Name, Path string
	Dialect
	Args func(at Place, s Scenario) ([]string, error)
	NSQ  bool // speaks the NSQ protocol
	Bare bool // without TLS; discards messages while no subscriber is connected
	// Pprof reports whether the broker serves Go's metrics at Place.Web.
	Pprof bool
	// Fields of a Pair.
	control   string // path of the loaddistributor; empty without a second broker
	forwarded bool
	// Fields of a broker with NATS servers. The first NATS server is the broker if Path is
	// empty. Otherwise the broker stores in the servers.
	nats     string // path of nats-server
	replicas int    // number of NATS servers; 0: none
	// Prepare, if not nil, prepares the broker after the broker has started to serve.
	Prepare func(ctx context.Context, at Place) error
	// BeforeStop, if not nil, is called after the measurement, before the broker stops.
	BeforeStop func(ctx context.Context, at Place) error
	// AfterExit, if not nil, adds the broker's own metrics to r after the broker has exited.
	AfterExit func(at Place, s Scenario, r *Result) error
}

// Place is the folder and the addresses of a running broker.
type Place struct {
	Dir      string // working directory, initially empty
	TCP, Web string // host:port
}

func port(address string) string {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		panic(err) // this package chose the address
	}
	return port
}

// NSQ is a broker that speaks the NSQ protocol and accepts nsqd's flags, plus flags. A
// subscriber sends identify, members of a JSON object, in IDENTIFY.
func NSQ(name, path, identify string, flags func(Scenario) []string) Broker {
	return Broker{Name: name, Path: path, Dialect: nsqDialect(identify), NSQ: true, Pprof: true, Args: func(at Place, s Scenario) ([]string, error) {
		memory := 10_000_000
		if s.Memory > 0 {
			memory = s.Memory
		}
		args := []string{
			"--data-path=" + at.Dir, "--tcp-address=" + at.TCP, "--http-address=" + at.Web, "--https-address=127.0.0.1:0",
			"--broadcast-address=127.0.0.1", "--log-level=error", fmt.Sprintf("--mem-queue-size=%d", memory),
		}
		if s.TLS {
			args = append(args, "--tls-cert="+filepath.Join(at.Dir, certFile), "--tls-key="+filepath.Join(at.Dir, keyFile))
		}
		return append(args, flags(s)...), nil
	}}
}

// Ours is SRTM's nsqd. The topic's contract is twice the scenario's rate. If the sender
// keeps a contract, the topic has the same contract. stamps selects the source of arrival
// stamps; if empty, nsqd uses the best source available.
func Ours(path, stamps string) Broker {
	b := NSQ("srtm", path, "", func(s Scenario) []string {
		rate, burst := 2*s.Rate, max(1000, int(s.Rate)/5)
		if rate == 0 {
			rate, burst = 100_000_000, 1_000_000
		}
		var args []string
		if s.Burst > 0 {
			// One extra token: the network adds some microseconds of jitter, so a message
			// can arrive just before the broker's bucket earns the token that the sender
			// spent.
			contract := Contract(s.Rate, s.Burst+1)
			rate, burst = contract.Rate.PerSecond(), int(contract.Burst)
			args = append(args, "--release-trace="+traceFile)
		}
		args = append(args, fmt.Sprintf("--topic-limit=%s:%g:%d", Topic, rate, burst))
		if s.Fsync {
			args = append(args, "--durability=fsync")
		}
		if stamps != "" {
			args = append(args, "--arrival-stamps="+stamps)
		}
		return args
	})
	b.AfterExit = readReleaseTrace
	if stamps != "" {
		b.Name += "-" + stamps
	}
	return b
}

// Expiring is Ours with a TTL, maximum attempts and a dead letter topic that no message reaches.
func Expiring(path string) Broker {
	b := Ours(path, "")
	b.Name += "-ttl"
	b.Prepare = func(ctx context.Context, at Place) error {
		for _, order := range []string{"/topic/create?topic=" + Topic, "/topic/expiry?ttl=1h&max_attempts=5&dead_letter=" + Topic + ".dead&topic=" + Topic} {
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+at.Web+order, nil)
			if err != nil {
				return err
			}
			r.Close = true // the connection
			client := &http.Client{Timeout: patience}
			answer, err := client.Do(r)
			if err != nil {
				return err
			}
			if answer.Body.Close(); answer.StatusCode != http.StatusOK {
				return fmt.Errorf("%s: %s", order, answer.Status)
			}
		}
		return nil
	}
	return b
}

// Unbuffered makes a broker send each message immediately. A subscriber sends Unbuffered in
// IDENTIFY.
const Unbuffered = `"output_buffer_size":-1,"output_buffer_timeout":-1`

// AnotherNSQ is the original nsqd, or a fork that accepts the same flags.
func AnotherNSQ(name, path, identify string) Broker {
	return NSQ(name, path, identify, func(s Scenario) []string {
		if s.Fsync {
			return []string{"--sync-every=1", "--mem-queue-size=0"}
		}
		return nil
	})
}

// Floor is bench/floor, a broker that does the least possible work.
func Floor(path string) Broker {
	return Broker{Name: "floor", Path: path, Dialect: nsqDialect(""), NSQ: true, Bare: true, Args: func(at Place, s Scenario) ([]string, error) {
		args := []string{"--tcp-address=" + at.TCP}
		if s.Fsync {
			args = append(args, "--fsync="+filepath.Join(at.Dir, "messages"))
		}
		return args, nil
	}}
}

// NATS is nats-server, without streams.
func NATS(path string) Broker {
	return Broker{Name: "nats", Path: path, Dialect: natsDialect(), Pprof: true, Args: func(at Place, _ Scenario) ([]string, error) {
		return []string{"-a", "127.0.0.1", "-p", port(at.TCP), "--profile", port(at.Web)}, nil
	}}
}

// Redis is redis-server with streams, in memory.
func Redis(path string) Broker {
	return Broker{Name: "redis", Path: path, Dialect: redisDialect(), Args: func(at Place, _ Scenario) ([]string, error) {
		return []string{"--port", port(at.TCP), "--bind", "127.0.0.1", "--dir", at.Dir, "--save", "", "--appendonly", "no", "--maxclients", "12000", "--loglevel", "warning"}, nil
	}}
}

// running is a started broker.
type running struct {
	*local.Process
	at      Place
	publish string // address for publishers
	web     bool
	beside  []*local.Process // other processes, in start order
	counted []*local.Process // processes whose processor time and memory count: the broker's, and some beside

	// Fields of a Pair.
	control string // the loaddistributor's HTTP address
	other   string // folder of the other broker
}

// start starts a broker for a scenario in an empty folder.
func (b Broker) start(s Scenario) (_ *running, err error) {
	dir, err := os.MkdirTemp("", "srtm-load-")
	if err != nil {
		return nil, err
	}
	r := &running{at: Place{Dir: dir}, web: b.Pprof}
	defer func() {
		if err != nil {
			r.stop()
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	var join []string
	if b.control != "" {
		r.other = filepath.Join(dir, "other")
		if err := os.Mkdir(r.other, 0o700); err != nil {
			return nil, err
		}
		if join, err = r.startBeside(b, s); err != nil {
			return nil, err
		}
	}
	if b.replicas > 0 {
		var urls string
		if r.beside, urls, err = local.NATS(b.nats, dir, b.replicas); err != nil {
			return nil, err
		}
		r.counted = slices.Clone(r.beside)
		if b.Path == "" {
			r.Process, r.beside = r.beside[0], r.beside[1:]
			first, _, _ := strings.Cut(urls, ",")
			r.at.TCP = strings.TrimPrefix(first, "nats://")
			r.publish = r.at.TCP
			return r, nil
		}
		join = []string{"--durability=replicated", "--broker-id=b", "--jetstream-url=" + urls, "--jetstream-replicas=" + strconv.Itoa(b.replicas)}
	}
	if s.TLS {
		if err := certify(dir); err != nil {
			return nil, err
		}
	}
	r.Process, err = local.OnFreePorts(2, func(at []string) (*local.Process, error) {
		r.at.TCP, r.at.Web = at[0], at[1]
		args, err := b.Args(r.at, s)
		if err != nil {
			return nil, err
		}
		if args = append(args, join...); b.control != "" {
			args = append(args, "--broker-id=carrier", "--mcap=1000000000")
		}
		r.publish = r.at.TCP
		listening := at[:1]
		if r.web {
			listening = at
		}
		return local.Start(b.Path, args, local.Options{Dir: dir, Ready: local.Accepts(listening...), Within: 5 * time.Second})
	})
	if err == nil {
		r.counted = append(r.counted, r.Process)
	}
	if err == nil && b.control != "" {
		err = r.join(b, s, join)
	}
	return r, err
}

// stop terminates the broker, and kills the process after a timeout. The exit code is
// ignored: brokers disagree about the code after a signal.
func (r *running) stop() {
	if r.Process != nil {
		_ = r.Process.Stop()
	}
	for _, p := range slices.Backward(r.beside) {
		_ = p.Stop()
	}
}
