package fleet

import (
	"errors"
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// Publishers of MQTT speak version 5.0 with quality of service 1, since only 5.0 has refusals and
// redirections. A publisher keeps its packet ids in the order of its messages.

// mqttHello returns the CONNECT of a publisher, which asks for redirection.
func mqttHello(s schedule.Source, cfg *Config) []byte {
	return packet.AppendConnect(nil, packet.Hello{
		Version: packet.V5, ClientID: s.ID, KeepAlive: uint16(min(cfg.Heartbeat.Seconds(), 1<<16-1)), Redirect: true,
	})
}

// mqttName returns the MQTT topic name of a publisher's messages.
func (c *Config) mqttName(s schedule.Source) string {
	if c.Name == "" {
		return c.Topic
	}
	return strings.ReplaceAll(c.Name, "{id}", s.ID)
}

// packetID returns the packet id of a publisher's message, which is never 0.
func packetID(seq uint32) uint16 { return uint16(1 + seq%(1<<16-1)) }

// packets handles every complete packet and returns the rest.
func (w *worker) packets(l *link, in []byte, now mono.Time) (rest []byte, err error) {
	for l.state != dead {
		kind, body, n, err := packet.Parse(in, maxFrame)
		if err != nil || n == 0 {
			return in, err
		}
		in = in[n:]
		switch {
		case kind == packet.Connack && l.state == identifying:
			answer, err := packet.ParseConnack(packet.V5, body)
			switch {
			case err != nil:
				return in, err
			case answer.Reference != "":
				w.redirect(l, answer.Reference, now)
			case answer.Reason != 0:
				return in, fmt.Errorf("CONNECT: %w", answer.Refusal())
			default:
				l.maximum = answer.Maximum
				w.welcome(l, now)
			}
		case kind == packet.Disconnect:
			answer, err := packet.ParseDisconnect(body)
			if err != nil {
				return in, err
			}
			if answer.Reference == "" {
				w.handleLoss(l, answer.Refusal())
			} else {
				w.redirect(l, answer.Reference, now)
			}
		case kind == packet.Puback && l.state == ready:
			if err := w.acknowledge(l, body, now); err != nil {
				return in, err
			}
		case kind == packet.PingReply:
		default:
			return in, fmt.Errorf("unexpected packet %v of %d bytes", kind, len(body))
		}
	}
	return in, nil
}

// acknowledge handles a PUBACK. A broker acknowledges the messages of a connection in order.
func (w *worker) acknowledge(l *link, body []byte, now mono.Time) error {
	id, reason, err := packet.ParsePuback(body)
	if err != nil {
		return err
	}
	if l.open.Len() == 0 {
		return errors.New("a PUBACK without a message")
	}
	if want := packetID(l.open.Front().seq); id != want {
		return fmt.Errorf("a PUBACK of packet %d, want packet %d", id, want)
	}
	if reason >= 0x80 {
		return w.answer(l, &wire.Error{Code: wire.ErrorCode(fmt.Sprintf("%#02x", reason))}, now)
	}
	return w.answer(l, nil, now)
}

// redirect connects a publisher to the broker at the given address, in place of the broker of l. Messages
// without a PUBACK wait for the new broker: a device with QoS 1 sends such messages again.
func (w *worker) redirect(l *link, address string, now mono.Time) {
	p := l.publisher
	p.target = address
	for l.open.Len() > 0 {
		w.unanswered--
		w.stats.Sent--
		w.park(p, l.open.Pop().batch)
	}
	if l == p.link {
		p.link = nil
		w.connected--
		w.stats.Moved++
		w.release(l)
	} else {
		p.next = nil
		w.drop(l)
	}
	w.queueDial(p, now.Add(backoff(p.failures)))
	p.failures++ // until a broker accepts the publisher
}

// ping sends PINGREQ on every connection, twice in each keep alive interval.
func (w *worker) ping(now mono.Time) {
	if now.Before(w.nextPing) {
		return
	}
	w.nextPing = now.Add(w.cfg.Heartbeat / 2)
	for _, l := range w.links {
		if l != nil && l.state == ready {
			w.write(l, packet.Append(nil, packet.PingRequest, nil))
		}
	}
}
