//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// peer is a broker that can be measured. It does not change.
type peer struct {
	name string
	path string
	dialect
	args func(at place, s scenario) ([]string, error)
	nsq  bool // it speaks NSQ's protocol
	// pprof says that it serves Go's own figures at place.web.
	pprof bool
}

// place is where a broker runs.
type place struct {
	dir      string // its own, empty
	tcp, web string // host:port
}

func (at place) port(address string) string {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		panic(err) // we made it
	}
	return port
}

// nsqArgs are flags that every nsqd has.
func nsqArgs(at place, s scenario) []string {
	memory := 10_000_000
	if s.memory > 0 {
		memory = s.memory
	}
	args := []string{
		"--data-path=" + at.dir, "--tcp-address=" + at.tcp, "--http-address=" + at.web, "--https-address=127.0.0.1:0",
		"--broadcast-address=127.0.0.1", "--log-level=error", fmt.Sprintf("--mem-queue-size=%d", memory),
	}
	if s.tls {
		args = append(args, "--tls-cert="+filepath.Join(at.dir, certFile), "--tls-key="+filepath.Join(at.dir, keyFile))
	}
	return args
}

// ours is SRTM's nsqd, with a contract that is twice what the work needs and the
// best arrival stamps there are.
func ours(path string) peer {
	return peer{
		name: "srtm", path: path, dialect: nsqDialect(""), nsq: true, pprof: true,
		args: func(at place, s scenario) ([]string, error) {
			rate, burst := 2*s.rate, max(1000, int(s.rate)/5)
			if rate == 0 {
				rate, burst = 100_000_000, 1_000_000
			}
			args := append(nsqArgs(at, s), fmt.Sprintf("--topic-limit=%s:%g:%d", topic, rate, burst))
			if s.fsync {
				args = append(args, "--durability=fsync")
			}
			return args, nil
		},
	}
}

// unbuffered is what a subscriber identifies with that wants its messages at once.
const unbuffered = `"output_buffer_size":-1,"output_buffer_timeout":-1`

// anotherNSQ is a broker that speaks NSQ's protocol and takes nsqd's flags.
func anotherNSQ(name, path, identify string) peer {
	return peer{
		name: name, path: path, dialect: nsqDialect(identify), nsq: true, pprof: true,
		args: func(at place, s scenario) ([]string, error) {
			args := nsqArgs(at, s)
			if s.fsync {
				args = append(args, "--sync-every=1", "--mem-queue-size=0")
			}
			return args, nil
		},
	}
}

func nats(path string) peer {
	return peer{name: "nats", path: path, dialect: natsDialect(), pprof: true, args: func(at place, _ scenario) ([]string, error) {
		return []string{"-a", "127.0.0.1", "-p", at.port(at.tcp), "--profile", at.port(at.web)}, nil
	}}
}

func redis(path string) peer {
	return peer{name: "redis", path: path, dialect: redisDialect(), args: func(at place, _ scenario) ([]string, error) {
		return []string{"--port", at.port(at.tcp), "--bind", "127.0.0.1", "--dir", at.dir, "--save", "", "--appendonly", "no", "--maxclients", "12000", "--loglevel", "warning"}, nil
	}}
}

func mosquitto(path string) peer {
	return peer{name: "mosquitto", path: path, dialect: mqttDialect(), args: func(at place, _ scenario) ([]string, error) {
		file := filepath.Join(at.dir, "mosquitto.conf")
		text := "listener " + at.port(at.tcp) + " 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\npersistence false\nlog_type none\nmax_queued_messages 0\nmax_inflight_messages " + strconv.Itoa(credit) + "\n"
		return []string{"-c", file}, os.WriteFile(file, []byte(text), 0o600)
	}}
}

// process is a broker that runs.
type process struct {
	at    place
	cmd   *exec.Cmd // nil: not started
	ended chan struct{}
	log   bytes.Buffer // owned by the process until ended
	web   bool
}

// errEnded says that a broker did not live to listen.
var errEnded = errors.New("the broker ends at once")

// start starts a peer for a scenario. Somebody may take a port between the look
// for a free one and the broker's own: one that ends at once is tried again.
func (p peer) start(ctx context.Context, s scenario) (b *process, err error) {
	for range 3 {
		if b, err = p.startOnce(ctx, s); !errors.Is(err, errEnded) {
			break
		}
	}
	return b, err
}

// startOnce starts it in an empty folder.
func (p peer) startOnce(ctx context.Context, s scenario) (*process, error) {
	dir, err := os.MkdirTemp("", "srtm-peer-")
	if err != nil {
		return nil, err
	}
	b := &process{at: place{dir: dir}, web: p.pprof}
	fail := func(err error) (*process, error) { return nil, errors.Join(err, b.stop()) }
	for _, to := range []*string{&b.at.tcp, &b.at.web} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return fail(err)
		}
		*to = ln.Addr().String()
		if err := ln.Close(); err != nil {
			return fail(err)
		}
	}
	if s.tls {
		if err := certify(dir); err != nil {
			return fail(err)
		}
	}
	args, err := p.args(b.at, s)
	if err != nil {
		return fail(err)
	}
	b.cmd = exec.CommandContext(ctx, p.path, args...)
	b.cmd.Stdout, b.cmd.Stderr = &b.log, &b.log
	b.cmd.Dir = dir
	if err := b.cmd.Start(); err != nil {
		b.cmd = nil
		return fail(err)
	}
	b.ended = make(chan struct{})
	go func() {
		defer close(b.ended)
		_ = b.cmd.Wait() // brokers have exit codes of their own for a signal
	}()
	addresses := []string{b.at.tcp}
	if b.web {
		addresses = append(addresses, b.at.web)
	}
	for _, address := range addresses {
		if err := b.waitFor(address); err != nil {
			err = errors.Join(err, b.stop())
			return nil, fmt.Errorf("%w; it says: %.500s", err, b.log.Bytes())
		}
	}
	return b, nil
}

// waitFor waits until the broker listens.
func (b *process) waitFor(address string) error {
	for give := time.Now().Add(patience); ; {
		c, err := net.Dial("tcp", address)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(give) {
			return fmt.Errorf("the broker does not listen: %w", err)
		}
		select {
		case <-b.ended:
			return errEnded
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// stop ends the broker, by force if it does not hurry: its work is done.
func (b *process) stop() error {
	var err error
	if b.cmd != nil {
		err = b.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-b.ended:
		case <-time.After(5 * time.Second):
			_ = b.cmd.Process.Kill()
			<-b.ended
		}
		if errors.Is(err, os.ErrProcessDone) {
			err = nil
		}
	}
	return errors.Join(err, os.RemoveAll(b.at.dir))
}

// clockTick is the unit of the processor times in /proc, fixed by its ABI.
const clockTick = 10 * time.Millisecond

// cpu returns the processor time that the broker has used.
func (b *process) cpu() (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", b.cmd.Process.Pid))
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
func (b *process) rss() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.cmd.Process.Pid))
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
func (b *process) heap(ctx context.Context) (h heap, ok bool, err error) {
	if !b.web {
		return h, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.at.web+"/debug/pprof/heap?debug=1", nil)
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
