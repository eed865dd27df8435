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
	fs.DurationVar(&f.leases.Session, "session-lease", d.Session, "how long a broker with --policy=strict keeps its bases without a renewal of its lease")
	fs.DurationVar(&f.leases.ClockBound, "clock-bound", d.ClockBound, "how far two hosts' clocks may drift apart within --session-lease; 0.1 % of --session-lease or more")
	fs.DurationVar(&f.leases.PresumeDead, "presume-dead-after", d.PresumeDead, "how long a broker with --policy=available may be disconnected before its shares go to other brokers, as if its process had ended. Beware: a broker that is only cut off keeps its bases, so contracts are exceeded by them (default 0: never; then srtm share forget does it)")
	fs.Int64Var(&f.percent, "flex-percent", DefaultFlex/10, "`part` of each share that ends with the lease, in percent; topics with the rule static have none")
	return f
}

// Apply returns c with the values of the flags.
func (f *LeaseFlags) Apply(c Config) Config {
	c.Leases, c.Flex = f.leases, ledger.Permille(10*f.percent)
	return c
}
