package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tools/help"
	"github.com/srtm-io/srtm/tools/iotpub/emulate"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// execute runs a command line.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := help.Root("iotpub", "Emulate IoT publishers",
		`iotpub emulates IoT publishers against a broker or a cluster.

Exit code: 0; 1 if an accepted message was lost or arrived twice, or on failure;
2 if the command line is wrong.`,
		runCommand(), greedyCommand(), scheduleCommand())
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}

// buildLoad reports an invalid flag as a usage error, and an invalid trace file as a
// failure.
func buildLoad(o load.Options) (*load.Load, error) {
	l, err := o.Build()
	if err != nil && o.Trace == "" {
		return nil, program.UsageError{Err: err}
	}
	return l, err
}

func runCommand() *cobra.Command {
	cfg := emulate.Config{
		Load: load.Default(), Duration: 10 * time.Second, Topic: "sensors", Channel: "iotpub",
		Connect: 30 * time.Second, Drain: 10 * time.Second, Workers: 1, MaxOutstanding: 4096,
		Heartbeat: 30 * time.Second, Interval: 5 * time.Second, Background: emulate.DefaultBackground(),
	}
	output, level, protocol, mqtt := "text", "error", "nsq", ""
	var at []string
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Send a load, and report messages and latencies",
		Long: `run opens one connection for each publisher and sends each message at its
scheduled time, however slow the broker is (an open loop). It reports the
messages that were offered, accepted and refused, and their latencies. All
latencies count from the scheduled send time.

With --subscribe it also receives all messages, through go-nsq, and checks that
each accepted message arrives exactly once.

With --protocol mqtt each publisher is a device that speaks MQTT 5.0, with quality
of service 1. In a cluster, the broker of a device forwards its messages.`,
		Example: `  iotpub run --nsqd-tcp-address 127.0.0.1:4150 --publishers 1000 --rate 10 --subscribe
  iotpub run --loaddistributor-address 127.0.0.1:4170 --lookupd-http-address 127.0.0.1:4161 \
    --topic sensors --subscribe
  iotpub run --protocol mqtt --mqtt-address 127.0.0.1 --subscribe --nsqd-tcp-address 127.0.0.1`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return program.UsageError{Err: fmt.Errorf("output %q: want text or json", output)}
			}
			log, _, err := obs.NewLogger(cmd.ErrOrStderr(), level, "text")
			if err != nil {
				return program.UsageError{Err: err}
			}
			cfg.Logger = log
			switch protocol {
			case "nsq":
			case "mqtt":
				if cfg.MQTT = mqtt; mqtt == "" {
					return program.UsageError{Err: errors.New("--protocol mqtt needs --mqtt-address")}
				}
			default:
				return program.UsageError{Err: fmt.Errorf("protocol %q: want nsq or mqtt", protocol)}
			}
			if cfg.Background.At, err = emulate.ParseBackground(at); err != nil {
				return program.UsageError{Err: err}
			}
			if err := cfg.Validate(); err != nil {
				return program.UsageError{Err: err}
			}
			l, err := buildLoad(cfg.Load)
			if err != nil {
				return err
			}
			// A worker's thread is mostly in the kernel and returns at an instant of its
			// own choice. The extra processors keep one free for the worker when the
			// subscriber is busy.
			runtime.GOMAXPROCS(runtime.NumCPU() + cfg.Workers)
			return emulated(cmd, cfg, l, output)
		},
	}
	fs := cmd.Flags()
	cfg.Load.Flags(fs)
	fs.DurationVar(&cfg.Duration, "duration", cfg.Duration, "how long to send")
	fs.StringVar(&cfg.Topic, "topic", cfg.Topic, "topic to publish to")
	fs.StringVar(&protocol, "protocol", protocol, "`protocol` of the publishers: nsq or mqtt")
	fs.Var(service.AddressFlag(&mqtt, "", service.MQTTPort), "mqtt-address", "with --protocol mqtt: `host:port` of the broker that all publishers connect to")
	fs.StringVar(&cfg.Name, "mqtt-topic", "", "with --protocol mqtt: MQTT topic `name`, in which {id} is the publisher's id (default --topic)")
	fs.Var(service.AddressFlag(&cfg.Nsqd, "", service.NSQPort), "nsqd-tcp-address", "`host:port` of the broker that all publishers connect to; with --protocol mqtt only the subscriber connects to it")
	fs.Var(service.AddressFlag(&cfg.Loaddistributor, "", service.LoaddistributorPort), "loaddistributor-address", "gRPC `host:port` of the loaddistributor that assigns a broker to each publisher, in place of --nsqd-tcp-address")
	cfg.Trust.Flags(fs, "", "the loaddistributor")
	fs.BoolVar(&cfg.Subscribe, "subscribe", false, "receive the messages too, and check that each comes exactly once")
	fs.StringVar(&cfg.Channel, "channel", cfg.Channel, "with --subscribe: channel to subscribe to")
	fs.Var(service.AddressesFlag(&cfg.Lookupd, service.LookupPort), "lookupd-http-address", "with --subscribe: `host:port` of a lookup service that knows the topic's brokers; may be repeated; without it the subscriber connects to --nsqd-tcp-address")
	fs.DurationVar(&cfg.Connect, "connect-timeout", cfg.Connect, "maximum time until all publishers and the subscriber are connected")
	fs.DurationVar(&cfg.Drain, "drain-timeout", cfg.Drain, "maximum wait for answers after the last message; then maximum wait for missing messages without a delivery")
	fs.IntVar(&cfg.Workers, "workers", cfg.Workers, "`threads` that send")
	fs.BoolVar(&cfg.Mpub, "mpub", false, "send a batch as one MPUB instead of PUBs back to back")
	fs.IntVar(&cfg.MaxOutstanding, "max-outstanding", cfg.MaxOutstanding, "unanswered `commands` of a publisher before its messages wait")
	fs.DurationVar(&cfg.Heartbeat, "heartbeat", cfg.Heartbeat, "heartbeat interval to ask the broker for; the keep alive of MQTT")
	fs.DurationVar(&cfg.Interval, "progress", cfg.Interval, "time between lines of progress; 0: none")
	fs.StringVar(&cfg.Capture, "capture", "", "`file` for the time of each write, in seconds from the start, one per line, as drlsim bucket reads them")
	fs.StringVar(&cfg.Histograms, "histograms", "", "`file` for all counts of the run's latencies, an HdrHistogram log")
	fs.StringArrayVar(&at, "background", nil, "`broker` host:port=publishers (default port "+service.NSQPort+"): this number of Poisson publishers sends to the broker at the same time, to another topic; may be repeated")
	fs.Float64Var(&cfg.Background.Spec.Rate, "background-rate", cfg.Background.Spec.Rate, "with --background: mean rate of each publisher, in `msg/s`")
	fs.IntVar(&cfg.Background.Spec.Batch, "background-batch", cfg.Background.Spec.Batch, "with --background: messages a publisher sends back to back")
	fs.IntVar(&cfg.Background.Spec.Size, "background-size", cfg.Background.Spec.Size, "with --background: size of a message, in `bytes`")
	fs.StringVar(&cfg.Background.Topic, "background-topic", cfg.Background.Topic, "with --background: `topic` to publish to")
	fs.StringVar(&output, "output", output, "`form` of progress and report: text or json (one object a line)")
	fs.StringVar(&level, "log-level", level, "minimum `level` to log: debug, info, warn or error")
	return cmd
}

