// Command gateway is an HTTP reverse proxy. The gateway gives each class of requests a share of every
// resource of the servers (mQoS), and sends each request to the server that will answer soonest (JBQ).
//
// The pure packages schedule, balance, cost and policy decide. proxy carries requests, publish passes
// messages to brokers, and profile measures the cost of URLs. Read docs/gateway.md next.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/gateway/proxy"
	"github.com/srtm-io/srtm/gateway/publish"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
)

func main() {
	os.Exit(lifecycle.Main("gateway", func(ctx context.Context) error { return command(ctx, os.Args[1:]) }))
}

// run serves until ctx ends. Then run empties the queues.
func (o *options) run(ctx context.Context, log *slog.Logger, _ *slog.LevelVar) error {
	o.guard.Log(log)
	o.control.Log(log)
	o.brokers.Log(log)
	// net/http logs through package log, for example about a server that sends unrequested data.
	sparse, endLog := obs.Sparse(log)
	defer endLog()
	slog.SetLogLoggerLevel(slog.LevelWarn)
	slog.SetDefault(sparse)
	var group lifecycle.Group
	metrics := obs.NewRegistry()
	o.guard.Measure(metrics)
	config := o.proxy
	config.Tokens, config.Log, config.Metrics = o.guard.Tokens(), log, metrics
	if len(o.admission.Servers) > 0 {
		asker, err := client.New(o.admission)
		if err != nil {
			return err
		}
		group.Add("admission", asker.Run)
		config.Admission = asker
	}
	if o.publishers.Address != "" {
		o.publishers.Logger = log
		service, err := publish.New(o.publishers, o.maxPublish, metrics)
		if err != nil {
			return err
		}
		group.Add("publish", service.Run)
		config.Publish = service
	}
	p, err := proxy.New(config)
	if err != nil {
		return fmt.Errorf("--policy %s: %w", o.policyFile, err)
	}
	mux := http.NewServeMux()
	obs.Mount(mux, metrics, func() any { return p.Status() }, p.Healthy)
	mux.Handle("GET /status", obs.JSON(func() (any, error) { return p.Status(), nil }))
	admin, serveAdmin, err := daemon.ListenHTTP("--admin-address", o.adminAddress, o.guard, mux, log)
	if err != nil {
		return err
	}
	web, err := net.Listen("tcp", o.httpAddress)
	if err != nil {
		return fmt.Errorf("--http-address: %w", err)
	}
	// The group stops in reverse order: clients first, the operators' address last.
	group.Add("admin", serveAdmin)
	group.Add("proxy", p.Run)
	group.Add("policy", func(ctx context.Context) error { return o.follow(ctx, p, log) })
	group.Add("http", func(ctx context.Context) error {
		defer lifecycle.Hold(ctx)() // emptying the queues may take all of a daemon's stop time
		return lifecycle.ServeWithin(p.Listener(web, o.guard), p.Server(o.maxHeader), p.Drain)(ctx)
	})
	logWarnings(log, config.Policy)
	log.Info("gateway is up", obs.KeyVersion, program.Version(), "http", web.Addr().String(), "admin", admin.String(),
		"classes", len(config.Policy.Classes), "servers", len(config.Policy.Servers))
	err = group.Run(ctx)
	log.Info("gateway is down")
	return err
}

// follow reads the policy again when a file has changed. A faulty policy changes nothing, and follow
// logs the same faults once.
func (o *options) follow(ctx context.Context, p *proxy.Proxy, log *slog.Logger) error {
	lastFault := ""
	for clock.Sleep(ctx, time.Second) {
		changed, err := o.readPolicy(false)
		if changed != nil {
			err = p.SetPolicy(changed)
		}
		switch {
		case err != nil && err.Error() != lastFault:
			lastFault = err.Error()
			log.Warn("changed policy has faults; keeping the previous policy", "file", o.policyFile, obs.KeyError, err)
		case err == nil && changed != nil:
			lastFault = ""
			log.Info("policy read again", "file", o.policyFile, "classes", len(changed.Classes), "servers", len(changed.Servers))
			logWarnings(log, changed)
		}
	}
	return nil
}

// logWarnings logs the warnings of a policy.
func logWarnings(log *slog.Logger, p *policy.Policy) {
	for _, warning := range p.Warnings {
		log.Warn("policy", "warning", warning)
	}
}
