//go:build linux

package load

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"

	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Dialect encodes and decodes a broker's protocol for publishing and subscribing. The
// functions keep no state between connections.
type Dialect struct {
	// identify holds the members of the JSON object that an NSQ subscriber sends in
	// IDENTIFY.
	identify string
	// frame encodes the publication of n messages of size bytes to a topic, and returns the
	// offsets of the message bodies. With batch, frame uses one command if the protocol has a
	// batch command.
	frame func(to target, size, n int, batch bool) (frame []byte, bodies []int)
	// personal means that frames of different publishers differ.
	personal bool
	// number writes the message ids of the seq-th frame; nil if the protocol has none.
	number func(frame []byte, bodies []int, seq uint16)
	// hello performs the handshake of a publisher's connection.
	hello func(c net.Conn, id string) error
	// answers parses the replies at the start of in, and returns the number of accepted
	// messages and of parsed bytes; nil if the protocol does not acknowledge messages.
	answers func(in []byte, perFrame int) (accepted, used int, err error)
	// subscribe performs the handshake of a subscriber's connection. ready appends the
	// request for messages, at most credit unacknowledged.
	subscribe func(c net.Conn, from source) error
	ready     func(out []byte, from source, credit int) []byte
	// deliveries parses the complete deliveries at the start of in, calls deliver with each
	// body, and appends the replies to out.
	deliveries func(in, out []byte, from source, deliver func(body []byte)) (used int, reply []byte, err error)
}

// target is the topic of a publisher, whose connection has an id.
type target struct{ topic, id string }

// source is the channel of a topic that a subscriber receives.
type source struct{ topic, channel string }

const (
	Topic     = "bench" // the only topic, unless Scenario.Topics is above 1
	credit    = 2500    // unacknowledged messages per subscriber
	maxAnswer = 1 << 20 // bytes of a reply from an NSQ broker to a publisher
)

// repeat returns n copies of a frame, whose body starts at offset body.
func repeat(one []byte, body, n int) (frame []byte, bodies []int) {
	for i := range n {
		frame = append(frame, one...)
		bodies = append(bodies, i*len(one)+body)
	}
	return frame, bodies
}

// nsqDialect is the protocol of NSQ.
func nsqDialect(identify string) Dialect {
	return Dialect{
		identify: identify,
		frame: func(to target, size, n int, batch bool) ([]byte, []int) {
			if !batch {
				one := wire.AppendPub(nil, to.topic, make([]byte, size))
				return repeat(one, len(one)-size, n)
			}
			all := make([][]byte, n)
			for i := range all {
				all[i] = make([]byte, size)
			}
			frame := wire.AppendMpub(nil, to.topic, all)
			bodies := make([]int, n)
			for i := range bodies {
				bodies[i] = len(frame) - (n-1-i)*(4+size) - size
			}
			return frame, bodies
		},
		hello: func(c net.Conn, _ string) error {
			if encrypted(c) {
				return nil // upgrade already sent the magic
			}
			_, err := c.Write(wire.AppendMagic(nil))
			return err
		},
		answers: func(in []byte, perFrame int) (accepted, used int, err error) {
			for {
				kind, data, n, err := wire.ParseFrame(in[used:], maxAnswer)
				if err != nil || n == 0 {
					return accepted, used, err
				}
				used += n
				switch {
				case kind == wire.FrameError:
					return accepted, used, fmt.Errorf("the broker answered %s", data)
				case string(data) == "OK":
					accepted += perFrame
				}
			}
		},
		subscribe: func(c net.Conn, from source) error {
			var hello []byte
			want := 1
			if !encrypted(c) {
				hello = wire.AppendMagic(nil)
				if identify != "" {
					hello = wire.AppendIdentify(hello, []byte("{"+identify+"}"))
					want++
				}
			}
			if _, err := c.Write(wire.AppendSub(hello, from.topic, from.channel)); err != nil {
				return err
			}
			for range want {
				if err := expectFrame(c); err != nil {
					return err
				}
			}
			return nil
		},
		ready: func(out []byte, _ source, n int) []byte { return wire.AppendRdy(out, n) },
		deliveries: func(in, out []byte, _ source, deliver func([]byte)) (used int, reply []byte, err error) {
			for {
				kind, data, n, err := wire.ParseFrame(in[used:], 8<<20)
				if err != nil || n == 0 {
					return used, out, err
				}
				used += n
				switch {
				case kind == wire.FrameError:
					return used, out, fmt.Errorf("the broker answered %s", data)
				case kind == wire.FrameMessage:
					m, err := wire.ParseMessage(data)
					if err != nil {
						return used, out, err
					}
					deliver(m.Body)
					out = wire.AppendFin(out, m.ID)
				case string(data) == "_heartbeat_":
					out = wire.AppendNop(out)
				}
			}
		},
	}
}

