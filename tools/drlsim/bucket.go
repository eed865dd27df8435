package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/sim/bucket"
)

func bucketCommand() *cobra.Command {
	var (
		file  string
		rate  float64
		burst int64
		o     bucket.Options
	)
	cmd := &cobra.Command{
		Use:   "bucket --arrivals FILE|- --rate R --burst B",
		Short: "Access delays of recorded arrivals in a token bucket, whole or split",
		Long: `bucket judges recorded arrivals by a bucket of R tokens per second (exact to a
thousandth) and B tokens, full when the earliest message arrives, and prints the
access delay of every message.

Input: one message per line, its arrival time in seconds on any clock, from
-4000000000 to 4000000000 and exact to the nanosecond; then, if wanted, its
correlation key and its publisher:

  seconds[,key[,publisher]]

Blank lines are skipped; a name ending in .gz is read through gzip; "-" is
standard input. Lines need not be sorted: messages are judged in the order of the
file, as a broker judges them in the order they come, and out_of_order counts
those earlier than one before them.

--split K divides rate and burst over K buckets: even shares, in thousandths of a
message per second and in whole messages, that sum to R and B exactly, what is
left over going to the first. --assign says which message goes where:

  roundrobin  the n-th message to bucket n modulo K
  random      any bucket with equal chance, by --seed
  keyed       the n-th member of the m-th key to bucket n+m modulo K. A member is
              a publisher if the line names one, and all its messages go the same
              way; else every message is a member. Lines without a key are one
              group. So each group is split as evenly as the bucket.

Output: one JSON object on one line:

  rate_milli, burst   the contract: 1/1000 messages per second, messages
  split, assign, seed as given
  messages            how many were read
  out_of_order        how many are earlier than one before them in the file
  delayed             how many waited for a token
  mean_delay_s        mean access delay, seconds, of all messages
  quantiles_s         {"p50":S,"p90":S,"p99":S,"p99.9":S,"max":S}, of the access
                      delays, seconds, by nearest rank
  buckets             one object for each of the K: rate_milli, burst, messages,
                      delayed, mean_delay_s, quantiles_s
  bucket_of           for each message in the order of the file, its bucket, from 0
  access_delays_s     for each message in the order of the file, its access delay
                      in seconds, exact to the nanosecond, rounded up

--output table prints the same without the last two.`,
		Example: `  drlsim bucket --arrivals trace.csv.gz --rate 11000 --burst 26
  drlsim bucket --arrivals - --rate 1000 --burst 40 --split 4 --assign keyed`,
	}
	cmd.Flags().StringVar(&file, "arrivals", "", "`file` of arrival times, or - for standard input")
	cmd.Flags().Float64Var(&rate, "rate", 0, "token `rate`, messages per second, 0.001 to 1e9")
	cmd.Flags().Int64Var(&burst, "burst", 0, fmt.Sprintf("bucket `size`, messages, %d to %d", tokenbucket.MinBurst, tokenbucket.MaxBurst))
	cmd.Flags().IntVar(&o.Split, "split", 1, fmt.Sprintf("`buckets` to split the contract over, 1 to %d", bucket.MaxSplit))
	cmd.Flags().StringVar(&o.Assign, "assign", bucket.RoundRobin, "`rule` of assignment: "+strings.Join(bucket.Rules(), ", "))
	cmd.Flags().Uint64Var(&o.Seed, "seed", 1, "`number` that decides --assign random")
	return leaf(cmd, func(cmd *cobra.Command) (answer, error) {
		o.Contract = tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: burst}
		if err := o.Validate(); err != nil {
			return answer{}, usage(err)
		}
		trace, err := bucket.ReadFile(file, cmd.InOrStdin())
		if err != nil {
			return answer{}, err
		}
		r, err := bucket.Run(trace, o)
		return answer{[]any{r}, func(w io.Writer) error { return bucketTable(w, r) }}, err
	}, "arrivals", "rate", "burst")
}

func bucketTable(w io.Writer, r *bucket.Report) error {
	err := grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		row("bucket\trate/s\tburst\tmessages\tdelayed\tmean\tp50\tp90\tp99\tp99.9\tmax\t")
		line := func(name string, rate, burst int64, messages, delayed int, mean float64, q bucket.Quantiles) {
			row("%s\t%s\t%d\t%d\t%d\t%v\t%v\t%v\t%v\t%v\t%v\t", name, milli(rate), burst, messages, delayed, time.Duration(mean*1e9),
				time.Duration(q.P50), time.Duration(q.P90), time.Duration(q.P99), time.Duration(q.P999), time.Duration(q.Max))
		}
		if r.Split > 1 {
			for i, b := range r.Buckets {
				line(fmt.Sprint(i), b.RateMilli, b.Burst, b.Messages, b.Delayed, b.Mean, b.Quantiles)
			}
		}
		line("all", r.RateMilli, r.Burst, r.Messages, r.Delayed, r.Mean, r.Quantiles)
	})
	if err == nil {
		_, err = fmt.Fprintf(w, "assignment %s, seed %d; %s out of order\n", r.Assign, r.Seed, plural.Count(r.OutOfOrder, "message"))
	}
	return err
}

// milli formats a rate in thousandths per second as a rate per second.
func milli(rate int64) string {
	s := fmt.Sprintf("%d.%03d", rate/1000, rate%1000)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}
