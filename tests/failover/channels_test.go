package failover

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// command sends commands to a broker and reads an answer to each. It returns the body of the last
// answer.
func command(t *testing.T, address string, commands ...string) string {
	t.Helper()
	c := testkit.Result(net.Dial("tcp", address)).Must(t)
	defer c.Close()
	testkit.Must(t, c.SetDeadline(time.Now().Add(patience)))
	testkit.Result(io.WriteString(c, "  V2"+strings.Join(commands, ""))).Must(t)
	var body []byte
	for range commands {
		var head [8]byte
		testkit.Result(io.ReadFull(c, head[:])).Must(t)
		body = make([]byte, binary.BigEndian.Uint32(head[:])-4)
		testkit.Result(io.ReadFull(c, body)).Must(t)
	}
	return string(body)
}

// subscribe creates a channel as a consumer does, and disconnects after the broker's OK.
func subscribe(t *testing.T, b *local.Process, topic, channel string) {
	t.Helper()
	testkit.MustEqual(t, command(t, b.TCP, "SUB "+topic+" "+channel+"\n"), "OK", "the answer to SUB")
}

// channels returns the channels of the catalog, by name, with a "!" after the name of a paused
// channel.
func (c *cluster) channels(topic string) (names []string) {
	r, _ := ask(c, srtmv1.AdminServiceClient.ListChannels, &srtmv1.ListChannelsRequest{Topic: topic})
	for _, one := range r.GetChannels() {
		name := one.Name
		if one.Paused {
			name += "!"
		}
		names = append(names, name)
	}
	return names
}

