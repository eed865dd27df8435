//go:build linux

package peer

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/load"
)

// target is a wanted ratio of our broker's metric to another broker's metric. Latencies are
// compared in the least disturbed round.
type target struct {
	scenario, figure string
	others           []string // compared with the best of these
	bound            float64  // maximum, or minimum if higher is better
}

// targets are the targets of the hot path. "upstream" is the nsqd of the project NSQ.
var targets = []target{
	{"poisson-1000", "least p99", []string{"mosquitto", "nats", "redis"}, 1},
	{"poisson-1000", "least p99", []string{"upstream-unbuffered"}, 0.3},
	{"poisson-1000", "CPU us/msg", []string{"upstream-unbuffered"}, 0.45},
	{"poisson-1000", "CPU us/msg", []string{"mosquitto"}, 1},
	{"poisson-2000", "least p99", []string{"upstream-unbuffered"}, 0.1},
	{"poisson-4000", "least p99", []string{"upstream-unbuffered"}, 0.05},
	{"poisson-4000", "least p99", []string{"mosquitto"}, 1},
	{"poisson-4000", "CPU us/msg", []string{"mosquitto"}, 1},
	{"pipelined", "in/s", []string{"upstream"}, 5},
	{"pipelined", "out/s", []string{"upstream"}, 5},
	{"mpub", "in/s", []string{"upstream"}, 1.5},
	{"mpub", "out/s", []string{"upstream"}, 1.5},
	{"closed", "in/s", []string{"upstream"}, 1.2},
	{"tls", "CPU us/msg", []string{"upstream"}, 0.7},
	{"tls-pipelined", "CPU us/msg", []string{"upstream"}, 0.7},
	{"poisson-2000", "least p99", []string{"floor"}, 1.5},
	{"poisson-4000", "least p99", []string{"floor"}, 1.5},
	{"sparse-4000", "least p99", []string{"floor"}, 1.5},
	{"fsync", "least p99", []string{"floor"}, 1.2},
	{"fsync-closed", "in/s", []string{"floor"}, 1 / 1.2},
	{"overflow", "in/s", []string{"upstream"}, 1.5},
	{"overflow", "out/s", []string{"upstream"}, 1.5},
}

// idleBytes is the target for the memory of an idle connection, in bytes.
const idleBytes = 3 << 10

func columnOf(title string) column {
	for _, c := range columns {
		if c.Title == title {
			return c
		}
	}
	panic("there is no column " + title) // a test checks all titles
}

// writeVerdicts writes which targets the first broker meets, and where it is behind other
// brokers.
func writeVerdicts(out io.Writer, list []load.Scenario, names []string, runs []load.Result) error {
	var b strings.Builder
	results, ours := group(runs), names[0]
	for _, t := range targets {
		c := columnOf(t.figure)
		worst, compared := 0.0, ""
		for _, other := range t.others {
			if v, ok := results.ratio(c, t.scenario, ours, other); ok && (compared == "" || better(c.compared, worst, v)) {
				worst, compared = v, other
			}
		}
		if compared == "" {
			continue
		}
		relation := "at most"
		if c.compared == higher {
			relation = "at least"
		}
		verdict(&b, t.scenario, fmt.Sprintf("%s / %s", t.figure, compared), fmt.Sprintf("%s %.3g", relation, t.bound), fmt.Sprintf("%.3g", worst), !better(c.compared, t.bound, worst))
	}
	if v, ok := columnOf("bytes/conn").Figure(results[[2]string{"idle", ours}]); ok {
		verdict(&b, "idle", "bytes/conn", fmt.Sprintf("at most %d", idleBytes), fmt.Sprintf("%.0f", v), v <= idleBytes)
	}
	var text string
	if b.Len() > 0 {
		text = fmt.Sprintf("\n### Targets of %s\n\n| scenario | figure | wanted | measured | met |\n| --- | --- | --- | --- | --- |\n%s", ours, b.String())
	}
	if rows := behind(results, list, names); rows != "" {
		text += fmt.Sprintf("\n### Where %s is behind\n\n| broker | ratios that are worse than 1 |\n| --- | --- |\n%s", ours, rows)
	}
	_, err := io.WriteString(out, text)
	return err
}

func verdict(b *strings.Builder, scenario, figure, wanted, measured string, met bool) {
	yes := "yes"
	if !met {
		yes = "**no**"
	}
	host.Row(b, scenario, figure, wanted, measured, yes)
}

// better reports whether v is better than w.
func better(o order, v, w float64) bool { return o == lower && v < w || o == higher && v > w }

// behind writes a row for each broker that is better than the first broker in some metric.
// For the latency it compares least p99, since medians are more disturbed by the machine.
func behind(results results, list []load.Scenario, names []string) string {
	var b strings.Builder
	for _, other := range names[1:] {
		var all []string
		for _, c := range columns {
			var of []string
			for _, s := range list {
				if v, ok := results.ratio(c, s.Name, names[0], other); ok && c.shows(s) && c.Title != "p50 ms" && c.Title != "p99 ms" && better(c.compared, 1, v) {
					of = append(of, fmt.Sprintf("%s %.3g", s.Name, v))
				}
			}
			if len(of) > 0 {
				all = append(all, fmt.Sprintf("%s: %s", c.Title, strings.Join(of, ", ")))
			}
		}
		if len(all) > 0 {
			fmt.Fprintf(&b, "| %s | %s |\n", other, strings.Join(all, "; "))
		}
	}
	return b.String()
}

// writePage writes the whole report as a Markdown page.
func (r report) writePage(out io.Writer, list []load.Scenario) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Benchmark comparison of %s\n\nWritten by `bench peer`: do not edit. [Performance](../performance.md) says what the columns are.\n\n", r.names()[0])
	fmt.Fprintf(&b, "Commit %s, kernel %s, %d processors, %s, seed %d; rounds of %s: %s.\n\n", r.Commit, r.Kernel, r.CPUs, r.Go, r.Seed, r.Lasting, rounds(r.Runs))
	fmt.Fprintf(&b, "    bench peer %s\n\n", strings.Join(withoutFolders(r.Flags), " "))
	for _, broker := range r.Brokers {
		fmt.Fprintf(&b, "- %s: %s\n", broker.Name, broker.Version)
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(&b, "- %s\n", s)
	}
	if _, err := io.WriteString(out, b.String()); err != nil {
		return err
	}
	return errors.Join(writeVerdicts(out, list, r.names(), r.Runs), writeTables(out, list, r.names(), r.Runs))
}

// rounds returns the number of rounds, or the range of numbers, over scenarios and brokers.
func rounds(runs []load.Result) string {
	count := map[[2]string]int{}
	for _, r := range runs {
		count[[2]string{r.Scenario, r.Peer}]++
	}
	all := slices.Sorted(maps.Values(count))
	switch {
	case len(all) == 0:
		return "0"
	case all[0] < all[len(all)-1]:
		return fmt.Sprintf("%d to %d", all[0], all[len(all)-1])
	}
	return fmt.Sprint(all[0])
}

// withoutFolders removes the folders from paths in flags, since they differ between
// machines.
func withoutFolders(flags []string) (short []string) {
	for _, f := range flags {
		if i := strings.LastIndexByte(f, '='); i >= 0 && strings.ContainsRune(f[i:], filepath.Separator) {
			f = f[:i+1] + filepath.Base(f[i+1:])
		}
		short = append(short, f)
	}
	return short
}
