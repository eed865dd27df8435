package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

func brokerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "broker",
		Short: "The brokers of a cluster",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(brokerListCommand(), brokerDrainCommand(), brokerCapacityCommand(), brokerCalibrateCommand(), brokerRemoveCommand())
	return cmd
}

// drainPause is between two looks at what a draining broker still has.
const drainPause = 200 * time.Millisecond

func brokerDrainCommand() *cobra.Command {
	var c cli
	var undo, wait, force bool
	cmd := &cobra.Command{
		Use:   "drain BROKER",
		Short: "Move everything away from a broker",
		Long: `drain has nothing new placed on the broker, and moves the publishers of its
topics to others. A topic is gone from it once its consumers have had what it
still holds. What fits nowhere else stays. It says what it waits for and what would
let it go on, and "safe to stop" once nothing is on the broker any more.

--force has it end, whatever it costs: topics that fit nowhere else go beyond the
capacity of the other brokers, which degrades them, and messages that are left on
the broker are lost once nobody has published there and no consumer has been given
one for 10 s (the loaddistributor's --window).`,
		Args: oneBroker,
		RunE: func(cmd *cobra.Command, args []string) error {
			if undo && (wait || force) {
				return usagef("--undo excludes --wait and --force")
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewAdminServiceClient(conn).DrainBroker(ctx, &srtmv1.DrainBrokerRequest{BrokerId: args[0], Undo: undo, Force: force})
				if err != nil {
					return err
				}
				b := r.GetBroker()
				if wait {
					if b, err = emptied(ctx, conn, b, cmd.ErrOrStderr()); err != nil {
						return err
					}
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), b)
				}
				out := cmd.OutOrStdout()
				if _, err = fmt.Fprintf(out, "broker %s: draining %v, topics on it: %d\n%s", b.GetId(), b.GetDraining(), len(b.GetTopics()), waits(b)); err != nil {
					return err
				}
				if b.GetSafeToStop() {
					_, err = fmt.Fprintln(out, "safe to stop", b.GetId())
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&undo, "undo", false, "end a drain: place on the broker again")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it is safe to stop, within --timeout")
	cmd.Flags().BoolVar(&force, "force", false, "overload the other brokers and lose messages rather than wait")
	c.flags(cmd)
	return cmd
}

// waits is what a drain waits for, a line for each topic.
func waits(b *srtmv1.Broker) string {
	var s strings.Builder
	for _, w := range b.GetWaits() {
		fmt.Fprintf(&s, "  waits for %s: %s\n", cmp.Or(w.GetTopic(), "the broker"), w.GetReason())
		if w.GetRemedy() != "" {
			fmt.Fprintf(&s, "    what helps: %s\n", w.GetRemedy())
		}
	}
	return s.String()
}

// emptied waits until nothing is on the broker, and writes to log what it waits for
// when that changes.
func emptied(ctx context.Context, conn *grpc.ClientConn, b *srtmv1.Broker, log io.Writer) (*srtmv1.Broker, error) {
	ticker := time.NewTicker(drainPause)
	defer ticker.Stop()
	for said := ""; ; {
		if len(b.GetTopics())+len(b.GetWaits()) == 0 {
			return b, nil
		}
		if now := waits(b); now != said {
			said = now
			if _, err := fmt.Fprint(log, said); err != nil {
				return nil, err
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
		r, err := srtmv1.NewAdminServiceClient(conn).ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
		switch {
		case ctx.Err() != nil || status.Code(err) == codes.DeadlineExceeded:
			return nil, fmt.Errorf("topics still on broker %s: %s\n%s", b.GetId(), strings.Join(b.GetTopics(), ", "), waits(b))
		case err != nil:
			return nil, err
		}
		for _, one := range r.GetBrokers() {
			if one.GetId() == b.GetId() {
				b = one
			}
		}
	}
}

// maxMcap is the greatest capacity the API takes, msg/s.
const maxMcap = 1_000_000_000

func brokerCapacityCommand() *cobra.Command {
	var c cli
	var mcap int64
	var unset bool
	cmd := &cobra.Command{
		Use:   "capacity BROKER",
		Short: "Say what a broker carries within the SLO",
		Long: `capacity gives the broker an mcap that stands over the one it is configured with
(nsqd --mcap), until it is unset. Topics that were promised more are degraded.`,
		Args: oneBroker,
		RunE: func(cmd *cobra.Command, args []string) error {
			if unset == (mcap != 0) {
				return usagef("want either --mcap or --unset")
			}
			if mcap < 0 || mcap > maxMcap {
				return usagef("--mcap %d: want 1 to %d", mcap, int64(maxMcap))
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				b, err := setCapacity(ctx, conn, args[0], mcap)
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), b)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "broker %s: mcap %d msg/s, configured %d\n", b.GetId(), b.GetMcap(), b.GetConfiguredMcap())
				return err
			})
		},
	}
	cmd.Flags().Int64Var(&mcap, "mcap", 0, "maximum rate within the SLO, in `msg/s`")
	cmd.Flags().BoolVar(&unset, "unset", false, "go back to what the broker is configured with")
	c.flags(cmd)
	return cmd
}

