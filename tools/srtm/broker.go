package main

import (
	"context"
	"strconv"

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
	cmd.AddCommand(brokerListCommand())
	return cmd
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
