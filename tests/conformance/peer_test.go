package conformance

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The types of frames.
const (
	response = 0
	fault    = 1
	message  = 2
)

const heartbeat = "_heartbeat_"

// noID is a message id that no nsqd gives out.
const noID = "ffffffffffffffff"

// frame is a frame that nsqd sends.
//
//	[x][x][x][x][x][x][x][x][x]...
//	|  (int32) ||  (int32) ||
//	    size        kind      data, size-4 bytes
type frame struct {
	kind int32
	data []byte
}

func (f frame) String() string {
	names := map[int32]string{response: "response", fault: "error", message: "message"}
	name, known := names[f.kind]
	if !known {
		name = fmt.Sprintf("frame of type %d", f.kind)
	}
	return fmt.Sprintf("%s %.200q", name, f.data)
}

// delivery is the data of a message frame.
//
//	[x][x][x][x][x][x][x][x][x][x][x]...[x][x]...
//	|       (int64)        ||    ||  16   ||
//	       nanoseconds      uint16    id     body
//	                       attempts
type delivery struct {
	stamp    time.Time
	attempts uint16
	id       string
	body     string
}

// peer is a raw connection. Its methods fail the test when the expected frame does not come.
type peer struct {
	t  *testing.T
	nc net.Conn
	r  *bufio.Reader
	w  io.Writer // nc, or the compressor in front of nc

	beats bool // return heartbeats; false: answer and skip them
}

// dial connects and sends nothing.
func (n *node) dial(t *testing.T) *peer {
	t.Helper()
	return dialTo(t, "tcp", n.tcp)
}

func dialTo(t *testing.T, network, address string) *peer {
	t.Helper()
	nc := testkit.Result(net.DialTimeout(network, address, patience)).Must(t)
	t.Cleanup(func() { nc.Close() })
	return &peer{t: t, nc: nc, r: bufio.NewReader(nc), w: nc}
}

// open connects and sends the magic.
func (n *node) open(t *testing.T) *peer {
	t.Helper()
	p := n.dial(t)
	p.send("  V2")
	return p
}

// consumer connects and subscribes, with RDY at 0.
func (n *node) consumer(t *testing.T, topic, channel string) *peer {
	t.Helper()
	return n.open(t).sub(topic, channel)
}

// send writes text unchanged.
func (p *peer) send(format string, args ...any) {
	p.t.Helper()
	p.raw([]byte(fmt.Sprintf(format, args...)))
}

func (p *peer) raw(b []byte) {
	p.t.Helper()
	testkit.Must(p.t, p.nc.SetWriteDeadline(time.Now().Add(patience)))
	if _, err := p.w.Write(b); err != nil {
		p.t.Fatalf("write: %v", err)
	}
}

// sized returns a command line and its body behind 4 bytes of size.
func sized(line, body string) []byte {
	b := append([]byte(line), '\n')
	b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
	return append(b, body...)
}

// claimed returns a command line, a size, and a body whose length may differ.
func claimed(line string, size int32, body string) []byte {
	b := append([]byte(line), '\n')
	b = binary.BigEndian.AppendUint32(b, uint32(size))
	return append(b, body...)
}

// batch returns the body of an MPUB.
func batch(bodies ...string) string {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(bodies)))
	for _, body := range bodies {
		b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
		b = append(b, body...)
	}
	return string(b)
}

// read returns the next frame, or how the connection failed.
func (p *peer) read(within time.Duration) (frame, error) {
	if err := p.nc.SetReadDeadline(time.Now().Add(within)); err != nil {
		return frame{}, err
	}
	for {
		var head [8]byte
		if _, err := io.ReadFull(p.r, head[:]); err != nil {
			return frame{}, err
		}
		size := binary.BigEndian.Uint32(head[:])
		if size < 4 || size > 64<<20 {
			return frame{}, fmt.Errorf("frame of %d bytes", size)
		}
		f := frame{kind: int32(binary.BigEndian.Uint32(head[4:])), data: make([]byte, size-4)}
		if _, err := io.ReadFull(p.r, f.data); err != nil {
			return frame{}, fmt.Errorf("in the middle of a frame of %d bytes: %w", size, err)
		}
		if !p.beats && f.kind == response && string(f.data) == heartbeat {
			p.raw([]byte("NOP\n"))
			continue
		}
		return f, nil
	}
}

// next returns the next frame.
func (p *peer) next() frame {
	p.t.Helper()
	f, err := p.read(patience)
	if err != nil {
		p.t.Fatalf("no frame: %v", err)
	}
	return f
}

// response takes a response of exactly these bytes.
func (p *peer) response(want string) {
	p.t.Helper()
	if f := p.next(); f.kind != response || string(f.data) != want {
		p.t.Fatalf("got %v, want response %q", f, want)
	}
}

func (p *peer) ok() {
	p.t.Helper()
	p.response("OK")
}

// oks takes count OK responses.
func (p *peer) oks(count int) {
	p.t.Helper()
	for range count {
		p.ok()
	}
}

// fault takes an error with this code and returns its text. The connection may stay open.
func (p *peer) fault(code string) string {
	p.t.Helper()
	f := p.next()
	word, text, _ := strings.Cut(string(f.data), " ")
	if f.kind != fault || word != code {
		p.t.Fatalf("got %v, want error %s", f, code)
	}
	return text
}

// fatal takes an error with this code and the end of the connection.
func (p *peer) fatal(code string) {
	p.t.Helper()
	p.fault(code)
	p.closed()
}

