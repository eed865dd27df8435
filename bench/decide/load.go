package decide

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/obs"
)

// Result is what a run measured.
type Result struct {
	Sent, Answered int64
	Latency        *obs.Latency
	CPU            time.Duration // of the server, per answer
	RSS            int64         // bytes, at the end
}

// A request that is not answered in patience is lost.
const patience = time.Second

// keys are asked for in turn.
const keys = 1000

func key(i int64) string { return fmt.Sprintf("bench/%04d", i%keys) }

// pace calls send for each of n requests, when it is due or later: by a thread of its
// own that the kernel wakes without its usual slack, since Go's timers are late by up to
// a millisecond, which would be in each latency.
func pace(n int64, rate float64, send func(i int64, due time.Time)) {
	runtime.LockOSThread() // and is not unlocked: the thread ends with its goroutine
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	start := time.Now()
	for i := range n {
		due := start.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			ts := unix.NsecToTimespec(int64(wait))
			_ = unix.Nanosleep(&ts, nil) // one that is cut short sends a little early
		}
		send(i, due)
	}
}

// UDP asks over one socket. Without a session (echo) it takes what comes back for the
// answer; with one it asks admission, without MACs. admission/wire has the layout.
func UDP(s *Server, rate float64, d time.Duration, echo bool) (r Result, err error) {
	conn, err := net.Dial("udp", s.At)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	question := func(kind byte, session, number uint64, key string) []byte {
		q := append([]byte{0xAD, 1, kind, 0}, make([]byte, 24)...)
		binary.BigEndian.PutUint64(q[4:], session)
		binary.BigEndian.PutUint64(q[12:], number)
		binary.BigEndian.PutUint32(q[20:], 1)
		binary.BigEndian.PutUint16(q[26:], uint16(len(key)))
		return append(append(q, key...), make([]byte, 16)...)
	}
	var session uint64
	buf := make([]byte, 512)
	if !echo {
		if _, err := conn.Write(question(0, 0, 1, "")); err != nil {
			return r, err
		}
		conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := conn.Read(buf); err != nil {
			return r, fmt.Errorf("no session: %w", err)
		}
		session = binary.BigEndian.Uint64(buf[4:])
	}
	n := int64(rate * d.Seconds())
	first := uint64(time.Now().UnixNano()) >> 10 << 20
	due := make([]time.Time, n)
	var mu sync.Mutex // of due
	r.Latency = obs.NewLatency()
	conn.SetReadDeadline(time.Now().Add(d + patience))
	var reading sync.WaitGroup
	reading.Go(func() {
		for r.Answered < n {
			size, err := conn.Read(buf)
			if err != nil {
				return
			}
			at := time.Now()
			if i := binary.BigEndian.Uint64(buf[12:]) - first; size >= 44 && i < uint64(n) {
				mu.Lock()
				intended := due[i]
				mu.Unlock()
				r.Latency.Record(at.Sub(intended))
				r.Answered++
			}
		}
	})
	before := s.cpu()
	reading.Go(func() {
		pace(n, rate, func(i int64, intended time.Time) {
			mu.Lock()
			due[i] = intended
			mu.Unlock()
			if _, err := conn.Write(question(1, session, first+uint64(i), key(i))); err == nil {
				r.Sent++
			}
		})
	})
	reading.Wait()
	return r, s.account(&r, before)
}

// Streams asks over persistent connections. Each has a request at a time, and what is
// due meanwhile waits, which its latency shows; one alone is pipelined instead, as a UDP
// socket is. answered reads one answer.
func Streams(s *Server, rate float64, d time.Duration, connections int, request func(i int64) string, answered func(*bufio.Reader) error) (r Result, err error) {
	r.Latency = obs.NewLatency()
	type ask struct {
		i   int64
		due time.Time
	}
	n := int64(rate * d.Seconds())
	due := make(chan ask, n)
	conns := make([]net.Conn, connections)
	for c := range conns {
		if conns[c], err = net.Dial("tcp", s.At); err != nil {
			return r, err
		}
		defer conns[c].Close()
		conns[c].SetDeadline(time.Now().Add(2*d + 5*patience))
	}
	var mu sync.Mutex // of r and err
	note := func(due time.Time, bad error) bool {
		mu.Lock()
		defer mu.Unlock()
		if bad != nil {
			err = bad
			return false
		}
		r.Latency.Record(time.Since(due))
		return true
	}
	var asking sync.WaitGroup
	before := s.cpu()
	for _, conn := range conns {
		asking.Go(func() {
			in := bufio.NewReader(conn)
			for a := range due {
				var bad error
				if connections > 1 {
					_, bad = conn.Write([]byte(request(a.i)))
				}
				if bad == nil {
					bad = answered(in)
				}
				if !note(a.due, bad) {
					return
				}
			}
		})
	}
	asking.Go(func() {
		defer close(due)
		pace(n, rate, func(i int64, at time.Time) {
			due <- ask{i, at} // has room for all
			r.Sent++
			if connections == 1 {
				conns[0].Write([]byte(request(i))) // an error shows when the answer is read
			}
		})
	})
	asking.Wait()
	r.Answered = r.Latency.Count()
	if err != nil {
		return r, err
	}
	return r, s.account(&r, before)
}

// HTTP asks for a path, which may have a %s for the key.
func HTTP(s *Server, rate float64, d time.Duration, path string) (Result, error) {
	return Streams(s, rate, d, 16, func(i int64) string {
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
		_, err = resp.Body.Read(make([]byte, 512))
		if err != nil && err.Error() == "EOF" {
			err = nil
		}
		return err
	})
}

// cpu is what all threads of the server and of its children have run.
func (s *Server) cpu() (d time.Duration) {
	for _, pid := range append([]int{s.Pid()}, s.children()...) {
		threads, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/schedstat")
		for _, path := range threads {
			text, _ := os.ReadFile(path) // a thread may have ended
			var ns int64
			if _, err := fmt.Sscan(string(text), &ns); err == nil {
				d += time.Duration(ns)
			}
		}
	}
	return d
}

func (s *Server) children() (pids []int) {
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

func (s *Server) account(r *Result, before time.Duration) error {
	if r.Answered == 0 {
		return fmt.Errorf("%s answered nothing", s.Name)
	}
	r.CPU = (s.cpu() - before) / time.Duration(r.Answered)
	for _, pid := range append([]int{s.Pid()}, s.children()...) {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
		if err != nil {
			return err
		}
		_, rest, _ := strings.Cut(string(text), "VmRSS:")
		var kb int64
		if _, err := fmt.Sscan(rest, &kb); err != nil {
			return err
		}
		r.RSS += kb << 10
	}
	return nil
}
