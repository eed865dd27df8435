package testkit

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
)

// Release is a line of a broker's release trace.
type Release struct{ Arrival, Eligible, Released mono.Time }

// ReadTrace returns the releases of a topic in a release trace. It ignores an unfinished
// last line.
func ReadTrace(t testing.TB, path, topic string) (all []Release) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text[:bytes.LastIndexByte(text, '\n')+1])) {
		rest, found := strings.CutPrefix(line, topic+",")
		if !found {
			continue
		}
		var r Release
		if n, err := fmt.Sscanf(rest, "%d,%d,%d\n", &r.Arrival, &r.Eligible, &r.Released); n != 3 || err != nil {
			t.Fatalf("%s: %q: %v", path, line, err)
		}
		all = append(all, r)
	}
	return all
}

// Times returns the eligible times and the release times.
func Times(all []Release) (eligible, released []mono.Time) {
	for _, r := range all {
		eligible, released = append(eligible, r.Eligible), append(released, r.Released)
	}
	return eligible, released
}
