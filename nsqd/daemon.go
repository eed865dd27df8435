package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	admission "github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/console"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/lookupd"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/nsqd/replicated"
	"github.com/srtm-io/srtm/nsqd/statsd"
)

// nsqd is a broker process with open sockets. run serves.
type nsqd struct {
	opts       *options
	level      *slog.LevelVar // level of log
	log        *slog.Logger
	listeners  *listeners
	stamps     *hook.Stamper
	jetstream  *replicated.Cluster // nil: topic logs are in files
	storage    *broker.Storage
	broker     *broker.Broker
	conns      *conn.Server
	announcer  *lookupd.Announcer
	control    *agent.Agent // nil: standalone
	trace      *os.File     // nil: no release trace
	group      lifecycle.Group
	lookupCtx  context.Context // context of the lookups before a topic is created; ends when the shutdown begins
	endLookups context.CancelFunc
}

// open wires an nsqd and opens its sockets. The caller must run the nsqd. level is the level of log.
func open(ctx context.Context, opts *options, log *slog.Logger, level *slog.LevelVar) (_ *nsqd, err error) {
	d := &nsqd{opts: opts, level: level, log: log, listeners: new(listeners)}
	d.lookupCtx, d.endLookups = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if d.stamps, err = hook.Open(opts.stamps, opts.hook, log); err != nil {
		return nil, err
	}
	config := opts.broker
	if opts.releaseTrace != "" {
		if d.trace, err = os.OpenFile(opts.releaseTrace, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err != nil {
			return nil, fmt.Errorf("--release-trace: %w", err)
		}
		config.Trace = broker.NewTrace(d.trace, log)
	}
	stored := opts.storage
	stored.Log = log
	if opts.durability == durabilityReplicated {
		cluster := opts.jetstream
		cluster.Log = log
		if cluster.TLS, err = opts.jetstreamTLS.TLS("jetstream-"); err != nil {
			return nil, err
		}
		if d.jetstream, err = replicated.Connect(ctx, cluster); err != nil {
			return nil, fmt.Errorf("--jetstream-url: %w", err)
		}
		stored.Replicated = d.jetstream
		defer context.AfterFunc(ctx, func() { d.jetstream.EndAfter(storeWithin) })() // while the broker restores messages
	}
	if d.storage, err = broker.OpenStorage(stored); err != nil {
		return nil, fmt.Errorf("--data-path: %w", err)
	}
	config.Storage = d.storage
	config.Changed = func() {
		if d.announcer != nil { // set before nsqd serves
			d.announcer.Notify()
		}
	}
	if !opts.managed() { // in a cluster the loaddistributor names the channels
		config.Channels = func(topic string) []string { return d.announcer.Channels(d.lookupCtx, topic) }
	}
	config.Log = d.log
	if opts.managed() {
		config.Confirm = d.confirmChannel
	}
	if opts.forwards() {
		config.DeadLetter = d.forwardDeadLetter
	}
	if d.broker, err = broker.New(config); err != nil {
		return nil, err
	}
	opts.conn.MaxBodies = opts.broker.MaxMemory / 4
	registry := obs.NewRegistry()
	if opts.forwards() {
		if opts.conn.Forward, err = d.forwarder(registry); err != nil {
			return nil, err
		}
	}
	if opts.servesMQTT() {
		if opts.conn.MQTT, err = mqtt.New(d.mqttConfig(), registry); err != nil {
			return nil, program.UsageError{Err: err}
		}
		secure.OnReadAgain(opts.conn.MQTT.Reload)
		d.group.Add("mqtt sessions", opts.conn.MQTT.Run)
	}
	if d.conns, err = conn.New(opts.conn, d.broker, d.stamps, log); err != nil {
		return nil, err
	}
	if err := d.listeners.open(ctx, opts, d.conns); err != nil {
		return nil, err
	}
	node := opts.node(address(d.listeners.tcp), address(d.listeners.http))
	if opts.conn.Forward != nil {
		opts.conn.Forward.SetBroker(node.BrokerID, advertised(node.BroadcastAddress, d.listeners.tcp, node.BroadcastTCPPort))
	}
	if d.announcer, err = lookupd.New(d.lookupdConfig(node), opts.lookupds); err != nil {
		return nil, program.UsageError{Err: err}
	}
	for topic := range config.Presets {
		if _, err := d.broker.CreateTopic(topic); err != nil {
			return nil, program.UsageError{Err: fmt.Errorf("--topic-limit: %w", err)}
		}
	}
	if err := d.broker.Restore(); err != nil {
		return nil, err
	}
	api := opts.api
	api.Node, api.Session, api.Managed, api.TopologyAware = node, &opts.session, opts.managed(), opts.topologyAware && opts.region != ""
	api.Lookupds, api.Settings, api.Percentiles, api.Tokens = d.announcer.State, d.settings(), opts.statsd.Percentiles, opts.tokens
	api.Forward, api.MaxBodies, api.Connections = opts.conn.Forward, opts.conn.MaxBodies, d.listeners.connections
	if opts.tokens != nil {
		opts.tokens.Log(log)
	}
	opts.control.Log(log)
	opts.jetstreamTLS.Log(log)
	if opts.authServers != nil {
		api.Auth = opts.authServers.Counts
		maxWaiting := min(auth.MaxWaiting, max(1, opts.addresses.maxHTTP/2))
		api.Authorise = auth.NewCache(opts.authServers.Ask, clock.Mono, maxWaiting).Ask
	}
	if len(opts.admission.Servers) > 0 {
		decider, err := admission.New(opts.admission)
		if err != nil {
			return nil, fmt.Errorf("--admission-address: %w", err)
		}
		api.Admission = decider
		d.group.Add("admission", decider.Run)
	}
	if opts.tls.server != nil {
		opts.tls.server.Log(log)
		registry.MustRegister(opts.tls.server.Expiry())
	}

	// The group stops in reverse order. The broker first stores all acknowledged messages and waits
	// only for the disk, as the supervisor may kill nsqd soon. Then nsqd leaves the control plane and
	// nsqlookupd, stops accepting connections, and disconnects the clients. The metrics end last.
	if opts.managed() {
		bases, err := agent.OpenFiles(filepath.Join(opts.dataPath, "shares"))
		if err != nil {
			return nil, fmt.Errorf("--data-path: %w", err)
		}
		membership := opts.agent
		membership.BrokerID, membership.Version = node.BrokerID, node.Release
		host := node.BroadcastAddress
		membership.TCPAddress = advertised(host, d.listeners.tcp, node.BroadcastTCPPort)
		membership.HTTPAddress = net.JoinHostPort(host, strconv.Itoa(node.BroadcastHTTPPort))
		membership.MQTTAddress = advertised(host, d.listeners.mqtt, opts.addresses.broadcastMQTTPort)
		membership.MQTTSAddress = advertised(host, d.listeners.mqtts, opts.addresses.broadcastMQTTSPort)
		if membership.Durability = opts.durabilityOf(); d.jetstream != nil {
			membership.TakeOver = d.broker.TakeOver
		}
		if opts.conn.Forward != nil {
			membership.ForwardKey = opts.conn.Forward.SetKey
		}
		membership.DrainPublishers, membership.NudgeConsumers = d.conns.DrainPublishers, d.conns.NudgeConsumers
		membership.DataPath, membership.Lock = opts.dataPath, d.storage.LockID()
		if whole, err := filepath.Abs(opts.dataPath); err == nil { // on error the path stays as given
			membership.DataPath = whole
		}
		membership.Store, membership.Fresh, membership.Log, membership.Metrics = bases, bases.Fresh(), log, registry
		if d.control, err = agent.New(membership, d.broker.Node()); err != nil {
			return nil, program.UsageError{Err: err}
		}
		api.Agent = func() any { return d.control.State() }
		api.Control = d.control.Health
		api.ChangeChannel = d.changeChannel
	}
	all := httpapi.New(api, d.broker, d.conns, d.stamps, registry, log)
	whole := http.Handler(all)
	var pages *console.Console
	if opts.addresses.console && !opts.managed() { // in a cluster the loaddistributor serves the console
		cfg := console.Config{
			Brokers: console.InProcess(all), Self: "this-broker", CallerName: secure.CallerName, Hosts: []string{node.Hostname, node.BroadcastAddress},
			Metrics: registry, Own: registry, Log: log,
		}
		if opts.tokens != nil {
			cfg.May = opts.tokens.Check
		}
		if pages, err = console.New(cfg); err != nil {
			return nil, err
		}
		whole = daemon.WithPages(all, pages, console.Prefix)
	}
	routes := whole
	var web []func(context.Context) error
	if d.listeners.admin != nil {
		admin := lifecycle.HTTP(whole, log)
		if _, mixed := d.listeners.admin.(mixedListener); mixed {
			admin = serveMixed(admin, port(d.listeners.admin))
		}
		web = append(web, lifecycle.Serve(d.listeners.admin, admin))
		routes = all.Public()
	}
	if d.listeners.http != nil {
		handler := routes
		if opts.tls.forced() {
			handler = httpapi.TLSRequired(port(d.listeners.https))
		}
		web = append(web, lifecycle.Serve(d.listeners.http, lifecycle.HTTP(handler, log)))
	}
	if d.listeners.https != nil {
		web = append(web, lifecycle.Serve(d.listeners.https, lifecycle.HTTP(routes, log)))
	}
	if len(web) > 0 {
		d.group.Add("http", lifecycle.Together(web...))
	}
	if pages != nil {
		d.group.Add("console", pages.Run)
	}
	if opts.conn.Forward != nil {
		d.group.Add("forward", opts.conn.Forward.Run)
	}
	d.group.Add("clients", d.disconnectAtEnd)
	d.group.Add("tcp", func(ctx context.Context) error { return d.conns.Serve(ctx, d.listeners.tcp) })
	if d.listeners.mqtt != nil {
		d.group.Add("mqtt", func(ctx context.Context) error { return d.conns.ServeProtocol(ctx, d.listeners.mqtt, conn.MQTT) })
	}
	if d.listeners.mqtts != nil {
		d.group.Add("mqtts", func(ctx context.Context) error { return d.conns.ServeProtocol(ctx, d.listeners.mqtts, conn.MQTTS) })
	}
	d.group.Add("nsqlookupd", d.announcer.Run)
	if push := opts.statsd; push.Address != "" {
		// NSQ names a node by broadcast address and HTTP port.
		push.Prefix = statsd.Prefix(push.Prefix, net.JoinHostPort(node.BroadcastAddress, strconv.Itoa(node.HTTPPort)))
		push.Topics, push.Log = d.stats, log
		pusher, err := statsd.New(push)
		if err != nil {
			return nil, program.UsageError{Err: err}
		}
		d.group.Add("statsd", pusher.Run)
	}
	if d.control != nil {
		d.group.Add("agent", d.control.Run)
	}
	d.group.Add("broker", d.storeAtEnd)
	return d, nil
}

// minForwarded is the minimum of forward.Config.MaxBytes, in bytes.
const minForwarded = 64 << 20

// forwarder returns the Forwarder that publishes at other brokers of the cluster.
func (d *nsqd) forwarder(metrics *prometheus.Registry) (*forward.Forwarder, error) {
	f, err := forward.New(forward.Config{
		LoadDistributor: d.opts.agent.LoadDistributor, DialOptions: d.opts.agent.DialOptions,
		TLS: d.opts.tls.brokers(), MaxConnections: d.opts.maxForwards, MaxBytes: max(minForwarded, d.opts.broker.MaxMemory/16),
		Log: d.log, Metrics: metrics,
	})
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	return f, nil
}

// forwardDeadLetter publishes body at the broker of a dead letter topic. The first call comes when
// messages are restored, after open has made the forwarder.
func (d *nsqd) forwardDeadLetter(ctx context.Context, topic string, body []byte) error {
	line := d.opts.conn.Forward.Line(forward.Publisher{ClientID: "dead-letters", Visits: true})
	defer line.Close()
	return line.Begin(ctx, topic, pool.Message{Body: body}).Wait()
}

// stats returns the stats of all topics.
func (d *nsqd) stats() []broker.Stats {
	topics := d.broker.Topics()
	all := make([]broker.Stats, len(topics))
	for i, t := range topics {
		all[i] = t.Stats()
	}
	return all
}

// settings returns the settings that operators can change at run time.
func (d *nsqd) settings() map[string]httpapi.Setting {
	return map[string]httpapi.Setting{
		"nsqlookupd_tcp_addresses": {
			Get: func() any { return append([]string{}, d.announcer.Addresses()...) },
			Set: func(value []byte) error {
				var addresses []string
				if err := json.Unmarshal(value, &addresses); err != nil {
					return err
				}
				return d.announcer.SetAddresses(addresses)
			},
		},
		"log_level": {
			Get: func() any { return obs.LevelNumber(d.level.Level()) },
			Set: func(value []byte) error {
				level, err := obs.ParseLevel(string(value))
				if err == nil {
					d.level.Set(level)
				}
				return err
			},
		},
	}
}

// lookupdConfig announces the broadcast ports.
func (d *nsqd) lookupdConfig(n httpapi.Node) lookupd.Config {
	return lookupd.Config{
		Node: lookupd.Node{
			BroadcastAddress: n.BroadcastAddress,
			Hostname:         n.Hostname,
			TCPPort:          n.BroadcastTCPPort,
			HTTPPort:         n.BroadcastHTTPPort,
			Version:          n.Version,
			Region:           d.opts.region,
			Zone:             d.opts.zone,
		},
		Topics: func() []lookupd.Topic {
			topics := d.broker.Topics()
			listing := make([]lookupd.Topic, len(topics))
			for i, t := range topics {
				listing[i] = lookupd.Topic{Name: t.Name(), Channels: t.ChannelNames()}
			}
			return listing
		},
		ConnectTimeout: d.opts.auth.ConnectTimeout,
		RequestTimeout: d.opts.auth.RequestTimeout,
		PingInterval:   lookupd.DefaultPingInterval,
		RetryAfter:     lookupd.DefaultRetryAfter,
		Seed:           uint64(time.Now().UnixNano()),
		Log:            d.log,
	}
}

// run serves until ctx ends. Then run drains.
func (d *nsqd) run(ctx context.Context) error {
	d.log.Info(program.Banner("nsqd"))
	d.listeners.log(d.log)
	d.log.Info("nsqd is up", "version", program.Version(), "tcp", name(d.listeners.tcp), "http", name(d.listeners.http), "https", name(d.listeners.https), "admin", name(d.listeners.admin), "managed", d.opts.managed())
	d.log.Info("limits", "connections", d.opts.conn.MaxConnections, "http_connections", d.opts.addresses.maxHTTP, "topics", d.opts.broker.MaxTopics,
		"topic_channels", d.opts.broker.MaxTopicChannels, "channels", d.opts.broker.MaxChannels, "message_bytes", d.opts.broker.MaxMemory)
	err := d.group.Run(ctx)
	err = errors.Join(err, d.close())
	d.log.Info("nsqd is down")
	return err
}

// close releases the resources of open that no part of the group owns. The group has already closed the
// listeners that it served.
func (d *nsqd) close() error {
	d.endLookups()
	d.listeners.close()
	if d.opts.authServers != nil {
		d.opts.authServers.Close()
	}
	var errs faults.List
	closed := func(part string, err error) { errs.If(err != nil, "close %s: %w", part, err) }
	if d.jetstream != nil { // only after a failed open; otherwise the broker is closed already
		d.jetstream.EndAfter(storeWithin)
	}
	if d.broker != nil {
		closed("the broker", d.broker.Close())
	}
	if d.storage != nil {
		closed("the storage", d.storage.Close())
	}
	if d.jetstream != nil {
		d.jetstream.Close()
	}
	if d.trace != nil {
		closed("the release trace", d.trace.Close())
	}
	if d.stamps != nil {
		closed("arrival stamps", d.stamps.Close())
	}
	return errs.Err()
}

// storeWithin is how long JetStream may take to store the remaining messages when nsqd stops. With its
// other waits nsqd stops within 10 s.
const storeWithin = 7 * time.Second

// storeAtEnd stops publishers at a message boundary and stores the remaining messages. With
// --drain-timeout the broker delivers for that time first.
func (d *nsqd) storeAtEnd(ctx context.Context) error {
	<-ctx.Done()
	release := lifecycle.Hold(ctx) // a slow disk must not lose messages
	defer release()
	d.endLookups()
	d.conns.StopReading()
	if d.opts.drainTimeout > 0 {
		limit, cancel := context.WithTimeout(context.Background(), d.opts.drainTimeout)
		defer cancel()
		d.broker.Drain(limit)
	}
	if m := d.opts.conn.MQTT; m != nil {
		limit, cancel := context.WithTimeout(context.Background(), willsWithin)
		defer cancel()
		m.PublishWills(limit)
	}
	if d.jetstream != nil {
		d.jetstream.EndAfter(storeWithin)
		defer d.jetstream.Close() // ends a take-over: no message may be stored after the broker is closed
	}
	start := time.Now()
	if err := d.broker.Close(); err != nil {
		return fmt.Errorf("store the remaining messages: %w", err)
	}
	d.log.Info("all messages are stored", "took", time.Since(start))
	return nil
}

// clientsGrace is how long clients may take to read the data that is on its way to them.
const clientsGrace = 500 * time.Millisecond

// disconnectAtEnd closes all client connections.
func (d *nsqd) disconnectAtEnd(ctx context.Context) error {
	<-ctx.Done()
	grace, cancel := context.WithTimeout(context.Background(), clientsGrace)
	defer cancel()
	if err := d.conns.Shutdown(grace); err != nil {
		d.log.Warn("clients did not disconnect in time; their connections are cut", "limit", clientsGrace, obs.KeyError, err) // the clients' failure, not nsqd's
	}
	if m := d.opts.conn.MQTT; m != nil {
		m.Close()
	}
	return nil
}
