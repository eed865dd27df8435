package mqtt

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// parted is a cluster of three brokers with MQTT addresses. Two of them have a part of topic t.
type parted struct {
	t *testing.T
	*localtest.Cluster
	admin srtmv1.AdminServiceClient
	mqtt  []string // addresses by broker
	flags [][]string
}

func startParted(t *testing.T) *parted {
	t.Helper()
	p := &parted{t: t, Cluster: localtest.Start(t, 0, []string{"--fitting=off", "--report-interval=200ms"}), mqtt: localtest.Ports(t, 3)}
	for i, address := range p.mqtt {
		p.flags = append(p.flags, []string{"--mcap=2000", "--mqtt-address=" + address, "--data-path=" + t.TempDir()})
		p.Join(t, p.flags[i]...)
	}
	connection := localtest.Dial(t, p.RPC)
	p.admin = srtmv1.NewAdminServiceClient(connection)
	testkit.Result(localtest.CreateTopic(t.Context(), connection, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name: "t", Contract: &srtmv1.Contract{RateMilli: 3_000_000, Burst: 1000, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		Channels: []string{"archive"}, // without another channel the topic keeps its messages for a late subscriber
	}})).Must(t)
	testkit.MustEqual(t, len(p.homes()), 2)
	localtest.Consume(t, "t", "archive", new(received), func(cfg *nsq.Config) {
		cfg.MaxInFlight, cfg.LookupdPollInterval, cfg.LookupdPollJitter = 2000, 200*time.Millisecond, 0
	}, "http://"+p.Web)
	return p
}

// homes returns the brokers with a part of the topic, as indexes.
func (p *parted) homes() (homes []int) {
	p.t.Helper()
	r := testkit.Result(p.admin.GetTopic(p.t.Context(), &srtmv1.GetTopicRequest{Name: "t"})).Must(p.t)
	for _, q := range r.Topic.Quotas {
		homes = append(homes, slices.Index([]string{"b1", "b2", "b3"}, q.BrokerId))
	}
	slices.Sort(homes)
	return homes
}

// publish publishes a message at each broker with a part, and returns what a subscriber gets.
func (p *parted) publish(what string) (messages []string) {
	p.t.Helper()
	for _, home := range p.homes() {
		body := fmt.Sprintf("%s at b%d", what, home+1)
		testkit.Equal(p.t, localtest.MustAsk(p.t, http.MethodPost, "http://"+p.Brokers[home].HTTP+"/pub?topic=t", body), "OK")
		messages = append(messages, "t "+body)
	}
	return messages
}

// channelAt reports whether a broker has a channel of the topic.
func (p *parted) channelAt(broker int, channel string) bool {
	p.t.Helper()
	text := localtest.MustAsk(p.t, http.MethodGet, "http://"+p.Brokers[broker].HTTP+"/stats?format=json&topic=t", "")
	return strings.Contains(text, fmt.Sprintf("%q:%q", "channel_name", channel))
}

// subscribers are a device with a clean session, a device with a kept session, and a device with a shared
// subscription, at each broker.
func (p *parted) subscribers() (all []*device) {
	p.t.Helper()
	for i, address := range p.mqtt {
		clean, stays := connect(p.t, address, fmt.Sprint("clean-", i+1)), connect(p.t, address, fmt.Sprint("kept-", i+1), kept)
		shared := connect(p.t, address, fmt.Sprint("shared-", i+1))
		clean.subscribe("t", 1)
		stays.subscribe("t", 1)
		shared.subscribe(fmt.Sprintf("$share/group-%d/t", i+1), 1)
		all = append(all, clean, stays, shared)
	}
	return all
}

// A subscriber at any broker gets the messages of all parts of a topic: at a broker with a part and at a
// broker without a part. The messages keep coming while the parts move.
func TestSubscriberGetsAllPartsOfATopic(t *testing.T) {
	p := startParted(t)
	all := p.subscribers()
	want := func(messages []string) {
		t.Helper()
		for _, d := range all {
			d.want(messages...)
		}
	}
	want(p.publish("first"))

	// The topic leaves a broker for the broker that had no part.
	leaving, stays := p.homes()[0], p.homes()[1]
	drain := &srtmv1.DrainBrokerRequest{BrokerId: fmt.Sprint("b", leaving+1)}
	testkit.Result(p.admin.DrainBroker(t.Context(), drain)).Must(t)
	n := 0
	testkit.WaitFor(t, "the topic at other brokers", func() bool {
		n++
		want(p.publish(fmt.Sprint("moving ", n)))
		return !slices.Contains(p.homes(), leaving)
	})
	want(p.publish("moved"))
	testkit.WaitFor(t, "the end of the drain", func() bool {
		r, err := p.admin.ListBrokers(t.Context(), &srtmv1.ListBrokersRequest{})
		return err == nil && r.Brokers[leaving].SafeToStop
	})
	want(p.publish("drained"))
	testkit.EqualSlices(t, slices.Sorted(slices.Values(p.homes())), slices.DeleteFunc([]int{0, 1, 2}, func(i int) bool { return i == leaving }))

	// The broker of the other part restarts. The kept sessions at the other brokers get all messages, from before
	// and after the restart.
	before := p.publish("before the restart")
	testkit.Must(t, p.Brokers[stays].Signal(syscall.SIGTERM))
	<-p.Brokers[stays].Done()
	p.Brokers[stays] = localtest.NSQD(t, "", append(p.flags[stays], "--loaddistributor-address="+p.RPC, fmt.Sprint("--broker-id=b", stays+1))...)
	p.Cluster.Join(t, "--mcap=1") // waits until all brokers have joined
	after := p.publish("after the restart")
	for _, i := range []int{leaving, 3 - leaving - stays} {
		all[3*i+1].want(slices.Concat(before, after)...) // in any order
	}
}

// The end of a session deletes the session's channel at all brokers of the topic.
func TestSessionExpiryDeletesTheChannelOfAllParts(t *testing.T) {
	p := startParted(t)
	for i, address := range p.mqtt {
		channel := fmt.Sprint("mqtt.device-", i)
		d := connect(t, address, fmt.Sprint("device-", i), keptFor(1))
		d.subscribe("t", 1)
		d.want(p.publish("before")...)
		for _, home := range p.homes() {
			testkit.Equal(t, p.channelAt(home, channel), true, "at b%d", home+1)
		}
		d.vanish()
		testkit.WaitFor(t, "the end of the channel", func() bool {
			return !slices.ContainsFunc(p.homes(), func(home int) bool { return p.channelAt(home, channel) })
		})
	}
}
