package controller

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/tokenbucket"
)

// A broker that is cut off does not learn that a contract was lowered or removed, or that
// a raise was reverted. It uses its former share until its lease ends or, with the policy
// "available", until it is reached. So the catalog stores these unconfirmed shares before
// the change is acknowledged (reconcile), until the adaptor knows that they are confirmed
// (contracts.noteUnconfirmed). While there are unconfirmed shares:
//
//   - the answers of the API name them (View.Lowering);
//   - a restarted adaptor does not adopt reported shares of the topic. It lowers all
//     shares to the contract, and waits for the brokers (terms.contract, mayHold);
//   - no topic of the same name is created (change.grant).
//
// A broker that is cut off also delays the growth of other brokers' shares after a
// contract was raised. The catalog records that the contract is not in force
// (Topic.Raising) until the adaptor knows that brokers have confirmed all of it.

// excess returns the shares that brokers may use beyond a contract, derived from the
// adaptor's shares of the topic and the stored unconfirmed shares (kept).
func excess(shares *srtmv1.TopicShares, query reconcile.LookUnconfirmed, recorded []catalog.UnconfirmedShare) (u reconcile.Unconfirmed) {
	former := map[string]tokenbucket.Share{}
	for _, s := range recorded {
		former[s.Broker] = s.Share
	}
	awaited := map[string]tokenbucket.Share{}
	var sum tokenbucket.Share
	add := func(s tokenbucket.Share) { sum.Rate, sum.Burst = sum.Rate+s.Rate, sum.Burst+s.Burst }
	lowered := query.Contract.Rate < query.Former.Rate || query.Contract.Burst < query.Former.Burst
	unknown := false
	for _, id := range shares.GetAwaited() {
		s, found := former[id]
		// After a raise the broker may have received more than its record says.
		if lowered && (!found || query.Raised) && slices.Contains(query.Holders, id) {
			s = s.Max(query.Former)
		}
		if s.IsZero() {
			unknown = true
			continue
		}
		awaited[id] = s
		add(s)
	}
	for _, m := range shares.GetMembers() {
		add(service.ShareOf(m.Reserved))
	}
	beyond := sum.Rate > query.Contract.Rate || sum.Burst > query.Contract.Burst
	for _, m := range shares.GetMembers() {
		if _, isAwaited := awaited[m.BrokerId]; isAwaited {
			continue
		}
		reserved, target := service.ShareOf(m.Reserved), service.ShareOf(m.Target)
		_, found := former[m.BrokerId]
		// A broker with an empty target stays until it has given up its whole share: a
		// restarted adaptor would not wait for it. A broker stays, too, while the sum lacks an
		// unknown share.
		if (reserved.Rate > target.Rate || reserved.Burst > target.Burst) && (beyond || found && (target.IsZero() || unknown)) {
			u.Shares = append(u.Shares, catalog.UnconfirmedShare{Broker: m.BrokerId, Share: reserved})
			u.Pending = u.Pending || m.Connected
		}
	}
	for _, id := range slices.Sorted(maps.Keys(awaited)) {
		u.Shares = append(u.Shares, catalog.UnconfirmedShare{Broker: id, Share: awaited[id]})
	}
	slices.SortFunc(u.Shares, func(a, b catalog.UnconfirmedShare) int { return cmp.Compare(a.Broker, b.Broker) })
	if p := raising(shares); query.Raised && p != nil {
		u.Raising = true
		connected := func(b *srtmv1.AwaitedBroker) bool { return b.Connected }
		u.Pending = u.Pending || len(p.Brokers) == 0 || slices.ContainsFunc(p.Brokers, connected)
	}
	return u
}

// current reports whether the adaptor's shares are of this contract, or of the part of it that
// has brokers. Until a reverted or a new contract has reached the adaptor, the targets of the
// shares say nothing about the contract in force.
func current(shares *srtmv1.TopicShares, contract tokenbucket.Share) bool {
	divided := service.ShareOf(shares.GetContract())
	return shares.GetContract() != nil && divided.Rate <= contract.Rate && divided.Burst <= contract.Burst
}

