package agent

import (
	"maps"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/tbadaptor/holder"
	"github.com/srtm-io/srtm/tokenbucket"
)

// What the owner does for the lease, and for the bases that outlive it.

// Policy is what the broker does when its lease is gone for good.
type Policy string

const (
	// Available goes on with the bases of its shares.
	Available Policy = "available"
	// Strict stops.
	Strict Policy = "strict"
)

var policyProto = map[Policy]srtmv1.LeasePolicy{
	Available: srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE,
	Strict:    srtmv1.LeasePolicy_LEASE_POLICY_STRICT,
}

// longestLease bounds what an adaptor may say.
const longestLease = 24 * time.Hour

// resume takes up the bases of the process before, if that one was without the adaptor
// when it ended. If it was not, the adaptor may have seen its end, and what it held may
// be another's. A strict broker has none: it cannot tell whether its lease is over.
func (o *owner) resume() {
	there := o.node.Topics()
	o.lease.Noted = o.alone
	for _, b := range o.bases {
		o.disk[b.Topic] = b
		if o.lease.Strict || !o.alone {
			o.cfg.Log.Info("holds nothing of the process before until it is granted again", obs.KeyTopic, b.Topic)
			o.save(b.Topic)
			continue
		}
		o.holdings.Keep(holder.Grant{Topic: b.Topic, Epoch: b.Epoch, Share: b.Share})
		if slices.Contains(there, b.Topic) {
			if g, due := o.holdings.Prepared(b.Topic); due {
				o.apply(g)
			}
		}
		o.cfg.Log.Info("goes on with the base of the process before", obs.KeyTopic, b.Topic,
			obs.KeyRate, b.Share.Rate.PerSecond(), obs.KeyBurst, b.Share.Burst)
	}
}

// setAlarm has keepLease called when there is something to do.
func (o *owner) setAlarm() {
	due := mono.Never
	if o.grants != nil {
		due = o.lease.Request()
	}
	if !o.lease.Noted {
		due = min(due, max(o.lease.Alone(), o.retry))
	}
	due = min(due, o.holdings.Due(o.lease.Ends()))
	if o.woken != 0 {
		due = min(due, o.goesOn())
	}
	wait := time.Hour
	if due != mono.Never {
		wait = min(wait, max(0, due.Sub(clock.Mono())))
	}
	o.alarm.Reset(wait)
}

// keepLease asks for the lease to be renewed, and ends what has ended.
func (o *owner) keepLease(now mono.Time) {
	if o.woken != 0 && !now.Before(o.goesOn()) {
		o.cfg.Log.Warn("the adaptor does not answer: messages leave again, by the bases of shares")
		o.runs(now)
	}
	if o.grants != nil && !now.Before(o.lease.Request()) {
		o.lease.Asked = now
		o.grants.reply(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Renew{Renew: &srtmv1.LeaseRequest{
			Stamp: uint64(now), Heard: o.lease.Sent,
		}}})
	}
	if !o.lease.Noted && !now.Before(max(o.lease.Alone(), o.retry)) {
		o.note(true, now)
	}
	o.lapse(now)
}

// note keeps on the disk whether this process is without the adaptor.
func (o *owner) note(alone bool, now mono.Time) {
	if o.cfg.Store == nil || o.lease.Strict {
		o.lease.Noted = alone
		return
	}
	if err := o.cfg.Store.SetAlone(alone); err != nil {
		o.cfg.Log.Error("whether this broker is without the adaptor is not on the disk", "alone", alone, obs.KeyError, err)
		o.retry = now.Add(time.Second)
		return
	}
	o.lease.Noted = alone
}

// renewed is the adaptor's answer to a request, or to the hello.
func (o *owner) renewed(m *srtmv1.Lease, now mono.Time) {
	at, flex, session := mono.Time(m.Stamp), m.Flex.AsDuration(), m.Session.AsDuration()
	if at < 0 || at > now || flex <= 0 || session < flex || session > longestLease {
		o.cfg.Log.Error("lease refused: it makes no sense", "stamp", m.Stamp, "flex", flex, "session", session)
		return
	}
	if o.pulse != nil {
		o.pulse.length.Store(int64(flex))
	}
	if o.woken != 0 && at >= o.woken {
		o.runs(at)
	}
	o.lapse(now) // before it is renewed: what is over does not come back
	o.lease.Renew(at, flex, session)
	o.lease.Heard = now
	// An adaptor that does not say when it sent its word goes by no evidence.
	if takes := m.Sent != 0; takes == o.lease.Noted {
		o.note(!takes, now)
	}
	if o.lease.Sent = m.Sent; o.lease.Noted {
		o.lease.Sent = 0 // one after this might go on with its bases
	}
	flexUntil, until := o.lease.Ends()
	for _, topic := range o.holdings.Topics() {
		in := o.holdings.Of(topic)
		flexible := in.Flex != (tokenbucket.Share{})
		if !in.Prepared || !flexible && !o.lease.Strict {
			continue
		}
		// The node may have seen the end of it before we did.
		if left := o.node.Renew(topic, flexUntil, until); flexible && !left && o.holdings.LapseOne(topic, true, false) {
			o.lapsed(topic)
		}
	}
}

