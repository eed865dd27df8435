package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/plural"
)

// ClusterConfig configures a cluster. Immutable.
type ClusterConfig struct {
	Brokers int   // number of brokers; 1 .. 100
	Mcap    int64 // maximum rate of each broker within the SLO, msg/s; > 0
	BinDir  string
	LogDir  string // also for the brokers' data, in separate folders
	// BrokerFlags are extra flags of every broker, LoaddistributorFlags of the
	// loaddistributor.
	BrokerFlags, LoaddistributorFlags []string
	// Admission starts an admission process for the brokers' /pub and /mpub. Gateway
	// starts a gateway with one class of requests, whose /pub and /mpub go to the brokers.
	Admission, Gateway bool
	// NATS is the path of nats-server. Three servers then store the brokers' data
	// (--durability=replicated). "": brokers store data in files.
	NATS string
	// MQTT makes the brokers listen for MQTT, too.
	MQTT bool
	// StartTimeout bounds the time until all brokers have joined.
	StartTimeout time.Duration
}

// Validate reports all problems at once.
func (c ClusterConfig) Validate() error {
	var f faults.List
	f.If(c.Brokers < 1 || c.Brokers > 100, "%d brokers: want 1 to 100", c.Brokers)
	f.If(c.Mcap <= 0, "mcap %d msg/s is not positive", c.Mcap)
	f.If(c.StartTimeout <= 0, "start timeout %v is not positive", c.StartTimeout)
	return f.Err()
}

// Cluster is a running cluster.
type Cluster struct {
	// Set by StartCluster.
	Conn    *grpc.ClientConn // to the loaddistributor
	GRPC    string           // its address
	Lookup  string           // host:port of its nsqlookupd-compatible HTTP
	Adaptor string           // host:port of the tbadaptor's HTTP

	MQTT      []string // host:port of each broker for MQTT; empty: none
	Admission string   // host:port of admission's gRPC; "": not started
	Gateway   string   // host:port of the gateway for clients; "": not started
	Policy    string   // file of the gateway's policy

	// Owned by the caller's goroutine.
	processes []*Process // in start order
	nats      []*Process // brokers need these until the brokers have ended
}

// StartCluster starts a tbadaptor, a loaddistributor and brokers, and waits until every
// broker has joined. After an error nothing keeps running.
func StartCluster(ctx context.Context, cfg ClusterConfig) (_ *Cluster, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	addresses, err := Ports(9 + cfg.Brokers)
	if err != nil {
		return nil, err
	}
	c := &Cluster{GRPC: addresses[0], Lookup: addresses[1], Adaptor: addresses[3]}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	// Programs in start order.
	type program struct {
		name, binary string
		flags        []string
		ready        func() error // nil: not awaited
	}
	adaptor, brokerFlags := addresses[2], slices.Clone(cfg.BrokerFlags)
	controlFlags := append([]string{
		"--grpc-address", c.GRPC, "--http-address", c.Lookup, "--tcp-address=", "--store=memory", "--tbadaptor-address", adaptor,
	}, cfg.LoaddistributorFlags...)
	if cfg.Admission {
		controlFlags = append(controlFlags, "--console-admission-address="+addresses[4])
	}
	if cfg.Gateway {
		controlFlags = append(controlFlags, "--console-gateway-address="+addresses[8])
	}
	programs := []program{
		{"tbadaptor", "tbadaptor", []string{"--grpc-address", adaptor, "--http-address", c.Adaptor}, nil},
		{"loaddistributor", "loaddistributor", controlFlags, nil},
	}
	if cfg.Admission {
		c.Admission = addresses[4]
		programs = append(programs, program{"admission", "admission", []string{
			"--data-path", cfg.LogDir, "--grpc-address", c.Admission, "--http-address", addresses[5], "--udp-address", addresses[6],
		}, Answers("http://" + addresses[5] + "/healthz")})
		brokerFlags = append(brokerFlags, "--admission-address="+addresses[6])
	}
	if cfg.Gateway {
		c.Gateway, c.Policy = addresses[7], filepath.Join(cfg.LogDir, "policy.toml")
		if err := os.WriteFile(c.Policy, []byte("[[class]]\nname = \"everyone\"\n"), 0o600); err != nil {
			return nil, fmt.Errorf("policy of the gateway: %w", err)
		}
		programs = append(programs, program{"gateway", "gateway", []string{
			"--policy", c.Policy, "--http-address", c.Gateway, "--admin-address", addresses[8], "--loaddistributor-address", c.GRPC,
		}, Answers("http://" + addresses[8] + "/healthz")})
	}
	if cfg.NATS != "" {
		var urls string
		if c.nats, urls, err = NATS(cfg.NATS, cfg.LogDir, 3); err != nil {
			return nil, err
		}
		brokerFlags = append(brokerFlags, "--durability=replicated", "--jetstream-url="+urls)
	}
	for i := range cfg.Brokers {
		name := "broker" + strconv.Itoa(i+1)
		data, err := os.MkdirTemp(cfg.LogDir, name+"-data-") // not the folder of an earlier cluster
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		flags := slices.Clone(brokerFlags)
		if cfg.MQTT {
			c.MQTT = append(c.MQTT, addresses[9+i])
			flags = append(flags, "--mqtt-address="+addresses[9+i])
		}
		// A broker chooses free ports and reports them to the loaddistributor.
		programs = append(programs, program{name, "nsqd", append([]string{
			"--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--broadcast-address", "127.0.0.1",
			"--broker-id", name, "--mcap", strconv.FormatInt(cfg.Mcap, 10), "--loaddistributor-address", c.GRPC, "--data-path", data,
		}, flags...), nil})
	}
	for _, program := range programs {
		p, err := Start(filepath.Join(cfg.BinDir, program.binary), program.flags, Options{Log: filepath.Join(cfg.LogDir, program.name+".log"), Ready: program.ready})
		if err != nil {
			return nil, fmt.Errorf("%w (build the binaries, or name their folder with --bin-dir)", err)
		}
		p.name = program.name
		c.processes = append(c.processes, p)
	}
	if c.Conn, err = grpc.NewClient(c.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return nil, fmt.Errorf("loaddistributor at %s: %w", c.GRPC, err)
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.StartTimeout)
	defer cancel()
	return c, c.await(ctx, cfg.Brokers)
}

// await returns when all brokers have joined or a process has died.
func (c *Cluster) await(ctx context.Context, brokers int) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		joined := 0
		r, err := srtmv1.NewAdminServiceClient(c.Conn).ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
		for _, b := range r.GetBrokers() {
			if b.GetConnected() {
				joined++
			}
		}
		if joined == brokers {
			return nil
		}
		if err := c.Died(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("%d of %s have joined: %w", joined, plural.Count(brokers, "broker"), context.Cause(ctx)), err)
		case <-tick.C:
		}
	}
}

// Died returns an error that names every process that ended by itself.
func (c *Cluster) Died() error {
	var errs []error
	for _, p := range slices.Concat(c.nats, c.processes) {
		errs = append(errs, p.Died())
	}
	return errors.Join(errs...)
}

// Stop ends the processes, the last started first, each within a bound, and then the
// nats-servers. The error names the failed processes.
func (c *Cluster) Stop() error {
	var errs []error
	if c.Conn != nil {
		errs = append(errs, c.Conn.Close())
	}
	for _, all := range [][]*Process{c.processes, c.nats} {
		for _, p := range all {
			p.Terminate()
		}
		for _, p := range slices.Backward(all) {
			errs = append(errs, p.Stop())
		}
	}
	return errors.Join(errs...)
}
