package replicated_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A broker is killed and loses its disk, but still has all acknowledged messages.
func TestABrokerAndItsDiskAreLost(t *testing.T) {
	s := startServers(t, 3)
	start := func() *local.Process { // in a new folder
		return localtest.NSQD(t, "", "--durability=replicated", "--jetstream-url="+s.url(), "--broker-id=b.1")
	}
	b := start()
	producer := testkit.Result(localtest.NewProducer(b.TCP, "p")).Must(t)
	var want []string
	for n := range 200 {
		want = append(want, fmt.Sprint("message ", n))
		testkit.Must(t, producer.Publish("t", []byte(want[n])))
	}
	testkit.Must(t, b.Kill())
	producer.Stop()
	b = start()
	got := make(localtest.Bodies, 1000)
	localtest.Consume(t, "t", "c", got, nil, b.TCP)
	got.Want(t, want...)
	producer = localtest.Producer(t, b.TCP, "p")
	testkit.Must(t, producer.Publish("t", []byte("after")))
	got.Want(t, "after")
}

// A topic that is created again during the deletion of its stream gets a new stream.
func TestATopicIsDeletedAndMadeAnew(t *testing.T) {
	s := startServers(t, 3)
	b := localtest.NSQD(t, "", "--durability=replicated", "--jetstream-url="+s.url(), "--broker-id=b")
	ask := func(what string) {
		t.Helper()
		localtest.MustAsk(t, http.MethodPost, "http://"+b.HTTP+what, "x")
	}
	const rounds = 10
	for range rounds {
		ask("/pub?topic=t")
		var both sync.WaitGroup
		both.Go(func() { ask("/topic/delete?topic=t") })
		for range 3 {
			both.Go(func() { ask("/pub?topic=t") })
		}
		both.Wait()
	}
}
