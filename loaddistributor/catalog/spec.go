package catalog

import (
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// OverLimit selects how a broker treats a message without a token.
type OverLimit uint8

const (
	// Delay accepts the message and releases it when its token arrives.
	Delay OverLimit = iota
	// Reject refuses a message whose access delay would exceed the broker's limit.
	Reject
)

// Pacing selects how brokers treat publishers that exceed their part.
type Pacing string

// Pacing modes; "": the broker's default.
const (
	PacingOff    Pacing = "off"
	PacingAdvise Pacing = "advise"
	PacingPolice Pacing = "police"
)

func (p Pacing) enabled() bool { return p == PacingAdvise || p == PacingPolice }

// Durability is the durability guarantee of an OK to a publisher.
type Durability string

// Durability values; "": the brokers' default.
const (
	DurabilityMemory     Durability = "memory"
	DurabilityFsync      Durability = "fsync"
	DurabilityReplicated Durability = "replicated"
)

// SLO promises that the fraction Quantile, in (0, 1), of a topic's messages is delivered
// within Latency, > 0.
type SLO struct {
	Quantile float64
	Latency  time.Duration
}

// Spec is the ordered specification of a topic. A Spec is never modified after an event
// has carried it, so readers may share it.
type Spec struct {
	Demand    placement.Demand
	SLO       SLO
	OverLimit OverLimit
	// Policy and ShareRule are resolved names, never empty.
	Policy, ShareRule string
	Pacing            Pacing
	Durability        Durability
	Channels          []string
	Tenant            string // owner; "": an operator
	// Since holds the time of the first message of each of Demand.Publishers of an open
	// topic, in seconds since the Unix epoch. These times are learned, not ordered.
	Since []int64
	// Expiry is the message expiry; ChannelExpiry overrides Expiry per channel.
	Expiry        expiry.Settings
	ChannelExpiry map[string]expiry.Settings
	// Auto limits how the contract of an open topic follows measurements.
	Auto Auto
}

// Auto limits an automatic contract. Rate or burst follows measurements if its limit is
// above 0.
type Auto struct {
	MaxRate            int64 // milli-msg/s
	MinBurst, MaxBurst int64
	Measured           bool // the contract comes from measurements
}

// Name returns the topic's name.
func (s *Spec) Name() string { return s.Demand.Topic }

// Contract returns (r, b).
func (s *Spec) Contract() tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(s.Demand.RateMilli), Burst: s.Demand.Burst}
}

// Keeping returns a copy with the given durability.
func (s *Spec) Keeping(d Durability) *Spec {
	c := *s
	c.Durability = d
	return &c
}

// Weighted returns the groups with a weight.
func (s *Spec) Weighted() (groups []placement.Group) {
	for _, g := range s.Demand.Groups {
		if g.Weight > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// Equal reports whether s and o order the same. The order of publishers matters, because
// the placement depends on it.
func (s *Spec) Equal(o *Spec) bool {
	return s.PlacedAs(o) && s.Tenant == o.Tenant && s.SLO == o.SLO && s.OverLimit == o.OverLimit && s.ShareRule == o.ShareRule && s.Pacing == o.Pacing && s.Durability == o.Durability &&
		slices.Equal(s.Channels, o.Channels) && slices.Equal(s.Since, o.Since) && s.Auto == o.Auto &&
		s.Expiry == o.Expiry && maps.Equal(s.ChannelExpiry, o.ChannelExpiry)
}

// PlacedAs reports whether s and o agree in everything that determines a placement.
func (s *Spec) PlacedAs(o *Spec) bool {
	a, b := &s.Demand, &o.Demand
	return a.Topic == b.Topic && a.Rate == b.Rate && a.RateMilli == b.RateMilli && a.Burst == b.Burst && a.Open == b.Open && s.Policy == o.Policy &&
		slices.Equal(a.Publishers, b.Publishers) && slices.Equal(a.Groups, b.Groups)
}

// Endpoint is a member of a topic with its addresses for publishers.
type Endpoint struct {
	Broker, TCPAddress, HTTPAddress string
	MQTTAddress, MQTTSAddress       string // see BrokerJoined
}

// Assignment is the place of a publisher.
type Assignment struct {
	Publisher string
	Endpoint  // zero: no place at present
	// Epoch is the epoch of the placement.
	Epoch uint64
	// Unknown: the topic does not know the publisher. Only Placement.Of sets Unknown.
	Unknown bool
	Paced   bool // the publisher may request its advised rate
}

// Placement assigns the publishers of a topic to brokers. It is immutable. A change makes
// a new Placement with a greater epoch, so readers use a Placement without a lock and
// compare two to find changes.
type Placement struct {
	epoch   uint64
	members []Endpoint
	spread  *spread
	paced   bool // publishers may request their advised rates
}

// spread is the part of a Placement that survives a change of addresses.
type spread struct {
	*placement.Names
	member []int32 // member[i] is the index in Placement.members for publisher i of Demand.Expand(), or unplaced
	// unplaced is the number of unplaced publishers.
	unplaced int
	// memberOfUnknown is the member for unknown publishers of an open topic. Other topics have
	// others = unknown.
	memberOfUnknown int32
}

// Values of spread.member. unplaced: the publisher has no place. unknown: newSpread has
// not seen the publisher yet.
const (
	unplaced int32 = -1
	unknown  int32 = -2
)

// Epoch grows with every change of the placement, even when the topic is deleted and
// created again.
func (p *Placement) Epoch() uint64 { return p.epoch }

// Members returns the brokers in the order of the plan. Callers must not modify the
// slice.
func (p *Placement) Members() []Endpoint { return p.members }

// Len returns the number of publishers.
func (p *Placement) Len() int { return p.spread.Len() }

// At returns the assignment of publisher i, 0 <= i < Len.
func (p *Placement) At(i int) Assignment { return p.assignment(i, p.spread.ID(i)) }

func (p *Placement) assignment(i int, id string) Assignment {
	a := Assignment{Publisher: id, Epoch: p.epoch, Paced: p.paced}
	if m := p.spread.member[i]; m != unplaced {
		a.Endpoint = p.members[m]
	}
	return a
}

// Of returns a publisher's assignment. The publisher may be missing in the topic's list.
func (p *Placement) Of(id string) Assignment {
	i, found := p.Index(id)
	if found {
		return p.assignment(i, id)
	}
	a := Assignment{Publisher: id, Epoch: p.epoch, Unknown: p.spread.memberOfUnknown < 0, Paced: p.paced}
	if !a.Unknown {
		a.Endpoint = p.members[p.spread.memberOfUnknown]
	}
	return a
}

// Unplaced returns the number of publishers without a broker.
func (p *Placement) Unplaced() int { return p.spread.unplaced }

// Index returns the index of the publisher with the given id.
func (p *Placement) Index(id string) (int, bool) {
	return p.spread.Index(id)
}
