package httpapi

import (
	"fmt"
	"runtime"
	"strings"
	"time"
	"unicode"
)

// text formats /stats as text. The columns are NSQ's, because scripts parse them. SRTM's values are
// on lines of their own.
func (s statsJSON) text(now time.Time) string {
	var b strings.Builder
	start := time.Unix(s.StartTime, 0)
	fmt.Fprintf(&b, "nsqd v%s (built w/%s)\nstart_time %s\nuptime %s\n\nHealth: %s\n", s.Version, runtime.Version(), start.UTC().Format(time.RFC3339), now.Sub(start), s.Health)
	if m := s.Memory; m != nil {
		b.WriteString("\nMemory:\n")
		const line = "   %-25s\t%d\n"
		for _, l := range m.Levels() {
			fmt.Fprintf(&b, line, l.Name, l.Value)
		}
		fmt.Fprintf(&b, line, "gc_total_runs", m.GCTotalRuns)
	}
	if len(s.Topics) == 0 {
		b.WriteString("\nTopics: None\n")
	} else {
		b.WriteString("\nTopics:\n")
	}
	for i, t := range s.Topics {
		if i > 0 {
			b.WriteString("\n")
		}
		t.text(&b, now)
	}
	if len(s.Producers) == 0 {
		b.WriteString("\nProducers: None\n")
		return b.String()
	}
	b.WriteString("\nProducers:\n")
	for _, c := range s.Producers {
		total, topics := uint64(0), []string{}
		for _, p := range c.PubCounts {
			total += p.Count
			topics = append(topics, fmt.Sprintf("%s=%d", p.Topic, p.Count))
		}
		fmt.Fprintf(&b, "   [V2 %-21s] msgs: %-8d topics: %s connected: %s\n", c.name(), total, strings.Join(topics, ","), c.age(now))
	}
	return b.String()
}

func (t topicJSON) text(b *strings.Builder, now time.Time) {
	fmt.Fprintf(b, "%s[%-15s] depth: %-5d be-depth: %-5d msgs: %-8d e2e%%: %s\n",
		paused(t.Paused, ""), t.Name, t.Depth, t.BackendDepth, t.MessageCount, t.EndToEnd)
	if l := t.SRTM; l.Limited {
		fmt.Fprintf(b, "      srtm: %g msg/s burst: %d tokens: %.3f refused: %d exceeded: %d of %d\n", l.Rate, l.Burst, l.Tokens, l.Refused, l.Exceeded, l.Delivered)
	}
	if l := t.SRTM.Latency; l.Delivery.Count > 0 {
		fmt.Fprintf(b, "      srtm: p99 us: access %d processing %d delivery %d, consumer %d\n", l.Access.P99, l.Processing.P99, l.Delivery.P99, l.Consumer.P99)
	}
	for _, c := range t.Channels {
		fmt.Fprintf(b, "%s[%-25s] depth: %-5d be-depth: %-5d inflt: %-4d def: %-4d re-q: %-5d timeout: %-5d msgs: %-8d e2e%%: %s\n",
			paused(c.Paused, "   "), c.Name, c.Depth, c.BackendDepth, c.InFlight, c.Deferred, c.RequeueCount, c.TimeoutCount, c.MessageCount, c.EndToEnd)
		for _, client := range c.Clients {
			fmt.Fprintf(b, "        [%s %-21s] state: %d inflt: %-4d rdy: %-4d fin: %-8d re-q: %-8d msgs: %-8d connected: %s\n",
				client.Version, client.name(), client.State, client.InFlightCount, client.ReadyCount, client.FinishCount, client.RequeueCount, client.MessageCount, client.age(now))
		}
	}
}

// String formats the percentiles in their order.
func (e endToEndJSON) String() string {
	var all []string
	for _, p := range e.Percentiles {
		all = append(all, time.Duration(p.Nanos).Round(time.Microsecond).String())
	}
	return strings.Join(all, ", ")
}

// paused returns the beginning of a line, with a mark if paused.
func paused(p bool, indent string) string {
	if p {
		return indent + "*P "
	}
	return indent + "   "
}

// name returns the client's id and port, or its address if it has no id. It removes control
// characters, because a line break in the id would forge a line.
func (c clientJSON) name() string {
	name := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return -1
		}
		return r
	}, c.ClientID)
	if i := strings.LastIndexByte(c.RemoteAddress, ':'); i >= 0 {
		return name + c.RemoteAddress[i:]
	}
	return name
}

func (c clientJSON) age(now time.Time) time.Duration {
	return now.Sub(time.Unix(c.ConnectTime, 0)).Truncate(time.Second)
}
