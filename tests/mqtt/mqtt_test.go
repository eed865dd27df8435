package mqtt

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
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
var kept = keptFor(3600)

func keptFor(seconds uint32) options {
	return func(c *paho.Connect) {
		c.CleanStart, c.Properties = false, &paho.ConnectProperties{SessionExpiryInterval: &seconds}
	}
}

// dial connects a device.
func dial(t *testing.T, conn net.Conn, id string, set ...options) *device {
	t.Helper()
	d := &device{t: t, received: make(chan *paho.Publish, 100), ended: make(chan byte, 1), conn: conn}
	d.Client = paho.NewClient(paho.ClientConfig{
		Conn: conn, PacketTimeout: testkit.Hang,
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
	for limit := time.After(testkit.Hang); len(missing) > 0; {
		select {
		case p := <-d.received:
			delete(missing, p.Topic+" "+string(p.Payload))
		case <-limit:
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

// An NSQ consumer gets the payloads of MQTT publishers. MQTT subscribers get the topic names, too.
func TestDevicesPublishAndSubscribe(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "rules.toml")
	write := func(text string) { testkit.Must(t, os.WriteFile(rules, []byte(text), 0o600)) }
	write("[[mqtt]]\nfilter = \"fleet/+/telemetry\"\ntopic = \"telemetry\"\npublisher = \"{1}\"\n")
	b := start(t, "--mqtt-rules="+rules)
	for _, path := range []string{"topic/create?topic=telemetry", "channel/create?topic=telemetry&channel=archive"} {
		localtest.MustAsk(t, http.MethodPost, "http://"+b.process.HTTP+"/"+path, "")
	}
	received := make(localtest.Bodies, 100)
	stop := localtest.Consume(t, "telemetry", "archive", received, nil, b.process.TCP)
	all, one := connect(t, b.mqtt, "all"), connect(t, b.mqtt, "one")
	all.subscribe("fleet/+/telemetry", 1)
	one.subscribe("fleet/7/telemetry", 0)
	publisher := connect(t, b.mqtt, "gateway")
	testkit.Equal(t, publisher.publish("fleet/7/telemetry", "seven", 1), 0)
	testkit.Equal(t, publisher.publish("fleet/8/telemetry", "eight", 1), 0)
	publisher.publish("fleet/7/telemetry", "again", 0)
	received.Want(t, "seven", "eight", "again")
	all.want("fleet/7/telemetry seven", "fleet/8/telemetry eight", "fleet/7/telemetry again")
	one.want("fleet/7/telemetry seven", "fleet/7/telemetry again")
	testkit.Equal(t, publisher.publish("no/rule", "x", 1), 0x90)

	// A shared subscription reads the channel of an NSQ consumer.
	stop()
	testkit.Equal(t, publisher.publish("fleet/9/telemetry", "nine", 1), 0)
	worker := connect(t, b.mqtt, "worker")
	worker.subscribe("$share/archive/fleet/+/telemetry", 1)
	worker.want("fleet/9/telemetry nine")

	// A faulty file changes nothing. A good file counts at once.
	write("[[mqtt]]\nfilter = \"no/rule\"\ntopik = \"other\"\n")
	testkit.Must(t, b.process.Signal(syscall.SIGHUP))
	testkit.WaitFor(t, "the fault of the rules", func() bool { return strings.Contains(b.process.AllOutput(), "topik") })
	testkit.Equal(t, publisher.publish("no/rule", "x", 1), 0x90)
	write("[[mqtt]]\nfilter = \"no/rule\"\ntopic = \"other\"\n")
	testkit.Must(t, b.process.Signal(syscall.SIGHUP))
	testkit.WaitFor(t, "the new rules", func() bool { return publisher.publish("no/rule", "x", 1) == 0 })
}

// A kept session gets the messages that came while the client was disconnected, also after kill -9 of the broker.
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

// A connection with the same client id ends the older connection. A stopping broker sends the reason.
func TestBrokerSendsWhyItEndsAConnection(t *testing.T) {
	b := start(t)
	first := connect(t, b.mqtt, "same")
	first.subscribe("t", 1)
	second := connect(t, b.mqtt, "same")
	testkit.Equal(t, <-first.ended, 0x8E)
	subscriber := connect(t, b.mqtt, "subscriber", kept)
	subscriber.subscribe("t", 1)
	testkit.Must(t, b.process.Signal(syscall.SIGTERM))
	for _, d := range []*device{second, subscriber} {
		testkit.Equal(t, <-d.ended, 0x8B)
	}
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

// A device at a broker without the topic publishes and subscribes there. After a move to another broker the
// session is new, and the channel has the messages.
func TestDeviceAtAnyBrokerOfACluster(t *testing.T) {
	ports := localtest.Ports(t, 2)
	c := localtest.Start(t, 0, nil)
	for _, port := range ports {
		c.Join(t, "--mcap=1000", "--mqtt-address="+port)
	}
	publisher, subscriber := connect(t, ports[0], "publisher"), connect(t, ports[1], "subscriber", kept)
	subscriber.subscribe("shared", 1)
	testkit.Equal(t, publisher.publish("shared", "one", 1), 0)
	subscriber.want("shared one")
	subscriber.vanish()
	testkit.Equal(t, publisher.publish("shared", "two", 1), 0)
	subscriber = connect(t, ports[0], "subscriber", kept)
	testkit.Equal(t, subscriber.present, false)
	subscriber.subscribe("shared", 1)
	subscriber.want("shared two")

	// A clean start ends a session at each broker, with the channel, also at the broker without the topic.
	subscriber.vanish()
	for _, port := range ports {
		subscriber = connect(t, port, "subscriber", kept, func(c *paho.Connect) { c.CleanStart = true })
		testkit.Equal(t, subscriber.present, false)
		subscriber.subscribe("shared", 1)
		subscriber.vanish()
		testkit.Equal(t, publisher.publish("shared", "lost at "+port, 1), 0)
		subscriber = connect(t, port, "subscriber", kept, func(c *paho.Connect) { c.CleanStart = true })
		testkit.Equal(t, subscriber.present, false)
		subscriber.subscribe("shared", 1)
		testkit.Equal(t, publisher.publish("shared", "new at "+port, 1), 0)
		testkit.Equal(t, string((<-subscriber.received).Payload), "new at "+port)
		subscriber.vanish()
	}
}

// A device has a session at each of two brokers. The end of the older session leaves the channel to the later
// session, although the device is disconnected.
func TestLaterSessionAtAnotherBrokerKeepsItsChannel(t *testing.T) {
	ports := localtest.Ports(t, 2)
	c := localtest.Start(t, 0, nil)
	for _, port := range ports {
		c.Join(t, "--mcap=1000", "--mqtt-address="+port)
	}
	publisher := connect(t, ports[0], "publisher")
	for i, port := range ports {
		older := connect(t, port, "subscriber", keptFor(1))
		older.subscribe("shared", 1)
		later := connect(t, ports[1-i], "subscriber", kept)
		later.subscribe("shared", 1)
		older.vanish()
		later.vanish()
		message := "while disconnected from " + ports[1-i]
		testkit.Equal(t, publisher.publish("shared", message, 1), 0)
		testkit.WaitFor(t, "the end of the older session", func() bool {
			return testkit.Result(localtest.Metric(c.Brokers[i], "srtm_nsqd_mqtt_sessions")).Must(t) == 0
		})
		later = connect(t, ports[1-i], "subscriber", kept)
		testkit.Equal(t, later.present, true)
		later.want("shared " + message)
		// A clean start ends the session, so that the next round begins anew.
		later.vanish()
		connect(t, ports[1-i], "subscriber").vanish()
	}
}
