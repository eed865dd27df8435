package main

import (
	"cmp"
	crand "crypto/rand"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/admission/client"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/registry"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/loaddistributor/webhook"
	"github.com/srtm-io/srtm/tbadaptor/loop"
	"github.com/srtm-io/srtm/tokenbucket"
)

// options has the configuration, from flags or from the file.
type options struct {
	addresses         daemon.Addresses
	tcpAddress        string
	broadcastAddress  string
	inactiveProducer  time.Duration
	tombstoneLifetime time.Duration
	hostname          string // from the operating system
	openLookup        bool
	adaptorSecurity   secure.ClientConfig // for a tbadaptor
	adaptorOptions    []grpc.DialOption   // made from adaptorSecurity
	tbadaptorAddress  string
	tbadaptorLease    time.Duration
	store, dataPath   string
	advertise         string // address that a leader sends to others
	etcdEndpoints     daemon.List
	etcdPrefix        string
	etcdUser          string
	etcdPasswordFile  string
	etcdSecurity      secure.ClientConfig // no token
	etcdLease         time.Duration
	reportInterval    time.Duration
	prepareTimeout    time.Duration
	window            time.Duration
	evacuateAfter     time.Duration
	takeOverAfter     time.Duration
	consumerWait      time.Duration
	deathEvidence     bool
	rebalance         string
	rebalanceRules    tuner.RebalanceConfig
	leases            *loop.LeaseFlags
	fitting           string
	fittingRound      time.Duration
	sharePeriod       time.Duration
	seed              uint64
	admissionClient   client.Config
	autoCreate        string
	defaultTopic      string
	maxTopics         int // maximum of topics that publishing creates; maxTenantTopics per tenant
	maxTenantTopics   int
	topic             *srtmv1.TopicSpec // made from defaultTopic
	reservation       rpc.Reservation   // for a topic created without a contract
	tenantRates       map[string]tokenbucket.Rate
	console           bool
	consoleHosts      daemon.List
	brokerSecurity    secure.ClientConfig // of the console for brokers' HTTP
	brokers           http.RoundTripper   // made from brokerSecurity
	threshold         float64             // of the brokers' capacity
	webhook           string
	webhookSecurity   secure.ClientConfig // for the receiver of webhook
	hook              *webhook.Config     // made from webhook and webhookSecurity; nil: none

	// The console reaches admission's servers and gateways with these.
	admissionAddresses, gatewayAddresses daemon.List
	admissionSecurity, gatewaySecurity   secure.ClientConfig
	admissionOptions                     []grpc.DialOption // made from admissionSecurity
	gateways                             http.RoundTripper // made from gatewaySecurity
}

// Values of --auto-create.
const (
	autoCreateOn  = "on"
	autoCreateOff = "off"
)

// fittingOff is the value of --fitting that leaves topics where their rates placed them.
const fittingOff = "off"

// adaptorPrefix and etcdPrefix begin the flags for the credentials of a tbadaptor and of etcd.
const (
	adaptorPrefix = "tbadaptor-"
	etcdPrefix    = "etcd-"
)

// webhookPrefix begins the flags for the credentials of a webhook's receiver.
const webhookPrefix = "capacity-webhook-"

// grace is how long brokers may take to reconnect to a loaddistributor that has lost its state. grace
// is longer than any pause between the brokers' attempts.
const grace = 15 * time.Second

func (o *options) groups() []daemon.Group {
	o.addresses.GRPC, o.addresses.HTTP = "127.0.0.1:4170", "127.0.0.1:4161"
	return append(o.addresses.Groups("operators, publishers, brokers", "NSQ's lookup, metrics, profiles", "tcp-address"),
		daemon.Group{Title: daemon.Listen, Flags: o.addressFlags},
		daemon.Group{Title: daemon.Storage, Flags: o.storeFlags},
		daemon.Group{Title: "Brokers", Flags: o.brokerFlags},
		daemon.Group{Title: "Placement and fitting", Flags: o.placementFlags},
		daemon.Group{Title: "Lack of brokers", Flags: o.capacityFlags},
		daemon.Group{Title: "Shares", Flags: o.shareFlags},
		daemon.Group{Title: "Tenants", Flags: o.tenantFlags},
		daemon.Group{Title: daemon.Security, Flags: o.securityFlags},
		daemon.Group{Title: daemon.Ask, Flags: func(fs *flag.FlagSet) {
			o.admissionClient.Flags(fs, "for tenant/T/admin before a caller of tenant T creates or updates a topic or moves publishers")
		}},
		daemon.Group{Title: daemon.Ignored, Flags: o.ignoredFlags},
	)
}

