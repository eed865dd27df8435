//go:build linux

package load

import (
	"time"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Scenario is one kind of work. It does not change.
type Scenario struct {
	Name, What string

	Conns    int     // publishers
	Rate     float64 // messages per second of all, open loop; 0: as fast as they go in
	Together int     // messages that a publisher sends at one instant
	Batch    bool    // in one command, where the protocol has one
	Size     int     // bytes of a message, at least TimeSize
	Channels int     // each gets every message
	Limit    int     // messages, at most; without a rate
	Closed   bool    // without a rate: each publisher waits for an answer before its next
	Storm    float64 // connections per second, beside those, that are opened, greet and end

	// Burst is that of a contract, of 1.1 times the rate, that the sender keeps: what
	// is due before the contract allows it waits. 0: it keeps none.
	Burst int
	// Slowest has Result.Slowest be so many of the deliveries that took longest, of
	// messages of AllTimes or more.
	Slowest int
	Busy    int // threads that do nothing but compute meanwhile

	Slow   bool // one channel more, that takes 100 messages per second
	Late   bool // subscribers come when all is sent
	Memory int  // messages that a queue may hold in memory; 0: all
	Fsync  bool // what is accepted is on stable storage
	TLS    bool

	NSQOnly bool // brokers of other protocols have nothing that compares
}

// The times in a message. Those beyond TimeSize are in messages that have room for
// them.
const (
	TimeDue    = 0  // when it was due
	TimeBefore = 8  // when its write began
	TimeAfter  = 16 // when the write before it on this connection had returned; 0: it is the first
	TimeSize   = 8
	AllTimes   = 24
)

// The bounds of a run.
const (
	Warming  = time.Second      // before what is measured, open loop
	longest  = 5 * time.Second  // of sending as fast as it goes in, if not Closed
	patience = 20 * time.Second // for answers and deliveries after the last message was sent
)

// Contract is what a stream of that rate and burst keeps.
func Contract(rate float64, burst int) tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.PerSecond(1.1 * rate), Burst: int64(burst)}
}
