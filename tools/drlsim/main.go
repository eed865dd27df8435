// Command drlsim evaluates the pure packages without a cluster. It computes the access
// delay of a contract, by theory for Poisson arrivals or by replay of a recorded trace,
// whole or split over brokers. It also simulates the brokers, topics and publishers of a
// scenario. It uses tokenbucket, placement and tbadaptor/share of production. The same
// input and seed give the same output. Read tools/sim/scenario next.
package main

import (
	"io"
	"os"

	"github.com/srtm-io/srtm/internal/program"
)

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run executes a command line and returns the exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := command()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.Execute()
	if err != nil {
		program.PrintError(stderr, "drlsim", err)
	}
	return exitCode(err)
}
