package main

import (
	"cmp"
	"flag"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/server"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
)

// options has the configuration, from flags or from the file.
type options struct {
	addresses                           daemon.Addresses
	role                                string
	dataPath, database                  string
	macKeyFile, defaultReply, fullReply string
	server                              server.Config // serverConfig sets the other fields
	peers                               secure.ClientConfig
	peerOptions                         []grpc.DialOption
	decider                             client.Config
}

func (o *options) serves() bool { return o.role != "router" }
func (o *options) routes() bool { return o.role != "server" }

func (o *options) groups() []daemon.Group {
	o.decider.DefaultFor = map[string]bool{}
	o.addresses.HTTP, o.addresses.GRPC = "127.0.0.1:4191", "127.0.0.1:4192"
	return append(o.addresses.Groups("rules (srtm admission), Envoy's rate limit service", "/qos, /auth, /v1/check, metrics, profiles", "udp-address"),
		daemon.Group{Title: daemon.Listen, Flags: o.addressFlags},
		daemon.Group{Title: "Rules and keys", Flags: o.serverFlags},
		daemon.Group{Title: "Questions to servers", Flags: o.askFlags},
		daemon.Group{Title: daemon.Security, Flags: o.securityFlags},
	)
}

func (o *options) addressFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.server.Address, "udp-address", "127.0.0.1:4193", "`host:port` for UDP: questions; beyond loopback with --mac-key-file only")
	fs.StringVar(&o.server.Advertise, "advertise", "", "`host:port` at which routers and other servers reach --udp-address, and this server's name in the store, where it is to stay the same (default: --udp-address)")
	fs.StringVar(&o.server.Replicate, "advertise-grpc", "", "`host:port` at which other servers reach --grpc-address, to replicate what keys hold (default: --grpc-address)")
}

func (o *options) serverFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.role, "role", "all", "`what` this process does: server (decides, over UDP), router (forwards HTTP and gRPC to servers), or all")
	fs.StringVar(&o.dataPath, "data-path", "", "`directory` for admission.db, the SQLite store (default: the working directory)")
	fs.StringVar(&o.database, "database", "", "`URL` of a PostgreSQL store (postgres://...), in place of SQLite")
	fs.DurationVar(&o.server.Checkpoint, "checkpoint", server.DefaultCheckpoint, "how often what keys hold is saved: what a key was admitted since then, at most its capacity, it may be admitted again after a crash, unless its rule is strict")
	fs.DurationVar(&o.server.Poll, "poll", server.DefaultPoll, "how often edited rules are looked for")
	fs.DurationVar(&o.server.Lookup, "lookup-wait", server.DefaultLookup, "for how `long` a question waits at most for its key to be looked up, whatever its client would wait, 1ms to 5s")
	fs.IntVar(&o.server.MaxKeys, "max-keys", server.DefaultMaxKeys, "how many keys may be in memory; each takes about 93 bytes with a key of 20 characters, 200 in the process")
	fs.IntVar(&o.server.MaxSessions, "max-sessions", server.DefaultMaxSessions, "how many askers are known at a time; each takes up to 200 KB")
	fs.StringVar(&o.fullReply, "full-reply", "deny", "`reply` to keys for which there is no room: deny or admit")
	fs.IntVar(&o.server.Loops, "udp-loops", runtime.GOMAXPROCS(0), "how many sockets and goroutines answer questions (default one for each processor)")
}

func (o *options) askFlags(fs *flag.FlagSet) {
	fs.Var((*daemon.List)(&o.decider.Servers), "server", "UDP `host:port` of a server, for --role=router, until the store's list of servers is read; repeat it for several")
	fs.IntVar(&o.decider.Attempts, "attempts", client.DefaultAttempts, "how many `times` a question is sent to a server that gives no sign of life, before the default reply; the waits are 100 us to 5 ms, by what answers take")
	fs.DurationVar(&o.decider.Wait, "wait", client.DefaultWait, "for how `long` a decision waits for a server that looks the key up in its store, before the default reply, 1ms to 5s and at most --lookup-wait; an answer that comes later is not charged")
	fs.BoolVar(&o.decider.PaperTimers, "paper", false, "retry after 100 us each time, as the Janus paper does, and not by what answers take")
	fs.StringVar(&o.defaultReply, "default-reply", "deny", "`reply` where no server answers: deny or admit")
	fs.Func("default-reply-for", "`prefix=reply` for keys with that prefix where no server answers; repeat it for several", func(s string) error {
		prefix, reply, _ := strings.Cut(s, "=")
		admit, err := client.ParseReply(reply)
		o.decider.DefaultFor[prefix] = admit
		return err
	})
}