func (o *options) addressFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.tcpAddress, "tcp-address", "127.0.0.1:4160", "`host:port` where nodes register as with nsqlookupd; empty for none")
	fs.StringVar(&o.broadcastAddress, "broadcast-address", "", "`host` at which registering nodes reach this process over HTTP (default the hostname)")
	fs.StringVar(&o.advertise, "advertise-address", "", "gRPC `host:port` to which followers redirect clients while this process leads (default --grpc-address)")
	fs.BoolVar(&o.console, "console", true, "serve the web console at /ui/ of --http-address")
	fs.Var(&o.consoleHosts, "console-host", "further host `name`, beside localhost, under which the console is served without TLS; may be repeated")
	fs.Var(&o.admissionAddresses, "console-admission-address", "gRPC `host:port` of a server of admission, which the console shows; may be repeated")
	fs.Var(&o.gatewayAddresses, "console-gateway-address", "`host:port` of a gateway's --admin-address, which the console shows; may be repeated")
}

func (o *options) storeFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.store, "store", storeBolt, "where topics and placements are kept: bbolt (a file), etcd (shared by several, one leads) or memory (lost at the end)")
	fs.StringVar(&o.dataPath, "data-path", ".", "`folder` of --store=bbolt")
	fs.Var(&o.etcdEndpoints, "etcd-endpoint", "`URL` of an etcd member, for --store=etcd; may be repeated")
	fs.StringVar(&o.etcdPrefix, "etcd-prefix", "/srtm/loaddistributor/", "`prefix` of all keys in etcd")
	fs.DurationVar(&o.etcdLease, "etcd-lease", 5*time.Second, "how long a leader leads without a renewal of its lease; whole seconds, more than --flex-lease and --clock-bound together")
	fs.StringVar(&o.etcdUser, "etcd-user", "", "etcd `user`, with --etcd-password-file")
	fs.StringVar(&o.etcdPasswordFile, "etcd-password-file", "", "`file` with the user's password")
}

func (o *options) brokerFlags(fs *flag.FlagSet) {
	fs.DurationVar(&o.reportInterval, "report-interval", controller.DefaultReportInterval, "how often brokers report")
	fs.DurationVar(&o.takeOverAfter, "takeover-after", 5*time.Second, "how long a broker may be disconnected before another takes over its replicated topics; at least 8 s after a start of the loaddistributor; 0: never taken over")
	fs.DurationVar(&o.evacuateAfter, "evacuate-after", controller.DefaultEvacuateAfter, "how long a broker may be disconnected before its publishers are placed elsewhere; at least 8 s after a start of the loaddistributor, and at once if its process is known to have ended")
	fs.BoolVar(&o.deathEvidence, "death-evidence", true, "treat a broker's process as ended if its session ends and both its ports, which had accepted connections, refuse them: its shares go to other brokers at once. Set it to false if another host may answer at the broker's address")
	fs.DurationVar(&o.inactiveProducer, "inactive-producer-timeout", registry.DefaultInactiveAfter, "how long a registered node without a PING is still listed")
	fs.DurationVar(&o.tombstoneLifetime, "tombstone-lifetime", registry.DefaultTombstoneFor, "how long a tombstone hides a producer")
}

