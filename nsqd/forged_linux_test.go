package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/wire"
)

// A publisher with a raw socket sends 100 messages so that TCP drops the messages and the filter notes them. The
// publisher waits until the contract would have released the messages, and then sends all at once.
func TestForgedStampsReleaseNothingSooner(t *testing.T) {
	s, err := hook.Open(hook.EBPF, hook.Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Skipf("no program can be loaded here; kernel/hook tests whether it should: %v", err)
	}
	testkit.Must(t, s.Close())
	const messages, rate, burst, slack = 100, 2000, 5, mono.Time(200 * time.Microsecond)
	trace := filepath.Join(t.TempDir(), "trace")
	d := start(t, "--arrival-stamps=ebpf", "--release-trace="+trace, fmt.Sprintf("--topic-limit=t:%d:%d", rate, burst))
	topic, err := d.broker.CreateTopic("t")
	if err == nil {
		err = topic.CreateChannel("c") // without a channel no message leaves
	}
	testkit.Must(t, err)
	nc, err := net.Dial("tcp", d.listeners.tcp.Addr().String())
	testkit.Must(t, err)
	defer nc.Close()
	testkit.Must(t, nc.SetDeadline(time.Now().Add(testkit.Hang)))
	var ok [10]byte // "OK" in its frame
	publish := func(p []byte, n int) {
		_, err := nc.Write(p)
		testkit.Must(t, err)
		for range n {
			if _, err := io.ReadFull(nc, ok[:]); err != nil || string(ok[8:]) != "OK" {
				t.Fatalf("%q, %v", ok, err)
			}
		}
	}
	one := wire.AppendPub(nil, "t", bytes.Repeat([]byte("m"), 100))
	publish(append(wire.AppendMagic(nil), one...), 1) // takes a ring
	forger := testkit.Forge(t, nc.(*net.TCPConn))
	forger.Send(testkit.Forgery{Seq: forger.Next, Size: messages * len(one), Old: true})
	for due := clock.Mono().Add(messages * time.Second / rate); clock.Mono().Before(due); {
		runtime.Gosched()
	}
	from := clock.Mono()
	publish(bytes.Repeat(one, messages), messages)

	var lines []string
	for give := time.Now().Add(testkit.Hang); len(lines) < messages+1; runtime.Gosched() {
		text, err := os.ReadFile(trace)
		if err != nil || time.Now().After(give) {
			t.Fatalf("%d messages have left, %v", len(lines), err)
		}
		lines = strings.Fields(string(text[:bytes.LastIndexByte(text, '\n')+1])) // a line may be half written
	}
	// Goroutines that release messages append their lines after each other, but not always in the order of the
	// releases. So the k-th of the times counts, not the time of the k-th line.
	var arrivals, tokens, releases []mono.Time
	for _, line := range lines[1:] {
		var arrival, token, release mono.Time
		if _, err := fmt.Sscanf(line, "t,%d,%d,%d", &arrival, &token, &release); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		arrivals, tokens, releases = append(arrivals, arrival), append(tokens, token), append(releases, release)
	}
	slices.Sort(arrivals)
	slices.Sort(tokens)
	slices.Sort(releases)
	for k := range tokens {
		due := from.Add(time.Duration(k-burst) * time.Second / rate)
		if early := max(from-arrivals[k], due-tokens[k], due-releases[k]); early > slack {
			t.Fatalf("message %d of the burst: arrival %v, token %v, release %v after it began, where the token is due at %v:\n%s",
				k, arrivals[k].Sub(from), tokens[k].Sub(from), releases[k].Sub(from), due.Sub(from), strings.Join(lines, "\n"))
		}
	}
}
