package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Patience is how long to wait for what must happen. Only a failure takes so
// long, so it is generous.
const Patience = 30 * time.Second

// Daemon is a process that runs until Stop or Kill.
type Daemon struct {
	// Set once.
	Flags []string
	Dir   string // its working folder
	TCP   string // of an nsqd: its addresses
	HTTP  string

	cmd    *exec.Cmd
	output record
	done   chan struct{} // closed when the process has ended

	err error // of the process; valid once done is closed
}

// record keeps what a process prints.
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

// Build compiles a package of this module, with the race detector if race: a
// race then shows in the exit code, which Stop returns.
func Build(ctx context.Context, pkg, to string, race bool) error {
	args := []string{"build", "-o", to}
	if race {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", pkg, err, output)
	}
	return nil
}

// Run starts a program in dir and returns once ready does, which is asked every
// few milliseconds.
func Run(binary, dir string, flags []string, ready func() error) (*Daemon, error) {
	d := &Daemon{Flags: flags, Dir: dir, done: make(chan struct{})}
	return d, d.start(binary, flags, ready)
}

func (d *Daemon) start(binary string, args []string, ready func() error) error {
	d.cmd = exec.Command(binary, args...)
	d.cmd.Dir, d.cmd.Stdout, d.cmd.Stderr = d.Dir, &d.output, &d.output
	if err := d.cmd.Start(); err != nil {
		return err
	}
	go func() {
		d.err = d.cmd.Wait()
		close(d.done)
	}()
	if err := d.await(ready); err != nil {
		return errors.Join(fmt.Errorf("%s %q: %w", binary, args, err), d.Kill(), errors.New(d.Output()))
	}
	return nil
}

func (d *Daemon) await(ready func() error) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(Patience); ; {
		err := ready()
		select {
		case <-d.done: // if there was an answer, it was another's
			return fmt.Errorf("ended at once: %w", d.err)
		case <-ticker.C:
		}
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("is not there after %v: %w", Patience, err)
		}
	}
}

// NSQD starts an nsqd, whose flags are as upstream's, on free loopback ports.
// Another process may take a port between its choice and its use; then it is
// tried again with others.
func NSQD(binary, dir string, flags ...string) (*Daemon, error) {
	const attempts = 5
	var errs []error
	for range attempts {
		free, err := Ports(2)
		if err != nil {
			return nil, err
		}
		d, err := NSQDAt(binary, dir, free[0], free[1], flags...)
		if err == nil {
			return d, nil
		}
		errs = append(errs, err)
		if !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// NSQDAt is NSQD at given addresses.
func NSQDAt(binary, dir, tcp, web string, flags ...string) (*Daemon, error) {
	d := &Daemon{Flags: flags, Dir: dir, TCP: tcp, HTTP: web, done: make(chan struct{})}
	args := append([]string{"--tcp-address=" + tcp, "--http-address=" + web, "--broadcast-address=127.0.0.1"}, flags...)
	// Any answer will do: HTTP may be there only to say that it must not be used.
	if err := d.start(binary, args, Answers("http://"+web+"/ping")); err != nil {
		return nil, err
	}
	return d, nil
}

// listening is how a program of NSQ's, or one in its place, logs an address.
var listening = regexp.MustCompile(`\b([A-Z]+): listening on (127\.0\.0\.1:[1-9][0-9]*)`)

// Listening is Run for a program with port 0 in its flags, which is ready once its
// log says where on 127.0.0.1 it listens for each of these protocols. It returns
// their addresses, of an nsqd also in the Daemon.
func Listening(binary, dir string, flags []string, protocols ...string) (*Daemon, map[string]string, error) {
	d := &Daemon{Flags: flags, Dir: dir, done: make(chan struct{})}
	at := map[string]string{}
	err := d.start(binary, flags, func() error {
		d.output.mu.Lock()
		defer d.output.mu.Unlock()
		for _, found := range listening.FindAllStringSubmatch(d.output.mu.String(), -1) {
			at[found[1]] = found[2]
		}
		for _, protocol := range protocols {
			if at[protocol] == "" {
				return fmt.Errorf("does not say where it listens for %s", protocol)
			}
		}
		return nil
	})
	d.TCP, d.HTTP = at["TCP"], at["HTTP"]
	return d, at, err
}

// Answers returns a question that has no error once a server answers at url,
// whatever it says.
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

// Pid returns the process id.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// Signal sends a signal.
func (d *Daemon) Signal(s os.Signal) error { return d.cmd.Process.Signal(s) }

// Done is closed when the process has ended; then Err tells how.
func (d *Daemon) Done() <-chan struct{} { return d.done }

// Err returns how the process ended. Requires: Done is closed.
func (d *Daemon) Err() error { return d.err }

// Output returns the last of what it printed.
func (d *Daemon) Output() string {
	const most = 1500
	d.output.mu.Lock()
	defer d.output.mu.Unlock()
	s := d.output.mu.String()
	return s[max(0, len(s)-most):]
}

// Stop ends the process in good order. It fails when it does not end, or not
// with exit code 0, as after a data race. One that has ended already was judged
// by whoever ended it.
func (d *Daemon) Stop() error {
	select {
	case <-d.done:
		return nil
	default:
	}
	if err := d.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("SIGTERM: %w", err)
	}
	timer := time.NewTimer(2 * Patience)
	defer timer.Stop()
	select {
	case <-d.done:
		if d.err != nil {
			return fmt.Errorf("exit after SIGTERM: %w; it printed last:\n%s", d.err, d.Output())
		}
		return nil
	case <-timer.C:
		return errors.Join(errors.New("it does not end after SIGTERM"), d.Kill())
	}
}

// Kill ends the process at once.
func (d *Daemon) Kill() error {
	err := d.cmd.Process.Kill()
	<-d.done
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}
