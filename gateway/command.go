package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/gateway/profile"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/program"
)

// command runs the gateway, or the subcommand that the first argument names.
func command(ctx context.Context, args []string) error {
	o := &options{}
	p := &daemon.Program{
		Name: "gateway", About: about, Groups: o.groups(), Validate: o.validate, Run: o.run,
		Examples: `  gateway --policy=/etc/srtm/gateway.toml
  gateway --policy=/etc/srtm/gateway.toml --http-address=0.0.0.0:443 --tls-cert=/etc/srtm/cert.pem \
    --tls-key=/etc/srtm/key.pem`,
		First: []string{
			"http-address", "admin-address", "policy", "profiles", "balance", "scheduler", "max-connections", "max-body-bytes",
			"loaddistributor-address", "tls-cert", "tls-key", "token-file", "config",
		},
		Values: map[string]string{
			"policy": "/etc/srtm/gateway.toml", "profiles": "/etc/srtm/profiles.toml",
			"balance": "jbq", "allow-insecure-listen": "http-address",
		},
	}
	if len(args) == 0 || strings.HasPrefix(args[0], "-") {
		return p.Execute(ctx, args)
	}
	commands := map[string]func() *daemon.Program{"check": o.check, "explain": o.explain, "profile": o.profile, "monitor": o.monitor}
	command := commands[args[0]]
	if command == nil {
		return program.UsageError{Err: fmt.Errorf("%q: want check, explain, profile or monitor, or flags alone%s",
			args[0], faults.Hint("", args[0], slices.Collect(maps.Keys(commands))))}
	}
	p = command()
	p.Name = "gateway " + args[0]
	return p.Execute(ctx, args[1:])
}

// flagsOf returns the flag groups of a subcommand with few flags.
func flagsOf(flags func(*flag.FlagSet)) []daemon.Group {
	return []daemon.Group{{Title: "Flags", Flags: flags}}
}

var policyValue = map[string]string{"policy": "/etc/srtm/gateway.toml"}

func (o *options) policyFlag(fs *flag.FlagSet) {
	fs.StringVar(&o.policyFile, "policy", "", "TOML `file` of classes, servers and costs")
}

func (o *options) check() *daemon.Program {
	return &daemon.Program{
		About: "gateway check reports what is wrong with a policy.", Examples: "  gateway check --policy=/etc/srtm/gateway.toml",
		Groups: flagsOf(o.policyFlag), Values: policyValue, Validate: o.validatePolicy,
		Run: func(context.Context, *slog.Logger, *slog.LevelVar) error {
			p := o.proxy.Policy
			for _, warning := range p.Warnings {
				fmt.Println("warning:", warning)
			}
			_, err := fmt.Printf("%s, %s, %s\n", plural.Count(len(p.Classes), "class"), plural.Count(len(p.Servers), "server"), plural.Count(len(p.Resources), "resource"))
			return err
		},
	}
}

func (o *options) explain() *daemon.Program {
	var tenant, target, method, host string
	header := http.Header{}
	flags := func(fs *flag.FlagSet) {
		o.policyFlag(fs)
		fs.StringVar(&target, "url", "", "`URL` or path of the request; also the last argument")
		fs.StringVar(&tenant, "tenant", "", "`tenant` of the request")
		fs.StringVar(&method, "method", http.MethodGet, "`name` of the request's method")
		fs.StringVar(&host, "host", "", "`name` in the request's Host header; empty: the URL's")
		fs.Func("header", "`\"Name: value\"` of the request; may be repeated", func(s string) error {
			name, value, ok := strings.Cut(s, ":")
			if !ok {
				return errors.New(`want "Name: value"`)
			}
			header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
			return nil
		})
	}
	validate := func() error {
		err := o.validatePolicy()
		if target == "" {
			err = errors.Join(err, errors.New("want the URL to explain"))
		}
		return err
	}
	run := func(context.Context, *slog.Logger, *slog.LevelVar) error {
		u, err := url.Parse(target)
		if err != nil {
			return err
		}
		if policy.Ambiguous(u) {
			fmt.Println("refused    400: servers differ in what this path means")
			return nil
		}
		p := o.proxy.Policy
		i, rule := p.Classify(policy.Request{
			Tenant: tenant, Method: method, Host: cmp.Or(host, u.Host), Path: u.Path, RawQuery: u.RawQuery, Header: header,
		})
		c := p.Classes[i]
		fmt.Printf("class      %s, weight %d: %s\n", c.Name, c.Weight, rule)
		fmt.Printf("waits      with at most %d others, %v at most\n", c.Queue, c.Wait)
		if key := c.AdmissionKey(tenant); key != "" {
			fmt.Printf("admission  %s; %s where admission does not answer\n", key, map[bool]string{true: "admitted", false: "refused"}[c.FailOpen])
		}
		units := p.CostOf(u.Path)
		if units == nil {
			fmt.Println("cost       learned")
		}
		for k := range units {
			fmt.Printf("cost       %g of %s\n", units[k], p.Resources[k])
		}
		return nil
	}
	return &daemon.Program{
		About:    "gateway explain shows of what class a request would be, why, and what it is taken to cost.",
		Examples: "  gateway explain --policy=/etc/srtm/gateway.toml --tenant=acme /reports/2026",
		Argument: "url", Groups: flagsOf(flags), Validate: validate, Run: run,
		Values: map[string]string{"policy": policyValue["policy"], "url": "/reports/2026", "tenant": "acme", "header": "Accept: text/html"},
	}
}

