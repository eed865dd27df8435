// Package convergence reproduces Table 1 of the paper (section 6.5) with real processes: a
// loaddistributor, six nsqd, a tbadaptor, and publishers that send in synchronised groups.
// For each row, the loaddistributor searches for a number of brokers that meets the SLO.
// Then the result is measured in a long run.
//
//	make convergence ARGS='--rows=5,30 --modes=off,fast'
//
// The brokers share this machine's processors, so no broker would have its own capacity.
// Therefore nsqd is built with the tag paced (nsqd/conn), and works for --pace on each
// message before writing it. The number of messages that such a broker absorbs within the
// SLO is the SLO's latency divided by the pace, as if its processor were that slow. The
// load is what the machine can carry in addition: an eighth of the paper's rate. The test
// of the fast search takes a fixed number of messages, and therefore lasts longer here.
//
// The mode off does not search. Its rows show the placement by rate alone, as a baseline
// for the search. Every row has its own cluster without learned state.
//
// run.go runs a row, table.go prints. `drlsim convergence` is the same in simulation, at
// full size; docs/evaluation/fitting.md has both tables.
package convergence
