// Package local runs programs on this machine as child processes on loopback: a single
// program (Start), an nsqd on free ports (NSQD), or a whole cluster with an operator's
// binaries and flags (StartCluster). `srtm up`, the benchmarks and the tests use it. It
// depends only on the programs' flags, their logs and the public API.
package local

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Patience bounds waits. Only a failure takes this long, so it is generous.
const Patience = time.Minute

// Process is a child process that runs until Stop or Kill. Where the system allows, it
// dies with this process and receives no signals from its terminal.
type Process struct {
	// Set by Start.
	Flags     []string
	Dir       string // working folder
	TCP       string // addresses of an nsqd
	HTTP      string
	name      string
	stopLimit time.Duration // Stop's bound
	cmd       *exec.Cmd
	log       string // the file with its output; "": in output
	output    record
	done      chan struct{} // closed when the process has ended

	err error // how the process ended; valid once done is closed

	// judged means that the caller sent a signal or knows of the end, so Stop does not
	// report it. Atomic.
	judged     atomic.Bool
	terminated atomic.Bool // SIGTERM was sent
}

// Options of a process. All fields are optional.
type Options struct {
	Dir string   // working folder; "": this process's
	Env []string // added to this process's
	// Stdin is the standard input; nil: empty.
	Stdin io.Reader
	// Log is a file for appending output; "": Output keeps it.
	Log string
	// Stdout receives standard output instead, from another goroutine until Done is
	// closed.
	Stdout io.Writer
	// Ready is called every few milliseconds. Start returns once Ready returns nil.
	Ready func() error
	// Within is how long Stop waits before it kills the process; 0: twice Patience.
	Within time.Duration
}

// record keeps the output of a process.
type record struct {
	mu struct {
		sync.Mutex
		bytes.Buffer
	}
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.Write(p)
}

// Build compiles a package of this module, with further flags of go build. With -race, a race
// changes the exit code, which Stop reports.
func Build(ctx context.Context, pkg, output string, flags ...string) error {
	args := append([]string{"build", "-ldflags=-w", "-o", output}, flags...) // without unused DWARF, linking takes half the time
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", pkg, err, output)
	}
	return nil
}

// Start starts a program. After an error nothing keeps running.
func Start(binary string, flags []string, o Options) (*Process, error) {
	p := newProcess(binary, flags, o)
	return p, p.start(o)
}

// Run is Start in dir with a function that reports readiness.
func Run(binary, dir string, flags []string, ready func() error) (*Process, error) {
	return Start(binary, flags, Options{Dir: dir, Ready: ready})
}

func newProcess(binary string, flags []string, o Options) *Process {
	return &Process{
		Flags: flags, Dir: o.Dir, log: o.Log, stopLimit: cmp.Or(o.Within, 2*Patience), name: filepath.Base(binary),
		done: make(chan struct{}), cmd: exec.Command(binary, flags...),
	}
}

func (p *Process) start(o Options) error {
	p.cmd.Dir, p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = o.Dir, o.Stdin, &p.output, &p.output
	p.cmd.SysProcAttr = childAttributes()
	if len(o.Env) > 0 {
		p.cmd.Env = append(os.Environ(), o.Env...)
	}
	if o.Log != "" {
		out, err := os.OpenFile(o.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return fmt.Errorf("%s: log: %w", p.name, err)
		}
		defer out.Close()
		p.cmd.Stdout, p.cmd.Stderr = out, out
	}
	if o.Stdout != nil {
		p.cmd.Stdout = o.Stdout
	}
	started := make(chan error)
	go func() {
		defer close(p.done)
		// The parent-death signal follows the forking thread, so the goroutine keeps its
		// thread until the child has ended.
		defer lockThread()()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		<-p.done
		return fmt.Errorf("%s: %w", p.name, err)
	}
	if o.Ready == nil {
		return nil
	}
	if err := p.await(o.Ready); err != nil {
		return errors.Join(fmt.Errorf("%q: %w", p.Flags, err), p.Kill())
	}
	return nil
}

func (p *Process) await(ready func() error) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(Patience); ; {
		err := ready()
		select {
		case <-p.done: // any answer came from another process
			return p.failure()
		case <-ticker.C:
		}
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s is not ready after %v: %w\n%s", p.name, Patience, err, p.Output())
		}
	}
}