// woke acts on a pulse that found that the process had not run: no message leaves before the
// adaptor has renewed the lease. An adaptor that does not answer for as long as it takes to
// be alone is waited for no longer: as the policy says, the broker goes on.
func (o *owner) woke(now mono.Time) {
	o.cfg.Log.Warn("this process did not run for a while: no message leaves before the adaptor has answered")
	o.woken = now
	o.lease.Asked = min(o.lease.Asked, now.Add(-o.lease.Length)) // a request is due
}

// goesOn is until when the adaptor is waited for.
func (o *owner) goesOn() mono.Time { return o.woken.Add(2 * o.lease.Length) }

// runs has messages leave again: the broker's id was this process' at that time.
func (o *owner) runs(at mono.Time) {
	o.woken = 0
	o.pulse.verify(at)
}

// lapse ends what the lease has ended by now.
func (o *owner) lapse(now mono.Time) {
	topics := o.holdings.Lapse(o.lease.Over(now))
	if len(topics) == 0 {
		return
	}
	o.cfg.Log.Warn("lease over", "topics", len(topics), obs.KeyPolicy, o.cfg.Policy)
	flexUntil, until := o.lease.Ends()
	for _, topic := range topics {
		if o.holdings.Of(topic).Prepared {
			o.node.Renew(topic, flexUntil, until) // it looks at its clock
		}
		o.lapsed(topic)
	}
}

// lapsed tells the adaptor what is left of a share.
func (o *owner) lapsed(topic string) {
	o.metrics.lapses.Inc()
	o.ackPresent(topic)
}

// held is what the hello says: of each topic what is in force, or would be after
// a restart, if that is more.
func (o *owner) held() []*srtmv1.HeldShare {
	held := o.holdings.Reconcile(o.node.Topics())
	for _, topic := range slices.Sorted(maps.Keys(o.disk)) {
		if o.holdings.Of(topic) == (holder.Holding{}) && !o.save(topic) {
			left := o.disk[topic]
			held = append(held, holder.Held{Topic: topic, Share: left.Share, Epoch: left.Epoch})
		}
	}
	list := make([]*srtmv1.HeldShare, len(held))
	for i, h := range held {
		share, base := h.Share, o.holdings.Of(h.Topic).Base()
		if disk := o.disk[h.Topic].Share; disk.Rate > base.Rate || disk.Burst > base.Burst {
			base = larger(base, disk)
			share = larger(share, base)
			h.Flex = share.Less(base)
		}
		list[i] = &srtmv1.HeldShare{Topic: h.Topic, Share: shareproto.To(share), Flex: shareproto.To(h.Flex), Epoch: h.Epoch}
	}
	return list
}

func larger(a, b tokenbucket.Share) tokenbucket.Share {
	return tokenbucket.Share{Rate: max(a.Rate, b.Rate), Burst: max(a.Burst, b.Burst)}
}

// save brings the store in line with what is held of the topic, and reports
// whether it has no more than that. A base that cannot be written is at least
// taken away: after a crash the topic then waits for a new grant.
func (o *owner) save(topic string) bool {
	store := o.cfg.Store
	in := o.holdings.Of(topic)
	want := in.Base()
	if o.lease.Strict {
		want = tokenbucket.Share{}
	}
	last, there := o.disk[topic]
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
	if there {
		if gone := store.Remove(topic); gone != nil {
			o.cfg.Log.Error("the share on the disk is not up to date", obs.KeyTopic, topic, obs.KeyError, gone)
			return had.Rate <= want.Rate && had.Burst <= want.Burst
		}
		delete(o.disk, topic)
	}
	if err != nil {
		o.cfg.Log.Error("the share is not on the disk: after a crash the topic waits for a new one", obs.KeyTopic, topic, obs.KeyError, err)
	}
	return true
}

// saveAgain tries what failed before, and acknowledges it then.
func (o *owner) saveAgain() {
	for topic, released := range o.unsaved {
		if o.save(topic) {
			delete(o.unsaved, topic)
			in := o.holdings.Of(topic)
			o.ack(topic, in.Epoch, in.Share, released)
		}
	}
}
