// Package convergence is the paper's Table 1 (section 6.5) with everything real: a
// loaddistributor, six nsqd and a tbadaptor as processes, publishers that send in
// groups at the same instants, and for each row the search for a number of brokers
// that keeps the SLO, and then a long run of what was found.
//
//	make convergence ARGS='--rows=5,30 --modes=off,fast'
//
// The brokers share this machine's processors, so none of them would have a capacity
// of its own. These are built with the tag paced (nsqd/conn): they work for --pace on
// each message before they write it, so that what a broker absorbs within the SLO's
// latency is that latency over the pace, as in a broker whose processor takes so long.
// The load is what the machine carries besides: an eighth of the paper's rate. The
// test of the fast search takes a number of messages, not of seconds, so that it
// lasts the longer for it.
//
// The mode off does not fit: its rows are the placement by rate alone, which shows
// that there is something to find. Every row has a cluster of its own that has
// learned nothing before.
//
// run.go carries a row out, table.go prints. `drlsim convergence` is the same in
// simulation, at full size; docs/evaluation/fitting.md has both tables.
package convergence