func (o *options) placementFlags(fs *flag.FlagSet) {
	o.reservation = rpc.DefaultReservation
	fs.Int64Var(&o.reservation.Rate, "default-topic-rate", o.reservation.Rate, "contract rate r, in `msg/s`, of a topic that is created without --rate and --burst, until its traffic is measured; at most half of the largest broker's capacity")
	fs.Int64Var(&o.reservation.Burst, "default-topic-burst", o.reservation.Burst, "contract burst b of a topic without --rate and --burst, in `messages`")
	fs.StringVar(&o.autoCreate, "auto-create", autoCreateOn, "whether the first publish or subscription to a topic that does not exist creates it: `on` or off")
	fs.StringVar(&o.defaultTopic, "default-topic", "", "`TopicSpec` in JSON without a name, of topics that --auto-create creates: SLO, over-limit policy, bounds of the learned contract (default as srtm topic create NAME)")
	fs.IntVar(&o.maxTopics, "max-auto-topics", 10_000, "maximum number of `topics` with which --auto-create still creates another")
	fs.IntVar(&o.maxTenantTopics, "max-auto-tenant-topics", 1000, "maximum number of `topics` of a tenant with which --auto-create still creates another; the tenant is the publisher's AUTH identity, or the tenant of the caller's token or certificate")
	fs.DurationVar(&o.prepareTimeout, "prepare-timeout", controller.DefaultPrepareTimeout, "how long brokers, and then the adaptor, may take to create a topic")
	fs.DurationVar(&o.window, "window", controller.DefaultWindow, "length of the sliding window of stats and loads")
	fs.DurationVar(&o.consumerWait, "consumer-wait", controller.DefaultConsumerWait, "how long a move waits for a consumer of each channel at the brokers that are new to the topic, before publishers are sent there")
	fs.StringVar(&o.fitting, "fitting", tuner.ModeFast, "`how` new topics are fitted by measurement: fast (spread over more brokers until a test of processing delays passes), paper (rounds that search for the publishers each broker holds; the others are silent meanwhile) or off")
	fs.DurationVar(&o.fittingRound, "fitting-round", tuner.DefaultRound, "length of a round of --fitting=paper")
	fs.StringVar(&o.rebalance, "rebalance", "dry-run", "`what` to do when a broker misses a topic's SLO and its bucket is not to blame: on (move publishers), dry-run (log what would move) or off")
	fs.DurationVar(&o.rebalanceRules.Sustained, "rebalance-after", tuner.DefaultSustained, "how long the SLO must be missed before a move")
	fs.DurationVar(&o.rebalanceRules.Cooldown, "rebalance-cooldown", tuner.DefaultCooldown, "pause after each such move of a topic")
	fs.Float64Var(&o.rebalanceRules.MaxPart, "rebalance-step", tuner.DefaultMaxPart, "largest `part` of a topic's publishers that moves at once")
	fs.DurationVar(&o.rebalanceRules.Capture, "rebalance-capture", tuner.DefaultCapture, "how long arrivals are recorded before a move, to be replayed through the bucket; 0: the reported access delays decide")
	fs.Uint64Var(&o.seed, "seed", 0, "`seed` of the placement policies that draw at random (default drawn and logged)")
}

func (o *options) capacityFlags(fs *flag.FlagSet) {
	fs.Float64Var(&o.threshold, "capacity-threshold", controller.DefaultThreshold, "`part` of the brokers' capacity, above 0 to 1, that topics may use before another broker is reported as needed; 1: only when topics find no room")
	fs.StringVar(&o.webhook, "capacity-webhook", "", "`URL` to which the number of brokers needed is posted as JSON when the number changes, for an autoscaler (default none)")
	o.webhookSecurity.Flags(fs, webhookPrefix, "the receiver of --capacity-webhook")
}

func (o *options) shareFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.tbadaptorAddress, "tbadaptor-address", "", "gRPC `host:port` of a tbadaptor, as brokers reach it too (default none: embedded in this process)")
	fs.DurationVar(&o.tbadaptorLease, "tbadaptor-lease", 3*time.Second, "how long the tbadaptor of --tbadaptor-address acts without a renewal from a loaddistributor, and another tbadaptor in its place has to wait; the same for all loaddistributors of a store")
	fs.DurationVar(&o.sharePeriod, "share-period", loop.DefaultPeriod, "how often the embedded tbadaptor proposes shares")
	o.leases = loop.AddLeaseFlags(fs)
}

func (o *options) tenantFlags(fs *flag.FlagSet) {
	o.tenantRates = map[string]tokenbucket.Rate{}
	fs.Func("tenant-rate", "`tenant=rate`, in msg/s: the sum of a tenant's contracts; * stands for tenants that are not named; repeat it for several (default no bound)", func(s string) error {
		tenant, text, _ := strings.Cut(s, "=")
		rate, err := strconv.ParseFloat(text, 64)
		if err != nil || tenant == "" || !(rate >= 0 && rate <= float64(placement.MaxRate)) {
			return fmt.Errorf("want a tenant, = and 0 to %d msg/s", placement.MaxRate)
		}
		o.tenantRates[tenant] = tokenbucket.PerSecond(rate)
		return nil
	})
}