func (o *options) securityFlags(fs *flag.FlagSet) {
	fs.StringVar(&o.macKeyFile, "mac-key-file", "", "`file` of keys that authenticate datagrams: lines of a number (0 to 65535) and a secret in hex (16 bytes or more); the first one signs, all are accepted")
	o.peers.Flags(fs, "peer-", "other servers")
}

func (o *options) validate() error {
	var f faults.List
	f.Add(faults.OneOf("role", o.role, "all", "server", "router"))
	f.Add(faults.OneOf("default-reply", o.defaultReply, "deny", "admit"))
	f.Add(faults.OneOf("full-reply", o.fullReply, "deny", "admit"))
	f.Add(faults.Within("checkpoint", o.server.Checkpoint, 10*time.Millisecond, time.Minute))
	f.Add(faults.Within("poll", o.server.Poll, 10*time.Millisecond, time.Minute))
	f.Add(faults.Within("wait", o.decider.Wait, time.Millisecond, client.MaxWait))
	f.Add(faults.Within("lookup-wait", o.server.Lookup, time.Millisecond, client.MaxWait))
	f.If(o.serves() && o.routes() && o.decider.Wait > o.server.Lookup, "--wait %v: want at most --lookup-wait (%v), by when the server has given up", o.decider.Wait, o.server.Lookup)
	f.If(o.server.Loops < 1, "--udp-loops %d: want 1 or more", o.server.Loops)
	f.If(o.server.MaxKeys < 1, "--max-keys %d: want 1 or more", o.server.MaxKeys)
	f.If(o.server.MaxSessions < 1, "--max-sessions %d: want 1 or more", o.server.MaxSessions)
	f.If(o.decider.Attempts < 1, "--attempts %d: want 1 or more", o.decider.Attempts)
	hasDecider := len(o.decider.Servers) > 0
	f.If(hasDecider && o.serves(), "--server is for --role=router")
	f.If(!hasDecider && !o.serves(), "--role=router needs --server")
	f.If(o.database != "" && !strings.HasPrefix(o.database, "postgres://") && !strings.HasPrefix(o.database, "postgresql://"),
		"--database: want postgres://..., or --data-path for SQLite")
	o.database = cmp.Or(o.database, filepath.Join(o.dataPath, "admission.db"))
	o.decider.DefaultAdmit, o.server.AdmitFull = o.defaultReply == "admit", o.fullReply == "admit"
	var err error
	if o.macKeyFile != "" {
		o.decider.Keys, err = client.ReadKeys(o.macKeyFile)
		f.If(err != nil, "--mac-key-file: %w", err)
	}
	o.peerOptions, err = o.peers.Load("peer-")
	f.Add(err)
	f.Add(o.addresses.Validate())
	if o.serves() {
		f.Add(o.addresses.Check("--udp-address", o.server.Address, o.macKeyFile != "", "--mac-key-file"))
	}
	return f.Err()
}

func (o *options) serverConfig(s server.Store, log *slog.Logger, metrics prometheus.Registerer, grpcAddress string) server.Config {
	cfg := o.server
	cfg.Keys, cfg.Store, cfg.Log, cfg.Metrics, cfg.Dial = o.decider.Keys, s, log, metrics, o.dial
	cfg.Replicate = cmp.Or(cfg.Replicate, grpcAddress)
	return cfg
}

// dial connects to another server.
func (o *options) dial(address string) (srtmv1.AdmissionReplicationClient, func() error, error) {
	conn, err := service.Keep(address, time.Second, o.peerOptions...)
	if err != nil {
		return nil, nil, err
	}
	return srtmv1.NewAdmissionReplicationClient(conn), conn.Close, nil
}
