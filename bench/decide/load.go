// Package decide measures what one decision costs: of admission over UDP and HTTP, of
// bare servers that decide nothing, and of what others use in its place. Its load is open
// loop: a latency counts from when the request should have been sent. bench/admission
// prints a table of it, bench/figures draws.
package decide

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/obs"
)

// Result is what a run measured.
type Result struct {
	Sent, Answered int64
	Latency        *obs.Latency
	CPU            time.Duration // of the server's process and its children, per answer
	RSS            int64         // bytes, at the end; 0: not known, of a bare server
}

// A request that is not answered in patience is lost.
const patience = time.Second

// After the last request was sent, the server's CPU time counts for so much longer, if not
// all are answered before.
const straggling = 20 * time.Millisecond

// keys are asked for in turn.
const keys = 1000

func key(i int64) string { return fmt.Sprintf("bench/%04d", i%keys) }

// pace calls send for each of n requests, when it is due or later: by a thread of its
// own that the kernel wakes without its usual slack, since Go's timers are late by up to
// a millisecond, which would be in each latency.
func pace(n int64, due func(i int64) time.Time, send func(i int64)) {
	runtime.LockOSThread() // and is not unlocked: the thread ends with its goroutine
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for i := range n {
		if wait := time.Until(due(i)); wait > 0 {
			ts := unix.NsecToTimespec(int64(wait))
			_ = unix.Nanosleep(&ts, nil) // one that is cut short sends a little early
		}
		send(i)
	}
}

// Load is an open loop's: the ith request is due at i/Rate and counts from then on,
// whenever it is sent.
type Load struct {
	Rate   float64 // per second
	Length time.Duration
	// Connections, or sockets. Of several each has one request at a time, as in the pool of
	// a client library, and what is due meanwhile waits. One alone is sent each request
	// when it is due, as by a client that pipelines. Each request is a write of its own.
	Connections int
}

// Protocol is how to ask. Dialogue makes a connection ready, and returns what makes the ith
// request, and what reads the answer to the one that has waited longest or, if there may
// be losses, to the one that it returns.
type Protocol struct {
	Lossy    bool // over UDP
	Dialogue func(net.Conn) (request func(i int64) []byte, answered func(in *bufio.Reader, waiting int64) (i int64, err error), err error)
}

// Stream is a protocol over TCP that answers in order.
func Stream(request func(i int64) string, answered func(*bufio.Reader) error) Protocol {
	return Protocol{Dialogue: func(net.Conn) (func(int64) []byte, func(*bufio.Reader, int64) (int64, error), error) {
		return func(i int64) []byte { return []byte(request(i)) }, func(in *bufio.Reader, waiting int64) (int64, error) { return waiting, answered(in) }, nil
	}}
}

// UDP asks admission, without MACs. Without a session (echo) it takes what comes back for
// the answer. admission/wire has the layout.
func UDP(s *Server, l Load, echo bool) (Result, error) {
	question := func(kind byte, session, number uint64, key string) []byte {
		q := append([]byte{0xAD, 3, kind, 0}, make([]byte, 28)...)
		binary.BigEndian.PutUint64(q[4:], session)
		binary.BigEndian.PutUint64(q[12:], number)
		binary.BigEndian.PutUint32(q[20:], 1)
		binary.BigEndian.PutUint32(q[24:], uint32(patience.Milliseconds()))
		binary.BigEndian.PutUint16(q[30:], uint16(len(key)))
		return append(append(q, key...), make([]byte, 16)...)
	}
	return Ask(s, l, Protocol{Lossy: true, Dialogue: func(conn net.Conn) (func(int64) []byte, func(*bufio.Reader, int64) (int64, error), error) {
		buf := make([]byte, 512)
		var session uint64
		if !echo {
			conn.SetReadDeadline(time.Now().Add(patience))
			if _, err := conn.Write(question(0, 0, 1, "")); err != nil {
				return nil, nil, err
			}
			if _, err := conn.Read(buf); err != nil {
				return nil, nil, fmt.Errorf("no session: %w", err)
			}
			session = binary.BigEndian.Uint64(buf[4:])
		}
		number := uint64(time.Now().Unix())<<32 - 1
		first := number + 1
		return func(i int64) []byte {
				number++
				return question(1, session, number, key(i))
			}, func(in *bufio.Reader, waiting int64) (int64, error) {
				for {
					n, err := in.Read(buf)
					if err != nil {
						return waiting, err
					}
					to := binary.BigEndian.Uint64(buf[12:])
					switch {
					case n < 48 || !echo && buf[2] != 2: // not decided: lost, after patience
					case l.Connections == 1:
						return int64(to - first), nil
					case to == number:
						return waiting, nil
					}
				}
			}, nil
	}})
}

