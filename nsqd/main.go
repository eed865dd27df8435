package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/tokenbucket"
)

func main() {
	os.Exit(lifecycle.Main("nsqd", func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) error {
	opts, err := parse(args, os.Stdout)
	if errors.Is(err, errDone) {
		return nil
	}
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	log, err := obs.NewLogger(os.Stderr, opts.LogLevel, opts.LogFormat)
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	stamps, err := hook.Open(hook.Mode(opts.ArrivalStamps), hook.Config{}, log)
	if err != nil {
		return err
	}
	defer func() {
		if err := stamps.Close(); err != nil {
			log.Warn("arrival stamps not closed", obs.KeyError, err)
		}
	}()
	b, err := broker.New(opts.brokerConfig())
	if err != nil {
		return err
	}
	for _, l := range opts.TopicLimits {
		t, err := b.CreateTopic(l.Topic)
		if err != nil {
			return lifecycle.UsageError{Err: fmt.Errorf("--topic-limit: %w", err)}
		}
		t.Contract(tokenbucket.Share{Rate: l.Rate, Burst: l.Burst}, l.Reject)
	}
	conns, err := conn.New(opts.connConfig(), b, stamps, log)
	if err != nil {
		return err
	}
	tcp, err := conns.Listen(ctx, opts.TCPAddress)
	if err != nil {
		return fmt.Errorf("--tcp-address: %w", err)
	}
	web, err := net.Listen("tcp", opts.HTTPAddress)
	if err != nil {
		tcp.Close()
		return fmt.Errorf("--http-address: %w", err)
	}
	node := opts.node(tcp.Addr(), web.Addr())
	api := httpapi.Config{Node: node, Limits: opts.sessionConfig().Limits, Managed: opts.managed()}
	registry := obs.NewRegistry()

	// The order of stopping is the reverse: the control plane lets go first,
	// then nothing new is accepted, what is held is drained, and last the
	// figures stop being served.
	var group lifecycle.Group
	var control *agent.Agent
	if opts.managed() {
		control, err = agent.New(opts.agentConfig(node, log, registry), b.Node())
		if err != nil {
			tcp.Close()
			web.Close()
			return lifecycle.UsageError{Err: err}
		}
		api.Agent = func() any { return control.State() }
	}
	handler := httpapi.New(api, b, conns, stamps, registry, log)
	group.Add("http", lifecycle.Serve(web, &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}))
	group.Add("broker", func(ctx context.Context) error {
		<-ctx.Done()
		return drain(b, conns, opts.DrainTimeout, log)
	})
	group.Add("tcp", func(ctx context.Context) error { return conns.Serve(ctx, tcp) })
	if control != nil {
		group.Add("agent", control.Run)
	}
	log.Info("nsqd is up", "version", obs.Version(), "tcp", tcp.Addr().String(), "http", web.Addr().String(), "managed", opts.managed())
	err = group.Run(ctx)
	log.Info("nsqd is down")
	return err
}

// drain empties the broker: publishers end at a message boundary, subscribers
// get what is left, and only then everything is closed.
func drain(b *broker.Broker, conns *conn.Server, limit time.Duration, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conns.StopReading()
	left := b.Drain(ctx)
	if left > 0 {
		log.Warn("messages are lost: they are in memory only and nobody took them", "messages", left)
	}
	b.Close()
	grace, cancel := context.WithTimeout(context.Background(), lifecycle.Grace)
	defer cancel()
	return conns.Shutdown(grace)
}
