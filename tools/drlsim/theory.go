package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/tokenbucket"
)

// delays is the output of drlsim theory for a contract.
type delays struct {
	Eq1      float64 `json:"expected_delay_eq1_s"`
	Exact    float64 `json:"expected_delay_exact_s"`
	PDelayed float64 `json:"p_delayed"`
}

// tail is the output of drlsim theory for a tail.
type tail struct {
	Tail float64 `json:"tail"`
}

func theoryCommand() *cobra.Command {
	var (
		lambda, rate, burst, rho, x float64
	)
	cmd := &cobra.Command{
		Use:   "theory (--lambda L --rate R --burst B | --rho RHO --tail X)",
		Short: "Expected access delay of Poisson arrivals; tail of the M/D/1 queue",
		Long: `theory computes the mean access delay of Poisson arrivals, L messages per second,
in a bucket of R tokens per second and B tokens, which need not be whole (a share
of 26 tokens over 12 brokers is --burst 2.1667), and prints

  {"expected_delay_eq1_s":S,"expected_delay_exact_s":S,"p_delayed":P}

  expected_delay_eq1_s    seconds, by Eq. (1) of the paper: exact for a burst of
                          1, an upper bound above (3 % high at a load of 0.91,
                          twice the truth at 0.1)
  expected_delay_exact_s  seconds, exact
  p_delayed               share of the messages that wait, 0 to 1

or, with --rho and --tail, the probability that the unfinished work of an M/D/1
queue of load RHO exceeds X service times (of the bucket: that more than X tokens
are owed or missing), and prints

  {"tail":P}

The load, L/R or RHO, must be below 1: above there is no expected delay.`,
		Example: `  drlsim theory --lambda 10000 --rate 11000 --burst 26
  drlsim theory --rho 0.9 --tail 4`,
	}
	cmd.Flags().Float64Var(&lambda, "lambda", 0, "arrival `rate`, messages per second, 0 or more")
	cmd.Flags().Float64Var(&rate, "rate", 0, "token `rate`, tokens per second, more than lambda")
	cmd.Flags().Float64Var(&burst, "burst", 0, fmt.Sprintf("bucket `size` in tokens, whole or not, %d to %d", tokenbucket.MinBurst, tokenbucket.MaxBurst))
	cmd.Flags().Float64Var(&rho, "rho", 0, "`load` of an M/D/1 queue, from 0 to below 1")
	cmd.Flags().Float64Var(&x, "tail", 0, "`work` to exceed, in service times")
	return leaf(cmd, func(cmd *cobra.Command) (answer, error) {
		wantsTail, err := theoryMode(cmd)
		if err != nil {
			return answer{}, usage(err)
		}
		var result any
		if wantsTail {
			result, err = tailOf(rho, x)
		} else {
			result, err = delaysOf(lambda, rate, burst)
		}
		if err != nil {
			return answer{}, usage(err)
		}
		return answer{[]any{result}, func(w io.Writer) error { return theoryTable(w, result) }}, nil
	})
}

// theoryMode reports whether the flags ask for a tail or for the delays of a contract.
func theoryMode(cmd *cobra.Command) (wantsTail bool, err error) {
	changed := func(name string) bool { return cmd.Flags().Changed(name) }
	ofTail, ofContract := []string{"rho", "tail"}, []string{"lambda", "rate", "burst"}
	wantsTail = slices.ContainsFunc(ofTail, changed)
	wantsDelays := slices.ContainsFunc(ofContract, changed)
	switch {
	case wantsTail && wantsDelays:
		return false, errors.New("--rho and --tail ask one question, --lambda, --rate and --burst another: give one set")
	case wantsTail:
		return true, required(cmd, ofTail...)
	case wantsDelays:
		return false, required(cmd, ofContract...)
	}
	return false, errors.New("missing --lambda, --rate, --burst, or --rho, --tail")
}

func delaysOf(lambda, rate, burst float64) (delays, error) {
	var f faults.List
	f.If(!(lambda >= 0) || math.IsInf(lambda, 1), "lambda %v is not 0 or more", lambda)
	f.If(!(rate > 0) || math.IsInf(rate, 1), "rate %v is not more than 0", rate)
	f.If(!(burst >= float64(tokenbucket.MinBurst) && burst <= float64(tokenbucket.MaxBurst)), "burst %v is outside %d to %d", burst, tokenbucket.MinBurst, tokenbucket.MaxBurst)
	f.If(len(f) == 0 && lambda >= rate, "lambda %v is not below rate %v: the debt grows for ever and no delay is to be expected", lambda, rate)
	if err := f.Err(); err != nil {
		return delays{}, err
	}
	return delays{
		Eq1:      tokenbucket.ExpectedDelayEq1(lambda, rate, burst),
		Exact:    tokenbucket.ExpectedDelayExact(lambda, rate, burst),
		PDelayed: tokenbucket.PDelayed(lambda, rate, burst),
	}, nil
}

func tailOf(rho, x float64) (tail, error) {
	var f faults.List
	f.If(!(rho >= 0 && rho < 1), "rho %v is not from 0 to below 1", rho)
	f.If(math.IsNaN(x) || math.IsInf(x, 0), "tail %v is not a finite number", x)
	if err := f.Err(); err != nil {
		return tail{}, err
	}
	return tail{tokenbucket.TailMD1(rho, x)}, nil
}

func theoryTable(w io.Writer, result any) error {
	return grid(w, 0, func(row func(string, ...any)) {
		switch r := result.(type) {
		case delays:
			row("expected access delay, exact\t%.6g s", r.Exact)
			row("expected access delay, Eq. (1)\t%.6g s", r.Eq1)
			row("messages that wait\t%.6g", r.PDelayed)
		case tail:
			row("tail\t%.6g", r.Tail)
		}
	})
}
