package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// mosquitto runs mosquitto_sub, and mosquitto_pub for each publish.
type mosquitto struct {
	a    *ask
	sub  *exec.Cmd     // nil for a publisher
	done chan struct{} // closed at the end of the subscriber's output
}

func openMosquitto(v *voice, a *ask) (user, error) {
	c := &mosquitto{a: a, done: make(chan struct{})}
	if a.Mode != "consume" {
		return c, nil
	}
	args, err := c.args()
	if err != nil {
		return nil, err
	}
	// %j is a JSON object. -d reports the SUBACK. stdbuf: mosquitto_sub writes its reports late to a pipe.
	args = append([]string{"-oL", "mosquitto_sub"}, append(args, "-i", a.ClientID, "-d", "-F", "%j")...)
	if a.Resume {
		args = append(args, "-c")
	}
	if a.Version == 5 && a.Expiry > 0 {
		args = append(args, "-x", strconv.Itoa(a.Expiry))
	}
	if a.WillName != "" {
		args = append(args, "--will-topic", a.WillName, "--will-payload", a.WillBody, "--will-qos", "1")
	}
	c.sub = exec.Command("stdbuf", args...)
	c.sub.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c.sub.Stderr = os.Stderr
	out, err := c.sub.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.sub.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.done)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 16<<20)
		ready, last := false, ""
		for lines.Scan() {
			line := lines.Text()
			var m struct{ Topic, Payload string }
			switch {
			case line == last: // SIGTERM interrupted mosquitto_sub's output, and it wrote its buffer again
			case strings.HasPrefix(line, "{"):
				if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
					v.say(map[string]any{"event": "fault", "error": err.Error()})
				}
				last = line // has the time of its arrival
				v.message(m.Topic, []byte(m.Payload))
			case strings.HasPrefix(line, "Subscribed ") && !ready:
				ready = true
				v.say(map[string]any{"event": "ready"})
			}
		}
	}()
	return c, nil
}

// args returns the arguments that mosquitto_pub and mosquitto_sub share.
func (c *mosquitto) args() ([]string, error) {
	host, port, err := net.SplitHostPort(c.a.TCP)
	if err != nil {
		return nil, err
	}
	version := "mqttv311"
	if c.a.Version == 5 {
		version = "mqttv5"
	}
	args := []string{"-h", host, "-p", port, "-V", version, "-q", "1", "-t", c.a.Topic, "-k", "5"}
	if c.a.TLSCA != "" {
		args = append(args, "--cafile", c.a.TLSCA)
	}
	return args, nil
}

func (c *mosquitto) publish(bodies []string) error {
	args, err := c.args()
	if err != nil {
		return err
	}
	pub := exec.Command("mosquitto_pub", append(args, "-i", c.a.ClientID, "-l")...)
	pub.Stdin = strings.NewReader(strings.Join(bodies, "\n") + "\n")
	pub.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if text, err := pub.CombinedOutput(); err != nil {
		return fmt.Errorf("mosquitto_pub: %w: %s", err, text)
	}
	return nil
}

func (c *mosquitto) close() error {
	if c.sub == nil {
		return nil
	}
	// mosquitto_sub sends DISCONNECT after SIGTERM.
	err := c.sub.Process.Signal(syscall.SIGTERM)
	<-c.done
	if waited := c.sub.Wait(); waited != nil {
		var exit *exec.ExitError
		if !errors.As(waited, &exit) {
			err = errors.Join(err, waited)
		}
	}
	return err
}
