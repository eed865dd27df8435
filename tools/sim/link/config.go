package link

import (
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/pacing/police"
)

// The controls.
const (
	Paper = "paper" // the paper's rules, windows of whole packets
	Paced = "paced" // the paper's rules, real windows, packets paced
	Level = "level" // brokers' water level, packets paced
)

// Controls returns the names of the controls.
func Controls() []string { return []string{Paper, Paced, Level} }

// The sizes of packets in bytes.
const (
	packetSize = 1000
	ackSize    = 40
)

// claimed is the ToS claimed by a greedy flow.
const claimed = 255

// Config configures a simulation.
type Config struct {
	Capacity float64       // of the link, either way, bits per second
	RTT      time.Duration // of propagation
	Flows    int           // long-lived flows in each direction
	ToS      []int         // of the flows, in turn
	Duration time.Duration // the second half is measured
	Seed     uint64
	Control  string
	// Buffer is the size of each queue, in bandwidth-delay products; at least two packets
	// of each flow.
	Buffer float64
	Greedy int  // number of forward flows that claim a ToS of 255
	Police bool // the routers hold flows to their assigned ToS
	// Bypass lets ACKs return without a queue. Otherwise ACKs share the queues of the
	// reverse direction with data.
	Bypass bool
	// Routers is the number of equal links in series, each with a router at each end; 0: 1.
	// The propagation time is divided evenly. Flows cross all of them.
	Routers int
	// Cross is the number of additional forward flows on the second link, twice as many on
	// the third, and so on. Such a flow crosses its link only. So the last link is the
	// bottleneck of the other flows.
	Cross int

	// Parameters that only some figures vary; zero: the value of the other figures.
	Theta float64 // degree of congestion above which the router signals overload
	Alpha float64 // the gain of windows
	// Web is the number of short forward flows of ToS 1 that begin per second, by a
	// Poisson process. Their sizes are Pareto with shape 1.35 and a mean of 30 packets.
	Web float64
	// Join is the number of additional forward flows, from From to To.
	Join     int
	From, To time.Duration
	// Sample is the time between entries of Result.Series; 0: none.
	Sample time.Duration
}

// Validate returns all faults of c.
func (c Config) Validate() error {
	var f faults.List
	f.If(!(c.Capacity >= 1e5 && c.Capacity <= 1e11), "capacity %v: want 100 kb/s to 100 Gb/s", c.Capacity)
	f.If(c.RTT < time.Millisecond || c.RTT > 10*time.Second, "RTT %v: want 1ms to 10s", c.RTT)
	f.If(c.Flows < 1 || c.Flows > 10_000, "%d flows: want 1 to 10000", c.Flows)
	f.If(len(c.ToS) == 0, "no ToS")
	for _, tos := range c.ToS {
		f.If(tos < 1 || tos > claimed, "ToS %d: want 1 to %d", tos, claimed)
	}
	f.If(c.Duration < time.Millisecond || c.Duration > time.Hour, "duration %v: want 1ms to 1h", c.Duration)
	f.If(c.Control != Paper && c.Control != Paced && c.Control != Level, "unknown control %q: there are %v", c.Control, Controls())
	f.If(!(c.Buffer > 0 && c.Buffer <= 100), "buffer %v: want up to 100 bandwidth-delay products", c.Buffer)
	f.If(c.Greedy < 0 || c.Greedy > c.Flows, "%d greedy flows of %d", c.Greedy, c.Flows)
	f.If(!(c.Theta >= 0 && c.Alpha >= 0 && c.Alpha <= 1), "theta %v, alpha %v: want not below 0, and 0 to 1", c.Theta, c.Alpha)
	f.If(!(c.Web >= 0 && c.Web <= 1e5), "%v short flows a second: want 0 to 100000", c.Web)
	f.If(c.Join < 0 || c.Join > 10_000 || c.From < 0 || c.From > c.To, "%d flows from %v to %v", c.Join, c.From, c.To)
	f.If(c.Routers < 0 || c.Routers > 16, "%d routers: want up to 16", c.Routers)
	f.If(c.Cross < 0 || c.Cross > 1000, "%d crossing flows for a router: want up to 1000", c.Cross)
	f.If(c.Sample < 0, "samples every %v", c.Sample)
	return f.Err()
}

// bytesPerSecond returns the capacity.
func (c Config) bytesPerSecond() float64 { return c.Capacity / 8 }

// group returns the name of the flows of a ToS.
func group(tos uint8) string { return "tos" + strconv.Itoa(int(tos)) }

// weights returns the weights that flows may claim: with police the assigned ToS.
func (c Config) weights() police.Weights {
	if !c.Police {
		return police.Weights{Max: claimed}
	}
	w := police.Weights{Max: 1}
	for _, tos := range c.ToS {
		w.Groups = append(w.Groups, police.Group{Key: group(uint8(tos)), Count: c.Flows + c.Join + c.crossing(), Weight: uint8(tos)})
	}
	return w
}

// routers returns the number of links.
func (c Config) routers() int { return max(1, c.Routers) }

// crossing returns the number of flows that cross one link only.
func (c Config) crossing() int { return c.Cross * c.routers() * (c.routers() - 1) / 2 }

// buffer returns the size of each queue, in bytes.
func (c Config) buffer() float64 {
	return max(c.Buffer*c.bytesPerSecond()*c.RTT.Seconds(), 2*packetSize*float64(c.Flows+c.Join))
}

// Flow is the result of one long-lived forward flow.
type Flow struct {
	ToS        int     `json:"tos"` // the assigned ToS
	Throughput float64 `json:"throughput_bps"`
	Greedy     bool    `json:"greedy"`
}

// Result has the measurements of the forward direction, in the second half.
type Result struct {
	Flows []Flow `json:"flows"` // across all links, without the flows of Config.Join
	Link         // the last one, which is the bottleneck

	Links []Link `json:"links,omitempty"` // in the order of the path, if there are several
	// Crossing are the flows of Config.Cross, in the order of their links.
	Crossing []Flow `json:"crossing,omitempty"`

	Series []Sample `json:"-"` // of the last link, from the beginning
}

// Link has the measurements of one link.
type Link struct {
	Utilization float64 `json:"utilization"`
	QueueMean   float64 `json:"queue_mean_fraction"` // of the buffer, over time
	QueueMax    float64 `json:"queue_max_fraction"`
	Drops       int     `json:"drops"`
}

// Sample describes the forward direction at a time, and since the last sample.
type Sample struct {
	At          time.Duration
	Queue       float64 // longest queue, as a fraction of the buffer
	Utilization float64
	Throughput  []float64 // bits per second of the first flow of each of Config.ToS
}
