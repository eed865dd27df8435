package agent

import (
	"errors"
	"slices"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

func TestWaitingOrdersAreOneBatch(t *testing.T) {
	node := agenttest.New()
	for _, topic := range []string{"t", "u", "v"} {
		node.Create(topic)
	}
	begun := make(chan string, 10)
	disk := map[string]chan error{"t": make(chan error), "u": make(chan error), "v": make(chan error)}
	node.SabotageChange(func(topic string) error {
		begun <- topic
		return <-disk[topic]
	})
	type answer struct {
		upTo   uint64
		faults []*srtmv1.ChannelFault
	}
	answers := make(chan answer, 10)
	q := startOrders(node, func(upTo uint64, faults []*srtmv1.ChannelFault) { answers <- answer{upTo, faults} })
	put := func(request uint64, topic, channel string) {
		q.put(&srtmv1.ChannelOrder{Request: request, Topic: topic, Version: request, Channels: []*srtmv1.TopicChannel{{Name: channel, Created: request}}})
	}
	put(11, "t", "d")
	if topic := <-begun; topic != "t" {
		t.Fatal(topic)
	}
	// These three orders wait until the first order is on disk.
	put(12, "u", "d")
	put(13, "v", "d")
	put(14, "v", "e")
	disk["t"] <- nil
	if a := <-answers; a.upTo != 11 || a.faults != nil {
		t.Fatal(a)
	}
	// Different topics at the same time, and the orders of one topic in sequence.
	two := []string{<-begun, <-begun}
	slices.Sort(two)
	if !slices.Equal(two, []string{"u", "v"}) {
		t.Fatal(two)
	}
	disk["u"] <- errors.New("disk full")
	disk["v"] <- errors.New("disk full")
	if topic := <-begun; topic != "v" {
		t.Fatal(topic)
	}
	disk["v"] <- nil
	a := <-answers
	var refused []uint64
	for _, f := range a.faults {
		refused = append(refused, f.Request)
		if f.Error != "disk full" {
			t.Error(f.Error)
		}
	}
	if a.upTo != 14 || !slices.Equal(refused, []uint64{12, 13}) {
		t.Error(a.upTo, refused)
	}
	q.wait()
	q.end()
	for topic, want := range map[string][]string{"t": {"d"}, "u": nil, "v": {"e"}} {
		if is, _ := node.Topic(topic); !slices.Equal(is.Channels, want) {
			t.Error(topic, is.Channels, want)
		}
	}
}
