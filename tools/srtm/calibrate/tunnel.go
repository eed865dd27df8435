package calibrate

import (
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// tunnelBuffer limits the socket buffers of a tunnel, in bytes, so that a slow broker
// soon holds the generator back.
const tunnelBuffer = 32 << 10

// newTunnel returns a proxy that connects the generator, which does not speak TLS, to a
// broker with TLS. The proxy requests TLS in the generator's IDENTIFY and encrypts the
// rest. Clients must begin with IDENTIFY, as ours do. The proxy listens on loopback, open
// to this machine while it runs.
func newTunnel(broker string, secure *tls.Config) (*local.Proxy, error) {
	host, _, err := net.SplitHostPort(broker)
	if err != nil {
		return nil, err
	}
	secure = secure.Clone()
	secure.ServerName = host
	return local.NewGreetingProxy(broker, func(near, far net.Conn) (net.Conn, net.Conn, error) {
		for _, c := range []net.Conn{near, far} {
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetReadBuffer(tunnelBuffer) // best effort: a larger buffer only holds back later
				_ = tcp.SetWriteBuffer(tunnelBuffer)
			}
		}
		encrypted, err := greet(near, far, secure)
		if err != nil {
			_, _ = near.Write(wire.AppendError(nil, wire.NewError(wire.CodeIdentifyFailed, err.Error()))) // best effort: the connection ends in any case
		}
		return near, encrypted, err
	})
}

// greet reads the generator's magic and IDENTIFY, sets up TLS with the broker, and
// answers the generator.
func greet(near, far net.Conn, secure *tls.Config) (*tls.Conn, error) {
	deadline := time.Now().Add(connectTimeout)
	if err := errors.Join(near.SetDeadline(deadline), far.SetDeadline(deadline)); err != nil {
		return nil, err
	}
	start := make([]byte, len(wire.AppendIdentify(wire.AppendMagic(nil), nil)))
	if _, err := io.ReadFull(near, start); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(start[len(start)-4:])
	if want := wire.AppendIdentify(wire.AppendMagic(nil), nil); string(start[:len(start)-4]) != string(want[:len(want)-4]) || size > maxFrame {
		return nil, fmt.Errorf("%.40q is no IDENTIFY", start)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(near, body); err != nil {
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
	_, text, err := frames.Read(far, maxFrame)
	if err != nil {
		return nil, err
	}
	var granted map[string]any
	if err := json.Unmarshal(text, &granted); err != nil || granted["tls_v1"] != true {
		return nil, fmt.Errorf("the broker gives no TLS: %.100q", text)
	}
	encrypted := tls.Client(far, secure)
	if _, text, err = frames.Read(encrypted, maxFrame); err == nil && string(text) != wire.OK {
		err = errors.New(string(text))
	}
	if err != nil {
		return nil, fmt.Errorf("TLS with the broker: %w", err)
	}
	answer := []byte(wire.OK)
	if negotiated {
		granted["tls_v1"] = false // between the generator and the proxy
		if answer, err = json.Marshal(granted); err != nil {
			return nil, err
		}
	}
	if _, err := near.Write(wire.AppendResponse(nil, answer)); err != nil {
		return nil, err
	}
	return encrypted, errors.Join(near.SetDeadline(time.Time{}), far.SetDeadline(time.Time{}))
}
