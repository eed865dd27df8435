// Package profile measures the cost of requests to a web server, like the mQoS paper's prober. A
// monitor beside the server reports resource usage. A prober requests one URL after the other and
// computes the differences. The package knows only the policy format of the gateway. Read monitor.go,
// then prober.go.
package profile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Usage is a server's total usage since some moment in the past, by resource: cpu in milliseconds of
// processor time, disk and net in kilobytes, read and written.
type Usage map[string]float64

// Monitor reads the counters of a control group (version 2) and of a network interface.
type Monitor struct {
	Cgroup    string // folder of the group
	NetDev    string // /proc/net/dev
	Interface string // "": all except the loopback
}

// Read returns the usage. If the group does not count input and output, disk is absent.
func (m Monitor) Read() (Usage, error) {
	usage := Usage{}
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("monitor: "+format, args...)) }
	read := func(file, hint string) string {
		text, err := os.ReadFile(file)
		if err != nil {
			fault("%w%s", err, hint)
		}
		return string(text)
	}
	add := func(resource, file, value string) {
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			fault("%s: %w", file, err)
		}
		usage[resource] += n / 1e3
	}
	for line := range strings.Lines(read(filepath.Join(m.Cgroup, "cpu.stat"), ": --cgroup is to be a control group of version 2")) {
		if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
			add("cpu", "cpu.stat", strings.TrimSpace(value))
		}
	}
	disk := filepath.Join(m.Cgroup, "io.stat")
	if _, err := os.Stat(disk); !errors.Is(err, os.ErrNotExist) {
		usage["disk"] = 0
		for _, field := range strings.Fields(read(disk, "")) {
			if name, value, _ := strings.Cut(field, "="); name == "rbytes" || name == "wbytes" {
				add("disk", "io.stat", value)
			}
		}
	}
	for line := range strings.Lines(read(m.NetDev, "")) {
		name, counters, _ := strings.Cut(strings.TrimSpace(line), ":")
		if fields := strings.Fields(counters); len(fields) > 8 && (name == m.Interface || m.Interface == "" && name != "lo") {
			add("net", m.NetDev, fields[0]) // bytes received
			add("net", m.NetDev, fields[8]) // bytes sent
		}
	}
	if _, found := usage["net"]; m.Interface != "" && !found {
		fault("there is no interface %q", m.Interface)
	}
	return usage, errors.Join(faults...)
}
