// Package decide measures the cost of one decision: of admission over UDP and HTTP, of bare
// servers that decide nothing, and of common alternatives. The load is open loop: latency
// counts from the scheduled time of a request. bench/admission prints the results in a
// table, and bench/figures draws them.
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

	"github.com/srtm-io/srtm/internal/histogram"
)

// Result is the result of a run.
type Result struct {
	Sent, Answered int64
	Latency        *histogram.Latency
	CPU            time.Duration // of the server's process and its children, per answer
	RSS            int64         // bytes, at the end; 0 for a bare server
}

// patience is the time after which an unanswered request counts as lost.
const patience = time.Second

// straggling bounds the time after the last request during which the server's CPU time
// counts. The time ends earlier when all requests are answered.
const straggling = 20 * time.Millisecond

// keys is the number of keys, which are requested in turn.
const keys = 1000

func key(i int64) string { return fmt.Sprintf("bench/%04d", i%keys) }

// pace calls send for each of n requests, at or after its due time. pace runs on its own
// thread, which the kernel wakes without timer slack. Go's timers are late by up to a
// millisecond, which would add to each latency.
func pace(n int64, due func(i int64) time.Time, send func(i int64)) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for i := range n {
		if wait := time.Until(due(i)); wait > 0 {
			ts := unix.NsecToTimespec(int64(wait))
			_ = unix.Nanosleep(&ts, nil) // an interrupted sleep sends slightly early
		}
		send(i)
	}
}

// Load is an open-loop load. Request i is due at i/Rate, and its latency counts from the
// due time.
type Load struct {
	Rate   float64 // per second
	Length time.Duration
	// Connections is the number of connections or sockets. Several connections each have
	// one request at a time, like a client library's pool, and further requests wait. A
	// single connection sends each request when due, like a pipelining client. Each request
	// is a separate write.
	Connections int
}

// Protocol defines requests and answers. Dialogue prepares a connection. request encodes
// request i. answered reads an answer and returns the number of the answered request: the
// oldest waiting request, or any request of a lossy protocol.
type Protocol struct {
	Lossy    bool // over UDP
	Dialogue func(net.Conn) (request func(i int64) []byte, answered func(in *bufio.Reader, waiting int64) (i int64, err error), err error)
}

// Stream is a TCP protocol with answers in order.
func Stream(request func(i int64) string, answered func(*bufio.Reader) error) Protocol {
	return Protocol{Dialogue: func(net.Conn) (func(int64) []byte, func(*bufio.Reader, int64) (int64, error), error) {
		return func(i int64) []byte { return []byte(request(i)) }, func(in *bufio.Reader, waiting int64) (int64, error) { return waiting, answered(in) }, nil
	}}
}

// UDP sends requests to admission, without MACs. With echo there is no session, and any
// datagram is an answer. admission/wire documents the layout.
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
				return nil, nil, fmt.Errorf("open a session: %w", err)
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

// Ask sends a load. A request without an answer within patience is lost if the protocol is
// lossy, and otherwise an error.
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
		connection := &lines[c]
		if connection.Conn, err = net.Dial(network, s.At); err != nil {
			return r, err
		}
		defer connection.Close()
		if connection.request, connection.answered, err = p.Dialogue(connection.Conn); err != nil {
			return r, err
		}
	}
	r.Latency = histogram.NewLatency()
	n := int64(l.Rate * l.Length.Seconds())
	waiting := make(chan int64, n) // room for all requests
	before, start := s.CPU(), time.Now()
	end := start.Add(2*l.Length + 5*patience)
	due := func(i int64) time.Time { return start.Add(time.Duration(float64(i) / l.Rate * float64(time.Second))) }
	var mu sync.Mutex // guards r.Latency and err
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
		return lost && l.Connections > 1 // a single connection received nothing for patience
	}
	var asking, sending sync.WaitGroup
	for _, to := range lines {
		asking.Go(func() {
			in := bufio.NewReader(to)
			for i := range waiting {
				if l.Connections > 1 {
					to.Write(to.request(i)) // the read reports errors
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
	select { // excludes the server's work while the client waits for lost requests
	case <-answered:
	case <-time.After(straggling):
	}
	cpu := s.CPU() - before
	<-answered
	if r.Answered = r.Latency.Count(); err == nil && r.Answered == 0 {
		err = fmt.Errorf("%s answered no request", s.Name)
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

// HTTP requests a path, in which %s stands for the key. Only status 200 is an answer.
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

// CPU returns the run time of all threads of the server and its children, in nanoseconds.
func (s *Server) CPU() (d time.Duration) {
	for _, pid := range s.processes() {
		threads, _ := procfs.AllThreads(pid)
		for _, thread := range threads {
			if used, err := thread.Schedstat(); err == nil { // the thread may have ended
				d += time.Duration(used.RunningNanoseconds)
			}
		}
	}
	return d
}

// processes returns the process ids of the server and its children.
func (s *Server) processes() []int {
	pids := []int{s.Pid()}
	lists, _ := filepath.Glob("/proc/" + strconv.Itoa(s.Pid()) + "/task/*/children")
	for _, path := range lists {
		text, _ := os.ReadFile(path)
		for _, child := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(child); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// memory adds the resident memory of the server and its children to r.
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
