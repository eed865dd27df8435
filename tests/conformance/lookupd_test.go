package conformance

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// registry is a minimal nsqlookupd: it speaks nsqlookupd's TCP protocol and remembers the commands.
//
//	"  V1", then lines; IDENTIFY has a body behind 4 bytes of size. Answers
//	are 4 bytes of size and a body, without a frame type.
type registry struct {
	t    *testing.T
	ln   net.Listener
	web  *httptest.Server // serves its HTTP API
	wait sync.WaitGroup

	mu struct {
		sync.Mutex
		commands []string // in the order of arrival
		identity []map[string]any
		conns    []net.Conn
		channels []string // of any topic
	}
}

func newRegistry(t *testing.T) *registry {
	t.Helper()
	ln := testkit.Result(net.Listen("tcp", "127.0.0.1:0")).Must(t)
	r := &registry{t: t, ln: ln}
	r.mu.channels = []string{}
	r.web = httptest.NewServer(http.HandlerFunc(r.channels))
	r.wait.Go(r.accept)
	t.Cleanup(func() {
		ln.Close()
		r.drop()
		r.wait.Wait()
		r.web.Close()
	})
	return r
}

func (r *registry) flag() string { return "--lookupd-tcp-address=" + r.ln.Addr().String() }

// channels answers an nsqd's question about a topic that the nsqd has just created.
func (r *registry) channels(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if req.URL.Path != "/channels" {
		http.NotFound(w, req)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"channels": r.mu.channels}) // fails if the client has left
}

func (r *registry) accept() {
	for {
		nc, err := r.ln.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		r.mu.conns = append(r.mu.conns, nc)
		r.mu.Unlock()
		r.wait.Go(func() {
			defer nc.Close()
			if err := r.serve(nc); err != nil && !ended(err) && !errors.Is(err, net.ErrClosed) {
				r.note("fault: " + err.Error())
			}
		})
	}
}

// drop closes all connections.
func (r *registry) drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, nc := range r.mu.conns {
		nc.Close()
	}
	r.mu.conns = nil
}

// know sets the channels that every topic has elsewhere.
func (r *registry) know(channels ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.channels = channels
}

func (r *registry) note(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.commands = append(r.mu.commands, line)
}

// received returns the commands from the given position on.
func (r *registry) received(from int) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.mu.commands[min(from, len(r.mu.commands)):])
}

func (r *registry) serve(nc net.Conn) error {
	in := bufio.NewReader(nc)
	magic := make([]byte, 4)
	if _, err := io.ReadFull(in, magic); err != nil {
		return err
	}
	if string(magic) != "  V1" {
		return fmt.Errorf("magic %q", magic)
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		line = strings.TrimRight(line, "\r\n")
		answer := "OK"
		if line == "IDENTIFY" {
			if answer, err = r.identify(in); err != nil {
				return err
			}
		}
		r.note(line)
		reply := binary.BigEndian.AppendUint32(nil, uint32(len(answer)))
		if _, err := nc.Write(append(reply, answer...)); err != nil {
			return err
		}
	}
}

// identity returns the body of the first IDENTIFY.
func (r *registry) identity() map[string]any {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.identity[0]
}

