// Package load turns command-line flags into publishers and a schedule: either a fleet of
// equal publishers (tools/iotpub/schedule) or a recording (tools/iotpub/trace). iotpub
// sends the load. `srtm up` needs the load to declare the topic. Package load sends
// nothing.
package load

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/trace"
)

// Options describe a load.
type Options struct {
	// Spec is the fleet of equal publishers. A trace uses only the seed.
	Spec schedule.Spec
	// Trace is the file of a recording, empty for none. Replay configures the replay, with
	// the seed of Spec.
	Trace  string
	Replay trace.Options
	// Keep limits a trace to the first publishers; 0 means all.
	Keep int
}

// Default returns the load of the paper's experiments: 1,000 Poisson publishers
// at 10 msg/s each.
func Default() Options {
	return Options{
		Spec:   schedule.Spec{Publishers: 1000, Rate: 10, Batch: 1, Process: schedule.Poisson, Size: 100, Seed: 1},
		Replay: trace.Options{Compress: 1, Copies: 1, Spread: trace.DefaultSpread},
	}
}

// Flags adds the flags of a load to fs, with the values of o as defaults.
func (o *Options) Flags(fs *pflag.FlagSet) {
	s := &o.Spec
	fs.IntVar(&s.Publishers, "publishers", s.Publishers, "number of publishers, each with its own connection")
	fs.Float64Var(&s.Rate, "rate", s.Rate, "mean rate of each publisher, in `msg/s`")
	fs.IntVar(&s.Batch, "batch", s.Batch, "messages a publisher sends back to back; the mean rate stays")
	fs.IntVar(&s.GroupSize, "group-size", s.GroupSize, "`publishers` that share a correlation key; 0 or 1: no keys")
	fs.BoolVar(&s.Sync, "sync", s.Sync, "publishers of a group send at the same instants")
	fs.DurationVar(&s.Noise, "noise", s.Noise, "with --sync: blur each group's instants by uniform 0 to this")
	fs.StringVar((*string)(&s.Process), "process", string(s.Process), "spacing of a publisher's messages: poisson or periodic (random phase)")
	fs.IntVar(&s.Size, "size", s.Size, "size of a message, in `bytes`; at least 24 are sent")
	fs.IntVar(&s.SizeTo, "size-to", s.SizeTo, "maximum size, in `bytes`: each batch draws its own, uniform from --size; 0: all are of --size")
	fs.Uint64Var(&s.Seed, "seed", s.Seed, "seed of everything random: the same seed, the same load")
	fs.StringVar(&o.Trace, "trace", o.Trace, "replay the recording in `file`, CSV or CSV.gz, instead: offset_seconds,publisher_id,correlation_key,payload_bytes")
	fs.Float64Var(&o.Replay.Compress, "compress", o.Replay.Compress, "with --trace: run it so many `times` faster")
	fs.IntVar(&o.Replay.Copies, "copies", o.Replay.Copies, "with --trace: superpose so many rotated copies")
	fs.DurationVar(&o.Replay.From, "trace-from", o.Replay.From, "with --trace: begin at this offset of the recording")
	fs.DurationVar(&o.Replay.To, "trace-to", o.Replay.To, "with --trace: end at this offset; 0: at its end")
	fs.DurationVar(&o.Replay.Spread, "spread", o.Replay.Spread, "with --trace: spread events of equal stamps over so long, before compressing")
	fs.IntVar(&o.Keep, "keep", o.Keep, "with --trace: only the first so many `publishers`; 0: all")
}

// Args returns the flags that describe the load to another process.
func (o Options) Args() (args []string) {
	fs := pflag.NewFlagSet("load", pflag.ContinueOnError)
	o.Flags(fs)
	fs.VisitAll(func(f *pflag.Flag) { args = append(args, "--"+f.Name+"="+f.Value.String()) })
	return args
}

// Load is a set of publishers and their schedule.
type Load struct {
	Sources []schedule.Source
	// Stream returns the schedule from the start. All streams are equal.
	Stream func() schedule.Stream
	// Span is the length of the schedule; 0: unlimited.
	Span time.Duration
	// Groups are the groups of equal publishers; nil for a trace.
	Groups []schedule.Group
	// Text describes the load in one line.
	Text string
}

// Rate is the mean rate of all publishers, in msg/s.
func (l *Load) Rate() float64 {
	rate := 0.0
	for _, s := range l.Sources {
		rate += s.Rate
	}
	return rate
}

// Build reads the recording, if Trace is set. The error names every invalid flag, or the
// file and line of a fault in the recording.
func (o Options) Build() (*Load, error) {
	if o.Trace == "" {
		if o.Keep != 0 {
			return nil, errors.New("keep: only with a trace; without one say how many publishers")
		}
		if err := o.Spec.Validate(); err != nil {
			return nil, err
		}
		spec := o.Spec
		text := fmt.Sprintf("%s at %g msg/s each, %g msg/s in all", plural.Count(spec.Publishers, string(spec.Process)+" publisher"), spec.Rate, spec.Rate*float64(spec.Publishers))
		if spec.Batch > 1 {
			text += fmt.Sprintf(", batches of %d", spec.Batch)
		}
		if spec.GroupSize > 1 {
			kind := "labelled"
			if spec.Sync {
				kind = "synchronised"
			}
			if spec.Noise > 0 {
				kind += fmt.Sprintf(" to %v", spec.Noise)
			}
			text += fmt.Sprintf(", %s groups of %d", kind, spec.GroupSize)
		}
		return &Load{
			Sources: spec.Sources(), Groups: spec.Groups(), Text: text,
			Stream: func() schedule.Stream { return spec.Stream() },
		}, nil
	}

	options := o.Replay
	options.Seed = o.Spec.Seed
	if err := options.Validate(); err != nil {
		return nil, err
	}
	if o.Keep < 0 {
		return nil, fmt.Errorf("keep: %d publishers, want 0 for all, or more", o.Keep)
	}
	recording, err := trace.Open(o.Trace)
	if err != nil {
		return nil, err
	}
	replay, err := recording.Replay(options)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.Trace, err)
	}
	l := &Load{Sources: replay.Sources(), Stream: replay.Stream, Span: replay.Span()}
	if o.Keep > 0 && o.Keep < len(l.Sources) {
		l.Sources = l.Sources[:o.Keep]
		l.Stream = func() schedule.Stream {
			return schedule.Only(replay.Stream(), func(e schedule.Event) bool { return int(e.Source) < o.Keep })
		}
	}
	l.Text = fmt.Sprintf("%s: %s, %.4g msg/s in all (%g times faster, %s, lasts %v)",
		o.Trace, plural.Count(len(l.Sources), "publisher"), l.Rate(), options.Compress, plural.Count(options.Copies, "copy"), l.Span.Round(time.Second))
	return l, nil
}