func (o *options) securityFlags(fs *flag.FlagSet) {
	fs.BoolVar(&o.openLookup, "open-lookup", false, "with --token-file, answer what NSQ clients look up (GET /lookup, /topics, /channels, /nodes, /info) without a token")
	o.adaptorSecurity.Flags(fs, adaptorPrefix, "the tbadaptor of --tbadaptor-address")
	o.etcdSecurity.TLSFlags(fs, etcdPrefix, "etcd")
	o.brokerSecurity.Flags(fs, brokersPrefix, "brokers' HTTP, for the console")
	o.admissionSecurity.Flags(fs, admissionPrefix, "the servers of --console-admission-address")
	o.gatewaySecurity.Flags(fs, gatewayPrefix, "the gateways of --console-gateway-address")
}

func (o *options) ignoredFlags(fs *flag.FlagSet) {
	fs.String("log-prefix", "[nsqlookupd] ", "accepted for compatibility; ignored: log lines are structured and have no prefix")
	fs.Bool("verbose", false, "accepted for compatibility; ignored, as by nsqlookupd: use --log-level")
}

// validate completes the options, or returns all errors.
func (o *options) validate() (err error) {
	if o.hostname, err = os.Hostname(); err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	o.broadcastAddress = cmp.Or(o.broadcastAddress, o.hostname)
	o.advertise = cmp.Or(o.advertise, o.addresses.GRPC)
	if o.seed == 0 {
		o.seed = rand.Uint64()
	}
	log := slog.New(slog.DiscardHandler)
	errs := []error{o.addresses.Validate(), faults.OneOf("fitting", o.fitting, tuner.ModeFast, tuner.ModePaper, fittingOff), faults.OneOf("store", o.store, storeBolt, storeEtcd, storeMemory)}
	errs = append(errs, o.addresses.CheckPlain("--tcp-address", o.tcpAddress), o.controllerConfig(log, nil).Validate())
	if _, err := controller.ParseRebalance(o.rebalance); err != nil {
		errs = append(errs, fmt.Errorf("--rebalance: %w", err))
	}
	o.adaptorOptions, err = o.adaptorSecurity.Load(adaptorPrefix)
	errs = append(errs, err)
	o.brokers, err = transport(brokersPrefix, o.brokerSecurity)
	errs = append(errs, err, o.checkWebhook())
	o.gateways, err = transport(gatewayPrefix, o.gatewaySecurity)
	errs = append(errs, err)
	o.admissionOptions, err = o.admissionSecurity.Load(admissionPrefix)
	errs = append(errs, err, checkPeers("console-admission-address", o.admissionAddresses), checkPeers("console-gateway-address", o.gatewayAddresses))
	if o.store != storeEtcd {
		if len(o.etcdEndpoints) > 0 {
			errs = append(errs, fmt.Errorf("--etcd-endpoint needs --store=etcd, not %s", o.store))
		}
	} else {
		_, err := o.etcdConfig()
		errs = append(errs, err)
		if _, port, err := net.SplitHostPort(o.advertise); err == nil && port == "0" {
			errs = append(errs, fmt.Errorf("--advertise-address %s, by default --grpc-address: followers cannot send callers to port 0", o.advertise))
		}
		// Otherwise another process would replace a leader that hangs while the leases of its brokers
		// still run by the old leader's clock.
		if leases := o.loopConfig(log, nil).Leases; o.tbadaptorAddress == "" && leases.Flex+leases.ClockBound >= o.etcdLease {
			errs = append(errs, fmt.Errorf("--flex-lease %v and --clock-bound %v together must be shorter than --etcd-lease %v", leases.Flex, leases.ClockBound, o.etcdLease))
		}
	}
	for field, problem := range o.reservation.Faults() {
		errs = append(errs, fmt.Errorf("--default-topic-%s %s", field, problem))
	}
	errs = append(errs, faults.OneOf("auto-create", o.autoCreate, autoCreateOn, autoCreateOff))
	if o.topic, err = rpc.ParseTopic(o.defaultTopic); err != nil {
		errs = append(errs, fmt.Errorf("--default-topic: %w", err))
	}
	for _, positive := range []struct {
		flag  string
		good  bool
		value any
	}{
		{"max-auto-topics", o.maxTopics > 0, o.maxTopics}, {"max-auto-tenant-topics", o.maxTenantTopics > 0, o.maxTenantTopics},
		{"inactive-producer-timeout", o.inactiveProducer > 0, o.inactiveProducer}, {"tombstone-lifetime", o.tombstoneLifetime > 0, o.tombstoneLifetime},
	} {
		if !positive.good {
			errs = append(errs, fmt.Errorf("--%s %v is not positive", positive.flag, positive.value))
		}
	}
	if o.takeOverAfter < 0 {
		errs = append(errs, fmt.Errorf("--takeover-after %v is negative", o.takeOverAfter))
	}
	if o.tbadaptorAddress == "" {
		errs = append(errs, o.loopConfig(log, nil).Faults("--share-period", "--window", "")) // the controller checks --prepare-timeout
	} else if _, _, err := controller.HostPort(o.tbadaptorAddress); err != nil {
		errs = append(errs, fmt.Errorf("--tbadaptor-address: %w", err))
	}
	if o.tbadaptorLease < 100*time.Millisecond || o.tbadaptorLease > time.Hour {
		errs = append(errs, fmt.Errorf("--tbadaptor-lease %v: want 100ms to 1h", o.tbadaptorLease))
	}
	return errors.Join(errs...)
}

