package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/faults"
)

// Process is the spacing of a source's events.
type Process string

const (
	// Poisson has exponential gaps, like an event-triggered sensor.
	Poisson Process = "poisson"
	// Periodic has equal gaps and a random phase, like a time-triggered sensor.
	Periodic Process = "periodic"
)

// Bounds of a Spec, beyond the capacity of any machine.
const (
	MaxPublishers = 1_000_000
	MaxRate       = 1_000_000 // msg/s per publisher
	MaxBatch      = 10_000
	MaxSize       = 64 << 20 // bytes
	MaxNoise      = time.Minute
	// PoolKey is the id prefix of publishers without a correlation key. The loaddistributor
	// uses the same prefix for anonymous groups.
	PoolKey = "pool"

	// maxGap protects offsets against overflow.
	maxGap = 24 * time.Hour
)

// Spec describes a fleet of equal publishers.
type Spec struct {
	Publishers int
	// Rate is the mean rate of each publisher, in msg/s.
	Rate float64
	// Batch is the number of messages that a publisher sends back to back. Larger batches
	// are less frequent, so the mean rate stays the same.
	Batch int
	// GroupSize is the number of publishers that share a correlation key. With 0 or 1 no
	// publisher has a key. The last group may be smaller.
	GroupSize int
	// Sync makes the publishers of a group send at the same instants. Without Sync the key
	// is only a label.
	Sync bool
	// Noise delays each member of a volley by a random time, uniform in [0, Noise). Range 0
	// to MaxNoise. Requires Sync.
	Noise   time.Duration
	Process Process
	// Size is the size of a message body in bytes. If SizeTo is set, each event draws a
	// size, uniform in Size .. SizeTo.
	Size, SizeTo int
	// Seed determines all random values.
	Seed uint64
}

// Validate returns every fault at once, joined, or nil.
func (s Spec) Validate() error {
	var f faults.List
	rate := s.Rate > 0 && s.Rate <= MaxRate // false for NaN
	noise := s.Noise >= 0 && s.Noise <= MaxNoise
	f.If(s.Publishers < 1 || s.Publishers > MaxPublishers, "publishers: %d, want 1 .. %d", s.Publishers, MaxPublishers)
	f.If(!rate, "rate: %v msg/s, want above 0 and up to %d", s.Rate, MaxRate)
	f.If(rate && s.Batch >= 1 && s.gap() > float64(maxGap), "rate: %v msg/s in batches of %d is less than one batch a day", s.Rate, s.Batch)
	f.If(s.Batch < 1 || s.Batch > MaxBatch, "batch: %d messages, want 1 .. %d", s.Batch, MaxBatch)
	f.If(s.GroupSize < 0 || s.GroupSize > MaxPublishers, "group size: %d publishers, want 0 .. %d", s.GroupSize, MaxPublishers)
	f.If(s.Sync && s.GroupSize < 2, "sync: needs groups of at least 2 publishers, the group size is %d", s.GroupSize)
	f.If(!noise, "noise: %v, want 0 .. %v", s.Noise, MaxNoise)
	f.If(noise && s.Noise > 0 && !s.Sync, "noise: blurs the instants of synchronised groups, and sync is off")
	f.If(s.Process != Poisson && s.Process != Periodic, "process: %q, want %s or %s", s.Process, Poisson, Periodic)
	f.If(s.Size < 0 || s.Size > MaxSize, "size: %d bytes, want 0 .. %d", s.Size, MaxSize)
	f.If(s.SizeTo != 0 && (s.SizeTo < s.Size || s.SizeTo > MaxSize), "maximum size: %d bytes, want %d .. %d, or 0 for one size", s.SizeTo, s.Size, MaxSize)
	return f.Err()
}

// gap is the mean time between two events of a source, in nanoseconds.
func (s Spec) gap() float64 { return float64(time.Second) / s.Rate * float64(s.Batch) }

// Group is a run of sources that share a key, with the ids "<key>.0", "<key>.1" and so on.
type Group struct {
	// Key is empty for the pool of publishers without a key.
	Key   string
	Count int
}

// Groups returns the groups in the order of Sources.
func (s Spec) Groups() []Group {
	if s.GroupSize < 2 {
		return []Group{{Count: s.Publishers}}
	}
	groups := make([]Group, 0, (s.Publishers+s.GroupSize-1)/s.GroupSize)
	for left := s.Publishers; left > 0; left -= s.GroupSize {
		groups = append(groups, Group{Key: fmt.Sprintf("g%d", len(groups)), Count: min(left, s.GroupSize)})
	}
	return groups
}

