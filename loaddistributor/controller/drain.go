package controller

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// maxWaits limits the topics named by DrainWaits.
const maxWaits = 100

// DrainWaits returns the reasons why the drain of a broker is not complete, by topic, and
// whether the broker is safe to stop. For a broker that does not drain, and on a
// follower, both are zero.
func (r *View) DrainWaits(id string) (waits []*srtmv1.DrainWait, safe bool) {
	now := time.Now()
	r.mu.RLock()
	defer r.mu.RUnlock()
	b, _ := r.cat.shown.Broker(id)
	if !b.Draining || r.knowledge.leader != nil {
		return nil, false
	}
	wait := func(topic, reason, remedy string) {
		waits = append(waits, &srtmv1.DrainWait{Topic: topic, Reason: reason, Remedy: remedy})
	}
	for _, name := range r.cat.shown.Placed(id) {
		if len(waits) == maxWaits {
			return waits, false
		}
		topic, _ := r.cat.shown.Topic(name)
		if slices.Contains(topic.Retiring, id) {
			reason, remedy := r.leftOn(topic, b, now)
			wait(name, reason, remedy)
			continue
		}
		l := r.topics.peek(name)
		switch own, why := l.owner, l.stays; {
		case !topic.Open():
			wait(name, "the topic is "+topic.State.String(), "")
		case own != nil && own.waiting != "":
			wait(name, own.waiting, "")
		case own != nil || why == nil:
			wait(name, "its publishers are being moved", "")
		case errors.As(why, new(*placement.Infeasible)) && !b.Forced:
			wait(name, "its publishers fit nowhere else: "+why.Error(), "add a broker, give one more capacity (srtm broker capacity), lower the topic's rate, or --force")
		case errors.As(why, new(*placement.Infeasible)):
			wait(name, "its publishers fit nowhere else: "+why.Error(), "add a broker, or update the topic")
		default:
			wait(name, fmt.Sprintf("it could not be moved, and is tried again within %v: %v", moveRetry, why), "")
		}
	}
	for _, name := range r.alien(id) {
		if len(waits) == maxWaits {
			return waits, false
		}
		wait(name, "the loaddistributor did not place it here, and it is in use", "end its publishers and consumers, or have them use another broker")
	}
	switch s := r.brokers.sessions[id]; {
	case len(waits) > 0:
	case !r.cat.shown.Empty(id):
		wait("", "deleted topics are being removed from it", "")
	case r.retires(id):
		wait("", "its shares are being given to others", "")
	case s != nil && s.reports.Count() == 0:
		wait("", "its first report is due", "")
	}
	return waits, len(waits) == 0
}

// leftOn describes what is left of a topic on a broker that it has moved away from, and
// the remedy.
func (r *View) leftOn(topic catalog.Topic, b catalog.Broker, now time.Time) (reason, remedy string) {
	name := topic.Spec.Name()
	if !b.Connected {
		return "the broker is away, and may have messages that no consumer has had", "start it again, or `srtm broker remove " + b.ID + "` if it is gone for good: what it has is lost then"
	}
	t := r.brokers.reported(b.ID).Topic(name)
	if t == nil {
		return "it is being removed", ""
	}
	last := t.Newest().Stats
	held := last.Depth + last.Backlog
	var parts, remedies []string
	if last.Publishers > 0 || last.Offered > 0 {
		parts = append(parts, fmt.Sprintf("%d connections still publish to it, and %d messages have come in its last report", last.Publishers, last.Offered))
		remedies = append(remedies, "end publishers that the topic does not have, or add them to it")
	}
	if held > 0 {
		parts = append(parts, fmt.Sprintf("consumers have not finished %d messages; %d consumers are connected", held, last.Subscribers))
		switch {
		case last.Subscribers > 0:
		case len(t.Channels) == 0:
			remedies = append(remedies, "connect a consumer: the topic has no channel")
		default:
			remedies = append(remedies, fmt.Sprintf("connect consumers to its channels (%s), or empty these", strings.Join(reconcile.FirstFew(t.Channels), ", ")))
		}
		switch {
		case !b.Forced:
			remedies = append(remedies, "--force to lose what no consumer takes")
		case !r.brokers.untaken(topic, b, now):
			parts = append(parts, fmt.Sprintf("they are lost after %v in which no client publishes and no consumer is given one", r.cfg.Window))
		}
	}
	if len(parts) == 0 {
		return "it is empty, and is being removed", ""
	}
	return strings.Join(parts, "; "), strings.Join(remedies, "; ")
}

// retires reports whether a topic is being retired from the broker.
func (r *View) retires(id string) bool {
	for _, l := range r.topics.byName {
		if l.owner != nil && l.owner.retiring == id {
			return true
		}
	}
	return false
}

// alien returns the topics in use on a broker that are not in the catalog, by name.
func (r *View) alien(id string) []string {
	var names []string
	for name, t := range r.brokers.reported(id).Topics() {
		if _, ours := r.cat.shown.Topic(name); !ours && t.Used {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// untaken reports whether the rest of a topic on a broker that drains by force must be
// given up.
func (bs *brokers) untaken(topic catalog.Topic, b catalog.Broker, now time.Time) bool {
	t := bs.reported(b.ID).Topic(topic.Spec.Name())
	return b.Forced && t != nil && !t.Untaken.IsZero() && now.Sub(t.Untaken) >= bs.cfg.Window-2*bs.cfg.ReportInterval &&
		now.Sub(t.Heard()) <= bs.cfg.Window // else the broker's state is unknown
}