// channelsOn returns the channels of a broker, in the same form.
func channelsOn(b *local.Process, topic string) (names []string) {
	text, _, err := localtest.Ask(http.MethodGet, "http://"+b.HTTP+"/stats?format=json&topic="+topic, "")
	var stats struct {
		Topics []struct {
			Channels []struct {
				Name   string `json:"channel_name"`
				Paused bool
				Depth  int
			}
		}
	}
	if err != nil || json.Unmarshal([]byte(text), &stats) != nil {
		return []string{"no answer"}
	}
	for _, t := range stats.Topics {
		for _, one := range t.Channels {
			name := one.Name
			if one.Paused {
				name += "!"
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (f *fleet) wantChannels(what string, want ...string) {
	f.t.Helper()
	testkit.WaitFor(f.t, fmt.Sprintf("%s: channels %v in the catalog and on all brokers; there are %v", what, want, f.channels("t")), func() bool {
		for _, b := range f.brokers {
			if !slices.Equal(channelsOn(b, "t"), want) {
				return false
			}
		}
		return slices.Equal(f.channels("t"), want)
	})
}

// carrier returns the broker of a topic on a single broker.
func (c *cluster) carrier(topic string) int {
	c.t.Helper()
	at := -1
	testkit.WaitFor(c.t, "the topic is on one broker", func() bool {
		t := c.topic(topic)
		if t.GetState() != srtmv1.TopicState_TOPIC_STATE_ACTIVE || len(t.Quotas) != 1 {
			return false
		}
		testkit.Result(fmt.Sscanf(t.Quotas[0].BrokerId, "b%d", &at)).Must(c.t)
		return true
	})
	return at - 1
}

// wantAll publishes to topic t and fails unless a channel of t gets every message.
func (c *cluster) wantAll(channel string) {
	c.t.Helper()
	const total = 50
	cl := newClient(c.t, c)
	p := publisher(c.t, cl, "t", 0)
	for n := range total {
		testkit.Must(c.t, p.Publish(c.t.Context(), body(0, n)))
	}
	testkit.NoError(c.t, cl.Close(c.t.Context()))
	all := &consumer{}
	localtest.Consume(c.t, "t", channel, all, func(cfg *nsq.Config) {
		cfg.LookupdPollInterval, cfg.LookupdPollJitter = 100*time.Millisecond, 0
	}, c.lookups()...)
	testkit.WaitFor(c.t, "the channel gets all that was published", func() bool { return all.count() == total })
}

// A consumer creates a channel and disconnects. Messages published after the topic has moved reach the
// channel, whether the broker was drained or killed at once, and even if the loaddistributor was
// killed in between.
func TestAChannelFollowsItsTopic(t *testing.T) {
	for _, restart := range []bool{false, true} {
		for _, away := range []string{"drain", "kill"} {
			t.Run(fmt.Sprintf("%s, loaddistributor restarted: %v", away, restart), func(t *testing.T) {
				c := newCluster(t, 1, 2, "--store=bbolt", "--evacuate-after=500ms")
				c.create(contract("t", 10_000, 1000, 2))
				from := c.carrier("t")
				subscribe(t, c.brokers[from], "t", "kept")
				if restart {
					c.kill(0)
					c.start(0)
					c.connect(2)
					testkit.WaitFor(t, "the broker has reported what it holds", func() bool { // otherwise the share is lost with the broker
						for _, b := range c.topic("t").GetStatus().GetBrokers() {
							if b.BrokerId == fmt.Sprintf("b%d", from+1) {
								return b.GetShare().GetRateMilli() > 0
							}
						}
						return false
					})
				}
				if away == "kill" {
					testkit.Must(t, c.brokers[from].Kill())
				} else {
					testkit.Result(ask(c, srtmv1.AdminServiceClient.DrainBroker, &srtmv1.DrainBrokerRequest{BrokerId: fmt.Sprintf("b%d", from+1)})).Must(t)
				}
				testkit.WaitFor(t, "the topic has moved", func() bool {
					q := c.topic("t").GetQuotas()
					return len(q) == 1 && q[0].BrokerId != fmt.Sprintf("b%d", from+1)
				})
				testkit.Equal(t, strings.Join(c.channels("t"), " "), "all kept", "channels of the catalog")
				c.wantAll("kept")
			})
		}
	}
}

// Channels are created, paused and deleted while one of the topic's two brokers is disconnected. When
// the broker is back, it has the catalog's channels, and restores no deleted channel. The topic stays on both
// brokers: nothing proves the broker's death.
func TestABrokerReturnsToOtherChannels(t *testing.T) {
	f := newFleet(t, 1, "--store=bbolt", "--death-evidence=false")
	f.create(wide())
	subscribe(t, f.brokers[0], "t", "deleted")
	subscribe(t, f.brokers[0], "t", "anew")
	f.wantChannels("both are connected", "all", "anew", "deleted")
	for _, b := range f.brokers { // each channel holds messages on each broker
		localtest.MustAsk(t, http.MethodPost, "http://"+b.HTTP+"/pub?topic=t", "old")
	}

	testkit.Must(t, f.brokers[1].Kill())
	testkit.WaitFor(t, "it is known to be gone", func() bool { return f.topic("t").GetState() == srtmv1.TopicState_TOPIC_STATE_DEGRADED })
	on := func(path, channel string) {
		t.Helper()
		localtest.MustAsk(t, http.MethodPost, "http://"+f.brokers[0].HTTP+path+"?topic=t&channel="+channel, "")
	}
	on("/channel/delete", "deleted")
	on("/channel/delete", "deleted") // NSQ's tools send requests to each broker
	on("/channel/delete", "anew")
	subscribe(t, f.brokers[0], "t", "anew")
	on("/channel/pause", "all")
	r := testkit.Result(ask(f.cluster, srtmv1.AdminServiceClient.CreateChannel, &srtmv1.CreateChannelRequest{Topic: "t", Channel: "more"})).Must(t)
	testkit.Equal(t, strings.Join(r.Pending, " "), "b2", "who creates it later")
	f.kill(0)
	f.start(0)
	f.startBroker(1)
	f.wantChannels("it is back", "all!", "anew", "more")
	if depth := localtest.MustAsk(t, http.MethodGet, "http://"+f.brokers[1].HTTP+"/channel/peek?topic=t&channel=anew", ""); strings.Contains(depth, "body") {
		t.Errorf("the channel that was created anew has what the deleted one had: %s", depth)
	}

	// Any broker, and the loaddistributor, make the change on all brokers.
	localtest.MustAsk(t, http.MethodPost, "http://"+f.brokers[1].HTTP+"/channel/unpause?topic=t&channel=all", "")
	testkit.Result(ask(f.cluster, srtmv1.AdminServiceClient.DeleteChannel, &srtmv1.DeleteChannelRequest{Topic: "t", Channel: "more"})).Must(t)
	f.wantChannels("they are asked for other changes", "all", "anew")

	// The store is lost, and the brokers bring the channels back.
	f.kill(0)
	testkit.Must(t, os.Remove(filepath.Join(f.dirs[0], "loaddistributor.db")))
	f.start(0)
	testkit.WaitFor(t, "the topic is rebuilt", func() bool { return f.topic("t").GetState() == srtmv1.TopicState_TOPIC_STATE_ACTIVE })
	f.wantChannels("the store was lost", "all", "anew")
}

// Without a control plane a consumer gets its channel at once. The topic's other broker has the
// channel once the control plane is back.
func TestAChannelWaitsForNoControlPlane(t *testing.T) {
	f := newFleet(t, 1, "--store=bbolt")
	f.create(wide())
	f.wantChannels("as declared", "all")
	f.kill(0)
	subscribe(t, f.brokers[0], "t", "one")
	subscribe(t, f.brokers[1], "t", "two")
	text, code, err := localtest.Ask(http.MethodPost, "http://"+f.brokers[0].HTTP+"/channel/delete?topic=t&channel=all", "")
	if err != nil || code != http.StatusServiceUnavailable || !strings.Contains(text, "CONTROL_PLANE_FAILED") {
		t.Errorf("a deletion without a control plane: %d %s %v", code, text, err)
	}
	f.start(0)
	f.wantChannels("the loaddistributor is back", "all", "one", "two")
}