func (r *registry) identify(in io.Reader) (answer string, err error) {
	var size [4]byte
	if _, err := io.ReadFull(in, size[:]); err != nil {
		return "", err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > 1<<16 {
		return "", fmt.Errorf("IDENTIFY of %d bytes", n)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(in, body); err != nil {
		return "", err
	}
	var o map[string]any
	if err := json.Unmarshal(body, &o); err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.identity = append(r.mu.identity, o)
	host, port, err := net.SplitHostPort(strings.TrimPrefix(r.web.URL, "http://"))
	if err != nil {
		return "", err
	}
	_, tcp, err := net.SplitHostPort(r.ln.Addr().String())
	if err != nil {
		return "", err
	}
	return fmt.Sprintf(`{"tcp_port":%s,"http_port":%s,"version":"1.3.0","broadcast_address":%q,"hostname":"registry.example"}`, tcp, port, host), nil
}

// receives waits for commands, in any order, from the given place on.
func (r *registry) receives(from int, want ...string) {
	r.t.Helper()
	testkit.WaitUntil(r.t, func() string {
		commands := r.received(from)
		for _, line := range want {
			if !slices.Contains(commands, line) {
				return fmt.Sprintf("no %q in %q", line, commands)
			}
		}
		return ""
	})
}

// acquainted waits until an nsqd has identified itself and registered a topic, and so has read the
// answer to its IDENTIFY.
func (r *registry) acquainted(n *node) {
	r.t.Helper()
	r.receives(0, "IDENTIFY")
	n.does(r.t, "/topic/create?topic=acquainted")
	r.receives(0, "REGISTER acquainted")
}

// place returns the position of the next command.
func (r *registry) place() int { return len(r.received(0)) }

func TestLookupd(t *testing.T) {
	group(t)
	check(t, "identifies itself", func(t *testing.T) {
		r := newRegistry(t)
		n := start(t, r.flag(), "--broadcast-tcp-port=1234", "--broadcast-http-port=1235", "--broadcast-address=broker.example")
		r.receives(0, "IDENTIFY")
		o := r.identity()
		has(t, o, "version", "broadcast_address", "hostname", "tcp_port", "http_port")
		if o["broadcast_address"] != "broker.example" || o["tcp_port"] != 1234.0 || o["http_port"] != 1235.0 {
			t.Errorf("got %v", o)
		}
		n.open(t).alive(n)
	})
	check(t, "with the ports it listens at", func(t *testing.T) {
		r := newRegistry(t)
		n := start(t, r.flag())
		r.receives(0, "IDENTIFY")
		o := r.identity()
		for key, address := range map[string]string{"tcp_port": n.tcp, "http_port": n.http} {
			_, port, _ := net.SplitHostPort(address)
			if got, _ := o[key].(float64); strconv.Itoa(int(got)) != port {
				t.Errorf("%s: got %v, want %s", key, got, port)
			}
		}
	})
	check(t, "registers and unregisters", func(t *testing.T) {
		r := newRegistry(t)
		n := start(t, r.flag())
		r.receives(0, "IDENTIFY")
		n.publish(t, "t", "x")
		r.receives(0, "REGISTER t")
		n.consumer(t, "t", "ch")
		r.receives(0, "REGISTER t ch")
		n.does(t, "/topic/create?topic=u")
		n.does(t, "/channel/create?topic=u&channel=ch")
		r.receives(0, "REGISTER u", "REGISTER u ch")
		n.does(t, "/channel/delete?topic=t&channel=ch")
		r.receives(0, "UNREGISTER t ch")
		n.does(t, "/topic/delete?topic=u")
		r.receives(0, "UNREGISTER u ch", "UNREGISTER u")
	})
	check(t, "ephemeral ones too", func(t *testing.T) {
		r := newRegistry(t)
		n := start(t, r.flag())
		c := n.consumer(t, "t#ephemeral", "ch#ephemeral")
		r.receives(0, "REGISTER t#ephemeral", "REGISTER t#ephemeral ch#ephemeral")
		c.nc.Close()
		r.receives(0, "UNREGISTER t#ephemeral ch#ephemeral", "UNREGISTER t#ephemeral")
	})
	check(t, "nothing is sent twice without need", func(t *testing.T) {
		r := newRegistry(t)
		n := start(t, r.flag())
		r.acquainted(n)
		for range 3 {
			n.publish(t, "t", "x")
			n.consumer(t, "t", "ch")
		}
		r.receives(0, "REGISTER t ch")
		n.does(t, "/topic/create?topic=last")
		r.receives(0, "REGISTER last")
		for _, line := range []string{"IDENTIFY", "REGISTER t", "REGISTER t ch"} {
			if count := len(slices.DeleteFunc(r.received(0), func(s string) bool { return s != line })); count != 1 {
				t.Errorf("%q was sent %d times: %q", line, count, r.received(0))
			}
		}
	})
	check(t, "connects again and sends all again", func(t *testing.T) {
		r := newRegistry(t)
		n := start(t, r.flag())
		n.consumer(t, "t", "ch")
		r.receives(0, "REGISTER t ch")
		at := r.place()
		r.drop()
		n.does(t, "/topic/create?topic=new")
		n.does(t, "/topic/create?topic=newer")
		// A channel's line also registers the channel's topic.
		r.receives(at, "IDENTIFY", "REGISTER t ch", "REGISTER new", "REGISTER newer")
	})
	check(t, "all of several", func(t *testing.T) {
		a, b := newRegistry(t), newRegistry(t)
		n := start(t, a.flag(), b.flag())
		n.consumer(t, "t", "ch")
		a.receives(0, "IDENTIFY", "REGISTER t ch")
		b.receives(0, "IDENTIFY", "REGISTER t ch")
	})
	check(t, "one that is unavailable does not matter", func(t *testing.T) {
		unused := localtest.Ports(t, 1)
		r := newRegistry(t)
		n := start(t, "--lookupd-tcp-address="+unused[0], r.flag())
		n.consumer(t, "t", "ch")
		r.receives(0, "REGISTER t ch")
		n.open(t).round(n)
	})
	check(t, "pings", func(t *testing.T) {
		r := newRegistry(t)
		start(t, r.flag())
		begin := time.Now()
		for range ticks(2 * patience) { // every 15 s
			if slices.Contains(r.received(0), "PING") {
				return
			}
		}
		t.Fatalf("no PING in %v: %q", time.Since(begin), r.received(0))
	})
	check(t, "addresses change at run time", func(t *testing.T) {
		a, b := newRegistry(t), newRegistry(t)
		n := start(t, a.flag())
		n.does(t, "/topic/create?topic=t")
		a.receives(0, "REGISTER t")
		list := fmt.Sprintf("[%q]", b.ln.Addr().String())
		if r := n.web(t, http.MethodPut, "/config/nsqlookupd_tcp_addresses", list); r.status != http.StatusOK {
			t.Fatalf("got %d %s", r.status, r.body)
		}
		b.receives(0, "IDENTIFY", "REGISTER t")
		at := a.place()
		n.does(t, "/topic/create?topic=u")
		b.receives(0, "REGISTER u")
		if commands := a.received(at); slices.Contains(commands, "REGISTER u") {
			t.Errorf("the old one received %q", commands)
		}
	})
	check(t, "a new topic begins with the channels others know", func(t *testing.T) {
		r := newRegistry(t)
		r.know("left", "right", "gone#ephemeral")
		n := start(t, r.flag())
		r.acquainted(n)
		// Upstream's nsqd sends one request and continues without an answer in time.
		var topics []string
		testkit.WaitUntil(t, func() string {
			topic := n.topic()
			topics = append(topics, topic)
			n.publish(t, topic, "x")
			for _, topic := range topics {
				s := mustLookup(t, n, topic)
				left, _ := s.channel("left")
				right, _ := s.channel("right")
				if len(s.Channels) == 2 && left.Depth == 1 && right.Depth == 1 {
					return ""
				}
			}
			return fmt.Sprintf("%d topics without their channels", len(topics))
		})
	})
}