// Sources returns the publishers in the order of their numbers.
//
// Requires: s is valid.
func (s Spec) Sources() []Source {
	sources := make([]Source, 0, s.Publishers)
	for _, g := range s.Groups() {
		prefix := g.Key
		if prefix == "" {
			prefix = PoolKey
		}
		for i := range g.Count {
			id := fmt.Sprintf("%s.%d", prefix, i)
			sources = append(sources, Source{ID: id, Key: g.Key, Rate: s.Rate, Batch: s.Batch})
		}
	}
	return sources
}

// Stream returns the fleet's events. The stream is infinite.
func (s Spec) Stream() *Fleet {
	f := &Fleet{batch: int32(s.Batch), size: int32(s.Size), periodic: s.Process == Periodic, gap: s.gap(), noise: int64(s.Noise), seed: s.Seed}
	if s.SizeTo > s.Size {
		f.sizes = uint64(s.SizeTo - s.Size + 1)
	}
	span := 1
	if s.Sync {
		span = s.GroupSize
	}
	for first := 0; first < s.Publishers; first += span {
		c := clock{first: int32(first), last: int32(min(first+span, s.Publishers))}
		// Each clock has its own generator. The clock's times depend only on the seed and
		// on first, not on the number of clocks.
		c.rng.Seed(s.Seed, uint64(first))
		c.blur.Seed(s.Seed, ^uint64(first)) // a separate generator, so that noise does not move volleys
		c.at = f.start(&c)
		f.clocks = append(f.clocks, c)
	}
	f.clocks.Init()
	f.member = f.clocks[0].first
	return f
}

// Fleet is the stream of a Spec. It is a heap of clocks. Each clock fires for a run of
// sources.
type Fleet struct {
	// set once
	batch, size int32
	periodic    bool
	gap         float64 // mean time between events of a clock, in ns
	noise       int64   // ns
	sizes       uint64  // number of sizes from size on; 0: one size
	seed        uint64

	clocks container.Heap[clock]
	// member is the next source of the top clock; only without noise.
	member int32
	// blurred holds the members of fired volleys that have yet to send; only with noise.
	blurred container.Heap[shot]
}

// shot is the event of one member of a volley.
type shot struct {
	at     int64 // ns
	source int32
}

// clock is a process that several sources may share.
type clock struct {
	at          int64 // time of the next event, in ns
	phase       int64 // ns, periodic only
	fired       int64 // events so far
	first, last int32 // sources [first, last)
	rng, blur   rand.PCG
}

func (f *Fleet) start(c *clock) int64 {
	r := rand.New(&c.rng)
	if f.periodic {
		c.phase = int64(r.Float64() * f.gap)
		return c.phase
	}
	return int64(r.ExpFloat64() * f.gap)
}

func (f *Fleet) advance(c *clock) {
	c.fired++
	if f.periodic {
		// Computed from the phase: repeated addition of a rounded gap would drift.
		c.at = c.phase + int64(math.Round(float64(c.fired)*f.gap))
		return
	}
	c.at += int64(rand.New(&c.rng).ExpFloat64() * f.gap)
}

// Next implements Stream. It always returns true.
func (f *Fleet) Next() (Event, bool) {
	var e Event
	if f.noise > 0 {
		e = f.nextBlurred()
	} else {
		e = f.nextSharp()
	}
	if f.sizes > 0 {
		// The generator depends only on the event, so sizes do not affect other random
		// values.
		var draw rand.PCG
		draw.Seed(f.seed^uint64(e.At), uint64(e.Source))
		e.Size += int32(draw.Uint64() % f.sizes)
	}
	return e, true
}

func (f *Fleet) nextSharp() Event {
	c := &f.clocks[0]
	e := Event{At: time.Duration(c.at), Source: f.member, Count: f.batch, Size: f.size}
	f.member++
	if f.member == c.last {
		f.advance(c)
		f.clocks.Fix()
		f.member = f.clocks[0].first
	}
	return e
}

// nextBlurred fires every volley that could contain the next event. No event is earlier
// than its volley.
func (f *Fleet) nextBlurred() Event {
	for len(f.blurred) == 0 || f.blurred[0].at >= f.clocks[0].at {
		c := &f.clocks[0]
		r := rand.New(&c.blur)
		for source := c.first; source < c.last; source++ {
			f.blurred.Push(shot{c.at + r.Int64N(f.noise), source})
		}
		f.advance(c)
		f.clocks.Fix()
	}
	s := f.blurred.Pop()
	return Event{At: time.Duration(s.at), Source: s.source, Count: f.batch, Size: f.size}
}

// Before orders shots by time, then source.
func (s shot) Before(o shot) bool {
	return s.at < o.at || s.at == o.at && s.source < o.source
}

// Before orders clocks by time, then first source.
func (c clock) Before(o clock) bool {
	return c.at < o.at || c.at == o.at && c.first < o.first
}
