//go:build linux

package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// usage is processor time, as far as it was used at an instant.
type usage struct {
	broker, load time.Duration // of the broker, and of this process
	busy, all    time.Duration // of all processors
}

func readUsage(b *running) (u usage, err error) {
	var self unix.Rusage
	stat, err1 := os.ReadFile("/proc/stat")
	err2 := unix.Getrusage(unix.RUSAGE_SELF, &self)
	u.broker, err = b.cpu()
	if err := errors.Join(err, err1, err2); err != nil {
		return u, err
	}
	u.load = time.Duration(self.Utime.Nano() + self.Stime.Nano())
	u.busy, u.all, err = parseSystemStat(stat)
	return u, err
}

func (u usage) since(v usage) usage {
	return usage{u.broker - v.broker, u.load - v.load, u.busy - v.busy, u.all - v.all}
}

// others is how many percent of all time went to other processes, or to whoever
// runs this machine if it is a virtual one.
func (u usage) others() float64 {
	if u.all <= 0 {
		return 0
	}
	return 100 * max(0, float64(u.busy-u.broker-u.load)) / float64(u.all)
}

// parseSystemStat returns how long all processors were busy, and how long they were
// there. The first line of /proc/stat has user, nice, system, idle, iowait, irq,
// softirq and steal; guests behind them are counted in user and nice.
func parseSystemStat(stat []byte) (busy, all time.Duration, err error) {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("processor time of the machine: %q", line)
	}
	for i, f := range fields[1:9] {
		ticks, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("processor time of the machine: %q", line)
		}
		spent := time.Duration(ticks) * clockTick
		all += spent
		if i != 3 && i != 4 {
			busy += spent
		}
	}
	return busy, all, nil
}

// clockTick is the unit of the processor times in /proc, fixed by its ABI.
const clockTick = 10 * time.Millisecond

// cpu returns the processor time that the broker has used.
func (r *running) cpu() (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.Pid()))
	if err != nil {
		return 0, err
	}
	return parseStat(stat)
}

// parseStat returns user and system time. The name in brackets may hold
// anything; the times are the 12th and 13th fields behind it.
func parseStat(stat []byte) (time.Duration, error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("processor time of the broker: %q", stat)
	}
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	return time.Duration(user+system) * clockTick, errors.Join(err1, err2)
}

// rss returns the bytes that the broker has in memory.
func (r *running) rss() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.Pid()))
	if err != nil {
		return 0, err
	}
	return parseRSS(status)
}

func parseRSS(status []byte) (int64, error) {
	_, rest, ok := strings.Cut(string(status), "\nVmRSS:")
	var kb int64
	if _, err := fmt.Sscanf(rest, "%d kB", &kb); !ok || err != nil {
		return 0, fmt.Errorf("memory of the broker: no VmRSS in its status: %w", err)
	}
	return kb << 10, nil
}

// heap is what a Go program says of its heap.
type heap struct{ mallocs, collections int64 }

// heap asks the broker; ok is false if it is not written in Go, or does not say.
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

// parseHeap reads the totals at the end of a heap profile as text.
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
