package clients

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// envMQTT names the path of a mosquitto to test instead of our nsqd: what a library does beside
// another broker.
const envMQTT = "SRTM_CLIENTS_MOSQUITTO"

// device is a client library of MQTT, in one version of the protocol.
type device struct {
	library
	kind    string // order's Library
	version int    // 3 or 5
	silent  bool   // the library does not report whether the broker had a session
}

func pahoGo(name, kind string, version int, needs ...string) device {
	return device{library{
		name: name, folder: "mqttgo", needs: append(needs, "go"), always: kind == "paho",
		install: func(s *site) error { return s.run("go", "build", "-o", filepath.Join(s.to, "driver"), ".") },
		command: func(s *site) []string { return []string{filepath.Join(s.to, "driver")} },
	}, kind, version, kind == "mosquitto" || version == 3}
}

func pahoPython(name string, version int) device {
	l := libraries[1] // pynsq: the same way to install
	l.name, l.folder, l.lacks = name, "mqttpython", nil
	return device{l, "paho", version, false}
}

func mqttJS(name string, version int) device {
	l := libraries[2] // nsqjs: the same way to install
	l.name, l.folder = name, "mqttnode"
	return device{l, "mqtt.js", version, false}
}

var devices = []device{
	pahoGo("mosquitto 3", "mosquitto", 3, "stdbuf", "mosquitto_pub", "mosquitto_sub"),
	pahoGo("mosquitto 5", "mosquitto", 5, "stdbuf", "mosquitto_pub", "mosquitto_sub"),
	pahoGo("paho Go 3", "paho", 3),
	pahoGo("paho Go 5", "paho", 5),
	pahoPython("paho Python 3", 3),
	pahoPython("paho Python 5", 5),
	mqttJS("mqtt.js 3", 3),
	mqttJS("mqtt.js 5", 5),
}

var deviceScenarios = []struct {
	name string
	run  func(t *testing.T, d device, s *site)
}{
	{"publish, subscribe", devicePublishes},
	{"to NSQ", deviceToNSQ},
	{"shared subscription", deviceShares},
	{"reconnect", deviceReconnects},
	{"will", deviceHasAWill},
	{"TLS", deviceEncrypts},
	{"large payloads", deviceSendsLarge},
	{"session expiry", deviceResumes},
}

func TestDevices(t *testing.T) {
	for _, d := range devices {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			t.Cleanup(func() { results.library(t, d.name) })
			s := d.prepare(t)
			for _, c := range deviceScenarios {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					t.Cleanup(func() { results.scenario(t, d.name, c.name) })
					c.run(t, d, s)
				})
			}
		})
	}
}

// mqttBroker is a broker that devices connect to.
type mqttBroker struct {
	tcp, tls string         // host:port
	ca       string         // file; "" without TLS
	nsqd     *local.Process // nil for mosquitto
}

// mqttRules map the names of the scenarios.
const mqttRules = "[[mqtt]]\nfilter = \"site/+/level\"\ntopic = \"level\"\npublisher = \"{1}\"\n"

// mqtt runs a broker for as long as t lasts.
func mqtt(t *testing.T, encrypted bool) *mqttBroker {
	t.Helper()
	ports, dir := localtest.Ports(t, 2), t.TempDir()
	b := &mqttBroker{tcp: ports[0]}
	var cert testkit.Certificate
	if encrypted {
		a := testkit.NewAuthority(t)
		cert, b.ca, b.tls = a.Certificate("nsqd"), a.File, ports[1]
	}
	if path := os.Getenv(envMQTT); path != "" {
		text := "listener " + port(b.tcp) + " 127.0.0.1\nuser root\nallow_anonymous true\nset_tcp_nodelay true\n"
		if encrypted {
			text += "listener " + port(b.tls) + " 127.0.0.1\ncertfile " + cert.CertFile + "\nkeyfile " + cert.KeyFile + "\n"
		}
		file := filepath.Join(dir, "mosquitto.conf")
		testkit.Must(t, os.WriteFile(file, []byte(text), 0o600))
		p, err := local.Start(path, []string{"-c", file}, local.Options{Log: filepath.Join(dir, "log"), Ready: local.Accepts(b.tcp)})
		localtest.Watch(t, p, err)
		return b
	}
	file := filepath.Join(dir, "rules.toml")
	testkit.Must(t, os.WriteFile(file, []byte(mqttRules), 0o600))
	flags := []string{"--mqtt-address=" + b.tcp, "--mqtt-rules=" + file}
	if encrypted {
		flags = append(flags, "--mqtts-address="+b.tls, "--tls-cert="+cert.CertFile, "--tls-key="+cert.KeyFile)
	}
	b.nsqd = start(t, flags...)
	return b
}

func port(address string) string {
	_, port, _ := net.SplitHostPort(address)
	return port
}

// order returns the common part of a device's orders.
func (d device) order(mode, address, id, topic string) order {
	return order{Library: d.kind, Version: d.version, Mode: mode, TCP: address, ClientID: id, Topic: topic}
}

