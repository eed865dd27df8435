package clients

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// order is a driver's task; see doc.go.
type order struct {
	Mode        string `json:"mode"` // produce or consume
	TCP         string `json:"tcp,omitempty"`
	Lookup      string `json:"lookup,omitempty"` // host:port of a lookup service, instead of tcp
	Topic       string `json:"topic"`
	Channel     string `json:"channel,omitempty"`
	Method      string `json:"method,omitempty"`    // pub, mpub, dpub
	DelayMS     int    `json:"delay_ms,omitempty"`  // of dpub
	InFlight    int    `json:"in_flight,omitempty"` // of a consumer
	Handle      string `json:"handle,omitempty"`    // finish; requeue, fail: the first attempt; touch: eight times within hold_ms
	HoldMS      int    `json:"hold_ms,omitempty"`
	TLSCA       string `json:"tls_ca,omitempty"`      // file; if set, use TLS
	Compression string `json:"compression,omitempty"` // snappy or deflate
	AuthSecret  string `json:"auth_secret,omitempty"`

	// Only MQTT. Topic is then a name of messages, or a filter.
	Library  string `json:"library,omitempty"`
	Version  int    `json:"version,omitempty"` // 3 or 5
	ClientID string `json:"client_id,omitempty"`
	Resume   bool   `json:"resume,omitempty"` // no clean start
	Expiry   int    `json:"expiry,omitempty"` // of the session, in seconds
	WillName string `json:"will_topic,omitempty"`
	WillBody string `json:"will_body,omitempty"`
}

// event is an event that a driver reports.
type event struct {
	Event    string `json:"event"`
	Body     string `json:"body"`
	Attempts int    `json:"attempts"`
	Count    int    `json:"count"`
	Error    string `json:"error"`
	Topic    string `json:"topic"`   // of a message of MQTT
	Present  bool   `json:"present"` // of a subscriber of MQTT: the broker had a session
}

// driver is a running driver.
type driver struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     io.WriteCloser
	events chan event // closed at the end of the driver's output
	errors struct {
		mu sync.Mutex // guards Buffer
		bytes.Buffer
	}
	early []event // messages that came before the subscriber was ready; messages returns them first
	ended bool
}

type lockedWriter struct{ d *driver }

func (w lockedWriter) Write(b []byte) (int, error) {
	w.d.errors.mu.Lock()
	defer w.d.errors.mu.Unlock()
	return w.d.errors.Write(b)
}

// drive starts a library's driver.
func drive(t *testing.T, l library, s *site, o order) *driver {
	t.Helper()
	text := testkit.Result(json.Marshal(o)).Must(t)
	argv := append(l.command(s), string(text))
	d := &driver{t: t, cmd: exec.Command(argv[0], argv[1:]...), events: make(chan event, 1000)}
	d.cmd.Dir, d.cmd.Stderr = s.to, lockedWriter{d}
	out := testkit.Result(d.cmd.StdoutPipe()).Must(t)
	d.in = testkit.Result(d.cmd.StdinPipe()).Must(t)
	testkit.Must(t, d.cmd.Start())
	var reader sync.WaitGroup
	reader.Go(func() { d.read(out) })
	t.Cleanup(func() {
		if !d.ended {
			_ = d.cmd.Process.Kill() // the driver may have ended by itself
			for range d.events {
			}
			reader.Wait()
			_ = d.cmd.Wait() // the killed process returns an error
		}
		reader.Wait()
		if t.Failed() {
			d.errors.mu.Lock()
			defer d.errors.mu.Unlock()
			text := d.errors.String()
			t.Logf("%s %s printed last:\n%s", l.name, o.Mode, text[max(0, len(text)-2000):])
		}
	})
	return d
}

func (d *driver) read(out io.Reader) {
	defer close(d.events)
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			e = event{Event: "fault", Error: fmt.Sprintf("%.200q: %v", lines.Text(), err)}
		}
		d.events <- e
	}
}

// next returns the next event that is not a retry.
func (d *driver) next(within time.Duration) (event, error) {
	timer := time.NewTimer(within)
	defer timer.Stop()
	for {
		select {
		case e, more := <-d.events:
			switch {
			case !more:
				return event{}, errors.New("the driver has ended")
			case e.Event == "retry":
				d.t.Logf("retry: %s", e.Error)
				continue
			case e.Event == "fault" || e.Event == "error":
				return e, errors.New(e.Error)
			}
			return e, nil
		case <-timer.C:
			return event{}, fmt.Errorf("nothing in %v", within)
		}
	}
}

// publish makes a producer publish bodies together.
func (d *driver) publish(bodies ...string) {
	d.t.Helper()
	line := testkit.Result(json.Marshal(bodies)).Must(d.t)
	_, err := d.in.Write(append(line, '\n'))
	testkit.Must(d.t, err)
	if e, err := d.next(patience); err != nil || e.Event != "published" || e.Count != len(bodies) {
		d.t.Fatalf("published %d: got %+v, %v", len(bodies), e, err)
	}
}

// messages waits for count messages of a consumer.
func (d *driver) messages(count int) (got []event) {
	d.t.Helper()
	got, d.early = d.early, nil
	for len(got) < count {
		e, err := d.next(patience)
		if err != nil || e.Event != "message" {
			d.t.Fatalf("message %d of %d: got %+v, %v", len(got)+1, count, e, err)
		}
		got = append(got, e)
	}
	return got
}

// end closes the driver's input and returns the remaining events: messages that came again to a
// consumer.
func (d *driver) end() (rest []event) {
	d.t.Helper()
	testkit.Must(d.t, d.in.Close())
	for {
		e, err := d.next(patience)
		if err != nil {
			d.t.Fatalf("at the end: %v", err)
		}
		if e.Event == "done" {
			break
		}
		rest = append(rest, e)
	}
	for e := range d.events {
		d.t.Errorf("after done: %+v", e)
	}
	d.ended = true
	if err := d.cmd.Wait(); err != nil {
		d.t.Errorf("exit: %v", err)
	}
	return rest
}