// Raw is a dialect without a protocol: frames are bare bodies, without replies.
func Raw() Dialect {
	return Dialect{
		frame: func(_ target, size, n int, _ bool) ([]byte, []int) { return repeat(make([]byte, size), 0, n) },
		hello: func(net.Conn, string) error { return nil },
	}
}

func encrypted(c net.Conn) bool {
	_, is := c.(*tls.Conn)
	return is
}

// expectFrame reads exactly one frame, and returns an error for an error frame.
func expectFrame(c io.Reader) error {
	kind, data, err := frames.Read(c, maxAnswer)
	if err == nil && kind == wire.FrameError {
		err = fmt.Errorf("the broker answered %s", data)
	}
	return err
}

// natsHello performs the handshake of NATS, and sends more.
func natsHello(c net.Conn, more string) error {
	if _, err := io.WriteString(c, "CONNECT {\"verbose\":false,\"pedantic\":false}\r\n"+more+"PING\r\n"); err != nil {
		return err
	}
	return readUntil(c, "PONG\r\n")
}

// natsDialect is the protocol of NATS. Without streams NATS acknowledges nothing. A subscriber
// acknowledges messages of a stream.
func natsDialect() Dialect {
	return Dialect{
		frame: func(to target, size, n int, _ bool) ([]byte, []int) {
			head := fmt.Sprintf("PUB %s %d\r\n", to.topic, size)
			return repeat(append(append([]byte(head), make([]byte, size)...), "\r\n"...), len(head), n)
		},
		hello:     func(c net.Conn, _ string) error { return natsHello(c, "") },
		subscribe: func(c net.Conn, from source) error { return natsHello(c, "SUB "+from.topic+" 1\r\n") },
		ready:     func(out []byte, _ source, _ int) []byte { return out },
		deliveries: func(in, out []byte, _ source, deliver func([]byte)) (used int, reply []byte, err error) {
			for {
				line, body, n, err := parseNATS(in[used:])
				if err != nil || n == 0 {
					return used, out, err
				}
				used += n
				switch {
				case body != nil:
					deliver(body)
					if words := bytes.Fields(line); len(words) == 5 { // MSG subject id reply size
						out = fmt.Appendf(out, "PUB %s 0\r\n\r\n", words[3])
					}
				case string(line) == "PING":
					out = append(out, "PONG\r\n"...)
				}
			}
		},
	}
}

// parseNATS parses the first line of in, and the body of a message. n is 0 if the message is
// incomplete. body is nil for other lines.
func parseNATS(in []byte) (line, body []byte, n int, err error) {
	line, n = cutLine(in)
	switch {
	case n == 0:
	case bytes.HasPrefix(line, []byte("MSG ")):
		size, err := strconv.Atoi(string(line[bytes.LastIndexByte(line, ' ')+1:]))
		if err != nil || size < 0 || size > 8<<20 {
			return nil, nil, 0, fmt.Errorf("nats: cannot parse %q", line)
		}
		if len(in) < n+size+2 {
			return nil, nil, 0, nil
		}
		return line, in[n : n+size], n + size + 2, nil
	case bytes.HasPrefix(line, []byte("-ERR")):
		return nil, nil, 0, fmt.Errorf("nats: %s", line)
	}
	return line, nil, n, nil
}

// cutLine returns the first line of in without the line end, and the line's length with the
// line end. n is 0 if the line is incomplete.
func cutLine(in []byte) (line []byte, n int) {
	end := bytes.Index(in, []byte("\r\n"))
	if end < 0 {
		return nil, 0
	}
	return in[:end], end + 2
}

// readUntil reads up to end, byte by byte, so that later bytes stay in the socket.
func readUntil(c io.Reader, end string) error {
	var got []byte
	next := make([]byte, 1)
	for !bytes.HasSuffix(got, []byte(end)) {
		if _, err := io.ReadFull(c, next); err != nil {
			return fmt.Errorf("read the broker's answer after %q: %w", got, err)
		}
		if got = append(got, next[0]); len(got) > 1<<16 {
			return errors.New("the broker's answer is longer than 64 KiB")
		}
	}
	if bytes.Contains(got, []byte("-ERR")) {
		return fmt.Errorf("the broker answered %q", got)
	}
	return nil
}

