package agent

import (
	"maps"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tbadaptor/holder"
	"github.com/srtm-io/srtm/tokenbucket"
)

// This file has the owner's part of the lease, and of the bases that outlive the lease.

// Policy is the broker's behaviour after the lease has expired.
type Policy string

const (
	// Available continues with the bases of the shares.
	Available Policy = "available"
	// Strict stops the topics.
	Strict Policy = "strict"
)

var policyProto = map[Policy]srtmv1.LeasePolicy{
	Available: srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE,
	Strict:    srtmv1.LeasePolicy_LEASE_POLICY_STRICT,
}

// longestLease bounds a lease from an adaptor.
const longestLease = 24 * time.Hour

// resume restores the bases of the previous process, if that process had lost the adaptor when it
// ended. Otherwise the adaptor may have seen the process end, and may have granted its shares to other
// brokers. A Strict broker restores no base, as a Strict broker cannot know whether its lease is over.
func (o *owner) resume() {
	o.lease.Noted = o.alone
	for _, b := range o.bases {
		o.disk[b.Topic] = b
		if o.lease.Strict || !o.alone {
			o.cfg.Log.Info("saved share not usable; waiting for a grant", obs.KeyTopic, b.Topic)
			o.save(b.Topic)
			continue
		}
		o.holdings.Keep(holder.Grant{Topic: b.Topic, Epoch: b.Epoch, Share: b.Share})
		if exists, _ := o.node.Has(b.Topic); exists {
			if g, due := o.holdings.Prepared(b.Topic); due {
				o.apply(g)
			}
		}
		o.cfg.Log.Info("resumed the saved base share", obs.KeyTopic, b.Topic,
			obs.KeyRate, b.Share.Rate.PerSecond(), obs.KeyBurst, b.Share.Burst)
	}
}

// setAlarm sets the timer for the next call of keepLease.
func (o *owner) setAlarm() {
	due := mono.Never
	if o.grants != nil {
		due = o.lease.Request()
	}
	if !o.lease.Noted {
		due = min(due, max(o.lease.Alone(), o.retry))
	}
	due = min(due, o.holdings.NextEnd(o.lease.Ends()))
	if o.woken != 0 {
		due = min(due, o.goesOn())
	}
	wait := time.Hour
	if due != mono.Never {
		wait = min(wait, max(0, due.Sub(clock.Mono())))
	}
	o.alarm.Reset(wait)
}

// keepLease requests a renewal of the lease, and ends the expired shares.
func (o *owner) keepLease(now mono.Time) {
	if o.woken != 0 && !now.Before(o.goesOn()) {
		o.cfg.Log.Warn("adaptor unreachable: releasing messages by the bases of shares")
		o.handleRunning(now)
	}
	if o.grants != nil && !now.Before(o.lease.Request()) {
		o.lease.Requested = now
		o.grants.reply(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Renew{Renew: &srtmv1.LeaseRequest{
			Stamp: uint64(now), Heard: o.lease.Sent,
		}}})
	}
	if !o.lease.Noted && !now.Before(max(o.lease.Alone(), o.retry)) {
		o.recordAlone(true, now)
	}
	o.lapse(now)
}

// recordAlone stores whether this process has lost the adaptor.
func (o *owner) recordAlone(alone bool, now mono.Time) {
	if o.cfg.Store == nil || o.lease.Strict {
		o.lease.Noted = alone
		return
	}
	if err := o.cfg.Store.SetAlone(alone); err != nil {
		o.cfg.Log.Error("cannot save the adaptor state", "alone", alone, obs.KeyError, err)
		o.retry = now.Add(time.Second)
		return
	}
	o.lease.Noted = alone
}

// renewed handles the adaptor's lease, the answer to a request or to the hello.
func (o *owner) renewed(m *srtmv1.Lease, now mono.Time) {
	at, flex, session := mono.Time(m.Stamp), m.Flex.AsDuration(), m.Session.AsDuration()
	if at < 0 || at > now || flex <= 0 || session < flex || session > longestLease {
		o.cfg.Log.Error("invalid lease ignored", "stamp", m.Stamp, "flex", flex, "session", session)
		return
	}
	if o.pulse != nil {
		o.pulse.length.Store(int64(flex))
	}
	if o.woken != 0 && at >= o.woken {
		o.handleRunning(at)
	}
	o.lapse(now) // before the renewal, which must not restore an expired share
	o.lease.Renew(at, flex, session)
	o.lease.Received = now
	// An adaptor that does not send Sent accepts no evidence of a process's end.
	if noted := m.Sent != 0; noted == o.lease.Noted {
		o.recordAlone(!noted, now)
	}
	if o.lease.Sent = m.Sent; o.lease.Noted {
		o.lease.Sent = 0 // a later process might use the bases of this process
	}
	flexUntil, until := o.lease.Ends()
	for _, topic := range o.holdings.Topics() {
		in := o.holdings.Of(topic)
		flexible := in.Flex != (tokenbucket.Share{})
		if !in.Prepared || !flexible && !o.lease.Strict {
			continue
		}
		// The node may have ended the flexible part before the owner did.
		if ok := o.node.Renew(topic, flexUntil, until); flexible && !ok && o.holdings.LapseOne(topic, true, false) {
			o.lapsed(topic)
		}
	}
}

