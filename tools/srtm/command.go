package main

import (
	"cmp"
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

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tools/srtm/agent"
	"github.com/srtm-io/srtm/tools/srtm/plan"
	"github.com/srtm-io/srtm/tools/srtm/screen"
	"github.com/srtm-io/srtm/tools/srtm/up"
)

// addressEnv names the loaddistributor if the flag is not set.
const addressEnv = agent.AddressEnv

// The forms of output.
const (
	formJSON  = "json"
	formTable = "table"
)

// cli holds the common flags of the commands that talk to a server.
type cli struct {
	address     string
	addressFlag string
	trust       secure.ClientConfig
	options     []grpc.DialOption // from trust, after Load
	output      string
	timeout     time.Duration
}

// call is a command line being executed with a connection to the server.
type call struct {
	cli   *cli
	cmd   *cobra.Command
	args  []string
	ctx   context.Context // ends after the timeout
	conn  *grpc.ClientConn
	admin srtmv1.AdminServiceClient
	out   io.Writer

	progress *progress
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root := command()
	if err := checkLine(root, args); err != nil {
		return program.UsageError{Err: err}
	}
	root = command() // cobra keeps state in the tree
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := explain(root.ExecuteContext(ctx)); err != nil {
		return printable{err}
	}
	return nil
}

// printable is an error whose text may contain a server's text.
type printable struct{ error }

func (p printable) Error() string { return program.Printable(p.error.Error()) }
func (p printable) Unwrap() error { return p.error }

// command returns a new command tree, because cobra keeps state in the tree.
func command() *cobra.Command {
	root := parent("srtm", "Operate an SRTM cluster", `srtm operates an SRTM cluster through the loaddistributor's gRPC API, and the
admission service and gateways through their own.

Exit code: 0; 1 on failure; 2 if the command line is wrong; 3 if a topic cannot
be placed on the brokers there are.`,
		commandsOf("try", up.Command(), doctorCommand(), topCommand())...)
	root.AddCommand(commandsOf("messages", pubCommand(), tailCommand(), channelCommand(), agent.Command())...)
	root.AddCommand(commandsOf("topics", topicCommand(), shareCommand(), plan.Command())...)
	root.AddCommand(commandsOf("servers", brokerCommand(), clusterCommand(), admissionCommand(), gatewayCommand())...)
	root.AddGroup(
		&cobra.Group{ID: "try", Title: "Try and look"}, &cobra.Group{ID: "messages", Title: "Messages"},
		&cobra.Group{ID: "topics", Title: "Topics and contracts"}, &cobra.Group{ID: "servers", Title: "Servers"},
	)
	takeNoArguments(root)
	useHelp(root)
	root.SilenceUsage, root.SilenceErrors = true, true
	return root
}

// commandsOf adds commands to a group of the root command.
func commandsOf(group string, commands ...*cobra.Command) []*cobra.Command {
	for _, c := range commands {
		c.GroupID = group
	}
	return commands
}

// parent returns a command that only has subcommands.
func parent(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(commands...)
	return cmd
}

// leaf completes a command that calls the loaddistributor. do runs again if another
// server leads, so one-time work belongs into PreRunE.
func leaf(cmd *cobra.Command, do func(*call) error) *cobra.Command {
	c := &cli{}
	c.flags(cmd)
	cmd.ValidArgsFunction = c.complete
	return c.completes(cmd, do)
}

func (c *cli) completes(cmd *cobra.Command, do func(*call) error) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		p := startProgress(cmd, "waiting for the "+strings.TrimSuffix(c.addressFlag, "-address"))
		defer p.stop()
		cmd.SetErr(screen.Safe(cmd.ErrOrStderr()))
		err := c.call(cmd.Context(), func(x *call) error {
			x.cmd, x.args, x.out, x.progress = cmd, args, screen.Safe(p.before(cmd.OutOrStdout(), true)), p
			return do(x)
		})
		if err == nil {
			return nil
		}
		file := cmd.Flags().Lookup("file")
		return &callError{err, c.address, c.addressFlag, file != nil && file.Changed}
	}
	return cmd
}

// takeNoArguments makes a command and its subcommands refuse arguments, unless they set
// Args.
func takeNoArguments(cmd *cobra.Command) {
	if cmd.Args == nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return nil
			case cmd.HasAvailableSubCommands():
				return unknownCommand(cmd, args[0])
			}
			return usagef("%q: %s takes no arguments, only flags; see %[2]s --help", args[0], cmd.CommandPath())
		}
	}
	for _, sub := range cmd.Commands() {
		takeNoArguments(sub)
	}
}

// between checks the number of arguments, with a usage error.
func between(minimum, maximum int, want string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < minimum || len(args) > maximum {
			return usagef("%s: want %s, got %d arguments; for example:\n%s", cmd.CommandPath(), want, len(args), firstLine(cmd.Example))
		}
		return nil
	}
}