func (o *options) monitor() *daemon.Program {
	var m profile.Monitor
	flags := func(fs *flag.FlagSet) {
		fs.StringVar(&o.httpAddress, "http-address", "127.0.0.1:4197", "`host:port` for gateway profile")
		fs.StringVar(&m.Cgroup, "cgroup", "/sys/fs/cgroup", "`folder` of the server's control group (version 2), which counts cpu and disk")
		fs.StringVar(&m.NetDev, "net-dev", "/proc/net/dev", "`file` of the network interfaces' counters")
		fs.StringVar(&m.Interface, "interface", "", "`name` of the interface to count (default all but the loopback)")
		o.security.HTTPFlags(fs, "http-address")
	}
	validate := func() (err error) {
		o.guard, err = o.security.Load()
		_, unread := m.Read()
		return errors.Join(err, unread, o.security.CheckHTTP("--http-address", o.httpAddress))
	}
	run := func(ctx context.Context, log *slog.Logger, _ *slog.LevelVar) error {
		at, serve, err := daemon.ListenHTTP("--http-address", o.httpAddress, o.guard, obs.JSON(func() (any, error) { return m.Read() }), log)
		if err != nil {
			return err
		}
		log.Info("monitor is up", "http", at.String())
		return serve(ctx)
	}
	return &daemon.Program{
		About:    "gateway monitor reports to gateway profile what the web server beside it uses: cpu in milliseconds,\ndisk and net in kilobytes.",
		Examples: "  gateway monitor --cgroup=/sys/fs/cgroup/system.slice/nginx.service",
		Groups:   flagsOf(flags), Validate: validate, Run: run,
		Values: map[string]string{"interface": "eth0", "allow-insecure-listen": "http-address"},
	}
}

func (o *options) profile() *daemon.Program {
	cfg := profile.Config{Client: &http.Client{Timeout: time.Minute}}
	var server string
	flags := func(fs *flag.FlagSet) {
		fs.StringVar(&server, "server", "", "`URL` of the web server, which should have no other clients meanwhile")
		fs.StringVar(&cfg.Monitor, "monitor", "http://127.0.0.1:4197/", "`URL` of the gateway monitor beside it")
		fs.Var((*daemon.List)(&cfg.URLs), "url", "`URL` or path to measure; may be repeated (default: those of --sitemap)")
		fs.StringVar(&cfg.Sitemap, "sitemap", "", "`URL` or path of a sitemap (default none: what links lead to, on the same host, up to 200 pages)")
		fs.IntVar(&cfg.Repeat, "repeat", 20, "how many `times` each is requested by itself, and as often at 2 and 4 at once")
	}
	validate := func() (err error) {
		if cfg.Server, err = url.Parse(server); err != nil || cfg.Server.Scheme != "http" && cfg.Server.Scheme != "https" {
			err = fmt.Errorf("--server: want http:// or https://, got %q", server)
		}
		return errors.Join(err, faults.Within("repeat", cfg.Repeat, 1, 100_000))
	}
	run := func(ctx context.Context, _ *slog.Logger, _ *slog.LevelVar) error {
		r, err := profile.Run(ctx, cfg)
		if err != nil {
			return err
		}
		return r.Write(os.Stdout)
	}
	return &daemon.Program{
		About:    "gateway profile measures what a web server's pages take, requesting them (GET) one by one, and what\nthe server has, and writes it as a policy has it.",
		Examples: "  gateway profile --server=http://10.0.0.8:80 --monitor=http://10.0.0.8:4197/ > profiles.toml",
		Groups:   flagsOf(flags), Validate: validate, Run: run,
		Values: map[string]string{"server": "http://10.0.0.8:80", "url": "/reports/2026", "sitemap": "/sitemap.xml"},
	}
}
