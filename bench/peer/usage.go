//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
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

func readUsage(b *process) (u usage, err error) {
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
