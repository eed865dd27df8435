// Package turn simulates the turns of a broker's event loops, beside a load on the same
// processors. The input is the cost of each step, measured in a running broker, and the
// order and the bounds of a turn. The output is the latency of deliveries and replies.
// Package turn is pure: it uses virtual time and the caller's randomness. It knows nothing
// of topics, RDY and contracts; nsqd/conn has the real loop.
//
// The load is the load of tools/load: a sender with a schedule, and one subscriber. Both are
// urgent: they take processors from loops. loop.go has the turn, run.go the processors and
// the load. docs/decisions/0009-turn-of-a-loop.md has the results.
package turn

import "time"

// Costs are the processor times of the steps of the loops and of the load.
type Costs struct {
	Wake    time.Duration // of a sleeping thread
	Wait    time.Duration // epoll_wait, and the fixed work of a turn
	Read    time.Duration // read of a connection, with the command's execution
	Message time.Duration // each further command of a read
	Reply   time.Duration // write to a publisher
	Deliver time.Duration // write to the subscriber
	Encode  time.Duration // each message of this write
	FINs    time.Duration // read of the subscriber
	Finish  time.Duration // each FIN of this read
	Post    time.Duration // of a loop that has a message for a subscriber of another loop

	Send        time.Duration // the sender's write of a frame
	Receive     time.Duration // the subscriber's read
	Acknowledge time.Duration // the subscriber's write of FINs
	Received    time.Duration // each message of the subscriber
}

// Order is the place of deliveries in a turn.
type Order int

const (
	Last  Order = iota // after all replies
	First              // before all replies
	// Merged writes each reply after its read, and deliveries at the end.
	Merged
)

// Turn is the order and the bounds of a turn.
type Turn struct {
	Order    Order
	Events   int  // maximum number of connections that a turn reads
	Long     int  // with fewer connections to answer, deliveries are last
	Early    int  // reads after which deliveries are written early; 0: never
	Finish   bool // FINs are read before publishers
	Replies  int  // connections that a turn answers; 0: all
	Owed     int  // with Replies: a turn answers as many more as are owed beyond this number
	Commands int  // maximum number of messages of one read
}

// Config describes a simulation.
type Config struct {
	Costs
	Turn
	Processors  int
	Loops       int // connections are dealt out; the subscriber is on the first loop
	Connections int
	Rate        float64       // messages per second, at random instants (Poisson)
	Together    int           // messages of a frame; 0: 1
	Storm       int           // frames of different connections at one instant; 0: 1
	Pause       time.Duration // minimum sleep of the sender
	Closed      bool          // a publisher waits for its reply before its next message; without Rate
	Duration    time.Duration // of sending; the first tenth is not measured

	// At random instants, StallEvery apart on average, all threads stop for Stall.
	Stall, StallEvery time.Duration
}

// Result has quantiles 0.5, 0.99 and 0.999 of the time from the instant at which a message
// was due.
type Result struct {
	Delivered [3]time.Duration // to the subscriber's read
	Replied   [3]time.Duration // to the write of the reply
	Messages  int              // delivered
	Answers   int
	Rate      float64 // answers per second
	Busy      float64 // share of time in which a loop had work, mean of the loops
	Load      float64 // share of processor time used
	Turns     int
	Reads     float64 // connections per turn
}
