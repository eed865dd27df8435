// Command mqttgo drives three clients of MQTT as tests/clients says; see doc.go there: paho's two Go
// libraries, for MQTT 3.1.1 and for 5.0, and the programs mosquitto_pub and mosquitto_sub.
package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"
)

// ask is the test's order.
type ask struct {
	Library  string `json:"library"` // mosquitto or paho
	Mode     string `json:"mode"`
	TCP      string `json:"tcp"`
	Version  int    `json:"version"` // 3 or 5
	ClientID string `json:"client_id"`
	Topic    string `json:"topic"` // a name of messages, or a filter
	Resume   bool   `json:"resume"`
	Expiry   int    `json:"expiry"` // seconds
	WillName string `json:"will_topic"`
	WillBody string `json:"will_body"`
	TLSCA    string `json:"tls_ca"`
}

// patience bounds each wait for the broker.
const patience = time.Minute

// user is a client that is connected, or connects again by itself.
type user interface {
	// publish returns after the broker has acknowledged all bodies.
	publish(bodies []string) error
	close() error
}

// voice writes events, one per line.
type voice struct {
	mu  sync.Mutex // guards out
	out *json.Encoder
}

func (v *voice) say(event map[string]any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	_ = v.out.Encode(event) // the test has ended
}

func (v *voice) message(topic string, body []byte) {
	v.say(map[string]any{"event": "message", "topic": topic, "body": string(body)})
}

func (v *voice) ready(present bool) { v.say(map[string]any{"event": "ready", "present": present}) }

func (v *voice) retry(err error) { v.say(map[string]any{"event": "retry", "error": err.Error()}) }

func main() {
	runtime.LockOSThread() // mosquitto's programs end with this thread
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	v := &voice{out: json.NewEncoder(os.Stdout)}
	if err := run(v, os.Args[1:], os.Stdin); err != nil {
		log.Error("driver", "error", err)
		v.say(map[string]any{"event": "error", "error": err.Error()})
		os.Exit(1)
	}
	v.say(map[string]any{"event": "done"})
}

func run(v *voice, args []string, in io.Reader) error {
	var a ask
	if len(args) != 1 {
		return errors.New("want one argument, the order")
	}
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	open := openPaho3
	switch {
	case a.Library == "mosquitto":
		open = openMosquitto
	case a.Version == 5:
		open = openPaho5
	}
	c, err := open(v, &a)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var bodies []string
		if err := json.Unmarshal(lines.Bytes(), &bodies); err != nil {
			return err
		}
		if err := c.publish(bodies); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		v.say(map[string]any{"event": "published", "count": len(bodies)})
	}
	return errors.Join(lines.Err(), c.close())
}

// trust returns the configuration of TLS, or nil.
func (a *ask) trust() (*tls.Config, error) {
	if a.TLSCA == "" {
		return nil, nil
	}
	text, err := os.ReadFile(a.TLSCA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, nil
}