// OnFreePorts calls start with count free loopback addresses. If another process takes a
// port in the meantime, OnFreePorts retries with other ports.
func OnFreePorts(count int, start func(addresses []string) (*Process, error)) (*Process, error) {
	const attempts = 5
	var errs []error
	for range attempts {
		free, err := Ports(count)
		if err != nil {
			return nil, err
		}
		p, err := start(free)
		if err == nil {
			return p, nil
		}
		errs = append(errs, err)
		if !strings.Contains(strings.ToLower(err.Error()), "address already in use") {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// NSQD starts an nsqd, with upstream's flags, on free loopback ports.
func NSQD(binary, dir string, flags ...string) (*Process, error) {
	return OnFreePorts(2, func(addresses []string) (*Process, error) {
		return NSQDAt(binary, dir, addresses[0], addresses[1], flags...)
	})
}

// NSQDAt is NSQD at given addresses.
func NSQDAt(binary, dir, tcp, web string, flags ...string) (*Process, error) {
	args := append([]string{"--tcp-address=" + tcp, "--http-address=" + web, "--broadcast-address=127.0.0.1"}, flags...)
	// Any answer counts, because HTTP may only answer that it must not be used.
	p, err := Run(binary, dir, args, Answers("http://"+web+"/ping"))
	if err != nil {
		return nil, err
	}
	p.Flags, p.TCP, p.HTTP = flags, tcp, web
	return p, nil
}

// listening matches an address in the log of an NSQ-compatible program.
var listening = regexp.MustCompile(`\b([A-Z]+): listening on (127\.0\.0\.1:[1-9][0-9]*)`)

// Listening is Run for a program with port 0 in its flags. The program is ready once its
// log names its address on 127.0.0.1 for each of the protocols. Listening returns the
// addresses; for an nsqd, the Process has them too.
func Listening(binary, dir string, flags []string, protocols ...string) (*Process, map[string]string, error) {
	addresses := map[string]string{}
	o := Options{Dir: dir}
	p := newProcess(binary, flags, o)
	o.Ready = func() error {
		p.output.mu.Lock()
		defer p.output.mu.Unlock()
		for _, match := range listening.FindAllStringSubmatch(p.output.mu.String(), -1) {
			addresses[match[1]] = match[2]
		}
		for _, protocol := range protocols {
			if addresses[protocol] == "" {
				return fmt.Errorf("does not say where it listens for %s", protocol)
			}
		}
		return nil
	}
	err := p.start(o)
	p.TCP, p.HTTP = addresses["TCP"], addresses["HTTP"]
	return p, addresses, err
}

// Answers returns a readiness function that returns nil once a server gives any answer at
// url.
func Answers(url string) func() error {
	transport := &http.Transport{DisableKeepAlives: true}
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		res, err := transport.RoundTrip(req)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, res.Body)
		return errors.Join(err, res.Body.Close())
	}
}

// Accepts returns a readiness function that returns nil once there are listeners at all
// of the addresses.
func Accepts(addresses ...string) func() error {
	return func() error {
		for _, address := range addresses {
			c, err := net.DialTimeout("tcp", address, Patience)
			if err != nil {
				return err
			}
			_ = c.Close() // no data was sent
		}
		return nil
	}
}

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Signal sends a signal and does not wait.
func (p *Process) Signal(s os.Signal) error {
	p.judged.Store(true)
	if s == syscall.SIGTERM {
		p.terminated.Store(true)
	}
	return p.cmd.Process.Signal(s)
}

// Done returns a channel that is closed when the process has ended. Err and Failure then
// return the result.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns how the process ended. Requires: Done is closed.
func (p *Process) Err() error {
	p.judged.Store(true)
	return p.err
}

// Failure returns Err with the last output; nil for exit code 0. Requires: Done is
// closed.
func (p *Process) Failure() error {
	if p.Err() == nil {
		return nil
	}
	return p.failure()
}

// ExitCode returns the exit code, -1 after a signal. Requires: Done is closed.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Died returns how the process ended, with its last output; nil while it runs.
func (p *Process) Died() error {
	select {
	case <-p.done:
		return p.failure()
	default:
		return nil
	}
}

// Output returns the last part of the output.
func (p *Process) Output() string { return p.last(1500) }

// AllOutput returns the output, at most the last mebibyte.
func (p *Process) AllOutput() string { return p.last(1 << 20) }

// last returns the last most bytes of the output.
func (p *Process) last(limit int64) string {
	if p.log != "" {
		f, err := os.Open(p.log)
		if err != nil {
			return err.Error()
		}
		defer f.Close()
		if size, err := f.Seek(0, io.SeekEnd); err == nil {
			_, _ = f.Seek(max(0, size-limit), io.SeekStart) // a seek within the file does not fail
		}
		text, err := io.ReadAll(io.LimitReader(f, limit))
		if err != nil {
			return err.Error()
		}
		return string(text)
	}
	p.output.mu.Lock()
	defer p.output.mu.Unlock()
	s := p.output.mu.String()
	return s[max(0, int64(len(s))-limit):]
}

// failure describes how the process ended, with its last output. Requires: Done is
// closed.
func (p *Process) failure() error {
	err := p.err
	if err == nil {
		err = errors.New("ended")
	}
	text := strings.TrimSpace(p.Output())
	if p.log == "" {
		return fmt.Errorf("%s: %w; it printed last:\n%s", p.name, err, text)
	}
	return fmt.Errorf("%s: %w: %s (its output is in %s)", p.name, err, text[strings.LastIndexByte(text, '\n')+1:], p.log)
}

// Terminate sends SIGTERM once, because a second SIGTERM ends our daemons at once. It
// does not wait; Stop reports the end.
func (p *Process) Terminate() {
	if !p.terminated.Swap(true) {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error means that the process has ended
	}
}

// Stop ends the process in good order. It fails if the process does not end, or ends with
// an exit code other than 0, as after a data race. If the caller already ended the
// process by Signal, Stop or Kill, Stop returns nil.
func (p *Process) Stop() error {
	if p.Died() != nil && p.judged.Load() {
		return nil
	}
	p.Terminate()
	timer := time.NewTimer(p.stopLimit)
	defer timer.Stop()
	select {
	case <-p.done:
		return p.Failure()
	case <-timer.C:
	}
	// On SIGQUIT a hanging Go program prints its goroutines.
	_ = p.Signal(syscall.SIGQUIT) // an error means that the process has ended
	timer.Reset(10 * time.Second) // time on a busy machine
	select {
	case <-p.done:
	case <-timer.C:
	}
	return errors.Join(fmt.Errorf("%s: killed, it did not stop within %v of SIGTERM; it printed last:\n%s", p.name, p.stopLimit, p.AllOutput()), p.Kill())
}

// Kill ends the process at once.
func (p *Process) Kill() error {
	p.judged.Store(true)
	err := p.cmd.Process.Kill()
	<-p.done
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}
