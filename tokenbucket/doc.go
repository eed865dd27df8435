// Package tokenbucket implements the (r, b) envelope for all its users: the broker that releases
// messages, the ledger that moves shares, the fitting that replays traces, and the simulator. The
// package is pure: it reads no clock, draws no random numbers, and knows nothing of topics,
// messages or brokers. Times are mono.Time.
//
// bucket.go is the limiter, exact in integers, with its guarantee and the proof. hindsight.go is
// the limiter for messages that are judged out of order, with the stronger guarantee that a broker
// needs. theory.go computes expected delays under Poisson arrivals. profile.go finds the burst that
// a recorded trace needs. Read nsqd/broker next for how a message waits until it is eligible,
// tbadaptor/ledger for who may call Retune, and admission/table for callers that cannot wait.
package tokenbucket
