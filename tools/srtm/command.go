package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/targets"
	"github.com/srtm-io/srtm/tools/srtm/agent"
	"github.com/srtm-io/srtm/tools/srtm/plan"
	"github.com/srtm-io/srtm/tools/srtm/up"
)

// addressEnv names the loaddistributor where the flag does not.
const addressEnv = agent.AddressEnv

// The forms of output.
const (
	formJSON  = "json"
	formTable = "table"
)

// cli is what the commands that talk to a cluster share.
type cli struct {
	address     string
	addressFlag string
	trust       secure.ClientConfig
	options     []grpc.DialOption // of trust, once it is read
	output      string
	timeout     time.Duration
}

// run executes a command line.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root := command()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var coded *plan.ExitError // and not of a process that srtm up has run
	if errors.As(err, &coded) {
		return lifecycle.ExitError{Code: coded.Code, Err: err}
	}
	return explain(err)
}

// command returns the command tree, fresh: cobra keeps state in it.
func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "srtm",
		Short: "Operate an SRTM cluster",
		Long: `srtm operates an SRTM cluster through the loaddistributor's gRPC API, and the
admission service through its own.

Exit code: 0; 1 on failure; 2 if the command line is wrong; 3 if a topic cannot
be placed on the brokers there are.`,
		Version:       obs.Version(),
		Args:          noArguments,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("srtm, {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return lifecycle.UsageError{Err: err} })
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(admissionCommand(), agent.Command(), topicCommand(), channelCommand(), brokerCommand(), shareCommand(), clusterCommand(), plan.Command(), up.Command())
	return root
}

// noArguments and exactly are cobra's checks as usage errors.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s: unexpected argument %q", cmd.CommandPath(), args[0])
	}
	return nil
}

func oneName(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s: want one topic name, got %d arguments", cmd.CommandPath(), len(args))
	}
	return nil
}

func usagef(format string, args ...any) error {
	return lifecycle.UsageError{Err: fmt.Errorf(format, args...)}
}

// flags adds the flags of every command that talks to a cluster.
func (c *cli) flags(cmd *cobra.Command) {
	address := os.Getenv(addressEnv)
	if address == "" {
		address = "127.0.0.1:4170"
	}
	c.flagsTo(cmd, "loaddistributor", address, ", or of several with commas (environment: "+addressEnv+")")
}

// flagsTo is flags for another server than the loaddistributor.
func (c *cli) flagsTo(cmd *cobra.Command, server, address, more string) {
	c.addressFlag = server + "-address"
	cmd.Flags().StringVar(&c.address, c.addressFlag, address, "gRPC `host:port` of the "+server+more)
	c.trust.Flags(cmd.Flags(), "", "the "+server)
	cmd.Flags().StringVar(&c.output, "output", formTable, "`form` of the output: json or table")
	cmd.Flags().DurationVar(&c.timeout, "timeout", 30*time.Second, "how long to wait for the "+server)
}

// call runs do with a connection to the loaddistributor.
func (c *cli) call(cmd *cobra.Command, do func(context.Context, *grpc.ClientConn) error) error {
	return c.callWithin(cmd.Context(), do)
}

// callWithin is call, until ctx ends.
func (c *cli) callWithin(ctx context.Context, do func(context.Context, *grpc.ClientConn) error) error {
	if c.output != formJSON && c.output != formTable {
		return usagef("--output %q is neither json nor table", c.output)
	}
	if c.timeout <= 0 {
		return usagef("--timeout %v is not positive", c.timeout)
	}
	var err error
	if c.options, err = c.trust.Load(""); err != nil {
		return lifecycle.UsageError{Err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	to := c.address
	for attempt := 0; ; attempt++ {
		err := c.once(ctx, to, do)
		leader, elsewhere := targets.Leader(err)
		if !elsewhere || attempt == maxDetours {
			return err
		}
		// One that does not lead has done nothing. While there is no leader,
		// another is found within a lease or two.
		was := to
		if to = leader; to == "" || to == was {
			to = c.address
		}
		if attempt == 0 && to == leader {
			continue
		}
		timer := time.NewTimer(detourPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// How often a command is sent on to where the leader is said to be, and how long
// it waits for one where there is none.
const (
	maxDetours  = 100
	detourPause = 200 * time.Millisecond
)

func (c *cli) once(ctx context.Context, address string, do func(context.Context, *grpc.ClientConn) error) (err error) {
	conn, err := targets.Dial(address, c.options...)
	if err != nil {
		return usagef("--%s %q: %v", c.addressFlag, address, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	return do(ctx, conn)
}

// writeProto prints a message as JSON, with the field names of the .proto.
func writeProto(w io.Writer, m proto.Message) error {
	v, err := encode(m)
	if err != nil {
		return err
	}
	return writeJSON(w, v)
}

// writeProtos prints messages as a JSON array.
func writeProtos[M proto.Message](w io.Writer, messages []M) error {
	values := make([]json.RawMessage, len(messages))
	for i, m := range messages {
		v, err := encode(m)
		if err != nil {
			return err
		}
		values[i] = v
	}
	return writeJSON(w, values)
}

// encode returns the message for writeJSON, which lays it out: protojson
// varies its spacing on purpose.
func encode(m proto.Message) (json.RawMessage, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return b, nil
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// table prints rows under a head, in columns.
func table(w io.Writer, head []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(head, "\t"))
	for _, r := range rows {
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	return t.Flush()
}
