package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

func brokerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "broker",
		Short: "The brokers of a cluster",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(brokerListCommand(), brokerDrainCommand())
	return cmd
}

// drainPause is between two looks at what a draining broker still has.
const drainPause = 200 * time.Millisecond

func brokerDrainCommand() *cobra.Command {
	var c cli
	var undo, wait bool
	cmd := &cobra.Command{
		Use:   "drain BROKER",
		Short: "Move everything away from a broker",
		Long: `drain has nothing new placed on the broker, and moves the publishers of its
topics to others. A topic is gone from it once its consumers have had what it
still holds. What fits nowhere else stays: list shows it.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s: want one broker, got %d arguments", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if undo && wait {
				return usagef("--undo and --wait exclude each other")
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewAdminServiceClient(conn).DrainBroker(ctx, &srtmv1.DrainBrokerRequest{BrokerId: args[0], Undo: undo})
				if err != nil {
					return err
				}
				b := r.GetBroker()
				if wait {
					if b, err = emptied(ctx, conn, b); err != nil {
						return err
					}
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), b)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "broker %s: draining %v, topics on it: %d\n", b.GetId(), b.GetDraining(), len(b.GetTopics()))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&undo, "undo", false, "end a drain: place on the broker again")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until no topic is on it, within --timeout")
	c.flags(cmd)
	return cmd
}

// emptied waits until no topic is on the broker.
func emptied(ctx context.Context, conn *grpc.ClientConn, b *srtmv1.Broker) (*srtmv1.Broker, error) {
	ticker := time.NewTicker(drainPause)
	defer ticker.Stop()
	for {
		if len(b.GetTopics()) == 0 {
			return b, nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("topics still on broker %s: %s", b.GetId(), strings.Join(b.GetTopics(), ", "))
		}
		r, err := srtmv1.NewAdminServiceClient(conn).ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
		if err != nil {
			return nil, err
		}
		for _, one := range r.GetBrokers() {
			if one.GetId() == b.GetId() {
				b = one
			}
		}
	}
}

func brokerListCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the brokers, by id",
		Long: `list shows every broker that has joined: its capacity mcap and what of it is
promised to topics, both in msg/s, and whether its session is up.`,
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
					if b.GetDraining() {
						state += ", draining"
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
