package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// stopTimeout is how long a process may take to end after SIGTERM: longer than
// the daemons' own bound, so that it is theirs that counts.
const stopTimeout = 35 * time.Second

// Process is a child process whose output goes to a file.
type Process struct {
	// Set once.
	Name string
	Log  string // path of its output
	cmd  *exec.Cmd
	done chan struct{} // closed after err is set
	err  error

	// Owned by the caller's goroutine.
	stopping bool
}

// StartProcess starts a binary whose output goes to the file log, but standard
// output to stdout unless that is nil. The process dies with this one, where
// the system can arrange that, and gets no signal from this one's terminal.
// stdout is written to from another goroutine until Done is closed.
func StartProcess(name, binary, log string, args []string, stdout io.Writer) (*Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%s: log: %w", name, err)
	}
	defer out.Close()
	p := &Process{Name: name, Log: log, cmd: exec.Command(binary, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	p.cmd.SysProcAttr = childAttributes()
	started := make(chan error)
	go func() {
		defer close(p.done)
		// The parent-death signal follows the thread that forked, so the
		// goroutine keeps its thread until the child has ended.
		defer lockThread()()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: %w (build the binaries, or name their folder with --bin-dir)", name, err)
	}
	return p, nil
}

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Failure says how the process ended, with its last words; nil for exit code 0.
//
// Requires: Done is closed.
func (p *Process) Failure() error {
	if p.err == nil {
		return nil
	}
	return p.failure()
}

// ExitCode returns the exit code, -1 after a signal.
//
// Requires: Done is closed.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Terminate asks the process to end, once, and does not wait.
func (p *Process) Terminate() { p.signalStop() }

// signalStop asks the process to end, once.
func (p *Process) signalStop() {
	if p.stopping {
		return
	}
	p.stopping = true
	// An error means that it has ended, which Stop will see.
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
}

// Stop asks the process to end and waits; after a bound it kills. The error
// says what was wrong with the end.
func (p *Process) Stop() error {
	p.signalStop()
	limit := time.NewTimer(stopTimeout)
	defer limit.Stop()
	select {
	case <-p.done:
	case <-limit.C:
		_ = p.cmd.Process.Kill() // as in signalStop
		<-p.done
		return fmt.Errorf("%s: killed, it did not stop within %v of SIGTERM (its output is in %s)", p.Name, stopTimeout, p.Log)
	}
	if p.err != nil {
		return p.failure()
	}
	return nil
}

// failure says how the process ended, with the end of its output.
// Requires: done is closed.
func (p *Process) failure() error {
	err := p.err
	if err == nil {
		err = errors.New("ended")
	}
	return fmt.Errorf("%s: %w: %s (its output is in %s)", p.Name, err, p.lastLine(), p.Log)
}

// lastLine returns the last line of the output.
func (p *Process) lastLine() string {
	f, err := os.Open(p.Log)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	const most = 4096
	if size, err := f.Seek(0, 2); err == nil {
		_, _ = f.Seek(max(0, size-most), 0) // a seek within the file does not fail
	}
	buf := make([]byte, most)
	n, _ := f.Read(buf) // at the end of an empty file: nothing to show
	lines := strings.Split(strings.TrimSpace(string(buf[:n])), "\n")
	return lines[len(lines)-1]
}
