package store

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/api/srtm/journal"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Conversions between the catalog's types and the journal's.

func fromAbsorption(broker string, a catalog.Absorption) *journal.Absorbed {
	if a == (catalog.Absorption{}) {
		return nil
	}
	return &journal.Absorbed{Broker: broker, LatencyNs: int64(a.Latency), RateMilli: a.Rate, Burst: a.Burst}
}

func toAbsorption(a *journal.Absorbed) catalog.Absorption {
	return catalog.Absorption{Latency: time.Duration(a.GetLatencyNs()), Rate: a.GetRateMilli(), Burst: a.GetBurst()}
}

func fromDump(d catalog.Dump) *journal.Snapshot {
	s := &journal.Snapshot{Version: d.Version, Log: d.Log, Ahead: d.Ahead, Contracts: d.Contracts, Removed: d.Removed}
	for _, b := range d.Brokers {
		s.Brokers = append(s.Brokers, fromBroker(b))
	}
	for _, t := range d.Topics {
		s.Topics = append(s.Topics, fromTopic(t))
	}
	for _, entry := range d.Unconfirmed {
		s.Unconfirmed = append(s.Unconfirmed, fromUnconfirmed(entry))
	}
	return s
}

func fromUnconfirmed(e catalog.SharesUnconfirmed) *journal.Unconfirmed {
	m := &journal.Unconfirmed{Topic: e.Topic, Raising: e.Raising, Vague: e.Vague}
	for _, s := range e.Shares {
		m.Shares = append(m.Shares, &journal.UnconfirmedShare{Broker: s.Broker, RateMilli: int64(s.Share.Rate), Burst: s.Share.Burst})
	}
	return m
}

func toUnconfirmed(m *journal.Unconfirmed) catalog.SharesUnconfirmed {
	e := catalog.SharesUnconfirmed{Topic: m.GetTopic(), Raising: m.GetRaising(), Vague: m.GetVague()}
	for _, s := range m.GetShares() {
		e.Shares = append(e.Shares, catalog.UnconfirmedShare{Broker: s.GetBroker(), Share: tokenbucket.Share{Rate: tokenbucket.Rate(s.GetRateMilli()), Burst: s.GetBurst()}})
	}
	return e
}

func toDump(s *journal.Snapshot) (catalog.Dump, error) {
	d := catalog.Dump{Version: s.Version, Log: s.Log, Ahead: s.Ahead, Contracts: s.Contracts, Removed: map[string]uint64{}}
	maps.Copy(d.Removed, s.Removed)
	for _, b := range s.Brokers {
		d.Brokers = append(d.Brokers, toBroker(b))
	}
	for _, t := range s.Topics {
		entry, err := toTopic(t)
		if err != nil {
			return d, err
		}
		d.Topics = append(d.Topics, entry)
	}
	for _, m := range s.Unconfirmed {
		d.Unconfirmed = append(d.Unconfirmed, toUnconfirmed(m))
	}
	return d, nil
}

func fromBroker(b catalog.BrokerDump) *journal.Broker {
	k := b.Broker
	return &journal.Broker{
		Id: k.ID, Instance: k.Instance, Tcp: k.TCPAddress, Http: k.HTTPAddress, Mqtt: k.MQTTAddress, Mqtts: k.MQTTSAddress, Hostname: k.Hostname,
		Version: k.Version, Mcap: k.Configured, Connected: k.Connected, Draining: k.Draining, Forced: k.Forced,
		Leftovers: b.Leftovers, Kept: b.Kept, LeftAt: b.LeftAt, Calibrated: k.Calibrated,
		Absorbed: fromAbsorption("", k.Absorbed), DataPath: k.Folder, Lock: k.Lock, Forgotten: k.Forgotten, Strict: k.Strict,
	}
}

func toBroker(b *journal.Broker) catalog.BrokerDump {
	if b == nil {
		return catalog.BrokerDump{} // Load and Apply refuse an empty broker
	}
	return catalog.BrokerDump{
		Broker: catalog.Broker{
			ID: b.Id, Instance: b.Instance, TCPAddress: b.Tcp, HTTPAddress: b.Http, MQTTAddress: b.Mqtt, MQTTSAddress: b.Mqtts, Hostname: b.Hostname,
			Version: b.Version, Connected: b.Connected, Draining: b.Draining, Forced: b.Forced,
			Mcap: cmp.Or(b.Calibrated, b.Mcap), Configured: b.Mcap, Calibrated: b.Calibrated,
			Absorbed: toAbsorption(b.Absorbed), Folder: b.DataPath, Lock: b.Lock, Forgotten: b.Forgotten, Strict: b.Strict,
		},
		Leftovers: b.Leftovers, Kept: b.Kept, LeftAt: b.LeftAt,
	}
}

var phases = map[string]catalog.State{"preparing": catalog.Preparing, "active": catalog.Active, "deleting": catalog.Deleting}