// closed waits until nsqd has closed the connection, with nothing more sent.
func (p *peer) closed() {
	p.t.Helper()
	switch f, err := p.read(patience); {
	case err == nil:
		p.t.Fatalf("got %v, want the end of the connection", f)
	case errors.Is(err, os.ErrDeadlineExceeded):
		p.t.Fatal("the connection was not closed")
	case !ended(err):
		p.t.Fatalf("got %v, want the end of the connection", err)
	}
}

// hungUp waits for the end of the connection, whatever comes before the end.
func (p *peer) hungUp() {
	p.t.Helper()
	for {
		_, err := p.read(patience)
		if ended(err) {
			return
		}
		if err != nil {
			p.t.Fatalf("got %v, want the end of the connection", err)
		}
	}
}

// ended reports whether err means that the other side closed.
func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// quiet checks that nothing comes.
func (p *peer) quiet() {
	p.t.Helper()
	switch f, err := p.read(silence); {
	case err == nil:
		p.t.Fatalf("got %v, want nothing", f)
	case !errors.Is(err, os.ErrDeadlineExceeded):
		p.t.Fatalf("got %v, want nothing", err)
	}
}

// message takes a message.
func (p *peer) message() delivery {
	p.t.Helper()
	f := p.next()
	if f.kind != message {
		p.t.Fatalf("got %v, want a message", f)
	}
	const head = 8 + 2 + 16
	if len(f.data) < head {
		p.t.Fatalf("message frame of %d bytes", len(f.data))
	}
	return delivery{
		stamp:    time.Unix(0, int64(binary.BigEndian.Uint64(f.data))),
		attempts: binary.BigEndian.Uint16(f.data[8:]),
		id:       string(f.data[10:head]),
		body:     string(f.data[head:]),
	}
}

// body takes a message with this body.
func (p *peer) body(want string) delivery {
	p.t.Helper()
	m := p.message()
	testkit.MustEqual(p.t, m.body, want, "message")
	return m
}

// bodies takes count messages, finishes each, and returns their bodies sorted, because the protocol
// guarantees no order.
func (p *peer) bodies(count int) []string {
	p.t.Helper()
	var got []string
	for range count {
		m := p.message()
		p.fin(m.id)
		got = append(got, m.body)
	}
	slices.Sort(got)
	return got
}

// notBefore takes two messages, in any order, and checks that the late message did not come before its
// delay was over.
func (p *peer) notBefore(start time.Time, delay time.Duration, late, other string) (m delivery) {
	p.t.Helper()
	got := map[string]bool{}
	for range 2 {
		d := p.message()
		p.fin(d.id)
		got[d.body] = true
		if d.body != late {
			continue
		}
		m = d
		if waited := time.Since(start); waited < delay {
			p.t.Errorf("came after %v, want %v", waited, delay)
		}
	}
	if !got[late] || !got[other] {
		p.t.Fatalf("got %v", got)
	}
	return m
}

// alive checks that the connection still takes commands. It publishes to a topic with a fresh name.
func (p *peer) alive(n *node) {
	p.t.Helper()
	p.pub(n.topic(), "alive")
}

// identify sends an IDENTIFY with feature negotiation and returns the answer.
func (p *peer) identify(fields map[string]any) map[string]any {
	p.t.Helper()
	all := map[string]any{"feature_negotiation": true}
	for k, v := range fields {
		all[k] = v
	}
	p.raw(identity(p.t, all))
	f := p.next()
	if f.kind != response {
		p.t.Fatalf("got %v, want the answer to IDENTIFY %v", f, fields)
	}
	var answer map[string]any
	if err := json.Unmarshal(f.data, &answer); err != nil {
		p.t.Fatalf("answer to IDENTIFY %.200q: %v", f.data, err)
	}
	return answer
}

// identity returns an IDENTIFY command.
func identity(t *testing.T, fields map[string]any) []byte {
	t.Helper()
	body := testkit.Result(json.Marshal(fields)).Must(t)
	return sized("IDENTIFY", string(body))
}

// Commands. A command with a reply waits for the reply.

func (p *peer) sub(topic, channel string) *peer {
	p.t.Helper()
	p.send("SUB %s %s\n", topic, channel)
	p.ok()
	return p
}

func (p *peer) pub(topic string, bodies ...string) {
	p.t.Helper()
	for _, body := range bodies {
		p.raw(sized("PUB "+topic, body))
	}
	p.oks(len(bodies))
}

func (p *peer) dpub(topic string, delay time.Duration, body string) {
	p.t.Helper()
	p.raw(sized(fmt.Sprintf("DPUB %s %d", topic, delay.Milliseconds()), body))
	p.ok()
}

func (p *peer) mpub(topic string, bodies ...string) {
	p.t.Helper()
	p.raw(sized("MPUB "+topic, batch(bodies...)))
	p.ok()
}

func (p *peer) rdy(count int) *peer {
	p.t.Helper()
	p.send("RDY %d\n", count)
	return p
}

func (p *peer) fin(id string) {
	p.t.Helper()
	p.send("FIN %s\n", id)
}

func (p *peer) req(id string, delay time.Duration) {
	p.t.Helper()
	p.send("REQ %s %d\n", id, delay.Milliseconds())
}

func (p *peer) touch(id string) {
	p.t.Helper()
	p.send("TOUCH %s\n", id)
}

// publish puts messages into a topic, over a separate connection.
func (n *node) publish(t *testing.T, topic string, bodies ...string) {
	t.Helper()
	n.open(t).pub(topic, bodies...)
}
