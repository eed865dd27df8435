package clients

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// tally collects the results of the scenarios for the summary.
type tally struct {
	mu struct {
		sync.Mutex
		libraries map[string]*outcome
	}
}

// outcome is the result of one library.
type outcome struct {
	passed, failed int
	broken         bool              // something outside the scenarios failed
	skipped        map[string]string // reason by scenario; "": all of it
	took           time.Duration     // install time; 0: it was installed
}

// results of this run.
var results tally

func (r *tally) of(library string, change func(*outcome)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.libraries == nil {
		r.mu.libraries = map[string]*outcome{}
	}
	o := r.mu.libraries[library]
	if o == nil {
		o = &outcome{skipped: map[string]string{}}
		r.mu.libraries[library] = o
	}
	change(o)
}

func (r *tally) installed(library string, took time.Duration) {
	r.of(library, func(o *outcome) { o.took = took })
}

// scenario counts a scenario that has ended.
func (r *tally) scenario(t *testing.T, library, name string) {
	r.of(library, func(o *outcome) {
		switch {
		case t.Failed():
			o.failed++
		case !t.Skipped():
			o.passed++
		case o.skipped[name] == "":
			o.skipped[name] = "no reason given"
		}
	})
}

// library notes the end of a library.
func (r *tally) library(t *testing.T, library string) {
	r.of(library, func(o *outcome) { o.broken = t.Failed() && o.failed == 0 })
}

// skip skips t with a reason that the summary repeats. Without a name the whole library is skipped.
func (r *tally) skip(t *testing.T, library, name, why string) {
	t.Helper()
	r.of(library, func(o *outcome) { o.skipped[name] = why })
	t.Skipf("%s: %s", library, why)
}

// print writes the summary, a line for each library and for each reason. `make test` finds each line
// by its prefix.
func (r *tally) print(w io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(libraries)
	for _, d := range devices {
		all = append(all, d.library)
	}
	for _, l := range all {
		o := r.mu.libraries[l.name]
		if o == nil {
			continue // excluded by -run
		}
		if why := o.skipped[""]; why != "" {
			fmt.Fprintf(w, "clients: %-13s SKIPPED: %s\n", l.name, why)
			continue
		}
		line := fmt.Sprintf("clients: %-13s %d passed, %d failed, %d skipped", l.name, o.passed, o.failed, len(o.skipped))
		if o.broken {
			line += ", BROKEN"
		}
		if o.took > time.Second {
			line += fmt.Sprintf(" (installed in %v)", o.took.Round(time.Second))
		}
		fmt.Fprintln(w, line)
		reasons := map[string][]string{}
		for _, name := range slices.Sorted(maps.Keys(o.skipped)) {
			reasons[o.skipped[name]] = append(reasons[o.skipped[name]], name)
		}
		for _, why := range slices.Sorted(maps.Keys(reasons)) {
			fmt.Fprintf(w, "clients: %-13s SKIPPED %s: %s\n", "", strings.Join(reasons[why], "; "), why)
		}
	}
}

func TestWhatInstallersSayWithoutANetwork(t *testing.T) {
	for _, output := range []string{
		"WARNING: Retrying (Retry(total=0, ...)) after connection broken by 'NewConnectionError('...: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')'",
		"npm error code EAI_AGAIN\nnpm error syscall getaddrinfo",
		"[ERROR] Could not transfer artifact x: repo.example: Unknown host repo.example: Temporary failure in name resolution",
		"Caused by:\n  [6] Could not resolve hostname (Could not resolve host: index.example)",
	} {
		if !offline(output) {
			t.Errorf("%q is not taken for a missing network", output)
		}
	}
	for _, output := range []string{
		"ERROR: No matching distribution found for pynsq==99", "npm error code E404", "error: could not compile `driver`", "COMPILATION ERROR",
	} {
		if offline(output) {
			t.Errorf("%q is taken for a missing network", output)
		}
	}
}