func fromTopic(t catalog.TopicDump) *journal.Topic {
	entry := &journal.Topic{
		Spec: fromSpec(t.Spec), Key: t.Key, Phase: t.Phase.String(), Uncreated: t.Uncreated, Created: t.Created, Plan: fromPlan(t.Plan),
		Epoch: t.Epoch, Prepared: t.Prepared, Retiring: t.Retiring, Channels: fromChannels(t.Channels),
	}
	if t.Ordered != t.Spec {
		entry.Ordered = fromSpec(t.Ordered)
	}
	if t.Next != nil {
		entry.NextSpec, entry.NextPlan, entry.NextPrepared = fromSpec(t.Next.Spec), fromPlan(t.Next.Plan), t.NextPrepared
	}
	return entry
}

func toTopic(t *journal.Topic) (catalog.TopicDump, error) {
	d := catalog.TopicDump{
		Key: t.GetKey(), Phase: phases[t.GetPhase()], Uncreated: t.GetUncreated(), Created: t.GetCreated(), Plan: toPlan(t.GetPlan()), Epoch: t.GetEpoch(),
		Prepared: t.GetPrepared(), Retiring: t.GetRetiring(), Channels: toChannels(t.GetChannels()),
	}
	var err error
	if d.Spec, err = toSpec(t.GetSpec()); err != nil {
		return d, err
	}
	if d.Ordered = d.Spec; t.Ordered != nil {
		if d.Ordered, err = toSpec(t.Ordered); err != nil {
			return d, err
		}
	}
	if (t.NextSpec == nil) != (t.NextPlan == nil) {
		return d, fmt.Errorf("half of a next plan of topic %s", d.Spec.Name())
	}
	if t.NextSpec != nil {
		s, err := toSpec(t.NextSpec)
		if err != nil {
			return d, err
		}
		d.Next, d.NextPrepared = &catalog.Next{Spec: s, Plan: toPlan(t.NextPlan)}, t.NextPrepared
	}
	return d, nil
}

func fromChannels(all []catalog.Channel) (p []*journal.Channel) {
	for _, entry := range all {
		p = append(p, &journal.Channel{Name: entry.Name, Created: entry.Created, Paused: entry.Paused, Session: entry.Session})
	}
	return p
}

func toChannels(p []*journal.Channel) (all []catalog.Channel) {
	for _, entry := range p {
		all = append(all, catalog.Channel{Name: entry.GetName(), Created: entry.GetCreated(), Paused: entry.GetPaused(), Session: entry.GetSession()})
	}
	return all
}

func fromSpec(s *catalog.Spec) *journal.Spec {
	p := &journal.Spec{
		Name: s.Demand.Topic, RateMilli: s.Demand.RateMilli, Rate: s.Demand.Rate, Burst: s.Demand.Burst,
		Quantile: s.SLO.Quantile, LatencyNs: int64(s.SLO.Latency), Reject: s.OverLimit == catalog.Reject,
		Policy: s.Policy, ShareRule: s.ShareRule, Channels: s.Channels, Pacing: string(s.Pacing), Tenant: s.Tenant, Durability: string(s.Durability),
		Open: s.Demand.Open, Since: s.Since,
	}
	if a := s.Auto; a != (catalog.Auto{}) {
		p.Auto = &journal.Auto{MaxRateMilli: a.MaxRate, MinBurst: a.MinBurst, MaxBurst: a.MaxBurst, Measured: a.Measured}
	}
	p.Expiry = fromExpiry("", s.Expiry)
	for _, channel := range slices.Sorted(maps.Keys(s.ChannelExpiry)) {
		p.ChannelExpiry = append(p.ChannelExpiry, fromExpiry(channel, s.ChannelExpiry[channel]))
	}
	p.Publishers = fromPublishers(s.Demand.Publishers)
	for _, entry := range s.Demand.Groups {
		p.Groups = append(p.Groups, &journal.Group{Key: entry.Key, Count: int64(entry.Count), Rate: entry.Rate, Batch: int64(entry.Batch), Weight: uint32(entry.Weight)})
	}
	return p
}

// toSpec converts a specification. It refuses a specification that no request could have
// made, because expanding it could take any amount of memory.
func toSpec(p *journal.Spec) (*catalog.Spec, error) {
	if p == nil {
		return nil, errors.New("there is no specification")
	}
	s := toHead(p)
	if err := s.Demand.Validate(); err != nil {
		return nil, fmt.Errorf("topic %q: %w", p.Name, err)
	}
	return s, nil
}