// emulated runs the load and prints the report. A report with a fault is an error.
func emulated(cmd *cobra.Command, cfg emulate.Config, l *load.Load, output string) error {
	out := cmd.OutOrStdout()
	var printing error
	show := func(v interface{ WriteText(io.Writer) error }) {
		if output == "json" {
			printing = errors.Join(printing, json.NewEncoder(out).Encode(v))
			return
		}
		printing = errors.Join(printing, v.WriteText(out))
	}
	rep, err := emulate.Run(cmd.Context(), cfg, l, func(p *report.Progress) { show(p) })
	if err != nil {
		return err
	}
	show(rep)
	if printing != nil {
		return fmt.Errorf("print: %w", printing)
	}
	if fault := rep.Fault(); fault != "" {
		return errors.New(fault)
	}
	return nil
}

func scheduleCommand() *cobra.Command {
	options := load.Default()
	duration := 10 * time.Second
	cmd := &cobra.Command{
		Use:     "schedule",
		Short:   "Print when the messages of a load are sent",
		Example: `  iotpub schedule --publishers 100 --rate 1000 --duration 10s | drlsim bucket --rate 1100 --burst 20`,
		Long: `schedule prints the scheduled send time of every message, in seconds from the
start, and the correlation key of the publisher, if it has one. drlsim bucket
reads this form. Nothing is sent.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if duration <= 0 {
				return program.UsageError{Err: fmt.Errorf("duration: %v, want more than 0", duration)}
			}
			l, err := buildLoad(options)
			if err != nil {
				return err
			}
			w := bufio.NewWriter(cmd.OutOrStdout())
			stream := schedule.Until(l.Stream(), duration)
			line := make([]byte, 0, 100)
			for {
				e, ok := stream.Next()
				if !ok {
					return w.Flush()
				}
				line = strconv.AppendFloat(line[:0], e.At.Seconds(), 'f', 9, 64)
				if key := l.Sources[e.Source].Key; key != "" {
					line = append(append(line, ','), key...)
				}
				line = append(line, '\n')
				for range e.Count {
					if _, err := w.Write(line); err != nil {
						return fmt.Errorf("print: %w", err)
					}
				}
			}
		},
	}
	options.Flags(cmd.Flags())
	cmd.Flags().DurationVar(&duration, "duration", duration, "length of the printed schedule")
	return cmd
}
