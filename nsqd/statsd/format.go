package statsd

import (
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/stats"
)

// Prefix returns the prefix of every path: format, with %s replaced by the host as a single path
// component, and a final dot.
func Prefix(format, host string) string {
	host = strings.NewReplacer(".", "_", ":", "_").Replace(host)
	prefix := strings.ReplaceAll(format, "%s", host)
	if prefix != "" && !strings.HasSuffix(prefix, ".") {
		prefix += "."
	}
	return prefix
}

// formatter formats stats as lines, and remembers the counters of the last push.
type formatter struct {
	// Set once.
	prefix      string
	percentiles []float64
	ephemeral   bool // include ephemeral topics and channels

	counted map[string]uint64 // by path, at the last push
}

// lines are the lines of one push: each ends in a newline.
type lines struct {
	f       *formatter
	all     []string
	current map[string]uint64
}

// lines formats the stats, and remembers their counters.
func (f *formatter) lines(topics []broker.Stats, mem *stats.Memory) []string {
	l := &lines{f: f, current: make(map[string]uint64)}
	for _, t := range topics {
		if wire.Ephemeral(t.Name) && !f.ephemeral {
			continue
		}
		l.topic(t)
	}
	if mem != nil {
		l.memory(mem)
	}
	f.counted = l.current // forgets paths that no longer exist
	return l.all
}

func (l *lines) add(path string, value uint64, kind string) {
	l.all = append(l.all, l.f.prefix+path+":"+strconv.FormatUint(value, 10)+"|"+kind+"\n")
}

func (l *lines) gauge(path string, value int) { l.add(path, uint64(max(value, 0)), "g") }

// counter sends the growth of value. A counter that has fallen was restarted with its topic or
// channel.
func (l *lines) counter(path string, value uint64) {
	grown := value
	if previous := l.f.counted[path]; previous <= value {
		grown -= previous
	}
	l.current[path] = value
	l.add(path, grown, "c")
}

func (l *lines) topic(t broker.Stats) {
	path := "topic." + t.Name + "."
	l.counter(path+"message_count", t.Counters.Accepted)
	l.counter(path+"message_bytes", t.Counters.AcceptedBytes)
	l.gauge(path+"depth", t.Waiting)
	l.gauge(path+"backend_depth", 0)
	var all stats.Summary
	for _, c := range t.Channels {
		all.Merge(c.EndToEnd)
	}
	l.latencies(path, all)
	for _, c := range t.Channels {
		if wire.Ephemeral(c.Name) && !l.f.ephemeral {
			continue
		}
		l.channel(path+"channel."+c.Name+".", c)
	}
}

func (l *lines) channel(path string, c broker.ChannelStats) {
	l.counter(path+"message_count", c.Counters.Messages)
	l.gauge(path+"depth", c.Ready)
	l.gauge(path+"backend_depth", 0)
	l.gauge(path+"in_flight_count", c.InFlight)
	l.gauge(path+"deferred_count", c.Deferred)
	l.counter(path+"requeue_count", c.Counters.Requeued)
	l.counter(path+"timeout_count", c.Counters.TimedOut)
	l.gauge(path+"clients", c.Consumers)
	l.latencies(path, c.EndToEnd)
}

// latencies sends latencies in nanoseconds, as in /stats.
func (l *lines) latencies(path string, s stats.Summary) {
	for _, q := range l.f.percentiles {
		l.gauge(path+"e2e_processing_latency_"+percent(q), int(s.Quantile(q)))
	}
}

// percent names a percentile within a path: 0.99 is 99, 0.999 is 99_9. A dot would start another
// path component.
func percent(q float64) string {
	text := strconv.FormatFloat(q*100, 'f', 6, 64)
	text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	return strings.ReplaceAll(text, ".", "_")
}

func (l *lines) memory(m *stats.Memory) {
	const path = "mem."
	for _, level := range m.Levels() {
		l.add(path+level.Name, level.Value, "g")
	}
	l.counter(path+"gc_runs", uint64(m.GCTotalRuns))
}

// packets joins lines, in order, into packets of at most size bytes. A longer line gets its own
// packet.
func packets(all []string, size int) []string {
	var out []string
	var b strings.Builder
	for _, line := range all {
		if b.Len() > 0 && b.Len()+len(line) > size {
			out = append(out, b.String())
			b.Reset()
		}
		b.WriteString(line)
	}
	if b.Len() > 0 {
		out = append(out, b.String())
	}
	return out
}