// handleWake handles a pulse that found that the process had not run. No message leaves until the
// adaptor renews the lease. If the adaptor does not answer within two lease lengths, the broker
// continues by its policy.
func (o *owner) handleWake(now mono.Time) {
	o.cfg.Log.Warn("this process did not run for a while: no message leaves before the adaptor has answered")
	o.woken = now
	o.lease.Requested = min(o.lease.Requested, now.Add(-o.lease.Length)) // makes a request due
}

// goesOn returns when the owner stops waiting for the adaptor.
func (o *owner) goesOn() mono.Time { return o.woken.Add(2 * o.lease.Length) }

// handleRunning lets messages leave again: the broker's id belonged to this process at the given time.
func (o *owner) handleRunning(at mono.Time) {
	o.woken = 0
	o.pulse.verify(at)
}

// lapse ends the shares that have expired by now.
func (o *owner) lapse(now mono.Time) {
	topics := o.holdings.Lapse(o.lease.Ended(now))
	if len(topics) == 0 {
		return
	}
	o.cfg.Log.Warn("lease over", "topics", len(topics), obs.KeyPolicy, o.cfg.Policy)
	flexUntil, until := o.lease.Ends()
	for _, topic := range topics {
		if o.holdings.Of(topic).Prepared {
			o.node.Renew(topic, flexUntil, until) // the node ends the share by its own clock
		}
		o.lapsed(topic)
	}
}

// lapsed reports the rest of a share to the adaptor.
func (o *owner) lapsed(topic string) {
	o.metrics.lapses.Inc()
	o.ackPresent(topic)
}

// heldShares returns the shares for the hello: of each topic the share in force, or the base on
// disk where the base is larger.
func (o *owner) heldShares() []*srtmv1.HeldShare {
	held := o.holdings.Reconcile(o.node.Topics())
	for _, topic := range slices.Sorted(maps.Keys(o.disk)) {
		if o.holdings.Of(topic) == (holder.Holding{}) && !o.save(topic) {
			left := o.disk[topic]
			held = append(held, holder.HeldShare{Topic: topic, Share: left.Share, Epoch: left.Epoch})
		}
	}
	list := make([]*srtmv1.HeldShare, len(held))
	for i, h := range held {
		share, base := h.Share, o.holdings.Of(h.Topic).Base()
		if disk := o.disk[h.Topic].Share; disk.Rate > base.Rate || disk.Burst > base.Burst {
			base = base.Max(disk)
			share = share.Max(base)
			h.Flex = share.Less(base)
		}
		list[i] = &srtmv1.HeldShare{Topic: h.Topic, Share: service.ShareProto(share), Flex: service.ShareProto(h.Flex), Epoch: h.Epoch}
	}
	return list
}

// save writes the topic's base to the store, and reports whether the store has no more than the topic's
// base. If save cannot write the base, save removes the old base: after a crash the topic then waits
// for a new grant.
func (o *owner) save(topic string) bool {
	store := o.cfg.Store
	in := o.holdings.Of(topic)
	want := in.Base()
	if o.lease.Strict {
		want = tokenbucket.Share{}
	}
	last, saved := o.disk[topic]
	had := last.Share
	if store == nil || want == had {
		return true
	}
	var err error
	if !want.IsZero() {
		next := Base{Topic: topic, Epoch: in.Epoch, Share: want}
		if err = store.Save(next); err == nil {
			o.disk[topic] = next
			return true
		}
	}
	if saved {
		if removeErr := store.Remove(topic); removeErr != nil {
			o.cfg.Log.Error("cannot remove the saved share", obs.KeyTopic, topic, obs.KeyError, removeErr)
			return had.Rate <= want.Rate && had.Burst <= want.Burst
		}
		delete(o.disk, topic)
	}
	if err != nil {
		o.cfg.Log.Error("cannot save the share; after a crash the topic waits for a grant", obs.KeyTopic, topic, obs.KeyError, err)
	}
	return true
}

// saveAgain repeats the failed saves, and acknowledges their grants.
func (o *owner) saveAgain() {
	for topic, released := range o.unsaved {
		if o.save(topic) {
			delete(o.unsaved, topic)
			in := o.holdings.Of(topic)
			o.ack(topic, in.Epoch, in.Share, released)
		}
	}
}