func (o *options) controllerConfig(log *slog.Logger, metrics prometheus.Registerer) controller.Config {
	mode, _ := controller.ParseRebalance(o.rebalance) // validate reports the error
	measure := ""
	if o.fitting == tuner.ModeFast || o.fitting == tuner.ModePaper {
		measure = o.fitting // validate reports other values
	}
	var probe controller.Probe
	if o.deathEvidence {
		probe = controller.Dial
	}
	leases := o.loopConfig(log, nil).Leases
	return controller.Config{
		Probe:     probe,
		Threshold: o.threshold,
		Fitting:   measure, FittingRound: o.fittingRound,
		ReportInterval: o.reportInterval, PrepareTimeout: o.prepareTimeout, Window: o.window,
		EvacuateAfter: o.evacuateAfter, IDLease: leases.Flex + leases.ClockBound, TakeOverAfter: cmp.Or(o.takeOverAfter, -1), ConsumerWait: o.consumerWait, Rebalance: mode, RebalanceRules: o.rebalanceRules,
		ForwardKey: []byte(crand.Text()), Grace: grace, GrantAddress: o.tbadaptorAddress, Followed: o.store == storeEtcd, TenantRates: o.tenantRates, Seed: o.seed, Log: log, Metrics: metrics,
	}
}

// registryConfig omits the ports, which are known only once there are listeners. Nodes may take half of
// the descriptors that HTTP leaves, so that brokers and clients reach gRPC.
func (o *options) registryConfig() registry.Config {
	return registry.Config{
		MaxNodes:      bounded.Part(bounded.Descriptors(), 4, registry.DefaultMaxNodes),
		InactiveAfter: o.inactiveProducer, TombstoneFor: o.tombstoneLifetime,
		Self: registry.Node{BroadcastAddress: o.broadcastAddress, Hostname: o.hostname, Version: program.NSQ},
	}
}

func (o *options) loopConfig(log *slog.Logger, metrics prometheus.Registerer) loop.Config {
	return o.leases.Apply(loop.Config{
		Period: o.sharePeriod, Window: o.window, AckTimeout: o.prepareTimeout, Log: log, Metrics: metrics,
	})
}

// mandate returns the mandate of a leader that starts at now. With a new store no adaptor has been lent
// the right to act before.
func (o *options) mandate(r role, now mono.Time) *mandate {
	m := &mandate{lease: o.tbadaptorLease, bound: o.loopConfig(nil, nil).Leases.ClockBound, term: r.term.Number()}
	if r.cat.Version() > 0 {
		m.until = now.Add(m.lease + m.bound)
	}
	return m
}

// dial returns a connection that reconnects by itself. dial does not wait.
func dial(address string, options []grpc.DialOption) (*grpc.ClientConn, error) {
	return service.Keep(address, 5*time.Second, options...)
}
