package up

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// What was learned stands beside what was declared.
func TestTheReportShowsWhatWasLearned(t *testing.T) {
	r := &Report{Brokers: 2, Phases: []Phase{{Name: "SRTM placement"}, {Name: "blind split"}}}
	var out strings.Builder
	if err := r.compare(&out); err != nil || strings.Contains(out.String(), "declared") {
		t.Errorf("%v: %s", err, out.String())
	}
	r.Phases = append(r.Phases, Phase{Name: "undeclared", Learned: &Learned{Publishers: 200, Groups: 8}})
	out.Reset()
	testkit.Must(t, r.compare(&out))
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "publishers") {
			testkit.Equal(t, strings.Join(strings.Fields(line)[1:], " "), "declared declared 200 learned, 8 groups", "%q", line)
			return
		}
	}
	t.Errorf("no publishers in %s", out.String())
}
