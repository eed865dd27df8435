// Package up is `srtm up`: it starts a whole cluster on this machine with a topic, a
// contract, emulated sensors and a subscriber. It shows a live view, and reports whether
// every accepted message arrived exactly once, and how SRTM's placement compares with a
// blind split. The package only drives: tools/srtm/cluster and tools/iotpub supply the
// processes, and all requests to the cluster use the public API.
//
// A run (run.go) starts the cluster and calibrates: it finds a load that this machine
// carries, and the machine's delays. Then it derives the contract (derive.go). It runs
// one phase with SRTM's placement and one with a split over all brokers, with the same
// publishers, contract and seed. Finally it reports.
package up

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/program"
)

// Command returns `srtm up`.
func Command() *cobra.Command {
	o := defaults()
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run a local cluster with emulated sensors, and report",
		Long: `up starts a cluster on this machine (brokers, a loaddistributor, a tbadaptor,
on free ports of 127.0.0.1), creates a topic, connects one emulated sensor for
each publisher and a subscriber that uses go-nsq, and shows what happens.

First it calibrates: it measures whether this machine carries the load, reports this
with its measurements if it does not and takes fewer publishers, and derives the
contract. r is 1.1 x the offered rate. b is more than the load needs for a p99
access delay of 0 on one broker, and by the same factor less than it needs on
all of them (n on each). The SLO lies between what this machine takes without
tokens and what a blind split waits for them. Then it sends for half of
--duration with SRTM's placement and for the other half with the topic split
over all brokers. It ends with a report: whether every accepted message was
delivered exactly once, the p99 of both, and what tokens alone would have done,
which no other work on this machine can change.

With --mqtt the sensors are devices that speak MQTT 5.0 and know one broker only.
The brokers forward to the broker that the placement gives each publisher.

Ctrl-C drains and reports what there is; a second one ends at once.

Exit code: 0 if nothing was lost or duplicated; 1 if something was, or on
failure; 2 if the command line is wrong. A missed SLO and a load that this
machine does not carry are reported and are no failure.`,
		Example: `  srtm up
  srtm up --duration 20s --publishers 500 --group-size 50 --sync
  srtm up --duration 5m --admission --gateway
  srtm up --duration 20s --mqtt
  srtm up --duration 20s --replicated
  srtm up --trace detectors.csv.gz --compress 10 --copies 20`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := o.validate(); err != nil {
				return program.UsageError{Err: err}
			}
			l, err := o.load.Build()
			if err != nil {
				if o.load.Trace == "" {
					err = program.UsageError{Err: err}
				}
				return err
			}
			if o.binDir == "" {
				self, err := os.Executable()
				if err != nil {
					return fmt.Errorf("find the executables (say where with --bin-dir): %w", err)
				}
				o.binDir = filepath.Dir(self)
			}
			if o.replicated && !cmd.Flags().Changed("brokers") {
				o.brokers = 3
			}
			nats, err := o.findNATS()
			if err != nil {
				return err
			}
			keep := o.dataDir != ""
			if keep {
				err = os.MkdirAll(o.dataDir, 0o700)
			} else {
				o.dataDir, err = os.MkdirTemp("", "srtm-up-")
			}
			if err != nil {
				return fmt.Errorf("folder for logs: %w", err)
			}
			r := &run{options: o, load: l, nats: nats, stdout: cmd.OutOrStdout(), view: newView(cmd, o.output)}
			// A terminal that closes ends the cluster as Ctrl-C does.
			ctx, stop := context.WithCancel(cmd.Context())
			defer stop()
			defer lifecycle.OnHangup(stop)()
			err = r.all(ctx)
			switch {
			case keep:
			case err != nil:
				fmt.Fprintf(cmd.ErrOrStderr(), "the logs of the cluster are in %s\n", o.dataDir)
			default:
				err = os.RemoveAll(o.dataDir)
			}
			return errors.Join(err)
		},
	}
	o.flags(cmd.Flags())
	return cmd
}
