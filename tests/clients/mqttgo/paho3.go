package main

import (
	"fmt"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

// paho3 is a client of github.com/eclipse/paho.mqtt.golang.
type paho3 struct {
	a      *ask
	client mqtt.Client
}

func openPaho3(v *voice, a *ask) (user, error) {
	trust, err := a.trust()
	if err != nil {
		return nil, err
	}
	scheme := "tcp://"
	if trust != nil {
		scheme = "ssl://"
	}
	first := true
	o := mqtt.NewClientOptions().AddBroker(scheme + a.TCP).SetClientID(a.ClientID).SetCleanSession(!a.Resume).
		SetProtocolVersion(4).SetKeepAlive(5 * time.Second).SetMaxReconnectInterval(time.Second).SetConnectRetry(true).SetConnectRetryInterval(time.Second).
		SetDefaultPublishHandler(func(_ mqtt.Client, m mqtt.Message) { v.message(m.Topic(), m.Payload()) })
	if trust != nil {
		o.SetTLSConfig(trust)
	}
	if a.WillName != "" {
		o.SetWill(a.WillName, a.WillBody, 1, false)
	}
	o.SetConnectionLostHandler(func(_ mqtt.Client, err error) { v.retry(err) })
	o.SetOnConnectHandler(func(c mqtt.Client) {
		if a.Mode != "consume" {
			return
		}
		t := c.Subscribe(a.Topic, 1, nil)
		t.WaitTimeout(patience)
		if err := t.Error(); err != nil {
			v.retry(err)
		} else if first {
			first = false
			v.say(map[string]any{"event": "ready"})
		}
	})
	c := &paho3{a, mqtt.NewClient(o)}
	return c, c.wait(c.client.Connect())
}

func (c *paho3) wait(t mqtt.Token) error {
	if !t.WaitTimeout(patience) {
		return fmt.Errorf("no answer within %v", patience)
	}
	return t.Error()
}

func (c *paho3) publish(bodies []string) error {
	var all []mqtt.Token
	for _, body := range bodies {
		all = append(all, c.client.Publish(c.a.Topic, 1, false, body))
	}
	for _, t := range all {
		if err := c.wait(t); err != nil {
			return err
		}
	}
	return nil
}

func (c *paho3) close() error {
	c.client.Disconnect(250)
	return nil
}
