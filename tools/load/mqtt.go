//go:build linux

package load

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/srtm-io/srtm/mqtt/packet"
)

// The brokers of MQTT get the same work by the same packets: MQTT 3.1.1, since nats-server has
// no 5.0, with quality of service 1 for publishers and subscribers. At most credit messages of a
// subscriber have no PUBACK.

// OursMQTT is Ours with publishers and subscribers of MQTT.
func OursMQTT(path string) Broker {
	b := Ours(path, "")
	nsq := b.Args
	b.Name, b.Dialect, b.NSQ = "srtm-mqtt", mqttDialect(), false
	b.Args = func(at Place, s Scenario) ([]string, error) {
		args, err := nsq(at, s)
		args = slices.DeleteFunc(args, func(a string) bool { return a == "--tcp-address="+at.TCP })
		return append(args, "--tcp-address=127.0.0.1:0", "--mqtt-address="+at.TCP, "--mqtt-max-inflight="+strconv.Itoa(credit)), err
	}
	return b
}

// FloorMQTT is bench/floor with publishers and subscribers of MQTT.
func FloorMQTT(path string) Broker {
	b := Floor(path)
	b.Name, b.Dialect, b.NSQ = "floor-mqtt", mqttDialect(), false
	b.Args = func(at Place, _ Scenario) ([]string, error) {
		return []string{"--tcp-address=" + at.TCP, "--mqtt"}, nil
	}
	return b
}

// Mosquitto is mosquitto, without persistence.
func Mosquitto(path string) Broker {
	return Broker{Name: "mosquitto", Path: path, Dialect: mqttDialect(), Args: func(at Place, _ Scenario) ([]string, error) {
		file := filepath.Join(at.Dir, "mosquitto.conf")
		text := "listener " + port(at.TCP) + " 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\npersistence false\nlog_type none\nmax_queued_messages 0\nmax_inflight_messages " + strconv.Itoa(credit) + "\n"
		return []string{"-c", file}, os.WriteFile(file, []byte(text), 0o600)
	}}
}

// NATSMQTT is nats-server with publishers and subscribers of MQTT. nats-server stores messages of
// quality of service 1 in JetStream, on the disk.
func NATSMQTT(path string) Broker {
	return Broker{Name: "nats-mqtt", Path: path, Dialect: mqttDialect(), Pprof: true, Args: func(at Place, _ Scenario) ([]string, error) {
		file := filepath.Join(at.Dir, "nats.conf")
		text := fmt.Sprintf("server_name: n\nlisten: \"127.0.0.1:-1\"\nprof_port: %s\njetstream { store_dir: %q }\nmqtt { listen: %q, max_ack_pending: %d }\n",
			port(at.Web), filepath.Join(at.Dir, "jetstream"), at.TCP, credit)
		return []string{"--config", file}, os.WriteFile(file, []byte(text), 0o600)
	}}
}

// mqttDialect is MQTT 3.1.1 with quality of service 1, for publishers and subscribers.
func mqttDialect() Dialect {
	connect := func(c net.Conn, id string) error {
		if _, err := c.Write(packet.AppendConnect(nil, packet.Hello{Version: packet.V311, ClientID: id})); err != nil {
			return err
		}
		return expectMQTT(c, packet.Connack)
	}
	return Dialect{
		frame: func(to target, size, n int, _ bool) ([]byte, []int) {
			one := packet.AppendPublish(nil, packet.V311, to.topic, 1, make([]byte, size))
			return repeat(one, len(one)-size, n)
		},
		number: func(frame []byte, bodies []int, seq uint16) {
			for i, b := range bodies {
				id := 1 + (int(seq)*len(bodies)+i)%(1<<16-1)
				frame[b-2], frame[b-1] = byte(id>>8), byte(id)
			}
		},
		hello: connect,
		answers: func(in []byte, _ int) (accepted, used int, err error) {
			for {
				kind, _, n, err := packet.Parse(in[used:], maxAnswer)
				if err != nil || n == 0 {
					return accepted, used, err
				}
				used += n
				if kind == packet.Puback {
					accepted++
				}
			}
		},
		subscribe: func(c net.Conn, from source) error {
			if err := connect(c, from.channel); err != nil {
				return err
			}
			if _, err := c.Write(packet.AppendSubscribe(nil, packet.V311, 1, from.topic)); err != nil {
				return err
			}
			return expectMQTT(c, packet.Suback)
		},
		ready: func(out []byte, _ source, _ int) []byte { return out },
		deliveries: func(in, out []byte, _ source, deliver func([]byte)) (used int, reply []byte, err error) {
			for {
				kind, body, n, err := packet.Parse(in[used:], 8<<20)
				if err != nil || n == 0 {
					return used, out, err
				}
				used += n
				if kind&0xF0 != packet.Publish {
					continue
				}
				_, payload, id, err := packet.ParseDelivery(packet.V311, body)
				if err != nil {
					return used, out, err
				}
				deliver(payload)
				out = packet.AppendPuback(out, id)
			}
		},
	}
}

// expectMQTT reads a packet of at most 127 bytes. The packet must have the given kind, and
// its last byte must report success.
func expectMQTT(c io.Reader, kind packet.Kind) error {
	head := make([]byte, 2)
	if _, err := io.ReadFull(c, head); err != nil {
		return err
	}
	if packet.Kind(head[0]) != kind || head[1] == 0 || head[1] > 127 {
		return fmt.Errorf("mqtt: the broker answered %x, want %v", head, kind)
	}
	body := make([]byte, head[1])
	if _, err := io.ReadFull(c, body); err != nil {
		return err
	}
	if code := body[len(body)-1]; code > 2 || kind == packet.Connack && code != 0 {
		return fmt.Errorf("mqtt: the broker refused with code %#x", code)
	}
	return nil
}
