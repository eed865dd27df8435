// Package balance chooses the server that will answer soonest without being told how
// large any of them is: Join the Best Queue (JBQ), corrected, with what one needs
// beside it in production (servers that fail, that are new, or that others use, too).
// The paper's own algorithm is in tools/sim/web; Busy and RoundRobin are baselines and
// fall-backs. It is pure and knows nothing of HTTP: its caller says when
// a request goes, and when and how it ends. Read balance.go next, then eject.go.
package balance
