package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tools/sim/link"
)

func linkCommand() *cobra.Command {
	c := link.Config{}
	var capacity, buffer string
	cmd := &cobra.Command{
		Use:   "link",
		Short: "Flows of different ToS over one link, told by its routers what to send",
		Long: `link simulates the transport of the Improved EFXCP paper packet by packet. Endless
flows send 1000-byte packets in both directions over one link or several in series.
Each link has a FIFO queue with drop-tail in each direction, and a router at each end
that sends rates to the flows, in proportion to their ToS. ACKs are packets of 40
bytes. Flows take the values of --tos in turn. The second half of --duration is
measured, in the forward direction:

  throughput            of each flow
  utilization           of the link's capacity, ACKs included
  queue mean and max    as parts of the buffer
  drops                 packets that the router dropped

--control chooses the rules:

  paper   the paper's rules literally, windows of whole packets
  paced   the paper's rules, windows not rounded, packets paced
  level   the water level by which brokers advise publishers, packets paced

--ack-bypass lets ACKs return without a queue. If --routers is above 1, the flows cross
all links, and --cross adds flows that cross one link only: so many on the second link,
twice as many on the third. The last link is the bottleneck, and the result has its
utilization and queue; "links" lists every link.

--greedy makes the first flows claim a ToS of 255. With --police the router holds
each flow to the ToS that the flow was given, as brokers do.`,
		Example: `  drlsim link --capacity 300Mbps --rtt 60ms --flows 50 --tos 1,2,4,8,10 --duration 60s
  drlsim link --control level --greedy 5 --police --output table`,
	}
	flags := cmd.Flags()
	flags.StringVar(&capacity, "capacity", "300Mbps", "`rate` of the link each way, in bps, kbps, Mbps or Gbps")
	flags.DurationVar(&c.RTT, "rtt", 60*time.Millisecond, "round-trip `time` of propagation")
	flags.IntVar(&c.Flows, "flows", 50, "`number` of flows each way")
	flags.IntSliceVar(&c.ToS, "tos", []int{1, 2, 4, 8, 10}, "`weights` of the flows, in turn, 1 to 255")
	flags.DurationVar(&c.Duration, "duration", 60*time.Second, "virtual `time`")
	flags.Uint64Var(&c.Seed, "seed", 1, "`number` that decides when flows begin")
	flags.StringVar(&c.Control, "control", link.Paper, "`name` of the rules: "+strings.Join(link.Controls(), ", "))
	flags.StringVar(&buffer, "buffer", "1BDP", "`size` of each queue in bandwidth-delay products; at least two packets of each flow")
	flags.IntVar(&c.Greedy, "greedy", 0, "`number` of flows that claim a ToS of 255")
	flags.BoolVar(&c.Bypass, "ack-bypass", false, "let ACKs return without a queue")
	flags.IntVar(&c.Routers, "routers", 1, "`number` of links in series, 1 to 16")
	flags.IntVar(&c.Cross, "cross", 0, "`number` of flows that cross the second link only; twice as many cross the third, and so on")
	flags.Float64Var(&c.Alpha, "alpha", 0.5, "`gain` of windows by the paper's rules, up to 1")
	flags.BoolVar(&c.Police, "police", false, "hold each flow to the ToS that the flow was given")
	return leaf(cmd, func(*cobra.Command) (answer, error) {
		var err error
		if c.Capacity, err = bitsPerSecond(capacity); err != nil {
			return answer{}, usage(err)
		}
		if c.Buffer, err = bandwidthDelays(buffer); err != nil {
			return answer{}, usage(err)
		}
		if err := c.Validate(); err != nil {
			return answer{}, usage(err)
		}
		r := link.Run(c)
		return answer{[]any{r}, func(w io.Writer) error { return linkTable(w, r) }}, nil
	})
}

// bitsPerSecond reads a rate such as 300Mbps.
func bitsPerSecond(text string) (float64, error) {
	for _, unit := range []struct {
		name string
		bits float64
	}{{"Gbps", 1e9}, {"Mbps", 1e6}, {"kbps", 1e3}, {"bps", 1}} {
		if number, ok := strings.CutSuffix(text, unit.name); ok {
			if v, err := strconv.ParseFloat(number, 64); err == nil {
				return v * unit.bits, nil
			}
		}
	}
	return 0, fmt.Errorf("--capacity %q: want a number and bps, kbps, Mbps or Gbps", text)
}

// bandwidthDelays reads a size such as 0.5BDP. BDP alone is 1.
func bandwidthDelays(text string) (float64, error) {
	number := strings.TrimSuffix(text, "BDP")
	if number == "" && text != "" {
		return 1, nil
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil {
		return 0, fmt.Errorf("--buffer %q: want a number of bandwidth-delay products, such as 1BDP", text)
	}
	return v, nil
}

func linkTable(w io.Writer, r link.Result) error {
	fmt.Fprintf(w, "utilization %.4f, queue mean %.4f and max %.4f of the buffer, %s\n", r.Utilization, r.QueueMean, r.QueueMax, plural.Count(r.Drops, "drop"))
	return grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		row("flow\ttos\tMb/s\tgreedy\t")
		for i, f := range r.Flows {
			row("%d\t%d\t%.3f\t%v\t", i, f.ToS, f.Throughput/1e6, f.Greedy)
		}
	})
}
