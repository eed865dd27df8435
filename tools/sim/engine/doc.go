// Package engine simulates brokers under contracts, event by event: publishers'
// schedules come in, and out comes when each message arrived, had its token and
// was delivered. It is pure: virtual time, chance from a seed, the same answer
// for the same arguments. Contracts are kept by the production's own tokenbucket;
// what is modelled is only the broker as a server: how long it works on a message. It knows no topic's history and no
// SLO: the observer of deliveries counts.
//
// dist.go is how long work takes, model.go what a broker is, cluster.go the
// simulation. Read tools/sim/scenario next for
// where the arguments come from.
package engine
