package cluster

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

var manyTopics = flag.Int("topics", 300, "topics of TestManyTopicsThroughRestartDrainAndCrash, 1 to 10000; docs/limits.md has the figures of 10000")

// many is a cluster with many open topics that have channels.
type many struct {
	*localtest.Cluster
	t        *testing.T
	admin    srtmv1.AdminServiceClient
	grants   srtmv1.GrantServiceClient
	topics   int
	channels []string
	sampled  []string // topics that get messages
	killed   bool     // broker b1
}

// depths returns the number of waiting messages by broker, topic and channel.
func (m *many) depths(without int) map[string]map[string]map[string]int {
	all := map[string]map[string]map[string]int{}
	for i, b := range m.Brokers {
		if i == without {
			continue
		}
		var stats struct {
			Topics []struct {
				Name     string `json:"topic_name"`
				Channels []struct {
					Name  string `json:"channel_name"`
					Depth int    `json:"depth"`
				} `json:"channels"`
			} `json:"topics"`
		}
		text, _, err := localtest.Ask(http.MethodGet, "http://"+b.HTTP+"/stats?format=json", "")
		if err != nil || json.Unmarshal([]byte(text), &stats) != nil {
			return nil
		}
		id := fmt.Sprint("b", i+1)
		all[id] = map[string]map[string]int{}
		for _, topic := range stats.Topics {
			all[id][topic.Name] = map[string]int{}
			for _, c := range topic.Channels {
				all[id][topic.Name][c.Name] = c.Depth
			}
		}
	}
	return all
}

// list returns all topics.
func (m *many) list(ctx context.Context) (all []*srtmv1.Topic, err error) {
	for page := ""; ; {
		r, err := m.admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{PageSize: 1000, PageToken: page})
		if err != nil {
			return nil, err
		}
		all = append(all, r.Topics...)
		if page = r.NextPageToken; page == "" {
			return all, nil
		}
	}
}

// wait polls until objection returns "". A poll costs the processes about as much as an operation on
// each topic, so polls of many topics are rare. wait logs how long it took.
func (m *many) wait(what string, objection func() string) {
	m.t.Helper()
	start := time.Now()
	testkit.WaitUntil(m.t, func() string {
		<-time.After(time.Duration(m.topics) * 100 * time.Microsecond)
		return objection()
	})
	m.t.Logf("%s: %.1f s", what, time.Since(start).Seconds())
}

// whole waits until every topic is active, on other brokers than the broker of this number (-1: any),
// every broker of a topic has all channels, and every channel of a sampled topic has the given number
// of messages on all brokers together (-1: any number).
func (m *many) whole(what string, without, messages int) {
	m.t.Helper()
	m.wait(what, func() string {
		topics, err := m.list(m.t.Context())
		if err != nil || len(topics) != m.topics {
			return fmt.Sprintf("%d topics, want %d: %v", len(topics), m.topics, err)
		}
		depths := m.depths(without)
		for _, topic := range topics {
			if topic.State != srtmv1.TopicState_TOPIC_STATE_ACTIVE {
				if m.killed && strings.Contains(topic.Reason, "srtm share forget b1") {
					m.killed = false // the reason stays for some seconds
					m.forget("b1")
				}
				return fmt.Sprintf("%s is %v: %s", topic.Spec.Name, topic.State, topic.Reason)
			}
			for _, q := range topic.Quotas {
				for _, c := range m.channels {
					if _, there := depths[q.BrokerId][topic.Spec.Name][c]; !there {
						return fmt.Sprintf("%s lacks channel %s of %s", q.BrokerId, c, topic.Spec.Name)
					}
				}
			}
		}
		for _, name := range m.sampled {
			for _, c := range m.channels {
				n := 0
				for _, topics := range depths {
					n += topics[name][c]
				}
				if messages >= 0 && n != messages {
					return fmt.Sprintf("channel %s of %s has %d messages, want %d", c, name, n, messages)
				}
			}
		}
		return ""
	})
}

// forget does what a topic's reason says. On a busy machine the control plane finds the killed broker's ports
// closed too late for a proof: a process that started meanwhile could use the shares.
func (m *many) forget(broker string) {
	m.t.Helper()
	m.t.Logf("the shares of %s are given up", broker)
	testkit.Result(m.grants.ForgetBroker(m.t.Context(), &srtmv1.ForgetBrokerRequest{BrokerId: broker})).Must(m.t)
}

// publish sends a message to each sampled topic, by the brokers in turn.
func (m *many) publish() {
	for i, name := range m.sampled {
		localtest.MustAsk(m.t, http.MethodPost, "http://"+m.Brokers[i%len(m.Brokers)].HTTP+"/pub?topic="+name, "m")
	}
}

