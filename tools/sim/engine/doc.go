// Package engine simulates brokers under contracts, event by event. The input is the
// publishers' schedules. The output is the times at which each message arrived, had its
// token and was delivered. The package is pure: it uses virtual time and seeded
// randomness. tokenbucket of production enforces the contracts; only the broker is a
// model, as a server with a service time. The caller's observer counts deliveries.
//
// dist.go has service times, model.go the broker model, cluster.go the simulation. Read
// tools/sim/scenario next, which supplies the arguments.
package engine
