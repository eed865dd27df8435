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

// claimed is the ToS that a greedy flow claims.
const claimed = 255

// Config is a simulation.
type Config struct {
	Capacity float64       // of the link, either way, bits per second
	RTT      time.Duration // of propagation
	Flows    int           // long-lived ones each way
	ToS      []int         // of the flows, in turn
	Duration time.Duration // the second half is measured
	Seed     uint64
	Control  string
	// Buffer is each queue's, in bandwidth-delay products; at least two packets
	// of each flow.
	Buffer float64
	Greedy int  // so many of the forward flows claim a ToS of 255
	Police bool // the router holds flows to the ToS that is theirs

	// What figures vary besides; zero: the paper's.
	Theta float64 // the degree of congestion above which the router says overload
	Alpha float64 // the gain of windows
	// Web is how many short flows begin in a second, forward and of ToS 1, by a
	// Poisson process; Pareto sizes of shape 1.35 and a mean of 30 packets.
	Web float64
	// Join more forward flows run from From to To.
	Join     int
	From, To time.Duration
	// Sample is the time between entries of Result.Series; 0: none.
	Sample time.Duration
}

// Validate returns all that is wrong with c.
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
	f.If(c.Sample < 0, "samples every %v", c.Sample)
	return f.Err()
}

// bytesPerSecond is the capacity.
func (c Config) bytesPerSecond() float64 { return c.Capacity / 8 }

// group names the flows of a ToS.
func group(tos uint8) string { return "tos" + strconv.Itoa(int(tos)) }

// weights are what flows may claim: with police the ToS that is theirs.
func (c Config) weights() police.Weights {
	if !c.Police {
		return police.Weights{Most: claimed}
	}
	w := police.Weights{Most: 1}
	for _, tos := range c.ToS {
		w.Groups = append(w.Groups, police.Group{Key: group(uint8(tos)), Count: c.Flows + c.Join, Weight: uint8(tos)})
	}
	return w
}

// buffer is each queue's, in bytes.
func (c Config) buffer() float64 {
	return max(c.Buffer*c.bytesPerSecond()*c.RTT.Seconds(), 2*packetSize*float64(c.Flows+c.Join))
}

// Flow is what one long-lived forward flow came to.
type Flow struct {
	ToS        int     `json:"tos"` // that is its own
	Throughput float64 `json:"throughput_bps"`
	Greedy     bool    `json:"greedy"`
}

// Result is what was measured of the forward direction, in the second half.
type Result struct {
	Flows       []Flow  `json:"flows"` // without those that join
	Utilization float64 `json:"utilization"`
	QueueMean   float64 `json:"queue_mean_fraction"` // of the buffer, over time
	QueueMax    float64 `json:"queue_max_fraction"`
	Drops       int     `json:"drops"`

	Series []Sample `json:"-"` // from the beginning
}

// Sample is the forward direction at a time, and in the time since the last.
type Sample struct {
	At          time.Duration
	Queue       float64 // longest, of the buffer
	Utilization float64
	Throughput  []float64 // bits per second of the first flow of each of Config.ToS
}
