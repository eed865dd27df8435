package publishers

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// An open topic has no list of publishers. A stock producer behind the agent, and a sensor with only
// HTTP behind the gateway, need not know their broker or their declaration. The brokers know both by
// their own names.
func TestPublishersOfAnOpenTopicNeedToKnowNothing(t *testing.T) {
	c := &cluster{t, localtest.Start(t, 2, []string{"--fitting=off"}, "--mcap=10000")}
	localtest.Srtm(t, c.RPC, "topic", "create", topic, "--rate=1000", "--burst=100", "--slo-latency=10s")
	r := c.read()
	d := c.agent()
	var sent []string
	for _, id := range []string{"stock-1", "stock-2"} {
		for i := range 3 {
			sent = append(sent, fmt.Sprint(id, "/", i))
			testkit.Must(t, localtest.Producer(t, d.TCP, id).Publish(topic, []byte(sent[len(sent)-1])))
		}
	}
	policy := testkit.File(t, "policy.toml", "[[class]]\nname = \"sensors\"\n")
	at := localtest.Ports(t, 2)
	localtest.Run(t, localtest.Program(t, "gateway"), at[1]+"/healthz", "--policy="+policy, "--http-address="+at[0], "--admin-address="+at[1], "--loaddistributor-address="+c.RPC)
	for _, id := range []string{"web-1", "web-2"} {
		for i := range 3 {
			sent = append(sent, fmt.Sprint(id, "/", i))
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+at[0]+"/pub?topic="+topic, strings.NewReader(sent[len(sent)-1]))
			testkit.Must(t, err)
			request.Header.Set("X-Publisher-Id", id)
			answer := testkit.Result(http.DefaultClient.Do(request)).Must(t)
			answer.Body.Close()
			testkit.MustEqual(t, answer.StatusCode, http.StatusOK, "%s: %s", id, answer.Status)
		}
	}
	r.Want(t, sent...)
	var clients string
	for _, broker := range c.Brokers {
		text, _ := c.request(http.MethodGet, "http://"+broker.HTTP+"/stats?format=json", "")
		clients += text
	}
	for _, id := range []string{"stock-1", "stock-2", "web-1", "web-2"} {
		if !strings.Contains(clients, `"client_id":"`+id+`"`) {
			t.Errorf("no broker knows %s", id)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}
