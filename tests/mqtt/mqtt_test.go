package mqtt

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/eclipse/paho.golang/paho"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// device is a client of MQTT 5.0.
type device struct {
	t *testing.T
	*paho.Client
	received chan *paho.Publish
	ended    chan byte // reason of the broker's DISCONNECT
	present  bool
	conn     net.Conn
}

// options change the CONNECT of a device.
type options func(*paho.Connect)

// kept makes the broker keep the session.
func kept(c *paho.Connect) {
	expiry := uint32(3600)
	c.CleanStart, c.Properties = false, &paho.ConnectProperties{SessionExpiryInterval: &expiry}
}

// dial connects a device.
func dial(t *testing.T, conn net.Conn, id string, set ...options) *device {
	t.Helper()
	d := &device{t: t, received: make(chan *paho.Publish, 100), ended: make(chan byte, 1), conn: conn}
	d.Client = paho.NewClient(paho.ClientConfig{
		Conn: conn,
		OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(p paho.PublishReceived) (bool, error) {
			d.received <- p.Packet
			return true, nil
		}},
		OnServerDisconnect: func(p *paho.Disconnect) { d.ended <- p.ReasonCode },
		OnClientError:      func(error) {},
	})
	connect := &paho.Connect{ClientID: id, CleanStart: true, KeepAlive: 60}
	for _, change := range set {
		change(connect)
	}
	ack, err := d.Connect(t.Context(), connect)
	testkit.Must(t, err)
	d.present = ack.SessionPresent
	t.Cleanup(d.vanish)
	return d
}

// connect dials the MQTT address of a broker.
func connect(t *testing.T, address, id string, set ...options) *device {
	t.Helper()
	return dial(t, testkit.Result(net.Dial("tcp", address)).Must(t), id, set...)
}

// vanish ends the connection without DISCONNECT.
func (d *device) vanish() { d.conn.Close() }

func (d *device) subscribe(filter string, qos byte) {
	d.t.Helper()
	ack, err := d.Subscribe(d.t.Context(), &paho.Subscribe{Subscriptions: []paho.SubscribeOptions{{Topic: filter, QoS: qos}}})
	testkit.Must(d.t, err)
	testkit.MustEqual(d.t, ack.Reasons[0], qos)
}

// publish publishes and returns the reason code of the PUBACK.
func (d *device) publish(topic, payload string, qos byte) byte {
	d.t.Helper()
	response, err := d.Publish(d.t.Context(), &paho.Publish{Topic: topic, QoS: qos, Payload: []byte(payload)})
	if response == nil {
		testkit.Must(d.t, err)
		return 0
	}
	return response.ReasonCode
}

// want waits for messages, in any order.
func (d *device) want(messages ...string) {
	d.t.Helper()
	missing := map[string]bool{}
	for _, m := range messages {
		missing[m] = true
	}
	for len(missing) > 0 {
		select {
		case p := <-d.received:
			delete(missing, p.Topic+" "+string(p.Payload))
		case <-d.t.Context().Done():
			d.t.Fatalf("missing: %v", missing)
		}
	}
}

// broker is an nsqd with an MQTT address, which stays the same over restarts.
type broker struct {
	t            *testing.T
	process      *local.Process
	mqtt, binary string
	flags        []string
}

func start(t *testing.T, flags ...string) *broker {
	t.Helper()
	b := &broker{t: t, mqtt: localtest.Ports(t, 1)[0], binary: localtest.Program(t, "nsqd")}
	b.flags = append(flags, "--mqtt-address="+b.mqtt, "--data-path="+t.TempDir())
	b.restart()
	return b
}

func (b *broker) restart() { b.process = localtest.NSQD(b.t, b.binary, b.flags...) }

func (b *broker) kill() {
	b.t.Helper()
	testkit.Must(b.t, b.process.Kill())
}

// A kept session gets the messages that came while the client was away, also after kill -9 of the broker.
// The will of a kept session is published after the restart.
func TestKeptSessionSurvivesKill(t *testing.T) {
	b := start(t, "--durability=fsync")
	d := connect(t, b.mqtt, "sensor", kept, func(c *paho.Connect) {
		c.WillMessage = &paho.WillMessage{Topic: "wills", QoS: 1, Payload: []byte("sensor died")}
	})
	testkit.Equal(t, d.present, false)
	d.subscribe("commands", 1)
	watcher := connect(t, b.mqtt, "watcher", kept)
	watcher.subscribe("wills", 1)
	p := connect(t, b.mqtt, "publisher")
	testkit.Equal(t, p.publish("commands", "one", 1), 0)
	d.want("commands one")
	d.vanish()
	watcher.want("wills sensor died")
	testkit.Equal(t, p.publish("commands", "two", 1), 0)
	d = connect(t, b.mqtt, "sensor", kept, func(c *paho.Connect) {
		c.WillMessage = &paho.WillMessage{Topic: "wills", QoS: 1, Payload: []byte("broker died")}
	})
	testkit.Equal(t, d.present, true)
	d.want("commands two")
	b.kill()
	b.restart()
	watcher = connect(t, b.mqtt, "watcher", kept)
	testkit.Equal(t, watcher.present, true)
	watcher.want("wills broker died")
	p = connect(t, b.mqtt, "publisher")
	testkit.Equal(t, p.publish("commands", "three", 1), 0)
	d = connect(t, b.mqtt, "sensor", kept)
	testkit.Equal(t, d.present, true)
	d.want("commands three")

	// A clean start ends the session with its messages.
	d.vanish()
	testkit.Equal(t, p.publish("commands", "lost", 1), 0)
	d = connect(t, b.mqtt, "sensor")
	testkit.Equal(t, d.present, false)
	d = connect(t, b.mqtt, "sensor", kept)
	testkit.Equal(t, d.present, false)
	d.subscribe("commands", 1)
	testkit.Equal(t, p.publish("commands", "four", 1), 0)
	got := <-d.received
	testkit.Equal(t, string(got.Payload), "four")
}

// A connection with the same client id ends the older connection. A stopping broker says so.
func TestBrokerSaysWhyItEndsAConnection(t *testing.T) {
	b := start(t)
	first := connect(t, b.mqtt, "same")
	first.subscribe("t", 1)
	second := connect(t, b.mqtt, "same")
	testkit.Equal(t, <-first.ended, 0x8E)
	testkit.Must(t, b.process.Signal(syscall.SIGTERM))
	testkit.Equal(t, <-second.ended, 0x8B)
	<-b.process.Done()
}

// The handshake is the first thing at --mqtts-address. A client that sends plain text is closed.
func TestTLSFromTheFirstByte(t *testing.T) {
	authority := testkit.NewAuthority(t)
	certificate := authority.Certificate("broker")
	address := localtest.Ports(t, 1)[0]
	start(t, "--mqtts-address="+address, "--tls-cert="+certificate.CertFile, "--tls-key="+certificate.KeyFile)
	secure := dial(t, testkit.Result(tls.Dial("tcp", address, &tls.Config{RootCAs: authority.Pool})).Must(t), "secure")
	secure.subscribe("t", 1)
	testkit.Equal(t, secure.publish("t", "secret", 1), 0)
	secure.want("t secret")
	plain := testkit.Result(net.Dial("tcp", address)).Must(t)
	defer plain.Close()
	fmt.Fprint(plain, "plain text, and no TLS record at all")
	testkit.Must(t, plain.SetReadDeadline(time.Now().Add(time.Minute)))
	for buf := make([]byte, 100); ; {
		if _, err := plain.Read(buf); err != nil {
			testkit.Equal(t, os.IsTimeout(err), false, "the end of the connection")
			break
		}
	}
}
