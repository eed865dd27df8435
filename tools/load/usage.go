//go:build linux

package load

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"

	"github.com/srtm-io/srtm/internal/clock"
)

// usage is used processor time in seconds.
type usage struct {
	broker, load float64 // the broker's, and this process's
	busy, all    float64 // all processors'
}

func readUsage(b *running) (u usage, err error) {
	u.load = clock.CPU().Seconds()
	for _, p := range b.counted {
		spent, err := p.CPU()
		if err != nil {
			return u, err
		}
		u.broker += spent.Seconds()
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return u, err
	}
	machine, err := fs.Stat()
	t := machine.CPUTotal // User and Nice include guests
	u.busy = t.User + t.Nice + t.System + t.IRQ + t.SoftIRQ + t.Steal
	u.all = u.busy + t.Idle + t.Iowait
	return u, err
}

// memory returns the resident memory of the broker's processes, in bytes.
func (r *running) memory() (all int64, err error) {
	for _, p := range r.counted {
		bytes, err := p.RSS()
		if err != nil {
			return 0, err
		}
		all += bytes
	}
	return all, nil
}

func (u usage) since(v usage) usage {
	return usage{u.broker - v.broker, u.load - v.load, u.busy - v.busy, u.all - v.all}
}

// others returns the percentage of processor time that other processes used, or the host of
// a virtual machine.
func (u usage) others() float64 {
	if u.all <= 0 {
		return 0
	}
	return 100 * max(0, u.busy-u.broker-u.load) / u.all
}

// heap holds the allocation counters of a Go program.
type heap struct{ mallocs, collections int64 }

// heap requests the counters from the broker. ok is false if the broker does not serve
// them.
func (r *running) heap(ctx context.Context) (h heap, ok bool, err error) {
	if !r.web {
		return h, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.at.Web+"/debug/pprof/heap?debug=1", nil)
	if err != nil {
		return h, false, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return h, false, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return h, false, nil
	}
	return parseHeap(resp.Body)
}

// parseHeap parses the totals at the end of a heap profile in text form.
func parseHeap(r io.Reader) (h heap, ok bool, err error) {
	found := 0
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		for name, to := range map[string]*int64{"# Mallocs = ": &h.mallocs, "# NumGC = ": &h.collections} {
			if text, is := strings.CutPrefix(lines.Text(), name); is {
				if *to, err = strconv.ParseInt(text, 10, 64); err != nil {
					return h, false, fmt.Errorf("heap profile of the broker: %w", err)
				}
				found++
			}
		}
	}
	return h, found == 2, lines.Err()
}