// redisDialect is the protocol of Redis streams, with one consumer group per channel.
func redisDialect() Dialect {
	command := func(out []byte, words ...string) []byte {
		out = fmt.Appendf(out, "*%d\r\n", len(words))
		for _, w := range words {
			out = fmt.Appendf(out, "$%d\r\n%s\r\n", len(w), w)
		}
		return out
	}
	read := func(out []byte, from source, n int) []byte {
		return command(out, "XREADGROUP", "GROUP", from.channel, "c", "COUNT", strconv.Itoa(n), "BLOCK", "0", "STREAMS", from.topic, ">")
	}
	return Dialect{
		frame: func(to target, size, n int, _ bool) ([]byte, []int) {
			frame := command(nil, "XADD", to.topic, "MAXLEN", "~", "2000000", "*", "d", string(make([]byte, size)))
			return repeat(frame, len(frame)-2-size, n)
		},
		hello: func(net.Conn, string) error { return nil },
		answers: func(in []byte, _ int) (accepted, used int, err error) {
			for {
				v, n, err := parseRESP(in[used:])
				if err != nil || n == 0 {
					return accepted, used, err
				}
				if v.kind == '-' {
					return accepted, used, fmt.Errorf("redis: %s", v.text)
				}
				used += n
				accepted++
			}
		},
		subscribe: func(c net.Conn, from source) error {
			if _, err := c.Write(command(nil, "XGROUP", "CREATE", from.topic, from.channel, "$", "MKSTREAM")); err != nil {
				return err
			}
			return readUntil(c, "+OK\r\n")
		},
		ready: func(out []byte, from source, n int) []byte { return read(out, from, min(n, 500)) },
		deliveries: func(in, out []byte, from source, deliver func([]byte)) (used int, reply []byte, err error) {
			for {
				v, n, err := parseRESP(in[used:])
				if err != nil || n == 0 {
					return used, out, err
				}
				used += n
				switch v.kind {
				case '-':
					return used, out, fmt.Errorf("redis: %s", v.text)
				case '*': // [[stream, [[id, [field, value]], ...]]]
					if len(v.list) != 1 || len(v.list[0].list) != 2 {
						return used, out, errors.New("redis: the answer to XREADGROUP is not one stream with entries")
					}
					ack := []string{"XACK", from.topic, from.channel}
					for _, entry := range v.list[0].list[1].list {
						if len(entry.list) != 2 || len(entry.list[1].list) != 2 {
							return used, out, errors.New("redis: an entry is not an id with one field")
						}
						deliver(entry.list[1].list[1].text)
						ack = append(ack, string(entry.list[0].text))
					}
					out = read(command(out, ack...), from, 500)
				}
			}
		},
	}
}

// resp is a value of the Redis protocol.
type resp struct {
	kind byte // + - : $ *
	text []byte
	list []resp
}

// deepestRESP bounds the nesting of replies.
const deepestRESP = 6

// parseRESP parses the first value of in. n is 0 if the value is incomplete.
func parseRESP(in []byte) (v resp, n int, err error) { return parseRESPAt(in, 0) }

func parseRESPAt(in []byte, depth int) (v resp, n int, err error) {
	line, n := cutLine(in)
	if n == 0 {
		return v, 0, nil
	}
	if len(line) == 0 || depth > deepestRESP {
		return v, 0, fmt.Errorf("redis: cannot parse %q", line)
	}
	v = resp{kind: line[0], text: line[1:]}
	switch v.kind {
	case '+', '-', ':':
		return v, n, nil
	case '$', '*':
	default:
		return v, 0, fmt.Errorf("redis: cannot parse %q", line)
	}
	size, err := strconv.Atoi(string(line[1:]))
	if err != nil || size < -1 || size > 8<<20 {
		return v, 0, fmt.Errorf("redis: cannot parse %q", line)
	}
	if v.text = nil; size < 0 {
		return v, n, nil
	}
	if v.kind == '$' {
		if len(in) < n+size+2 {
			return v, 0, nil
		}
		v.text = in[n : n+size]
		return v, n + size + 2, nil
	}
	for range size {
		e, k, err := parseRESPAt(in[n:], depth+1)
		if err != nil || k == 0 {
			return v, 0, err
		}
		v.list = append(v.list, e)
		n += k
	}
	return v, n, nil
}
