package cluster

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// Creations fail as long as the tbadaptor is away. Brokers that have the topic meanwhile acknowledge messages. These
// messages are delivered when the topic is created, on whichever broker.
func TestMessagesOutliveAFailedCreation(t *testing.T) {
	adaptor := localtest.Ports(t, 2)
	c := localtest.Start(t, 2, []string{"--tbadaptor-address=" + adaptor[0], "--prepare-timeout=2s", "--auto-create=off", "--fitting=off"}, "--mcap=1000")
	create := func(rate int64) <-chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: spec("t", rate, 100)})
			ended <- err
		}()
		return ended
	}
	has := func(broker int) bool {
		return strings.Contains(localtest.MustAsk(t, http.MethodGet, "http://"+c.Brokers[broker].HTTP+"/stats?format=json", ""), `"topic_name":"t"`)
	}
	var accepted [2]bool
	for accepted != [2]bool{true, true} { // a creation may fail before the test finds the topic on a broker
		ended := create(1500) // needs both brokers
		for failed := false; !failed; {
			select {
			case err := <-ended:
				if failed = err != nil; !failed {
					t.Fatal("a topic was created without an adaptor")
				}
			default:
			}
			for i := range c.Brokers {
				if !accepted[i] && !failed && has(i) {
					_, code, err := localtest.Ask(http.MethodPost, "http://"+c.Brokers[i].HTTP+"/pub?topic=t", fmt.Sprint("at ", i))
					accepted[i] = err == nil && code == http.StatusOK
				}
			}
		}
	}
	for i := range c.Brokers {
		testkit.Equal(t, has(i), true, "the broker keeps what it has acknowledged")
	}
	if _, code, _ := localtest.Ask(http.MethodPost, "http://"+c.Brokers[0].HTTP+"/pub?topic=t", "late"); code == http.StatusOK {
		t.Error("a broker accepts messages of a topic that does not exist")
	}
	consumer := newPipe(t, c.Brokers[0].TCP, "consumer")
	consumer.send([]byte("SUB t archive\n"))
	if answer := consumer.answer(); !strings.HasPrefix(answer, "E_") {
		t.Errorf("a consumer would wait for a topic that does not exist: %s", answer)
	}

	localtest.Run(t, localtest.Program(t, "tbadaptor"), adaptor[1]+"/ping", "--grpc-address="+adaptor[0], "--http-address="+adaptor[1])
	testkit.WaitFor(t, "a creation", func() bool { return <-create(500) == nil }) // brokers must reach the adaptor first
	received := make(localtest.Bodies, 10)
	localtest.Consume(t, "t", "archive", received, func(cfg *nsq.Config) { cfg.LookupdPollInterval = 100 * time.Millisecond }, "http://"+c.Web)
	received.Want(t, "at 0", "at 1")
	testkit.WaitFor(t, "one broker with the topic", func() bool { return has(0) != has(1) })
}