// restart starts an ended broker again.
func (m *many) restart(i int) {
	old := m.Brokers[i]
	p, err := local.NSQDAt(localtest.Program(m.t, "nsqd"), old.Dir, old.TCP, old.HTTP, old.Flags...)
	m.Brokers[i] = localtest.Watch(m.t, p, err)
}

func TestManyTopicsThroughRestartDrainAndCrash(t *testing.T) {
	m := &many{t: t, topics: *manyTopics}
	m.Cluster = localtest.Start(t, 3, []string{"--store=bbolt", "--data-path=" + t.TempDir(), "--evacuate-after=1s", "--log-level=warn"},
		"--mcap=1000000", "--mem-queue-size=0", "--log-level=warn") // kill -9 loses no message that is in a file
	for i := range 10 {
		m.channels = append(m.channels, fmt.Sprint("c", i))
	}
	conn := localtest.Dial(t, m.RPC)
	m.admin, m.grants = srtmv1.NewAdminServiceClient(conn), srtmv1.NewGrantServiceClient(conn)
	names := make(chan string)
	var creators sync.WaitGroup
	for range 16 {
		creators.Go(func() {
			for name := range names {
				_, err := localtest.CreateTopic(t.Context(), conn, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
					Name: name, Channels: m.channels, Contract: &srtmv1.Contract{RateMilli: 100_000, Burst: 10},
				}})
				testkit.NoError(t, err)
			}
		})
	}
	start := time.Now()
	for i := range m.topics {
		name := fmt.Sprintf("t%05d", i)
		if i%max(1, m.topics/10) == 0 {
			m.sampled = append(m.sampled, name)
		}
		names <- name
	}
	close(names)
	creators.Wait()
	t.Logf("creation: %.1f s", time.Since(start).Seconds())
	m.whole("the state after the creation", -1, 0)
	start = time.Now()
	for _, b := range m.Brokers {
		localtest.MustAsk(t, http.MethodGet, "http://"+b.HTTP+"/metrics", "")
	}
	t.Logf("/metrics of %d brokers: %.1f s", len(m.Brokers), time.Since(start).Seconds())
	m.publish()
	m.whole("messages", -1, 1)

	for _, b := range m.Brokers {
		testkit.Must(t, b.Stop())
	}
	testkit.Must(t, m.Control.Stop())
	m.Control = localtest.Run(t, localtest.Program(t, "loaddistributor"), m.Web+"/ping", m.Control.Flags...)
	for i := range m.Brokers {
		m.restart(i)
	}
	m.whole("restart of all processes until all topics are active", -1, 1)

	for broker, topics := range m.depths(-1) {
		for _, name := range m.sampled {
			for c := range topics[name] {
				localtest.MustAsk(t, http.MethodPost, fmt.Sprintf("http://%s/channel/empty?topic=%s&channel=%s", m.Brokers[brokerOf(broker)].HTTP, name, c), "")
			}
		}
	}
	m.whole("emptied channels", -1, 0)
	testkit.Result(m.admin.DrainBroker(t.Context(), &srtmv1.DrainBrokerRequest{BrokerId: "b3"})).Must(t)
	m.wait("drain of a broker", func() string {
		r, err := m.admin.ListBrokers(t.Context(), &srtmv1.ListBrokersRequest{})
		i := slices.IndexFunc(r.GetBrokers(), func(b *srtmv1.Broker) bool { return b.Id == "b3" && b.SafeToStop })
		if i < 0 {
			return fmt.Sprintf("the drain waits: %v, %v", r, err)
		}
		return ""
	})
	m.whole("the state after the drain", 2, 0)
	testkit.Result(m.admin.DrainBroker(t.Context(), &srtmv1.DrainBrokerRequest{BrokerId: "b3", Undo: true})).Must(t)

	m.publish()
	m.whole("messages", -1, 1)
	testkit.Must(t, m.Brokers[0].Kill())
	m.killed = true
	m.wait("move of all topics off a killed broker", func() string {
		topics, err := m.list(t.Context())
		for _, topic := range topics {
			if slices.ContainsFunc(topic.Quotas, func(q *srtmv1.BrokerQuota) bool { return q.BrokerId == "b1" }) {
				return topic.Spec.Name + " is on the killed broker"
			}
		}
		if err != nil {
			return err.Error()
		}
		return ""
	})
	m.whole("after that, until all topics are active", 0, -1)
	m.killed = false
	m.restart(0)
	m.whole("return of the killed broker with its messages", -1, 1)
}
