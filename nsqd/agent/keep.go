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
	there := setOf(o.node.Topics())
	o.lease.Noted = o.alone
	for _, b := range o.core.bases {
		o.disk[b.Topic] = b
	}
	for _, b := range o.core.bases {
		if o.lease.Strict || !o.alone {
			o.cfg.Log.Info("holds nothing of the process before until it is granted again", obs.KeyTopic, b.Topic)
			o.save(b.Topic)
			continue
		}
		o.holdings.Keep(holder.Grant{Topic: b.Topic, Epoch: b.Epoch, Share: b.Share})
		if there[b.Topic] {
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
	for topic := range o.disk {
		if o.holdings.Of(topic) == (holder.Holding{}) {
			o.save(topic)
		}
	}
	o.saveNow()
	for _, topic := range slices.Sorted(maps.Keys(o.disk)) {
		if left := o.disk[topic]; o.holdings.Of(topic) == (holder.Holding{}) {
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

// bases is the shares that outlive the process: what the store has, and what it is to have. The
// owner does not wait for the disk: a Save that runs has the changes of many topics, and those
// that come meanwhile are the next one's.
type bases struct {
	disk   map[string]Base // what the store has, before the Save that runs
	dirty  map[string]bool // topics whose base may differ from the store's after that
	saving []Base          // what runs saves, the zero Share: forgets; nil: none runs
	saved  chan error      // of the Save that runs; room for one
	// unsaved are the tokens given up for grants that are not acknowledged, since their bases
	// are not in the store yet.
	unsaved map[string]tokenbucket.Tokens
}

func newBases() bases {
	return bases{disk: map[string]Base{}, dirty: map[string]bool{}, saved: make(chan error, 1), unsaved: map[string]tokenbucket.Tokens{}}
}

// base is what the store is to have of a topic; the zero Share: nothing.
func (o *owner) base(topic string) Base {
	in := o.holdings.Of(topic)
	b := Base{Topic: topic, Epoch: in.Epoch, Share: in.Base()}
	if o.lease.Strict {
		b.Share = tokenbucket.Share{}
	}
	return b
}

// save has the store brought in line with what is held of the topic, unless it is.
func (o *owner) save(topic string) {
	if o.cfg.Store != nil {
		o.dirty[topic] = true
		o.startSave()
	}
}

// isSaved reports whether the store has what save was last called for.
func (o *owner) isSaved(topic string) bool {
	return !o.dirty[topic] && !slices.ContainsFunc(o.saving, func(b Base) bool { return b.Topic == topic })
}

// startSave starts a Save of what is dirty, unless one runs.
func (o *owner) startSave() {
	if o.saving != nil {
		return
	}
	var keep []Base
	var forget []string
	for topic := range o.dirty {
		switch next := o.base(topic); {
		case next.Share == o.disk[topic].Share:
			delete(o.dirty, topic)
			continue
		case next.Share.IsZero():
			forget = append(forget, topic)
		default:
			keep = append(keep, next)
		}
		delete(o.dirty, topic)
		o.saving = append(o.saving, o.base(topic))
	}
	if o.saving == nil {
		return
	}
	store, saved := o.cfg.Store, o.saved
	o.sessions.Go(func() { saved <- store.Save(keep, forget) })
}

// finishSave takes the result of the Save that ran. A base that cannot be written is at least
// taken away: after a crash the topic then waits for a new grant.
func (o *owner) finishSave(err error) {
	batch := o.saving
	o.saving = nil
	if err != nil {
		forget := make([]string, len(batch))
		for i := range batch {
			forget[i], batch[i].Share = batch[i].Topic, tokenbucket.Share{}
		}
		if gone := o.cfg.Store.Save(nil, forget); gone != nil {
			o.cfg.Log.Error("shares on the disk are not up to date", obs.KeyCount, len(batch), obs.KeyError, gone)
			for _, b := range batch {
				o.dirty[b.Topic] = true
				if was, is := o.disk[b.Topic].Share, o.base(b.Topic).Share; was.Rate <= is.Rate && was.Burst <= is.Burst {
					o.acknowledgeSaved(b.Topic)
				}
			}
			return // saveAgain tries again
		}
		o.cfg.Log.Error("shares are not on the disk: after a crash their topics wait for new ones", obs.KeyCount, len(batch), obs.KeyError, err)
	}
	for _, b := range batch {
		if b.Share.IsZero() {
			delete(o.disk, b.Topic)
		} else {
			o.disk[b.Topic] = b
		}
		if !o.dirty[b.Topic] {
			o.acknowledgeSaved(b.Topic)
		}
	}
	o.startSave()
}

// acknowledgeSaved acknowledges a grant that waited for the store.
func (o *owner) acknowledgeSaved(topic string) {
	if released, waits := o.unsaved[topic]; waits {
		delete(o.unsaved, topic)
		in := o.holdings.Of(topic)
		o.ack(topic, in.Epoch, in.Share, released)
	}
}

// saveNow returns when the store has been brought in line, as far as it can be.
func (o *owner) saveNow() {
	for failed := false; !failed; {
		if o.startSave(); o.saving == nil {
			return
		}
		o.finishSave(<-o.saved)
		failed = o.saving == nil && len(o.dirty) > 0
	}
}

// saveAgain tries what failed before.
func (o *owner) saveAgain() { o.startSave() }