// raising returns the part of a contract that is in force according to the adaptor, and
// the brokers that the rest waits for; nil: the whole contract is in force.
func raising(shares *srtmv1.TopicShares) *srtmv1.Raising {
	contract := service.ShareOf(shares.GetContract())
	var sum tokenbucket.Share
	p := &srtmv1.Raising{}
	wait := func(id string, connected bool) {
		p.Brokers = append(p.Brokers, &srtmv1.AwaitedBroker{BrokerId: id, Connected: connected})
	}
	for _, id := range shares.GetAwaited() {
		wait(id, false)
	}
	for _, m := range shares.GetMembers() {
		confirmed, reserved, target := service.ShareOf(m.Acknowledged), service.ShareOf(m.Reserved), service.ShareOf(m.Target)
		sum.Rate += min(confirmed.Rate, reserved.Rate) // less than confirmed after the lease has ended
		sum.Burst += min(confirmed.Burst, reserved.Burst)
		blocks := !m.Connected && (reserved.Rate > target.Rate || reserved.Burst > target.Burst || confirmed.Rate < target.Rate || confirmed.Burst < target.Burst)
		if pending := m.Connected && m.GrantedEpoch != m.AcknowledgedEpoch; (pending || blocks) && !slices.Contains(shares.Awaited, m.BrokerId) {
			wait(m.BrokerId, m.Connected)
		}
	}
	if shares.GetContract() != nil && sum.Rate >= contract.Rate && sum.Burst >= contract.Burst {
		return nil
	}
	slices.SortFunc(p.Brokers, func(a, b *srtmv1.AwaitedBroker) int { return cmp.Compare(a.BrokerId, b.BrokerId) })
	if shares.GetContract() != nil {
		p.InForce = service.ShareProto(sum)
	}
	return p
}

// unconfirmed returns the shares that brokers may use beyond the contract of a changing
// topic. Without an answer of the adaptor, every holder may use the former contract.
func (c *change) unconfirmed(query reconcile.LookUnconfirmed) reconcile.Unconfirmed {
	name := c.op.name
	c.mu.RLock()
	recorded := c.cat.next.Unconfirmed(name)
	awaited, strict := c.cat.mayHold(name)
	c.mu.RUnlock()
	var shares *srtmv1.TopicShares
	var err error
	if removed := query.Contract.IsZero(); removed {
		// Repeat the removal: a restarted adaptor does not know the brokers.
		shares, err = c.adaptor.drop(name, awaited, strict)
	} else if shares, err = c.adaptor.topic(context.Background(), name, sharesTimeout); err == nil && !current(shares, query.Contract) {
		err = errForgotten
	}
	if err != nil {
		shares = &srtmv1.TopicShares{Awaited: awaited}
		u := excess(shares, query, recorded)
		u.Pending = true
		return u
	}
	u := excess(shares, query, recorded)
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, id := range shares.GetAwaited() { // the broker will soon reach the adaptor, too
		u.Pending = u.Pending || c.brokers.sessions[id] != nil
	}
	return u
}

// mayHold returns the brokers that may use shares of a present or deleted topic, by id,
// and the strict brokers among them. Requires: the lock held, for reading.
func (p *pipeline) mayHold(name string) (ids, strict []string) {
	if topic, found := p.next.Topic(name); found {
		ids = topic.Holders()
	}
	for _, s := range p.next.Unconfirmed(name) {
		ids = append(ids, s.Broker)
	}
	slices.Sort(ids)
	ids = slices.DeleteFunc(slices.Compact(ids), func(id string) bool {
		b, _ := p.next.Broker(id)
		return b.Forgotten
	})
	for _, id := range ids {
		if b, _ := p.next.Broker(id); b.Strict {
			strict = append(strict, id)
		}
	}
	return ids, strict
}

// noteUnconfirmed stores the adaptor's knowledge of shares beyond contracts, and sends a
// restarted adaptor the brokers that may still use a removed contract. done means that
// nothing has changed.
func (c *contracts) noteUnconfirmed(shares []*srtmv1.TopicShares) (done bool) {
	byTopic := map[string]*srtmv1.TopicShares{}
	c.mu.RLock()
	names := c.cat.next.UnconfirmedTopics() // including raised contracts
	c.mu.RUnlock()
	for _, t := range shares {
		var sum tokenbucket.Share
		for _, m := range t.Members {
			sum.Rate, sum.Burst = sum.Rate+tokenbucket.Rate(m.Reserved.GetRateMilli()), sum.Burst+m.Reserved.GetBurst()
		}
		if byTopic[t.Topic] = t; t.Contract != nil && (int64(sum.Rate) > t.Contract.RateMilli || sum.Burst > t.Contract.Burst) {
			names = append(names, t.Topic)
		}
	}
	slices.Sort(names)
	done = true
	for _, name := range slices.Compact(names) {
		changed, err := c.noteTopic(name, byTopic[name])
		if err != nil {
			c.cfg.Log.Warn("cannot send the adaptor the brokers that may use a removed contract; retrying", obs.KeyTopic, name, obs.KeyError, err)
		}
		done = done && !changed && err == nil
	}
	return done
}

