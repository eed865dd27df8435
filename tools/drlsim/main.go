// Command drlsim puts the pure packages to work on paper: what a contract costs
// in access delay, by theory for Poisson arrivals and by replay for a recorded
// trace, whole or split over brokers; and what brokers, topics and publishers of a
// scenario do, by simulation. It touches no cluster and re-implements nothing:
// tokenbucket, placement and tbadaptor/share are the production's own. Given the
// same input and seed it prints the same bytes. Read tools/sim/scenario next.
package main

import (
	"io"
	"os"

	"github.com/srtm-io/srtm/internal/lifecycle"
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
		lifecycle.PrintError(stderr, "drlsim", err)
	}
	return exitCode(err)
}