// toHead is toSpec without the check.
func toHead(p *journal.Spec) *catalog.Spec {
	s := &catalog.Spec{
		Demand: placement.Demand{Topic: p.Name, RateMilli: p.RateMilli, Rate: p.Rate, Burst: p.Burst, Open: p.Open},
		SLO:    catalog.SLO{Quantile: p.Quantile, Latency: time.Duration(p.LatencyNs)},
		Policy: p.Policy, ShareRule: p.ShareRule, Channels: p.Channels, Pacing: catalog.Pacing(p.Pacing), Tenant: p.Tenant, Durability: catalog.Durability(p.Durability),
		Since: p.Since,
		Auto:  catalog.Auto{MaxRate: p.Auto.GetMaxRateMilli(), MinBurst: p.Auto.GetMinBurst(), MaxBurst: p.Auto.GetMaxBurst(), Measured: p.Auto.GetMeasured()},
	}
	s.Expiry = toExpiry(p.Expiry)
	for _, e := range p.ChannelExpiry {
		if s.ChannelExpiry == nil {
			s.ChannelExpiry = make(map[string]expiry.Settings)
		}
		s.ChannelExpiry[e.GetChannel()] = toExpiry(e)
	}
	if p.Reject {
		s.OverLimit = catalog.Reject
	}
	s.Demand.Publishers = toPublishers(p.Publishers)
	for _, entry := range p.Groups {
		s.Demand.Groups = append(s.Demand.Groups, placement.Group{Key: entry.GetKey(), Count: int(entry.GetCount()), Rate: entry.GetRate(), Batch: int(entry.GetBatch()), Weight: int(entry.GetWeight())})
	}
	return s
}

func fromExpiry(channel string, e expiry.Settings) *journal.Expiry {
	if !e.On() {
		return nil
	}
	return &journal.Expiry{Channel: channel, TtlNs: int64(e.TTL), MaxAttempts: int64(e.MaxAttempts), DeadLetter: e.DeadLetter}
}

func toExpiry(p *journal.Expiry) expiry.Settings {
	return expiry.Settings{TTL: time.Duration(p.GetTtlNs()), MaxAttempts: int(p.GetMaxAttempts()), DeadLetter: p.GetDeadLetter()}
}

func fromPublishers(all []placement.Publisher) (p []*journal.Publisher) {
	for _, entry := range all {
		p = append(p, &journal.Publisher{Id: entry.ID, Key: entry.Key, Rate: entry.Rate, Batch: int64(entry.Batch)})
	}
	return p
}

func toPublishers(p []*journal.Publisher) (all []placement.Publisher) {
	for _, entry := range p {
		all = append(all, placement.Publisher{ID: entry.GetId(), Key: entry.GetKey(), Rate: entry.GetRate(), Batch: int(entry.GetBatch())})
	}
	return all
}

func fromChange(e catalog.TopicChanging) *journal.Change {
	return &journal.Change{
		Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan), Removed: differences(e.Removed), Added: differences(e.Added),
		Publishers: fromPublishers(e.Publishers), Since: e.Since,
	}
}

// toChange converts a change without checking the change against the topic.
func toChange(m *journal.Change) (catalog.TopicChanging, error) {
	if m.Spec == nil || len(m.Spec.Publishers)+len(m.Spec.Since) > 0 {
		return catalog.TopicChanging{}, errors.New("no specification without publishers")
	}
	return catalog.TopicChanging{
		Spec: toHead(m.Spec), Plan: toPlan(m.Plan), Removed: sums(m.Removed), Added: sums(m.Added),
		Publishers: toPublishers(m.Publishers), Since: m.Since,
	}, nil
}

func fromPlan(p placement.Plan) *journal.Plan {
	r := &journal.Plan{Policy: p.Policy, Unplaced: differences(p.Unplaced)}
	for _, q := range p.Quotas {
		r.Quotas = append(r.Quotas, &journal.Quota{
			Broker: q.Broker, Rate: q.Rate, Publishers: differences(q.Publishers), RateMilli: int64(q.Share.Rate), Burst: q.Share.Burst,
		})
	}
	return r
}

func toPlan(p *journal.Plan) placement.Plan {
	r := placement.Plan{Policy: p.GetPolicy(), K: len(p.GetQuotas()), Unplaced: sums(p.GetUnplaced())}
	for _, q := range p.GetQuotas() {
		entry := placement.Quota{
			Broker: q.GetBroker(), Rate: q.GetRate(), Publishers: sums(q.GetPublishers()),
			Share: tokenbucket.Share{Rate: tokenbucket.Rate(q.GetRateMilli()), Burst: q.GetBurst()},
		}
		r.Quotas = append(r.Quotas, entry)
	}
	return r
}

// differences encodes ascending indices as the first index and then the increments.
func differences(indices []int) (d []int64) {
	last := 0
	for _, i := range indices {
		d = append(d, int64(i-last))
		last = i
	}
	return d
}

// sums is the inverse of differences.
func sums(d []int64) (indices []int) {
	last := 0
	for _, delta := range d {
		last += int(delta)
		indices = append(indices, last)
	}
	return indices
}
