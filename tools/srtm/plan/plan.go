// Package plan is `srtm plan`: it places a topic described in a file, without a cluster,
// for capacity planning and for checking the placement. The package reads a scenario,
// calls loaddistributor/placement, and prints the plan. Read loaddistributor/placement
// next.
package plan

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// CodeInfeasible is the exit code if no plan exists. The printed answer says why.
const CodeInfeasible = 3

// answer is the JSON form of the output.
type answer struct {
	Policy     string      `json:"policy"`
	K          int         `json:"k"`
	Quotas     []quota     `json:"quotas"`
	Infeasible *infeasible `json:"infeasible"`
	Fits       *fits       `json:"fits,omitempty"` // with infeasible: changes that help
}

type quota struct {
	Broker     string         `json:"broker"`
	Rate       int64          `json:"rate"`
	Publishers int            `json:"publishers"`
	Groups     map[string]int `json:"groups"`
	Share      struct {
		RateMilli int64 `json:"rate_milli"`
		Burst     int64 `json:"burst"`
	} `json:"share"`
}

type infeasible struct {
	Need  int64  `json:"need"`
	Have  int64  `json:"have"`
	Bound string `json:"bound"`
}

// fits is placement.Fits: one change per field, 0 if the change does not help.
type fits struct {
	Rate        int64 `json:"rate"`
	Burst       int64 `json:"burst"`
	Publishers  int64 `json:"publishers"`
	MoreBrokers int64 `json:"more_brokers"`
	BrokerMcap  int64 `json:"broker_mcap"`
}

// Command returns `srtm plan`.
func Command() *cobra.Command {
	var file, policy, output string
	var seed uint64
	cmd := &cobra.Command{
		Use:   "plan --file scenario.json",
		Short: "Place a topic on paper: which brokers, which quotas, which shares",
		Long: `Place a topic on brokers that are described in a file, without touching a
cluster. Rates are in msg/s; a group's rate is that of each of its publishers;
publishers without a key form one pool.

  {"brokers": [{"id": "b1", "mcap": 64000, "allocated": 10000}],
   "topic": {"name": "t", "rate": 80000, "burst": 100,
             "groups": [{"key": "g1", "count": 25, "rate": 10}]}}

A topic may also list "publishers": [{"id": "p1", "key": "g1", "rate": 10}], or
have neither: then only quotas and shares are planned.

Exit codes: 0 a plan was found, 1 the input is bad, 2 a flag is, 3 nothing fits
(the output says which bound was met, and what would fit: of r, b, the number of
publishers and that of brokers, each by itself).`,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(placement.Policies(), policy) {
				return usage("--policy %q is not one of %s", policy, strings.Join(placement.Policies(), ", "))
			}
			if output != "json" && output != "table" {
				return usage("--output %q is not json or table", output)
			}
			if file == "" {
				return usage("--file is required: a scenario, or - for standard input")
			}
			name := file
			if name == "-" {
				name = "standard input"
			}
			s, err := read(file, cmd.InOrStdin())
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return run(cmd.OutOrStdout(), s, name, policy, output, seed)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&file, "file", "", "the scenario, a JSON file; - reads standard input")
	flags.StringVar(&policy, "policy", placement.SRTM, "placement policy: "+strings.Join(placement.Policies(), ", "))
	flags.StringVar(&output, "output", "table", "`form` of the output: json or table")
	flags.Uint64Var(&seed, "seed", 1, "seed of the policies that place publishers at random")
	return cmd
}

func usage(format string, args ...any) error {
	return program.UsageError{Err: fmt.Errorf(format, args...)}
}

func read(file string, stdin io.Reader) (scenario, error) {
	if file == "-" {
		return parse(stdin)
	}
	f, err := os.Open(file)
	if err != nil {
		if path := (*os.PathError)(nil); errors.As(err, &path) {
			err = path.Err // the caller names the file
		}
		return scenario{}, err
	}
	defer f.Close() // read only: nothing can be lost
	return parse(f)
}

func run(w io.Writer, s scenario, file, policy, output string, seed uint64) error {
	p, err := placement.Place(policy, s.brokers, s.demand, rand.New(rand.NewPCG(seed, 0)))
	var found placement.FieldErrors
	var bound *placement.Infeasible
	if errors.As(err, &found) || len(s.faults) > 0 {
		return errors.New(file + ": " + s.inForm(found).Text("\n"+file+": "))
	}
	if err != nil && !errors.As(err, &bound) {
		return err
	}
	a := answer{Policy: policy, K: p.K, Quotas: []quota{}}
	for _, q := range p.Quotas {
		out := quota{Broker: q.Broker, Rate: q.Rate, Publishers: len(q.Publishers), Groups: s.demand.Keys(q.Publishers)}
		out.Share.RateMilli, out.Share.Burst = int64(q.Share.Rate), q.Share.Burst
		a.Quotas = append(a.Quotas, out)
	}
	if bound != nil {
		f := bound.Fits
		a.Infeasible = &infeasible{Need: bound.Need, Have: bound.Have, Bound: bound.Bound}
		a.Fits = &fits{f.Rate, f.Burst, f.Publishers, f.MoreBrokers, f.Mcap}
	}
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		err = e.Encode(a)
	} else {
		err = table(w, a, s.demand.Topic, bound)
	}
	if err != nil {
		return fmt.Errorf("write the plan: %w", err)
	}
	if bound != nil {
		return program.ExitError{Code: CodeInfeasible, Err: bound}
	}
	return nil
}

func table(w io.Writer, a answer, topic string, bound *placement.Infeasible) error {
	if bound != nil {
		_, err := fmt.Fprintf(w, "topic %s, policy %s: nothing fits\nbound %s: need %d, have %d\nwhat would fit: %s\n",
			topic, a.Policy, bound.Bound, bound.Need, bound.Have, cmp.Or(bound.Fits.String(), "nothing by itself"))
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "BROKER\tRATE msg/s\tPUBLISHERS\tr_l msg/s\tb_l\t  GROUPS\n")
	for _, q := range a.Quotas {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d.%03d\t%d\t  %s\n", q.Broker, q.Rate, q.Publishers,
			q.Share.RateMilli/1000, q.Share.RateMilli%1000, q.Share.Burst, groups(q.Groups))
	}
	if _, err := fmt.Fprintf(w, "topic %s, policy %s, k = %d\n", topic, a.Policy, a.K); err != nil {
		return err
	}
	return t.Flush()
}

// groups lists the first few counts, by key.
func groups(counts map[string]int) string {
	if len(counts) == 0 {
		return "-"
	}
	const shown = 8
	var b strings.Builder
	for i, key := range slices.Sorted(maps.Keys(counts)) {
		if i == shown {
			fmt.Fprintf(&b, " and %d more", len(counts)-shown)
			break
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%s:%d", key, counts[key])
	}
	return b.String()
}
