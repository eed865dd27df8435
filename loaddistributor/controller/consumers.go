package controller

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// DefaultConsumerWait is how long a move waits for consumers. A library that asks
// where a topic is when a connection ends needs milliseconds, and the report that
// tells of it up to a second; but go-nsq may give a connection that is new to it no RDY
// for 5 s, until its others have less. One that asks at an interval only, which is a
// minute with most, is not waited for to the end.
const DefaultConsumerWait = 8 * time.Second

// consumersFirst waits until each channel that is read on a broker of the topic is
// read on those that are new to it, at most ConsumerWait. Their brokers are told to
// nudge the consumers of channels that are not. Where a broker of the topic is away,
// its publishers have waited long enough: nothing is waited for. Requires: the new
// brokers have prepared the topic, and its name is held.
func (c *Controller) consumersFirst(name string, topic catalog.Topic) {
	var fresh []string
	for _, q := range topic.Next.Plan.Quotas {
		if !slices.Contains(quotaBrokers(topic.Plan), q.Broker) {
			fresh = append(fresh, q.Broker)
		}
	}
	timeout := time.NewTimer(c.cfg.ConsumerWait)
	defer timeout.Stop()
	ticker := time.NewTicker(10 * sharesPause)
	defer ticker.Stop()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.mu.moving, name)
	}()
	due := c.now()
	until := due.Add(c.cfg.ConsumerWait)
	read := map[string]bool{}
	for {
		c.mu.Lock()
		missing := c.unreadLocked(topic, fresh, read)
		shown := !slices.ContainsFunc(fresh, func(id string) bool { return !c.mu.cat.Shows(name, id) })
		if len(missing) > 0 && shown && !c.now().Before(due) {
			c.nudgeLocked(topic, missing, fresh)
			due = due.Add(c.cfg.ConsumerWait / 2) // for those that were busy
		}
		if len(missing) == 0 || !c.plannedLocked(topic.Plan) {
			c.mu.Unlock()
			return
		}
		all := slices.Sorted(maps.Keys(missing))
		c.mu.moving[name] = fmt.Sprintf("before its publishers move, until %s: for consumers of %s on %s, which have to ask nsqlookupd again",
			until.Format(time.TimeOnly), strings.Join(firstFew(all), ", "), strings.Join(missing[all[0]], ", "))
		ending := c.mu.ending
		c.mu.Unlock()
		select {
		case <-ticker.C:
		case <-timeout.C:
			c.cfg.Log.Warn("moving before all consumers have come", obs.KeyTopic, name, "channels", firstFew(all), "brokers", missing[all[0]])
			return
		case <-ending:
			return
		}
	}
}

// quotaBrokers returns the brokers of a plan, in its order.
func quotaBrokers(plan placement.Plan) []string {
	ids := make([]string, len(plan.Quotas))
	for i, q := range plan.Quotas {
		ids[i] = q.Broker
	}
	return ids
}

// unreadLocked returns the channels that have consumers on brokers of the topic, or
// those it has left, and none on some of the fresh ones, which they are. Those that
// had consumers when it looked before are in read: a consumer that looks again is
// nowhere for a moment. Requires: mu held, for reading.
func (c *Controller) unreadLocked(topic catalog.Topic, fresh []string, read map[string]bool) map[string][]string {
	missing := map[string][]string{}
	for _, id := range append(quotaBrokers(topic.Plan), topic.Retiring...) {
		if f := c.reportedLocked(id)[topic.Spec.Name()]; f != nil && !slices.Contains(fresh, id) {
			for _, channel := range f.read {
				read[channel] = true
			}
		}
	}
	for _, id := range fresh {
		f := c.reportedLocked(id)[topic.Spec.Name()]
		for channel := range read {
			if f == nil || !slices.Contains(f.read, channel) {
				missing[channel] = append(missing[channel], id)
			}
		}
	}
	return missing
}

// nudgeLocked has consumers of these channels look again, each channel's on one
// broker, for most are connected to all: rather on one that the topic leaves. Requires:
// mu held.
func (c *Controller) nudgeLocked(topic catalog.Topic, channels map[string][]string, fresh []string) {
	name := topic.Spec.Name()
	order := slices.Concat(retiring(topic.Next.Plan, topic), quotaBrokers(topic.Plan))
	order = slices.DeleteFunc(order, func(id string) bool { return slices.Contains(fresh, id) })
	of := map[string][]string{}
	for _, channel := range slices.Sorted(maps.Keys(channels)) {
		for _, id := range order {
			if f := c.reportedLocked(id)[name]; f != nil && slices.Contains(f.read, channel) {
				of[id] = append(of[id], channel)
				break
			}
		}
	}
	for id, names := range of {
		c.mu.sessions[id].out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Nudge{
			Nudge: &srtmv1.NudgeConsumers{Topic: name, Channels: names},
		}})
	}
}
