//go:build linux

package load

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
)

// Durable is SRTM's nsqd with a durability of its own: memory or fsync. The topic has no
// contract.
func Durable(path, durability string) Broker {
	return NSQ(durability, path, "", func(Scenario) []string { return []string{"--durability=" + durability} })
}

// Replicated is SRTM's nsqd that stores each message in NATS servers before the reply. The
// processor time and the memory of the servers count.
func Replicated(path, nats string, replicas int) Broker {
	b := NSQ(fmt.Sprint("replicated-", replicas), path, "", func(Scenario) []string { return nil })
	b.nats, b.replicas = nats, replicas
	return b
}

// JetStream is a stream of NATS servers. A publisher gets a reply when the servers have
// stored its message.
func JetStream(natsServer string, replicas int) Broker {
	return Broker{
		Name: fmt.Sprint("jetstream-", replicas), Dialect: jetstreamDialect(), nats: natsServer, replicas: replicas,
		Prepare: func(ctx context.Context, at Place) error {
			c, err := nats.Connect("nats://"+at.TCP, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
			if err != nil {
				return err
			}
			defer c.Close()
			js, err := c.JetStream(nats.MaxWait(time.Second))
			if err != nil {
				return err
			}
			for limit := clock.Mono().Add(local.Patience); ; { // until the servers have elected a leader
				if _, err = js.AddStream(&nats.StreamConfig{Name: Topic, Subjects: []string{Topic}, Replicas: replicas, Storage: nats.FileStorage}); err == nil {
					_, err = js.AddConsumer(Topic, &nats.ConsumerConfig{Durable: "c0", DeliverSubject: deliverTo(source{Topic, "c0"}), AckPolicy: nats.AckExplicitPolicy, MaxAckPending: credit})
				}
				if err == nil || limit.Before(clock.Mono()) || !clock.Sleep(ctx, 50*time.Millisecond) {
					return err
				}
			}
		},
	}
}

// deliverTo is the subject to which the stream delivers a channel's messages.
func deliverTo(from source) string { return "deliver." + from.topic + "." + from.channel }

// jetstreamDialect is the protocol of NATS with a stream. A publisher subscribes to a subject
// of its own, to which the stream sends replies.
func jetstreamDialect() Dialect {
	inbox := func(id string) string { return "_INBOX." + id }
	d := natsDialect()
	d.personal = true
	d.frame = func(to target, size, n int, _ bool) ([]byte, []int) {
		head := fmt.Sprintf("PUB %s %s %d\r\n", to.topic, inbox(to.id), size)
		return repeat(append(append([]byte(head), make([]byte, size)...), "\r\n"...), len(head), n)
	}
	d.hello = func(c net.Conn, id string) error { return natsHello(c, "SUB "+inbox(id)+" 1\r\n") }
	d.answers = func(in []byte, _ int) (accepted, used int, err error) {
		for {
			_, body, n, err := parseNATS(in[used:])
			if err != nil || n == 0 {
				return accepted, used, err
			}
			used += n
			switch {
			case bytes.Contains(body, []byte(`"error"`)):
				return accepted, used, fmt.Errorf("jetstream: %s", body)
			case body != nil:
				accepted++
			}
		}
	}
	d.subscribe = func(c net.Conn, from source) error { return natsHello(c, "SUB "+deliverTo(from)+" 1\r\n") }
	return d
}