// noteTopic is noteUnconfirmed for one topic. shares is nil if the adaptor does not know
// the topic.
func (c *contracts) noteTopic(name string, shares *srtmv1.TopicShares) (changed bool, err error) {
	c.mu.RLock()
	owned := c.topics.owned(name)
	topic, found := c.cat.next.Topic(name)
	awaited, strict := c.cat.mayHold(name)
	c.mu.RUnlock()
	var query reconcile.LookUnconfirmed
	switch {
	case owned:
		return false, nil // the owner looks
	case found:
		if !current(shares, topic.Spec.Contract()) {
			return false, nil // run sends the contract first
		}
		query.Contract, query.Raised = topic.Spec.Contract(), topic.Raising
	case !shares.GetRemoving():
		if shares, err = c.adaptor.drop(name, awaited, strict); err != nil {
			return false, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	recorded := c.cat.next.Unconfirmed(name)
	u := excess(shares, query, recorded)
	now := catalog.SharesUnconfirmed{Topic: name, Shares: u.Shares, Raising: u.Raising, Vague: topic.Vague && len(shares.GetAwaited()) > 0}
	next, exists := c.cat.next.Topic(name)
	unchanged := slices.Equal(now.Shares, recorded) && now.Raising == topic.Raising && now.Vague == topic.Vague
	if c.topics.owned(name) || exists != found || next.Spec != topic.Spec || unchanged {
		return false, nil
	}
	_, err = c.cat.stage(now)
	return true, mustSucceed("the unconfirmed shares of topic "+name, err)
}

// Raising returns the part of a raised contract that is in force, and the brokers that
// the rest waits for; nil: the whole contract is in force.
func (r *View) Raising(ctx context.Context, topic catalog.Topic) *srtmv1.Raising {
	if !topic.Raising {
		return nil
	}
	shares, err := r.adaptor.topic(ctx, topic.Spec.Name(), sharesTimeout)
	if err != nil {
		r.cfg.Log.Debug("raising without shares", obs.KeyTopic, topic.Spec.Name(), obs.KeyError, err)
	}
	p := raising(shares)
	for _, b := range p.GetBrokers() {
		if remaining := shares.GetLeft()[b.BrokerId]; remaining != nil {
			b.Until = timestamppb.New(time.Now().Add(remaining.AsDuration()))
		}
	}
	return p
}

// Lowering returns the brokers that may use more than a topic's contract, or may use the
// contract of a deleted topic; nil: none.
func (r *View) Lowering(ctx context.Context, name string) *srtmv1.Lowering {
	r.mu.RLock()
	recorded := r.cat.committed.Unconfirmed(name)
	topic, found := r.cat.committed.Topic(name)
	r.mu.RUnlock()
	if len(recorded) == 0 {
		return nil
	}
	shares, err := r.adaptor.topic(ctx, name, sharesTimeout)
	if err != nil {
		r.cfg.Log.Debug("lowering without shares", obs.KeyTopic, name, obs.KeyError, err)
	}
	var query reconcile.LookUnconfirmed
	if found {
		query.Contract = topic.Spec.Contract()
	}
	// The adaptor may not have the topic or its contract yet.
	if adaptorKnows := shares.GetRemoving() || found && current(shares, query.Contract); adaptorKnows {
		recorded = excess(shares, query, recorded).Shares
	}
	return r.lowering(recorded, shares, time.Now())
}

// CatalogLowering is Lowering from the catalog alone, without the adaptor.
func (r *View) CatalogLowering(topic catalog.Topic) *srtmv1.Lowering {
	return r.lowering(topic.Unconfirmed, nil, time.Now())
}

// lowering describes the unconfirmed shares of brokers; nil: none.
func (r *View) lowering(unconfirmed []catalog.UnconfirmedShare, shares *srtmv1.TopicShares, now time.Time) *srtmv1.Lowering {
	if len(unconfirmed) == 0 {
		return nil
	}
	members := map[string]*srtmv1.MemberShare{}
	for _, m := range shares.GetMembers() {
		members[m.BrokerId] = m
	}
	p := &srtmv1.Lowering{}
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, s := range unconfirmed {
		share := &srtmv1.UnconfirmedShare{BrokerId: s.Broker, Share: service.ShareProto(s.Share), Policy: srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE}
		if b, _ := r.cat.committed.Broker(s.Broker); b.Strict {
			share.Policy = srtmv1.LeasePolicy_LEASE_POLICY_STRICT
		}
		if m := members[s.Broker]; m != nil && !slices.Contains(shares.GetAwaited(), s.Broker) {
			share.Policy, share.Connected = m.Policy, m.Connected
		}
		if remaining := shares.GetLeft()[s.Broker]; remaining != nil && share.Policy == srtmv1.LeasePolicy_LEASE_POLICY_STRICT {
			share.Until = timestamppb.New(now.Add(remaining.AsDuration()))
			share.MostMessages = s.Share.Burst + int64(math.Ceil(s.Share.Rate.PerSecond()*max(0, remaining.AsDuration().Seconds())))
		}
		p.Brokers = append(p.Brokers, share)
	}
	return p
}