// Ask sends a load. A request that is not answered in patience is lost where the protocol
// loses some, and an error where it does not.
func Ask(s *Server, l Load, p Protocol) (r Result, err error) {
	type line struct {
		net.Conn
		request  func(int64) []byte
		answered func(*bufio.Reader, int64) (int64, error)
	}
	network := "tcp"
	if p.Lossy {
		network = "udp"
	}
	lines := make([]line, l.Connections)
	for c := range lines {
		of := &lines[c]
		if of.Conn, err = net.Dial(network, s.At); err != nil {
			return r, err
		}
		defer of.Close()
		if of.request, of.answered, err = p.Dialogue(of.Conn); err != nil {
			return r, err
		}
	}
	r.Latency = obs.NewLatency()
	n := int64(l.Rate * l.Length.Seconds())
	waiting := make(chan int64, n) // has room for all
	before, start := s.cpu(), time.Now()
	end := start.Add(2*l.Length + 5*patience)
	due := func(i int64) time.Time { return start.Add(time.Duration(float64(i) / l.Rate * float64(time.Second))) }
	var mu sync.Mutex // of r.Latency and err
	note := func(i int64, bad error) (goOn bool) {
		at := time.Now()
		mu.Lock()
		defer mu.Unlock()
		if bad == nil {
			r.Latency.Record(at.Sub(due(i)))
			return true
		}
		lost := p.Lossy && errors.Is(bad, os.ErrDeadlineExceeded)
		if !lost {
			err = bad
		}
		return lost && l.Connections > 1 // of one alone, nothing came for so long
	}
	var asking, sending sync.WaitGroup
	for _, to := range lines {
		asking.Go(func() {
			in := bufio.NewReader(to)
			for i := range waiting {
				if l.Connections > 1 {
					to.Write(to.request(i)) // an error shows when the answer is read
				}
				deadline := time.Now().Add(patience)
				if deadline.After(end) {
					deadline = end
				}
				to.SetReadDeadline(deadline)
				if i, bad := to.answered(in, i); !note(i, bad) {
					return
				}
			}
		})
	}
	sending.Go(func() {
		defer close(waiting)
		pace(n, due, func(i int64) {
			waiting <- i
			r.Sent++
			if l.Connections == 1 {
				lines[0].Write(lines[0].request(i))
			}
		})
	})
	sending.Wait()
	answered := make(chan struct{})
	go func() { asking.Wait(); close(answered) }()
	select { // what the server does while we wait for the lost is not for their sake
	case <-answered:
	case <-time.After(straggling):
	}
	cpu := s.cpu() - before
	<-answered
	if r.Answered = r.Latency.Count(); err == nil && r.Answered == 0 {
		err = fmt.Errorf("%s answered nothing", s.Name)
	}
	if err != nil {
		return r, err
	}
	r.CPU = cpu / time.Duration(r.Answered)
	if s.Bare {
		return r, nil
	}
	return r, s.memory(&r)
}

// HTTP asks for a path, which may have a %s for the key, and takes nothing but 200 for an
// answer.
func HTTP(s *Server, l Load, path string) (Result, error) {
	return Ask(s, l, Stream(func(i int64) string {
		p := path
		if strings.Contains(p, "%s") {
			p = fmt.Sprintf(p, key(i))
		}
		return "GET " + p + " HTTP/1.1\r\nHost: x\r\n\r\n"
	}, func(in *bufio.Reader) error {
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s answered %s", s.Name, resp.Status)
		}
		return nil
	}))
}

// cpu is what all threads of the server and of its children have run, to the nanosecond.
func (s *Server) cpu() (d time.Duration) {
	for _, pid := range s.processes() {
		threads, _ := procfs.AllThreads(pid)
		for _, thread := range threads {
			if used, err := thread.Schedstat(); err == nil { // it may have ended
				d += time.Duration(used.RunningNanoseconds)
			}
		}
	}
	return d
}

// processes are the server's and its children's.
func (s *Server) processes() []int {
	pids := []int{s.Pid()}
	lists, _ := filepath.Glob("/proc/" + strconv.Itoa(s.Pid()) + "/task/*/children")
	for _, path := range lists {
		text, _ := os.ReadFile(path)
		for _, word := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// memory is what is resident, of the server and its children.
func (s *Server) memory(r *Result) error {
	for _, pid := range s.processes() {
		of, err := procfs.NewProc(pid)
		if err != nil {
			return err
		}
		status, err := of.NewStatus()
		if err != nil {
			return err
		}
		r.RSS += int64(status.VmRSS)
	}
	return nil
}
