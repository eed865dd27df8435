// Command figures makes the figures and tables of the SRTM paper's evaluation
// (section 6) again, and what the paper could not have: recorded traffic and the
// control plane's own cost. Most are simulated at the paper's full size
// (tools/sim/scenario); some are measured live at a part of it, with the
// project's own binaries on this machine. Each becomes a CSV file and a plot, and
// what the paper's text states stands beside ours in a table.
//
// It decides nothing: scenarios are described here, placement, shares and verdicts
// are the production's. Read figure.go for the list, docs/evaluation.md for what
// came of it.
package main
