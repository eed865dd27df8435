// Package balance chooses the server that will answer soonest, without knowing the size of any server.
// It implements Join the Best Queue (JBQ) with corrections, and handles servers that fail, servers that
// are new, and servers that other gateways use too. The paper's own algorithm is in tools/sim/web. Busy
// and RoundRobin are baselines and fall-backs. The package is pure and knows nothing of HTTP: the
// caller reports when a request is sent, and when and how it ends. Read balance.go next, then eject.go.
package balance
