package calibrate

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// tunnelBuffer bounds what waits in a tunnel's sockets, in bytes: what the broker does
// not take is to hold the generator back.
const tunnelBuffer = 32 << 10

// tunnel gives the generator, which speaks in clear, connections to a broker with TLS:
// its IDENTIFY asks for it, and what follows is encrypted. Whoever connects begins with
// IDENTIFY, as all of ours do. It is on loopback, and open to this machine as long as it
// lasts.
type tunnel struct {
	// Set once.
	ln     net.Listener
	broker string
	secure *tls.Config

	running sync.WaitGroup
	mu      sync.Mutex
	conns   map[net.Conn]bool // guarded by mu; nil once closed
}

func newTunnel(broker string, secure *tls.Config) (*tunnel, error) {
	host, _, err := net.SplitHostPort(broker)
	if err != nil {
		return nil, err
	}
	t := &tunnel{broker: broker, secure: secure.Clone(), conns: map[net.Conn]bool{}}
	t.secure.ServerName = host
	if t.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	t.running.Go(func() {
		for {
			near, err := t.ln.Accept()
			if err != nil {
				return // closed; or there are no files left, and who connects gets no answer
			}
			if t.keep(near) {
				t.running.Go(func() { t.serve(near) })
			}
		}
	})
	return t, nil
}

// keep has Close close the connection; false where that is over.
func (t *tunnel) keep(c net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns == nil {
		_ = c.Close() // nobody has used it
		return false
	}
	t.conns[c] = true
	return true
}

// drop ends a connection; how is of no interest, its other side sees it.
func (t *tunnel) drop(c net.Conn) {
	_ = c.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
}

// Close ends all connections.
func (t *tunnel) Close() error {
	err := t.ln.Close()
	t.mu.Lock()
	for c := range t.conns {
		_ = c.Close()
	}
	t.conns = nil
	t.mu.Unlock()
	t.running.Wait()
	return err
}

func (t *tunnel) serve(near net.Conn) {
	defer t.drop(near)
	far, err := (&net.Dialer{Timeout: connectTimeout}).DialContext(context.Background(), "tcp", t.broker)
	if err != nil {
		return
	}
	if !t.keep(far) {
		return
	}
	defer t.drop(far)
	for _, c := range []net.Conn{near, far} {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(tunnelBuffer) // a larger one holds back later
			_ = tcp.SetWriteBuffer(tunnelBuffer)
		}
	}
	from := bufio.NewReader(near)
	encrypted, err := t.greet(near, from, far)
	if err != nil {
		_, _ = near.Write(wire.AppendError(nil, wire.NewError(wire.CodeIdentifyFailed, err.Error()))) // it ends all the same
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(near, encrypted)
		_ = near.Close()
	}()
	_, _ = io.Copy(encrypted, from)
	_ = far.Close()
	<-done
}

// greet reads the generator's magic and IDENTIFY, makes TLS with the broker, and
// answers.
func (t *tunnel) greet(near net.Conn, from *bufio.Reader, far net.Conn) (*tls.Conn, error) {
	deadline := time.Now().Add(connectTimeout)
	if err := errors.Join(near.SetDeadline(deadline), far.SetDeadline(deadline)); err != nil {
		return nil, err
	}
	start := make([]byte, len(wire.AppendIdentify(wire.AppendMagic(nil), nil)))
	if _, err := io.ReadFull(from, start); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(start[len(start)-4:])
	if want := wire.AppendIdentify(wire.AppendMagic(nil), nil); string(start[:len(start)-4]) != string(want[:len(want)-4]) || size > maxFrame {
		return nil, fmt.Errorf("%.40q is no IDENTIFY", start)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(from, body); err != nil {
		return nil, err
	}
	var asked map[string]any
	if json.Unmarshal(body, &asked) != nil || asked == nil {
		return nil, fmt.Errorf("IDENTIFY of %.100q: want a JSON object", body)
	}
	negotiated := asked["feature_negotiation"] == true
	asked["feature_negotiation"], asked["tls_v1"] = true, true
	body, err := json.Marshal(asked)
	if err != nil {
		return nil, err
	}
	if _, err := far.Write(wire.AppendIdentify(wire.AppendMagic(nil), body)); err != nil {
		return nil, err
	}
	text, err := readFrame(far)
	if err != nil {
		return nil, err
	}
	var granted map[string]any
	if err := json.Unmarshal([]byte(text), &granted); err != nil || granted["tls_v1"] != true {
		return nil, fmt.Errorf("the broker gives no TLS: %.100q", text)
	}
	encrypted := tls.Client(far, t.secure)
	if text, err = readFrame(encrypted); err == nil && text != wire.OK {
		err = errors.New(text)
	}
	if err != nil {
		return nil, fmt.Errorf("TLS with the broker: %w", err)
	}
	answer := []byte(wire.OK)
	if negotiated {
		granted["tls_v1"] = false // here
		if answer, err = json.Marshal(granted); err != nil {
			return nil, err
		}
	}
	if _, err := near.Write(wire.AppendResponse(nil, answer)); err != nil {
		return nil, err
	}
	return encrypted, errors.Join(near.SetDeadline(time.Time{}), far.SetDeadline(time.Time{}))
}
