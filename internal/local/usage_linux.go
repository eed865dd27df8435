package local

import (
	"fmt"
	"time"

	"github.com/prometheus/procfs"
)

// CPU is the processor time that the process has used.
func (p *Process) CPU() (time.Duration, error) {
	of, err := procfs.NewProc(p.Pid())
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	stat, err := of.Stat()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	return time.Duration(stat.CPUTime() * float64(time.Second)), nil
}

// RSS is how many bytes the process has in memory.
func (p *Process) RSS() (int64, error) {
	of, err := procfs.NewProc(p.Pid())
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	status, err := of.NewStatus()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	return int64(status.VmRSS), nil
}
