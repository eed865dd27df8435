package main

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"

	"github.com/srtm-io/srtm/admission/client"
	publishers "github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/gateway/proxy"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/secure"
)

const about = `gateway is an HTTP reverse proxy that gives classes of requests their share of every
resource of its servers, and sends each request to the server that will answer soonest.

Also: gateway check, explain, profile and monitor; each has --help.`

// options has the configuration, from flags or from the file.
type options struct {
	httpAddress, adminAddress string
	policyFile, profiles      string
	text                      string // the policy and the profiles in use
	lastRead                  string // the policy and the profiles as last read
	maxHeader                 int
	maxPublish                int64
	proxy                     proxy.Config
	security                  secure.ServerConfig
	guard                     *secure.Server
	admission                 client.Config
	control, brokers          secure.ClientConfig // for the loaddistributor and for the brokers
	publishers                publishers.Config
}

func (o *options) groups() []daemon.Group {
	return []daemon.Group{
		{Title: daemon.Listen, Flags: o.addressFlags},
		{Title: "Classes and servers", Flags: o.policyFlags},
		{Title: daemon.Limits, Flags: o.limitFlags},
		{Title: daemon.Cluster, Flags: o.clusterFlags},
		{Title: daemon.Security, Flags: o.securityFlags},
		{Title: daemon.Ask, Flags: func(fs *flag.FlagSet) { o.admission.Flags(fs, "for classes with an admission key") }},
	}
}

func (o *options) addressFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.httpAddress, "http-address", "127.0.0.1:4195", "`host:port` for clients")
	fs.StringVar(&o.adminAddress, "admin-address", "127.0.0.1:4196", "`host:port` for operators: /status, metrics, profiles, state")
}

func (o *options) policyFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.policyFile, "policy", "", "TOML `file` of classes, servers and costs; it is read again when it has changed")
	fs.StringVar(&o.profiles, "profiles", "", "TOML `file` of more costs, which gateway profile has written; read again like --policy")
	fs.Var(&o.proxy.Balance, "balance", "`how` a server is chosen: jbq (the least expected answer time; the default), busy (the fewest requests), rr (each in turn)")
	fs.StringVar(&o.proxy.Scheduler, "scheduler", "mqos", "`how` classes share the servers: mqos (each resource), single:RESOURCE (that one), none (first come, first served)")
	fs.IntVar(&o.proxy.Gateways, "gateways", 1, "how many gateways share these servers: each takes its part of every capacity")
}

func (o *options) limitFlags(fs *flag.FlagSet) {
	fs.IntVar(&o.maxHeader, "max-header-bytes", 64<<10, "`bytes` of a request's header, at most")
	fs.IntVar(&o.proxy.MaxConnections, "max-connections", 0, "maximum number of `connections` of clients at --http-address; one more is answered 503 (with TLS: not at all) and closed (default 3/8 of the descriptor limit, of a large one half less 5000, at most 50000)")
	fs.Int64Var(&o.proxy.MaxBody, "max-body-bytes", 0, "`bytes` of a request's body, at most (default: no bound)")
	fs.Int64Var(&o.maxPublish, "max-publish-bytes", 256<<20, "`bytes` of the bodies of all requests to /pub and /mpub that are under way, at most (0: no bound)")
}

func (o *options) clusterFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.publishers.Address, "loaddistributor-address", "", "gRPC `host:port` of the loaddistributor, or of several with commas, by which what is posted to /pub and /mpub finds its broker (default none: it goes to a server)")
}

func (o *options) securityFlags(fs *flag.FlagSet) {
	o.security.HTTPFlags(fs, "http-address", "admin-address")
	o.control.Flags(fs, controlPrefix, "the loaddistributor")
	o.brokers.TLSFlags(fs, brokerPrefix, "brokers")
}

func (o *options) validate() error {
	errs := []error{
		faults.Within("gateways", o.proxy.Gateways, 1, 1000),
		faults.Within("max-header-bytes", o.maxHeader, 1<<10, 16<<20),
		faults.Within("max-connections", o.proxy.MaxConnections, 0, math.MaxInt32),
		faults.Within("max-body-bytes", o.proxy.MaxBody, 0, math.MaxInt64),
		faults.Within("max-publish-bytes", o.maxPublish, 0, math.MaxInt64),
		o.validatePolicy(),
	}
	var err error
	if o.proxy.MaxConnections == 0 {
		o.proxy.MaxConnections = defaultConnections(bounded.Descriptors())
	}
	o.guard, err = o.security.Load()
	errs = append(errs, err, o.security.CheckHTTP("--admin-address", o.adminAddress),
		o.security.Check("--http-address", o.httpAddress, o.security.CertFile != "", "--tls-cert and --tls-key"))
	if o.publishers.Address != "" {
		o.publishers.DialOptions, err = o.control.Load(controlPrefix)
		errs = append(errs, err)
		trust, err := o.brokers.TLS(brokerPrefix)
		errs = append(errs, err)
		if trust != nil {
			o.publishers.NSQ = publishers.DefaultNSQConfig()
			o.publishers.NSQ.TlsV1, o.publishers.NSQ.TlsConfig = true, trust
		}
	}
	return errors.Join(errs...)
}

// defaultConnections returns half of the descriptors that are not spare: a client's request takes
// another connection, to a server. The maximum is 50000 connections; their buffers take about 1 GB.
func defaultConnections(descriptors int64) int {
	return bounded.Part(descriptors, 2, 50_000)
}

// Prefixes of the flags for credentials.
const controlPrefix, brokerPrefix = "control-", "broker-"

func (o *options) validatePolicy() (err error) {
	if o.policyFile == "" {
		_, err = readOptional("--profiles", o.profiles)
		return errors.Join(errors.New("--policy is needed: a file of classes and servers"), err)
	}
	o.proxy.Policy, err = o.readPolicy(true)
	return err
}

// readOptional returns the text of a flag's file; "": the flag is empty.
func readOptional(flag, file string) (string, error) {
	if file == "" {
		return "", nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", flag, err)
	}
	return string(text) + "\n", nil
}

// readPolicy reads the policy and then the profiles as one text, since both may have [[cost]] tables.
// If the text is in use already, readPolicy returns nil. Unless now is set, readPolicy also returns nil
// if the text has changed since the last read: a file that is being written may be a valid policy with
// fewer classes and servers.
func (o *options) readPolicy(now bool) (*policy.Policy, error) {
	previous := o.lastRead
	text, err := readOptional("--policy", o.policyFile)
	profiles, lack := readOptional("--profiles", o.profiles)
	o.lastRead = text + profiles
	if err := errors.Join(err, lack); err != nil {
		return nil, err
	}
	if o.lastRead == o.text || o.lastRead != previous && !now {
		return nil, nil
	}
	o.text = o.lastRead
	p, err := policy.Parse([]byte(o.text))
	if err != nil {
		return nil, fmt.Errorf("--policy %s: %w", o.policyFile, err)
	}
	return p, nil
}
