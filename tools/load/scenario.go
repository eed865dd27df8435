//go:build linux

// Package load gives different brokers the same work and measures the result. A Scenario
// describes the work. A Broker describes how to start a broker and how to speak to it.
// Perform starts the broker, performs the work and returns the measurements. bench/peer and
// the sender of bench/stamps use this package.
//
// At a given rate the load is open loop: latency counts from the instant at which a message
// was due, even if the sender was late. Latency is measured per delivery and subscriber, in
// histograms of 1 us to 60 s, within 1 %. Processor time is the broker's, from
// /proc. Allocations and garbage collections come from /debug/pprof of Go brokers.
//
// The process that calls Perform produces the load, so every broker shares the machine with
// the load in the same way: compare measurements as ratios. The same rules keep the load
// light for every broker:
//
//   - Go's poller watches none of the connections, and the load's threads have priority.
//     Otherwise the load's wait for a processor would count as the broker's latency
//     (socket.go, thread.go).
//   - One thread sends, and wakes for each message. Above 30,000 frames a second the
//     thread wakes every 50 us and sends all messages that are due. The sender reads
//     a connection's replies after eight more frames, and counts all replies at the end
//     (publish.go).
//   - A subscriber reads all available deliveries and acknowledges them in one write. Some
//     client libraries write once per message, which would cost every broker more.
//
// Package load knows brokers only by their sockets. tools/iotpub emulates sensors that move
// between the brokers of a cluster. Read perform.go next.
package load

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Scenario describes the work for a broker. A Scenario is immutable.
type Scenario struct {
	Name, What string

	Conns    int     // number of publishers
	Rate     float64 // messages per second in total, open loop; 0: as fast as possible
	Together int     // messages per write of a publisher
	Batch    bool    // one command per write, if the protocol has a batch command
	Size     int     // bytes per message, at least TimeSize
	Topics   int     // number of topics, which publishers use in turn; 0: one
	Channels int     // number of channels of a topic; each gets every message
	Limit    int     // maximum number of messages, if Rate is 0; 0: as many as the time permits
	Closed   bool    // if Rate is 0: a publisher waits for the reply before its next frame
	Ahead    int     // if Closed: messages that a publisher may send before the reply; 0: one frame
	Acked    bool    // if Rate is above 0: measure the time to the reply, and so read each reply at once
	Storm    float64 // additional short-lived connections per second

	// Burst is the burst of the sender's contract, whose rate is 1.1 times Rate. The sender
	// delays a message until the contract allows it. If Burst is 0, the sender has no
	// contract.
	Burst int
	Busy  int // number of threads that only compute

	Slow   bool // an additional channel receives 100 messages per second
	Late   bool // subscribers start after the last message was sent
	Memory int  // messages that a queue may hold in memory; 0: all
	Fsync  bool // accepted messages are on stable storage
	TLS    bool

	NSQOnly bool // brokers with other protocols have no equivalent
}

// topic returns the topic of publisher i.
func (s Scenario) topic(i int) string {
	if i %= max(1, s.Topics); i > 0 {
		return fmt.Sprint(Topic, "-", i)
	}
	return Topic
}

// Offsets of the times in a message. Only messages with enough room have the times beyond
// TimeSize.
const (
	TimeDue    = 0  // due time
	TimeBefore = 8  // start of the message's write
	TimeAfter  = 16 // end of the connection's previous write; 0 in the first message
	TimeSize   = 8
	AllTimes   = 24
)

// The bounds of a run.
const (
	Warming  = time.Second      // warm-up, at a given rate
	longest  = 5 * time.Second  // of sending as fast as possible, up to a Limit
	patience = 20 * time.Second // for replies and deliveries after the last message
)

// Contract is the contract of a sender with the given rate and burst.
func Contract(rate float64, burst int) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.PerSecond(1.1 * rate), Burst: int64(burst)}
}
