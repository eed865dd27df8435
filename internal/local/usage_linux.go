package local

import (
	"fmt"
	"time"

	"github.com/prometheus/procfs"
)

// CPU returns the processor time of the process.
func (p *Process) CPU() (time.Duration, error) {
	process, err := procfs.NewProc(p.Pid())
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	stat, err := process.Stat()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	return time.Duration(stat.CPUTime() * float64(time.Second)), nil
}

// RSS returns the resident memory of the process in bytes.
func (p *Process) RSS() (int64, error) {
	process, err := procfs.NewProc(p.Pid())
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	status, err := process.NewStatus()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	return int64(status.VmRSS), nil
}
