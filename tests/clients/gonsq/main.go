// Command gonsq drives go-nsq as tests/clients says; see doc.go there.
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
	"sync"
	"time"

	"github.com/nsqio/go-nsq"
)

// ask is the test's order.
type ask struct {
	Mode        string `json:"mode"`
	TCP         string `json:"tcp"`
	Lookup      string `json:"lookup"`
	Topic       string `json:"topic"`
	Channel     string `json:"channel"`
	Method      string `json:"method"`
	DelayMS     int    `json:"delay_ms"`
	InFlight    int    `json:"in_flight"`
	Handle      string `json:"handle"`
	HoldMS      int    `json:"hold_ms"`
	TLSCA       string `json:"tls_ca"`
	Compression string `json:"compression"`
	AuthSecret  string `json:"auth_secret"`
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

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	v := &voice{out: json.NewEncoder(os.Stdout)}
	if err := run(v, os.Args[1:], os.Stdin); err != nil {
		log.Error("driver", "error", err)
		os.Exit(1)
	}
	v.say(map[string]any{"event": "done"})
}

func run(v *voice, args []string, in io.Reader) error {
	if len(args) != 1 {
		return errors.New("want one argument, what to do as JSON")
	}
	var a ask
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	config, err := a.config()
	if err != nil {
		return err
	}
	if a.Mode == "produce" {
		return produce(v, a, config, in)
	}
	return consume(v, a, config, in)
}

func (a ask) config() (*nsq.Config, error) {
	c := nsq.NewConfig()
	c.HeartbeatInterval = 5 * time.Second
	c.LookupdPollInterval = 200 * time.Millisecond
	c.DefaultRequeueDelay = 0
	c.MaxBackoffDuration = 2 * time.Second
	c.BackoffMultiplier = 300 * time.Millisecond
	c.MaxAttempts = 0
	if a.InFlight > 0 {
		c.MaxInFlight = a.InFlight
	}
	if a.TLSCA != "" {
		pem, err := os.ReadFile(a.TLSCA)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", a.TLSCA)
		}
		c.TlsV1 = true
		c.TlsConfig = &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"}
	}
	c.Snappy = a.Compression == "snappy"
	c.Deflate = a.Compression == "deflate"
	c.AuthSecret = a.AuthSecret
	return c, nil
}

func produce(v *voice, a ask, config *nsq.Config, in io.Reader) error {
	p, err := nsq.NewProducer(a.TCP, config)
	if err != nil {
		return err
	}
	defer p.Stop()
	p.SetLoggerLevel(nsq.LogLevelMax)
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var texts []string
		if err := json.Unmarshal(line, &texts); err != nil {
			return err
		}
		var bodies [][]byte
		for _, t := range texts {
			bodies = append(bodies, []byte(t))
		}
		if a.Method == "mpub" {
			retry(v, func() error { return p.MultiPublish(a.Topic, bodies) })
		} else {
			for _, body := range bodies {
				retry(v, func() error {
					if a.Method == "dpub" {
						return p.DeferredPublish(a.Topic, time.Duration(a.DelayMS)*time.Millisecond, body)
					}
					return p.Publish(a.Topic, body)
				})
			}
		}
		v.say(map[string]any{"event": "published", "count": len(bodies)})
	}
}

// retry repeats failed publishes, as a producer's user does.
func retry(v *voice, publish func() error) {
	for err := publish(); err != nil; err = publish() {
		v.say(map[string]any{"event": "retry", "error": err.Error()})
		time.Sleep(100 * time.Millisecond)
	}
}

func consume(v *voice, a ask, config *nsq.Config, in io.Reader) error {
	c, err := nsq.NewConsumer(a.Topic, a.Channel, config)
	if err != nil {
		return err
	}
	c.SetLoggerLevel(nsq.LogLevelMax)
	c.AddConcurrentHandlers(nsq.HandlerFunc(func(m *nsq.Message) error {
		v.say(map[string]any{"event": "message", "body": string(m.Body), "attempts": m.Attempts})
		switch {
		case a.Handle == "touch":
			for range 8 {
				time.Sleep(time.Duration(a.HoldMS) * time.Millisecond / 8)
				m.Touch()
			}
		case a.Handle == "requeue" && m.Attempts == 1:
			m.RequeueWithoutBackoff(0)
		case a.Handle == "fail" && m.Attempts == 1:
			return errors.New("fails on purpose")
		}
		return nil
	}), max(1, a.InFlight))
	if a.Lookup != "" {
		err = c.ConnectToNSQLookupd(a.Lookup)
	} else {
		err = c.ConnectToNSQD(a.TCP)
	}
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, in) // the end of the input is the signal to stop
	c.Stop()
	<-c.StopChan
	return err
}
