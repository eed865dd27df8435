// Package profile measures what requests take of a web server, as the mQoS paper's
// prober does: a monitor beside the server says what was used, and a prober asks for
// one URL after the other and looks at the difference. It knows nothing of the gateway
// but the form of its policy. Read monitor.go, then prober.go.
package profile

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Usage is what a server has used since some moment in the past, by resource: cpu in
// milliseconds of processor time, disk and net in kilobytes, read and written.
type Usage map[string]float64

// Monitor reads the counters of a control group (version 2) and of a network interface.
type Monitor struct {
	Cgroup    string // its folder
	NetDev    string // /proc/net/dev
	Interface string // "": all but the loopback
}

// ServeHTTP answers with the Usage as JSON.
func (m Monitor) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	usage, err := m.Read()
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(usage) // the client is gone; no one is left to tell
}

// Read returns what has been used. Where the group counts no input and output, there is
// no disk in it.
func (m Monitor) Read() (Usage, error) {
	usage := Usage{}
	text, err := os.ReadFile(filepath.Join(m.Cgroup, "cpu.stat"))
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	for fields := range words(text) {
		if len(fields) == 2 && fields[0] == "usage_usec" {
			if usage["cpu"], err = strconv.ParseFloat(fields[1], 64); err != nil {
				return nil, fmt.Errorf("monitor: cpu.stat: %w", err)
			}
			usage["cpu"] /= 1e3
		}
	}
	if text, err = os.ReadFile(filepath.Join(m.Cgroup, "io.stat")); err == nil {
		usage["disk"] = 0
		for fields := range words(text) {
			for _, f := range fields {
				name, value, _ := strings.Cut(f, "=")
				if name == "rbytes" || name == "wbytes" {
					n, err := strconv.ParseFloat(value, 64)
					if err != nil {
						return nil, fmt.Errorf("monitor: io.stat: %w", err)
					}
					usage["disk"] += n / 1e3
				}
			}
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	if text, err = os.ReadFile(m.NetDev); err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	found := false
	for fields := range words(bytes.ReplaceAll(text, []byte{':'}, []byte(": "))) {
		name, ok := strings.CutSuffix(fields[0], ":")
		if !ok || len(fields) < 10 || m.Interface != "" && name != m.Interface || m.Interface == "" && name == "lo" {
			continue
		}
		found = true
		for _, f := range []string{fields[1], fields[9]} { // bytes received and sent
			n, err := strconv.ParseFloat(f, 64)
			if err != nil {
				return nil, fmt.Errorf("monitor: %s: %w", m.NetDev, err)
			}
			usage["net"] += n / 1e3
		}
	}
	if m.Interface != "" && !found {
		return nil, fmt.Errorf("monitor: there is no interface %q", m.Interface)
	}
	return usage, nil
}

// words yields the words of each line that has any.
func words(text []byte) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
			if fields := strings.Fields(lines.Text()); len(fields) > 0 && !yield(fields) {
				return
			}
		}
	}
}
