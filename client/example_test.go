package client_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/nsq/wire"
)

// A publisher of a cluster. The client gets the publisher's broker from the loaddistributor, publishes
// there, and follows the publisher to another broker. Here the servers are small ones for tests.
func Example() {
	var log fake.Log
	broker, err := fake.NewBroker("a", &log)
	if err != nil {
		panic(err)
	}
	defer broker.Close()
	loaddistributor, err := fake.NewPlacement()
	if err != nil {
		panic(err)
	}
	defer loaddistributor.Close()
	loaddistributor.Place("volumes", broker.Address(), "loop-4711")

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{Address: loaddistributor.Address()})
	if err != nil {
		panic(err)
	}
	defer c.Close(ctx)
	publisher, err := c.Publisher(ctx, "volumes", "loop-4711")
	if err != nil {
		panic(err)
	}
	fmt.Println(publisher.Publish(ctx, []byte("42 cars"))) // nil: the broker has accepted the message
	// Output: <nil>
}

// A publisher of a single broker. BeginPublish does not wait for the answer, so many publishes are under
// way at a time. The broker accepts the messages in this order.
func ExamplePublisher_BeginPublish() {
	var log fake.Log
	broker, err := fake.NewBroker("a", &log)
	if err != nil {
		panic(err)
	}
	defer broker.Close()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	publisher, err := client.NewPublisher(ctx, client.Config{Broker: broker.Address()}, "volumes", "loop-4711")
	if err != nil {
		panic(err)
	}
	defer publisher.Close(ctx)
	var pending []client.Pending
	for _, body := range []string{"one", "two", "three"} {
		pending = append(pending, publisher.BeginPublish(ctx, []byte(body)))
	}
	for _, publish := range pending {
		if err := publish.Wait(); err != nil {
			panic(err)
		}
	}
	fmt.Println(len(pending), "accepted")
	// Output: 3 accepted
}

// A caller distinguishes three results: the broker refused the message, the broker may have accepted the
// message, and the message was not sent.
func ExampleRefusedError() {
	var log fake.Log
	broker, err := fake.NewBroker("a", &log)
	if err != nil {
		panic(err)
	}
	defer broker.Close()
	broker.Refuse(func(string, []byte) *wire.Error { return wire.NewError(wire.CodeQueueFull, "the topic is full") })

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	publisher, err := client.NewPublisher(ctx, client.Config{Broker: broker.Address()}, "volumes", "loop-4711")
	if err != nil {
		panic(err)
	}
	defer publisher.Close(ctx)
	err = publisher.Publish(ctx, []byte("42 cars"))
	var refused *client.RefusedError
	switch {
	case errors.As(err, &refused):
		fmt.Println("refused:", refused.Code)
	case errors.Is(err, client.ErrUnanswered):
		fmt.Println("accepted or lost")
	case err != nil:
		fmt.Println("not sent:", err)
	}
	// Output: refused: E_QUEUE_FULL
}
