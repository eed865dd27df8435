package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Brokers and placements change at random while the client publishes, and callers give up early. Each accepted message
// came once, no unsent message came, and in the end publishing works again.
func TestAnythingMayHappen(t *testing.T) {
	rng := testkit.Rand(t)
	log := &fake.Log{}
	placement := testkit.Result(fake.NewPlacement()).Must(t)
	defer placement.Close()
	var brokers []*fake.Broker
	for i := range 3 {
		b := testkit.Result(fake.NewBroker(fmt.Sprint(i), log)).Must(t)
		defer b.Close()
		brokers = append(brokers, b)
	}
	placement.Place(topic, brokers[0].Address(), "p")
	c, err := client.New(client.Config{Address: placement.Address(), MaxOutstanding: 8, DrainTimeout: 100 * time.Millisecond})
	testkit.Must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
	defer cancel()
	p, err := c.Publisher(ctx, topic, "p")
	testkit.Must(t, err)

	over, ended := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	var mu sync.Mutex
	results := map[string]error{}
	for publisher := range 4 {
		all.Go(func() {
			for n := 0; ; n++ {
				body := fmt.Sprintf("%d.%d", publisher, n)
				patience, cancel := context.WithTimeout(ctx, time.Duration(1+n%40)*time.Millisecond)
				err := p.Publish(patience, []byte(body))
				cancel()
				mu.Lock()
				results[body] = err
				mu.Unlock()
				select {
				case ended <- struct{}{}:
				case <-over:
					return
				}
			}
		})
	}
	for range 300 {
		b := brokers[rng.IntN(len(brokers))]
		switch rng.IntN(8) {
		case 0, 1:
			placement.Place(topic, b.Address(), "p")
		case 2:
			placement.Displace(topic, "p")
		case 3:
			b.Hold(true)
		case 4, 5:
			b.Hold(false)
		case 6:
			b.GiveAway()
		case 7:
			if rng.IntN(4) == 0 {
				placement.Delete(topic)
			} else {
				b.Abort()
			}
		}
		for range rng.IntN(30) {
			<-ended
		}
	}
	for _, b := range brokers {
		b.Hold(false)
	}
	placement.Place(topic, brokers[1].Address(), "p")
	close(over)
	all.Wait()
	for err = client.ErrUnknown; errors.Is(err, client.ErrUnknown); { // the placement may not have reached the client yet
		err = p.Publish(ctx, []byte("last"))
	}
	if err != nil {
		t.Errorf("the publisher does not continue: %v", err)
	}
	testkit.Must(t, c.Close(ctx))
	came := map[string]int{}
	for _, e := range log.Events() {
		if e.Kind == fake.Pub {
			came[string(e.Bodies[0])]++
		}
	}
	for body, err := range results {
		switch n := came[body]; {
		case err == nil && n != 1:
			t.Errorf("%s was accepted, and came %d times", body, n)
		case err != nil && !errors.Is(err, client.ErrUnanswered) && n > 0:
			t.Errorf("%s came: %v", body, err)
		}
	}
}
