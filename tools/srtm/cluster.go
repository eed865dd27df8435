package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

func clusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Back up what the loaddistributor knows, and bring it back",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(clusterExportCommand(), clusterImportCommand())
	return cmd
}

func clusterExportCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "export > FILE",
		Short: "Print the topics, placements and brokers that the store has",
		Long: `export prints all that the loaddistributor has in its store, for "srtm cluster
import" of the same or a later release. Messages, and the shares in force, are on the
brokers and not in it.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				stream, err := srtmv1.NewAdminServiceClient(conn).ExportCluster(ctx, &srtmv1.ExportClusterRequest{})
				if err != nil {
					return err
				}
				for {
					m, err := stream.Recv()
					if errors.Is(err, io.EOF) {
						return nil
					}
					if err != nil {
						return err
					}
					if _, err := cmd.OutOrStdout().Write(m.Text); err != nil {
						return err
					}
				}
			})
		},
	}
	c.flags(cmd)
	return cmd
}

func clusterImportCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Bring back what an export has and the loaddistributor has not",
		Long: `import brings back the topics and brokers of an export, as after the store was
lost: topics with their publishers where they were, and brokers with their drain and
capacity. What the loaddistributor has stays as it is. Topics that were created after
the export are not in it, those that were deleted after it come back. FILE may be "-".`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s: want one file, got %d arguments", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			read := func() ([]byte, error) { return os.ReadFile(args[0]) }
			if args[0] == "-" {
				read = func() ([]byte, error) { return io.ReadAll(cmd.InOrStdin()) }
			}
			text, err := read()
			if err != nil {
				return err
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				stream, err := srtmv1.NewAdminServiceClient(conn).ImportCluster(ctx)
				if err != nil {
					return err
				}
				const piece = 1 << 18
				for rest := text; len(rest) > 0; {
					n := min(len(rest), piece)
					if err := stream.Send(&srtmv1.ImportClusterRequest{Text: rest[:n]}); err != nil {
						break // the answer says why
					}
					rest = rest[n:]
				}
				r, err := stream.CloseAndRecv()
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), r)
				}
				for _, why := range r.LeftOut {
					fmt.Fprintln(cmd.ErrOrStderr(), "left out:", why)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "imported %d topics and %d brokers, left out %d topics\n", r.Topics, r.Brokers, len(r.LeftOut))
				return nil
			})
		},
	}
	c.flags(cmd)
	return cmd
}
