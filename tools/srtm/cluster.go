package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
)

func clusterCommand() *cobra.Command {
	return parent("cluster", "Back up what the loaddistributor knows, and bring it back", "", clusterExportCommand(), clusterImportCommand())
}

func clusterExportCommand() *cobra.Command {
	return leaf(&cobra.Command{
		Use:   "export > FILE",
		Short: "Print the topics, placements and brokers that the store has",
		Long: `export prints all that the loaddistributor has in its store, for "srtm cluster
import" of the same or a later release. Messages, and the shares in force, are on the
brokers and not in it.`,
	}, func(x *call) error {
		stream, err := x.admin.ExportCluster(x.ctx, &srtmv1.ExportClusterRequest{})
		for err == nil {
			var m *srtmv1.ExportClusterResponse
			if m, err = stream.Recv(); err == nil {
				_, err = x.out.Write(m.Text)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	})
}

func clusterImportCommand() *cobra.Command {
	var text []byte
	return leaf(&cobra.Command{
		Use:   "import FILE",
		Short: "Bring back what an export has and the loaddistributor has not",
		Long: `import brings back the topics and brokers of an export, as after the store was
lost: topics with their publishers where they were, and brokers with their drain and
capacity. What the loaddistributor has stays as it is. Topics that were created after
the export are not in it, those that were deleted after it come back. FILE may be "-".`,
		Args: between(1, 1, "one file"),
		PreRunE: func(cmd *cobra.Command, args []string) (err error) {
			text, err = readFile(cmd, args[0])
			return err
		},
	}, func(x *call) error {
		stream, err := x.admin.ImportCluster(x.ctx)
		if err != nil {
			return err
		}
		for piece := range slices.Chunk(text, 1<<18) {
			if err := stream.Send(&srtmv1.ImportClusterRequest{Text: piece}); err != nil {
				break // the answer has the reason
			}
		}
		r, err := stream.CloseAndRecv()
		return x.show(r, err, func() error {
			for _, reason := range r.LeftOut {
				fmt.Fprintln(x.cmd.ErrOrStderr(), "left out:", reason)
			}
			_, err := fmt.Fprintf(x.out, "imported %s and %s, left out %s\n",
				plural.Count(r.Topics, "topic"), plural.Count(r.Brokers, "broker"), plural.Count(len(r.LeftOut), "topic"))
			return err
		})
	})
}

// readFile reads a file, or standard input for "-".
func readFile(cmd *cobra.Command, name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(cmd.InOrStdin())
	}
	return os.ReadFile(name)
}
