//go:build linux

package replicated

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
)

const topic = "bench"

// inFlight is the maximum number of unacknowledged messages of a consumer.
const inFlight = 2500

// silent discards the log of a client.
type silent struct{}

func (silent) Output(int, string) error { return nil }

type programs struct{ nsqd, nats, upstream string }

// server is a system under test.
type server struct {
	name, what string
	batches    bool // the client publishes many messages per command
	start      func(ctx context.Context, dir string) (*system, error)
}

// system is a running server.
type system struct {
	processes []*local.Process
	// publisher opens a new connection.
	publisher func() (publisher, error)
	// consume calls do with each message and acknowledges the message, until end is called.
	consume func(do func(body []byte)) (end func(), err error)
	closing []func()
}

func (s *system) stop() (err error) {
	for _, c := range s.closing {
		c()
	}
	for i := len(s.processes) - 1; i >= 0; i-- { // brokers before their stores
		err = errors.Join(err, s.processes[i].Stop())
	}
	return err
}

type publisher interface {
	// publish publishes bodies. After the acknowledgement or a failure, another goroutine
	// calls done.
	publish(bodies [][]byte, done func(error)) error
	close()
}

func (p programs) servers() []server {
	all := []server{
		p.ours("memory", "our nsqd, in memory until it ends", 0),
		p.ours("fsync", "our nsqd, on the disk before OK", 0),
		p.ours("replicated-1", "our nsqd, `--durability=replicated` on one nats-server", 1),
		p.ours("replicated-3", "our nsqd, `--durability=replicated` on three nats-servers", 3),
		{"jetstream-3", "a stream of three replicas, through NATS' Go client", false, func(ctx context.Context, dir string) (*system, error) {
			return p.jetstream(ctx, dir, 3)
		}},
	}
	if p.upstream != "" {
		all = append(all, server{"upstream", "NSQ's nsqd, in memory", true, func(_ context.Context, dir string) (*system, error) {
			return nsqd(p.upstream, dir, nil, "--data-path="+dir)
		}})
	}
	return all
}

func (p programs) ours(name, what string, replicas int) server {
	return server{name, what, true, func(ctx context.Context, dir string) (*system, error) {
		if replicas == 0 {
			return nsqd(p.nsqd, dir, nil, "--log-level=warn", "--durability="+name)
		}
		stores, urls, err := local.NATS(p.nats, dir, replicas)
		if err != nil {
			return nil, err
		}
		return nsqd(p.nsqd, dir, stores, "--log-level=warn", "--durability=replicated", "--broker-id=b", "--jetstream-url="+urls, "--jetstream-replicas="+strconv.Itoa(replicas))
	}}
}

func nsqd(path, dir string, stores []*local.Process, flags ...string) (*system, error) {
	b, err := local.NSQD(path, dir, flags...)
	s := &system{processes: stores}
	if err != nil {
		return nil, errors.Join(err, s.stop())
	}
	s.processes = append(s.processes, b)
	s.publisher = func() (publisher, error) {
		p, err := nsq.NewProducer(b.TCP, nsq.NewConfig())
		if err != nil {
			return nil, err
		}
		p.SetLogger(silent{}, nsq.LogLevelError)
		n := &nsqPublisher{p: p, done: make(chan *nsq.ProducerTransaction, ahead)}
		go func() {
			for t := range n.done {
				t.Args[0].(func(error))(t.Error)
			}
		}()
		return n, p.Ping()
	}
	s.consume = func(do func([]byte)) (func(), error) {
		cfg := nsq.NewConfig()
		cfg.MaxInFlight, cfg.OutputBufferSize, cfg.OutputBufferTimeout = inFlight, -1, -1 // delivers each message at once
		c, err := nsq.NewConsumer(topic, "c", cfg)
		if err != nil {
			return nil, err
		}
		c.SetLogger(silent{}, nsq.LogLevelError)
		c.AddHandler(nsq.HandlerFunc(func(m *nsq.Message) error {
			do(m.Body)
			return nil
		}))
		return func() {
			c.Stop()
			<-c.StopChan
		}, c.ConnectToNSQD(b.TCP)
	}
	return s, nil
}

type nsqPublisher struct {
	p    *nsq.Producer
	done chan *nsq.ProducerTransaction
}

func (n *nsqPublisher) publish(bodies [][]byte, done func(error)) error {
	if len(bodies) == 1 {
		return n.p.PublishAsync(topic, bodies[0], n.done, done)
	}
	return n.p.MultiPublishAsync(topic, bodies, n.done, done)
}

func (n *nsqPublisher) close() {
	n.p.Stop()
	close(n.done)
}

func (p programs) jetstream(ctx context.Context, dir string, replicas int) (_ *system, err error) {
	stores, urls, err := local.NATS(p.nats, dir, replicas)
	if err != nil {
		return nil, err
	}
	s := &system{processes: stores}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	connect := func() (jetstream.JetStream, func(), error) {
		nc, err := nats.Connect(urls, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
		if err != nil {
			return nil, nil, err
		}
		js, err := jetstream.New(nc)
		return js, nc.Close, err
	}
	js, end, err := connect()
	if err != nil {
		return nil, err
	}
	s.closing = append(s.closing, end)
	var stream jetstream.Stream
	for limit := time.Now().Add(local.Patience); ; { // until the servers have elected a leader
		one, cancel := context.WithTimeout(ctx, time.Second)
		stream, err = js.CreateOrUpdateStream(one, jetstream.StreamConfig{
			Name: topic, Subjects: []string{topic}, Replicas: replicas, Storage: jetstream.FileStorage,
		})
		cancel()
		if err == nil {
			break
		}
		if time.Now().After(limit) || !clock.Sleep(ctx, 50*time.Millisecond) {
			return nil, fmt.Errorf("make a stream: %w", err)
		}
	}
	s.publisher = func() (publisher, error) {
		js, end, err := connect()
		if err != nil {
			return nil, err
		}
		j := &jetPublisher{js: js, end: end, sent: make(chan jetSent, 1<<16)}
		go j.answers()
		return j, nil
	}
	s.consume = func(do func([]byte)) (func(), error) {
		c, err := stream.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
			Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: inFlight,
		})
		if err != nil {
			return nil, err
		}
		it, err := c.Consume(func(m jetstream.Msg) {
			do(m.Data())
			_ = m.Ack() // if the ack is lost, the message comes again and counts twice
		})
		if err != nil {
			return nil, err
		}
		return it.Stop, nil
	}
	return s, nil
}

type jetSent struct {
	ack  jetstream.PubAckFuture
	done func(error)
}

type jetPublisher struct {
	js   jetstream.JetStream
	end  func()
	sent chan jetSent
}

func (j *jetPublisher) publish(bodies [][]byte, done func(error)) error {
	ack, err := j.js.PublishAsync(topic, bodies[0])
	if err == nil {
		j.sent <- jetSent{ack, done}
	}
	return err
}

func (j *jetPublisher) answers() {
	for s := range j.sent {
		select {
		case <-s.ack.Ok():
			s.done(nil)
		case err := <-s.ack.Err():
			s.done(err)
		}
	}
}

func (j *jetPublisher) close() {
	close(j.sent)
	j.end()
}
