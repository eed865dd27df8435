package hostile

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// broker is the broker under attack.
type broker struct {
	*local.Process
	mqtt string // address; "": none
}

// start runs an nsqd as long as t lasts. With mqtt, it serves MQTT, too.
func start(t *testing.T, binary string, mqtt bool, flags ...string) *broker {
	t.Helper()
	flags = append([]string{"--drain-timeout=0s"}, flags...)
	b := new(broker)
	if mqtt {
		b.mqtt = localtest.Ports(t, 1)[0]
		flags = append(flags, "--mqtt-address="+b.mqtt)
	}
	b.Process = localtest.NSQD(t, binary, flags...)
	return b
}

// dial opens a connection and sends the protocol's magic.
func (b *broker) dial() (net.Conn, error) {
	nc, err := net.Dial("tcp", b.TCP)
	if err != nil {
		return nil, err
	}
	if err := nc.SetDeadline(time.Now().Add(local.Patience)); err != nil {
		return nil, errors.Join(err, nc.Close())
	}
	if _, err := nc.Write(wire.AppendMagic(nil)); err != nil {
		return nil, errors.Join(err, nc.Close())
	}
	return nc, nil
}

// post sends a request over HTTP.
func (b *broker) post(path string, body io.Reader) error {
	res, err := web.Post("http://"+b.HTTP+path, "", body)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(res.Body)
	if err = errors.Join(err, res.Body.Close()); err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s %s", path, res.Status, answer)
	}
	return err
}

// metric returns a metric, or its sum over all labels.
func (b *broker) metric(name string) (float64, error) { return localtest.Metric(b.Process, name) }

// web keeps no connections, because kept connections would be goroutines.
var web = &http.Client{Timeout: local.Patience, Transport: &http.Transport{DisableKeepAlives: true}}

// residentBelow checks the process's peak memory.
func (b *broker) residentBelow(most int) error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.Pid()))
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			n, err := strconv.Atoi(fields[1])
			if err == nil && n<<10 > most {
				err = fmt.Errorf("the process had %d bytes, and may have %d", n<<10, most)
			}
			return err
		}
	}
	return errors.Join(err, errors.New("no VmHWM"))
}

// maxFrame is more than a broker sends here.
const maxFrame = 1 << 20

// others are well-behaved clients: pairs of a publisher and a subscriber, each with its own topic.
// They publish on a schedule, and a latency counts from the scheduled time until the subscriber has
// the message. So any delay of the publisher counts, too.
type others struct{ pairs []*pair }

// dialect is the protocol of a pair.
type dialect interface {
	// subscribe opens the connection of a subscriber. The broker has answered the subscription.
	subscribe(b *broker, topic string) (net.Conn, error)
	dial(b *broker, topic string) (net.Conn, error)
	// publication encodes the publish of a message.
	publication(topic string, number int, body []byte) []byte
	// read reads the next packet. ack acknowledges body; nil: the packet has no message.
	read(in io.Reader) (body, ack []byte, err error)
}

const (
	pairs = 2
	// every is the interval between a publisher's messages.
	every = 2 * time.Millisecond
)

type pair struct {
	topic     string
	speaks    dialect
	pub, sub  net.Conn
	wg        sync.WaitGroup
	closing   atomic.Bool
	latencies chan time.Duration
}

// meet connects the others as long as t lasts. If the broker serves MQTT, the last pair speaks MQTT.
func meet(t *testing.T, b *broker) *others {
	t.Helper()
	o := new(others)
	for i := range pairs {
		p := &pair{topic: fmt.Sprintf("others-%d", i), speaks: speaksNSQ{}, latencies: make(chan time.Duration, 1<<10)}
		if b.mqtt != "" && i == pairs-1 {
			p.speaks = speaksMQTT{}
		}
		o.pairs = append(o.pairs, p)
		p.open(t, b)
	}
	return o
}

