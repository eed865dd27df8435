// Package tokenbucket is the (r, b) envelope that everyone shares: the broker
// that releases by it, the ledger that moves parts of it, the fitting that
// replays traces through it and the simulator. It is pure: it reads no clock,
// draws no random number and knows nothing of topics, messages or brokers; a
// time comes in as a mono.Time and goes out as one.
//
// bucket.go is the limiter itself, exact in integers, with the guarantee it keeps
// and its proof; hindsight.go is the limiter for messages that are read out of
// order, with the stronger guarantee that a broker needs; theory.go is what to
// expect under Poisson arrivals; profile.go finds the burst a recorded trace
// needs. Read nsqd/broker next for how a message waits until it is eligible,
// tbadaptor/ledger for who may Retune, admission/table for who cannot wait.
package tokenbucket