func setCapacity(ctx context.Context, conn *grpc.ClientConn, id string, mcap int64) (*srtmv1.Broker, error) {
	r, err := srtmv1.NewAdminServiceClient(conn).SetBrokerCapacity(ctx, &srtmv1.SetBrokerCapacityRequest{BrokerId: id, Mcap: mcap})
	return r.GetBroker(), err
}

func brokerRemoveCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "remove BROKER",
		Short: "Strike a dead broker off",
		Long: `remove says that a broker is dead and will not come back with what it holds: its
shares go to others, as with "share forget", and what it may still have of topics
that have moved away from it is given up. It shows both. A broker that is connected
is refused (stop it first), and so is one that topics are placed on: they move away
by themselves as far as others have room, after --evacuate-after of the
loaddistributor.

Should the broker come back, it is told so, gives up what it holds, and joins as a
new one. If it was alive and only cut off, contracts were exceeded by its bases until
then.`,
		Args: oneBroker,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewAdminServiceClient(conn).RemoveBroker(ctx, &srtmv1.RemoveBrokerRequest{BrokerId: args[0]})
				if err != nil {
					return err
				}
				out := cmd.OutOrStdout()
				if c.output == formJSON {
					return writeProto(out, r)
				}
				if err := writeFreed(out, c.output, args[0], r.GetFreed()); err != nil || len(r.GetLeft()) == 0 {
					return err
				}
				_, err = fmt.Fprintf(out, "given up with what it may have had of them: %s\n", strings.Join(r.GetLeft(), ", "))
				return err
			})
		},
	}
	c.flags(cmd)
	return cmd
}

// oneBroker is cobra's check as a usage error.
func oneBroker(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s: want one broker, got %d arguments", cmd.CommandPath(), len(args))
	}
	return nil
}

func brokerListCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the brokers, by id",
		Long: `list shows every broker that has joined: its capacity mcap and what of it is
promised to topics, both in msg/s, and whether its session is up. "mcap set" says
that its capacity was set (calibrate, capacity), and is not what it is configured
with.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewAdminServiceClient(conn).ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProtos(cmd.OutOrStdout(), r.GetBrokers())
				}
				var rows [][]string
				for _, b := range r.GetBrokers() {
					state := "connected"
					if !b.GetConnected() {
						state = "gone"
					}
					switch {
					case b.GetSafeToStop():
						state += ", safe to stop"
					case b.GetForced():
						state += ", draining by force"
					case b.GetDraining():
						state += ", draining"
					}
					if b.GetCalibratedMcap() != 0 {
						state += ", mcap set"
					}
					rows = append(rows, []string{
						b.GetId(), b.GetTcpAddress(), b.GetHttpAddress(),
						strconv.FormatInt(b.GetMcap(), 10), strconv.FormatInt(b.GetAllocated(), 10),
						strconv.FormatInt(b.GetMcap()-b.GetAllocated(), 10), state, b.GetVersion(),
					})
				}
				return table(cmd.OutOrStdout(), []string{"BROKER", "TCP", "HTTP", "MCAP", "ALLOCATED", "FREE", "STATE", "VERSION"}, rows)
			})
		},
	}
	c.flags(cmd)
	return cmd
}