// subscriber starts a subscriber and waits for its SUBACK. present is whether the broker had a
// session, if the library reports it.
func (d device) subscriber(t *testing.T, s *site, o order) (c *driver, present bool) {
	t.Helper()
	c = drive(t, d.library, s, o)
	for {
		e, err := c.next(patience)
		switch {
		case err == nil && e.Event == "ready":
			return c, e.Present
		case err == nil && e.Event == "message" && o.Resume:
			c.early = append(c.early, e) // of the session, before SUBACK
		default:
			t.Fatalf("subscribe to %s: %+v, %v", o.Topic, e, err)
		}
	}
}

// lines are texts without line ends, which mosquitto_pub cannot send.
func lines(prefix string, count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprintf("%s %03d ü ☃ \"\\", prefix, i))
	}
	return all
}

func names(events []event) (all []string) {
	for _, e := range events {
		all = append(all, e.Topic)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// A subscriber gets every message, in order, with the MQTT name that the publisher used.
func devicePublishes(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	plain, _ := d.subscriber(t, s, d.order("consume", b.tcp, "sub-plain", "plain"))
	rule, _ := d.subscriber(t, s, d.order("consume", b.tcp, "sub-rule", "site/+/level"))
	narrow, _ := d.subscriber(t, s, d.order("consume", b.tcp, "sub-narrow", "site/7/level"))
	for _, name := range []string{"plain", "site/7/level", "site/8/level"} {
		p := drive(t, d.library, s, d.order("produce", b.tcp, "pub", name))
		p.publish(lines(name, 20)...)
		p.publish(lines(name+" again", 1)...)
		p.end()
	}
	want := func(name string) []string { return append(lines(name, 20), lines(name+" again", 1)...) }
	got := plain.messages(21)
	testkit.Equal(t, strings.Join(texts(got), "\n"), strings.Join(want("plain"), "\n"), "messages of the plain topic, in order")
	testkit.Equal(t, strings.Join(names(got), " "), "plain", "names")
	both := rule.messages(42)
	same(t, texts(both), append(want("site/7/level"), want("site/8/level")...))
	testkit.Equal(t, strings.Join(names(both), " "), "site/7/level site/8/level", "names")
	same(t, texts(narrow.messages(21)), want("site/7/level"))
	for _, c := range []*driver{plain, rule, narrow} {
		if rest := c.end(); len(rest) > 0 {
			t.Errorf("messages again, or of another name: %+v", rest)
		}
	}
}

// A consumer of NSQ gets a device's messages, and a device gets the messages of a producer of NSQ.
func deviceToNSQ(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	if b.nsqd == nil {
		results.skip(t, d.name, "to NSQ", "the broker under test does not speak NSQ")
	}
	gonsq := prepare(t, "go-nsq")
	c := drive(t, libraries[0], gonsq, order{Mode: "consume", TCP: b.nsqd.TCP, Topic: "level", Channel: ch, InFlight: 10, Handle: "finish"})
	p := drive(t, d.library, s, d.order("produce", b.tcp, "pub", "site/7/level"))
	p.publish(lines("from a device", 20)...)
	same(t, texts(c.messages(20)), lines("from a device", 20))
	p.end()
	c.end()
	sub, _ := d.subscriber(t, s, d.order("consume", b.tcp, "sub", "plain"))
	send(t, b.nsqd, "plain", lines("from NSQ", 20)...)
	got := sub.messages(20)
	same(t, texts(got), lines("from NSQ", 20))
	testkit.Equal(t, strings.Join(names(got), " "), "plain", "names")
	sub.end()
}

// Two subscribers of a shared subscription get each message once between them.
func deviceShares(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	one, _ := d.subscriber(t, s, d.order("consume", b.tcp, "one", "$share/workers/plain"))
	two, _ := d.subscriber(t, s, d.order("consume", b.tcp, "two", "$share/workers/plain"))
	p := drive(t, d.library, s, d.order("produce", b.tcp, "pub", "plain"))
	want := lines("shared", 200)
	p.publish(want...)
	got := append(one.messages(1), two.messages(1)...)
	p.end()
	var rest sync.WaitGroup
	var mu sync.Mutex
	all := make(chan struct{})
	for _, c := range []*driver{one, two} {
		rest.Go(func() {
			for {
				select {
				case e := <-c.events:
					mu.Lock()
					got = append(got, e)
					if len(got) == len(want) {
						close(all)
					}
					mu.Unlock()
				case <-all:
					return
				}
			}
		})
	}
	select {
	case <-all:
	case <-t.Context().Done():
	}
	rest.Wait()
	same(t, texts(got), want)
	for _, c := range []*driver{one, two} {
		if rest := c.end(); len(rest) > 0 {
			t.Errorf("messages again: %+v", rest)
		}
	}
}

// A device that loses its connection gets the messages that came meanwhile.
func deviceReconnects(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	through := newCable(t, b.tcp)
	o := d.order("consume", through.address(), "sub", "plain")
	o.Resume, o.Expiry = true, 3600
	sub, _ := d.subscriber(t, s, o)
	p := drive(t, d.library, s, d.order("produce", b.tcp, "pub", "plain"))
	p.publish(lines("before", 10)...)
	same(t, texts(sub.messages(10)), lines("before", 10))
	through.cut()
	p.publish(lines("after", 10)...)
	got := map[string]bool{}
	for len(got) < 10 { // a message may come twice: at least once
		for _, body := range texts(sub.messages(1)) {
			if !strings.HasPrefix(body, "before") {
				got[body] = true
			}
		}
	}
	for _, body := range lines("after", 10) {
		if !got[body] {
			t.Errorf("%q is missing", body)
		}
	}
	p.end()
	sub.end()
}

// The broker publishes the will of a device that ends without DISCONNECT, and no other will.
func deviceHasAWill(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	watcher, _ := d.subscriber(t, s, d.order("consume", b.tcp, "watcher", "status"))
	withWill := func(id string) *driver {
		o := d.order("consume", b.tcp, id, "plain")
		o.WillName, o.WillBody = "status", id+" is gone"
		c, _ := d.subscriber(t, s, o)
		return c
	}
	if d.kind != "mosquitto" || d.version != 5 { // mosquitto_sub requests its will with DISCONNECT
		withWill("polite").end()
	}
	rude := withWill("rude")
	testkit.Must(t, rude.cmd.Process.Kill())
	got := watcher.messages(1)
	testkit.Equal(t, got[0].Body, "rude is gone", "the will")
	testkit.Equal(t, got[0].Topic, "status", "the will's name")
	if rest := watcher.end(); len(rest) > 0 {
		t.Errorf("more wills: %+v", rest)
	}
}

func deviceEncrypts(t *testing.T, d device, s *site) {
	b := mqtt(t, true)
	sub, pub := d.order("consume", b.tls, "sub", "plain"), d.order("produce", b.tls, "pub", "plain")
	sub.TLSCA, pub.TLSCA = b.ca, b.ca
	c, _ := d.subscriber(t, s, sub)
	p := drive(t, d.library, s, pub)
	p.publish(lines("secret", 20)...)
	same(t, texts(c.messages(20)), lines("secret", 20))
	p.end()
	c.end()
}

func deviceSendsLarge(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	c, _ := d.subscriber(t, s, d.order("consume", b.tcp, "sub", "plain"))
	p := drive(t, d.library, s, d.order("produce", b.tcp, "pub", "plain"))
	var want []string
	for _, size := range []int{1, 127, 128, 16_383, 16_384, 1_000_000} {
		want = append(want, strings.Repeat("x", size))
	}
	p.publish(want...)
	same(t, texts(c.messages(len(want))), want)
	p.end()
	c.end()
}

// A session lasts until its expiry: the device gets what came while it was disconnected. A clean start, or no
// expiry, ends the session.
func deviceResumes(t *testing.T, d device, s *site) {
	b := mqtt(t, false)
	away := d.order("consume", b.tcp, "sub", "plain")
	away.Resume, away.Expiry = true, 3600
	c, present := d.subscriber(t, s, away)
	if present {
		t.Error("a session of a new device")
	}
	c.end()
	p := drive(t, d.library, s, d.order("produce", b.tcp, "pub", "plain"))
	p.publish(lines("away", 10)...)
	c, present = d.subscriber(t, s, away)
	if !present && !d.silent {
		t.Error("the session is gone before its expiry")
	}
	same(t, texts(c.messages(10)), lines("away", 10))
	c.end()
	clean, present := d.subscriber(t, s, d.order("consume", b.tcp, "sub", "plain"))
	if present {
		t.Error("a session after a clean start")
	}
	clean.end()
	if b.nsqd != nil { // a topic without a channel keeps its messages for the first channel
		post(t, b.nsqd, "/channel/create?topic=plain&channel=other", "")
	}
	p.publish(lines("to no session", 10)...)
	clean, _ = d.subscriber(t, s, d.order("consume", b.tcp, "sub", "plain"))
	p.publish(lines("last", 1)...)
	testkit.Equal(t, texts(clean.messages(1))[0], lines("last", 1)[0], "the first message of a new session")
	p.end()
	clean.end()
}

// cable forwards connections to a broker until cut.
type cable struct {
	listener net.Listener
	target   string
	running  sync.WaitGroup

	mu   sync.Mutex
	open []net.Conn // guarded by mu
}

func newCable(t *testing.T, target string) *cable {
	t.Helper()
	c := &cable{listener: testkit.Result(net.Listen("tcp", "127.0.0.1:0")).Must(t), target: target}
	c.running.Go(func() {
		for {
			near, err := c.listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", c.target)
			if err != nil {
				_ = near.Close()
				continue
			}
			c.mu.Lock()
			c.open = append(c.open, near, far)
			c.mu.Unlock()
			for _, pair := range [][2]net.Conn{{near, far}, {far, near}} {
				c.running.Go(func() {
					_, _ = io.Copy(pair[0], pair[1])
					_ = pair[0].Close()
					_ = pair[1].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		_ = c.listener.Close()
		c.cut()
		c.running.Wait()
	})
	return c
}

func (c *cable) address() string { return c.listener.Addr().String() }

// cut ends all connections. New connections are forwarded.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.open {
		_ = conn.Close()
	}
	c.open = nil
}