var (
	oneName   = between(1, 1, "one topic name")
	oneBroker = between(1, 1, "one broker")
)

func usagef(format string, args ...any) error {
	return program.UsageError{Err: fmt.Errorf(format, args...)}
}

// flags adds the flags of commands that talk to a cluster.
func (c *cli) flags(cmd *cobra.Command) {
	address := cmp.Or(os.Getenv(addressEnv), "127.0.0.1")
	c.flagsTo(cmd, "loaddistributor", address, service.LoaddistributorPort, "gRPC `host:port` of the loaddistributor, or of several with commas (environment: "+addressEnv+")", patience)
}

// flagsTo adds the flags for the given server.
func (c *cli) flagsTo(cmd *cobra.Command, server, address, port, usage string, timeout time.Duration) {
	c.addressFlag = server + "-address"
	cmd.Flags().Var(service.AddressFlag(&c.address, address, port), c.addressFlag, usage)
	c.trust.Flags(cmd.Flags(), "", "the "+server)
	cmd.Flags().StringVar(&c.output, "output", formTable, "`form` of the output: json or table")
	cmd.Flags().DurationVar(&c.timeout, "timeout", timeout, "how long to wait for the "+server)
}

// patience is the default timeout for a server.
const patience = 30 * time.Second

func (c *cli) check() error {
	if c.output != formJSON && c.output != formTable {
		return usagef("--output %q is neither json nor table", c.output)
	}
	if c.timeout <= 0 {
		return usagef("--timeout %v is not positive", c.timeout)
	}
	return nil
}

// call runs do with a connection to the leading server.
func (c *cli) call(ctx context.Context, do func(*call) error) error {
	err := c.check()
	if err != nil {
		return err
	}
	if c.options, err = c.trust.Load(""); err != nil {
		return program.UsageError{Err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	to := c.address
	for attempt := 0; ; attempt++ {
		err := c.once(ctx, to, do)
		leader, elsewhere := service.Leader(err)
		if !elsewhere || attempt == maxDetours {
			return err
		}
		// A server that does not lead has done nothing. Without a leader, a new one is
		// elected within a lease or two.
		previous := to
		if to = leader; to == "" || to == previous {
			to = c.address
		}
		if attempt == 0 && to == leader {
			continue
		}
		if !clock.Sleep(ctx, detourPause) {
			return err
		}
	}
}

// maxDetours is how often a command follows the reported leader. detourPause is the wait
// if there is no leader.
const (
	maxDetours  = 100
	detourPause = 200 * time.Millisecond
)

func (c *cli) once(ctx context.Context, address string, do func(*call) error) (err error) {
	conn, err := service.Dial(address, c.options...)
	if err != nil {
		return usagef("--%s %q: %v", c.addressFlag, address, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	return do(&call{cli: c, ctx: ctx, conn: conn, admin: srtmv1.NewAdminServiceClient(conn)})
}

// print writes v as JSON, or calls text.
func (c *cli) print(w io.Writer, v any, text func() error) error {
	if c.output == formJSON {
		return writeJSON(w, v)
	}
	return text()
}

// show prints the result v of a call as JSON, or calls text. err is the call's error.
func (x *call) show(v any, err error, text func() error) error {
	if err != nil {
		return err
	}
	return x.cli.print(x.out, v, text)
}

// print is show with a format for the text.
func (x *call) print(v any, err error, format string, args ...any) error {
	return x.show(v, err, func() error {
		_, err := fmt.Fprintf(x.out, format, args...)
		return err
	})
}

// list is show for messages or structs: it prints a JSON array, or a table.
func list[M any](x *call, all []M, err error, head string, cells func(M) []any) error {
	return x.show(jsonArray(all), err, func() error { return table(x.out, head, all, cells) })
}

func jsonArray[M any](all []M) []any {
	values := make([]any, len(all))
	for i, m := range all {
		values[i] = m
	}
	return values
}

// writeJSON prints a value or an array of values. Messages have the field names of the
// .proto.
func writeJSON(w io.Writer, v any) (err error) {
	if values, ok := v.([]any); ok {
		for i := range values {
			if values[i], err = encode(values[i]); err != nil {
				return err
			}
		}
	} else if v, err = encode(v); err != nil {
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// encode marshals a message for writeJSON, which sets the layout: protojson varies its
// spacing on purpose.
func encode(v any) (any, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return v, nil
	}
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return json.RawMessage(b), nil
}

// table prints one line of cells per value, in columns. head has the column names,
// separated by tabs.
func table[M any](w io.Writer, head string, all []M, cells func(M) []any) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, head)
	for _, m := range all {
		separator := "\n"
		for _, cell := range cells(m) {
			fmt.Fprint(t, separator, strings.ReplaceAll(program.Printable(fmt.Sprint(cell)), "\n", `\n`))
			separator = "\t"
		}
	}
	fmt.Fprintln(t)
	return t.Flush()
}