// connections returns the number of connections of the others.
func (o *others) connections() int { return 2 * len(o.pairs) }

func (p *pair) open(t *testing.T, b *broker) {
	t.Helper()
	var err error
	if p.sub, err = p.speaks.subscribe(b, p.topic); err == nil {
		p.pub, err = p.speaks.dial(b, p.topic)
	}
	if err == nil {
		err = errors.Join(p.sub.SetDeadline(time.Time{}), p.pub.SetDeadline(time.Time{}))
	}
	testkit.Must(t, err)
	p.wg.Go(func() { p.fault(t, "subscriber", p.receive()) })
	p.wg.Go(func() { p.fault(t, "publisher", p.answers()) })
	t.Cleanup(func() {
		p.closing.Store(true)
		p.pub.Close()
		p.sub.Close()
		p.wg.Wait()
	})
}

func (p *pair) fault(t *testing.T, who string, err error) {
	if err != nil && !p.closing.Load() {
		t.Errorf("%s of %s: %v", who, p.topic, err)
	}
}

var began = time.Now() // origin of the times in messages

func (p *pair) receive() error {
	in := bufio.NewReader(p.sub)
	for {
		body, ack, err := p.speaks.read(in)
		if err != nil {
			return err
		}
		if ack != nil {
			p.latencies <- time.Since(began) - time.Duration(binary.BigEndian.Uint64(body))
			if _, err := p.sub.Write(ack); err != nil {
				return err
			}
		}
	}
}

func (p *pair) answers() error {
	in := bufio.NewReader(p.pub)
	for {
		if _, _, err := p.speaks.read(in); err != nil {
			return err
		}
	}
}

// speaksNSQ makes a pair speak the NSQ protocol.
type speaksNSQ struct{}

func (speaksNSQ) subscribe(b *broker, topic string) (net.Conn, error) {
	nc, err := b.dial()
	if err == nil {
		err = write(nc, wire.AppendRdy(wire.AppendSub(nil, topic, "c"), 1000)) // the OK of SUB: the channel is there
	}
	return nc, err
}

func (speaksNSQ) dial(b *broker, _ string) (net.Conn, error) { return b.dial() }

func (speaksNSQ) publication(topic string, _ int, body []byte) []byte {
	return wire.AppendPub(nil, topic, body)
}

func (speaksNSQ) read(in io.Reader) (body, ack []byte, err error) {
	kind, data, err := frames.Read(in, maxFrame)
	switch {
	case err != nil:
		return nil, nil, err
	case kind == wire.FrameError:
		return nil, nil, errors.New(string(data))
	case kind != wire.FrameMessage:
		return nil, nil, nil
	}
	m, err := wire.ParseMessage(data)
	return m.Body, wire.AppendFin(nil, m.ID), err
}

// publish sends n messages, one per interval.
func (p *pair) publish(n int) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	start := time.Since(began)
	for i := range n {
		due := start + time.Duration(i)*every
		timer.Reset(due - time.Since(began))
		<-timer.C
		if _, err := p.pub.Write(p.speaks.publication(p.topic, i, binary.BigEndian.AppendUint64(nil, uint64(due)))); err != nil {
			return err
		}
	}
	return nil
}

// measure publishes for a duration, and returns all latencies.
func (o *others) measure(t *testing.T, duration time.Duration) (all []time.Duration) {
	t.Helper()
	n := int(duration / every)
	var wg sync.WaitGroup
	for _, p := range o.pairs {
		wg.Go(func() { p.fault(t, "publisher", p.publish(n)) })
	}
	patience := time.NewTimer(duration + local.Patience)
	defer patience.Stop()
	for _, p := range o.pairs {
		for range n {
			select {
			case d := <-p.latencies:
				all = append(all, d)
			case <-patience.C:
				t.Fatalf("a message of %s did not come within %v", p.topic, local.Patience)
			}
		}
	}
	wg.Wait()
	return all
}
