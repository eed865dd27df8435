package main

import (
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/eclipse/paho.golang/autopaho"
	"github.com/eclipse/paho.golang/paho"
)

// paho5 is a client of github.com/eclipse/paho.golang.
type paho5 struct {
	a      *ask
	client *autopaho.ConnectionManager
}

func openPaho5(v *voice, a *ask) (user, error) {
	trust, err := a.trust()
	if err != nil {
		return nil, err
	}
	server := &url.URL{Scheme: "mqtt", Host: a.TCP}
	if trust != nil {
		server.Scheme = "mqtts"
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	first := true
	config := autopaho.ClientConfig{
		ServerUrls: []*url.URL{server}, TlsCfg: trust, KeepAlive: 5, CleanStartOnInitialConnection: !a.Resume, SessionExpiryInterval: uint32(a.Expiry),
		ReconnectBackoff: autopaho.NewConstantBackoff(time.Second),
		OnConnectError:   v.retry,
		OnConnectionUp: func(c *autopaho.ConnectionManager, answer *paho.Connack) {
			if a.Mode != "consume" {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if _, err := c.Subscribe(ctx, &paho.Subscribe{Subscriptions: []paho.SubscribeOptions{{Topic: a.Topic, QoS: 1}}}); err != nil {
				v.retry(err)
			} else if first {
				first = false
				v.ready(answer.SessionPresent)
			}
		},
		ClientConfig: paho.ClientConfig{
			ClientID: a.ClientID,
			OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(m paho.PublishReceived) (bool, error) {
				v.message(m.Packet.Topic, m.Packet.Payload)
				return true, nil
			}},
			OnServerDisconnect: func(d *paho.Disconnect) { v.retry(fmt.Errorf("DISCONNECT, reason %#x", d.ReasonCode)) },
		},
	}
	if a.WillName != "" {
		config.WillMessage = &paho.WillMessage{Topic: a.WillName, Payload: []byte(a.WillBody), QoS: 1}
	}
	c := &paho5{a: a}
	if c.client, err = autopaho.NewConnection(context.Background(), config); err != nil {
		return nil, err
	}
	return c, c.client.AwaitConnection(ctx)
}

func (c *paho5) publish(bodies []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, body := range bodies {
		for {
			_, err := c.client.Publish(ctx, &paho.Publish{Topic: c.a.Topic, QoS: 1, Payload: []byte(body)})
			if err == nil {
				break
			}
			// A lost connection: the message is published again on the next one.
			if waiting := c.client.AwaitConnection(ctx); waiting != nil {
				return fmt.Errorf("%w; %w", err, waiting)
			}
		}
	}
	return nil
}

func (c *paho5) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return c.client.Disconnect(ctx)
}
