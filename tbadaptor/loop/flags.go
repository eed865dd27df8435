package loop

import (
	"flag"

	"github.com/srtm-io/srtm/tbadaptor/ledger"
)

// LeaseFlags are the flags of every program that contains an adaptor.
type LeaseFlags struct {
	leases  ledger.Leases
	percent int64
}

// AddLeaseFlags defines the flags.
func AddLeaseFlags(fs *flag.FlagSet) *LeaseFlags {
	f := &LeaseFlags{}
	d := DefaultLeases()
	fs.DurationVar(&f.leases.Flex, "flex-lease", d.Flex, "how long the flexible parts of a broker's shares last without a renewal")
	fs.DurationVar(&f.leases.Session, "session-lease", d.Session, "how long a broker with --policy=strict goes on with its bases without a renewal")
	fs.DurationVar(&f.leases.ClockBound, "clock-bound", d.ClockBound, "by how much two hosts' clocks may come apart within --session-lease; 0.1 % of --session-lease or more")
	fs.DurationVar(&f.leases.PresumeDead, "presume-dead-after", d.PresumeDead, "after how long without a word all that a broker with --policy=available holds goes to others, as if it were dead. Beware: one that lives and is only cut off uses its bases all the same, and as long as it does contracts are exceeded by them (default 0: never; then srtm share forget does it)")
	fs.Int64Var(&f.percent, "flex-percent", DefaultFlex/10, "`part` of each share that is on a lease, in percent; of topics with the rule static nothing is")
	return f
}

// Apply returns c with the values of the flags.
func (f *LeaseFlags) Apply(c Config) Config {
	c.Leases, c.Flex = f.leases, ledger.Permille(10*f.percent)
	return c
}
