package catalog

import (
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// OverLimit is what a broker does with a message that has no token.
type OverLimit uint8

const (
	// Delay accepts the message and releases it when its token is there.
	Delay OverLimit = iota
	// Reject refuses a message whose access delay would pass the broker's limit.
	Reject
)

// Pacing is what brokers do about publishers that send more than their part.
type Pacing string

// The modes; "": the broker's own.
const (
	PacingOff    Pacing = "off"
	PacingAdvise Pacing = "advise"
	PacingPolice Pacing = "police"
)

func (p Pacing) on() bool { return p == PacingAdvise || p == PacingPolice }

// Durability is what an OK to a publisher is worth.
type Durability string

// Its values; "": the brokers' own.
const (
	DurabilityMemory     Durability = "memory"
	DurabilityFsync      Durability = "fsync"
	DurabilityReplicated Durability = "replicated"
)

// SLO: a fraction Quantile, in (0, 1), of a topic's messages is delivered
// within Latency, above 0.
type SLO struct {
	Quantile float64
	Latency  time.Duration
}

// Spec is what a topic was ordered as. It is not modified after it has been
// handed over in an event, and may be shared by readers.
type Spec struct {
	Demand    placement.Demand
	SLO       SLO
	OverLimit OverLimit
	// Placement policy and share rule, by name, resolved: never empty.
	Policy, ShareRule string
	Pacing            Pacing
	Durability        Durability
	Channels          []string
	Tenant            string // whose it is; "": an operator's
	// Since is when each of Demand.Publishers of an open topic was heard first, in seconds
	// since the Unix epoch. They are learned, and not ordered.
	Since []int64
	// Expiry says when messages are given up, and ChannelExpiry what channels set of their own.
	Expiry        expiry.Settings
	ChannelExpiry map[string]expiry.Settings
	// Auto is between what the contract of an open topic follows what is measured.
	Auto Auto
}

// Auto are limits, of a rate and a burst that follow where they are above 0.
type Auto struct {
	MaxRate            int64 // milli-msg/s
	MinBurst, MaxBurst int64
	Measured           bool // the contract is from what was measured
}

// Name returns the topic's name.
func (s *Spec) Name() string { return s.Demand.Topic }

// Contract returns (r, b).
func (s *Spec) Contract() tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(s.Demand.RateMilli), Burst: s.Demand.Burst}
}

// Keeping returns a specification with that durability.
func (s *Spec) Keeping(d Durability) *Spec {
	c := *s
	c.Durability = d
	return &c
}

// Weighted returns the groups that have a weight, where the topic is paced.
func (s *Spec) Weighted() (groups []placement.Group) {
	for _, g := range s.Demand.Groups {
		if g.Weight > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// Equal reports whether both order the same. The order of publishers matters:
// a placement depends on it.
func (s *Spec) Equal(o *Spec) bool {
	return s.PlacedAs(o) && s.Tenant == o.Tenant && s.SLO == o.SLO && s.OverLimit == o.OverLimit && s.ShareRule == o.ShareRule && s.Pacing == o.Pacing && s.Durability == o.Durability &&
		slices.Equal(s.Channels, o.Channels) && slices.Equal(s.Since, o.Since) && s.Auto == o.Auto &&
		s.Expiry == o.Expiry && maps.Equal(s.ChannelExpiry, o.ChannelExpiry)
}

// PlacedAs reports whether all is the same in both that decides a placement.
func (s *Spec) PlacedAs(o *Spec) bool {
	a, b := &s.Demand, &o.Demand
	return a.Topic == b.Topic && a.Rate == b.Rate && a.RateMilli == b.RateMilli && a.Burst == b.Burst && a.Open == b.Open && s.Policy == o.Policy &&
		slices.Equal(a.Publishers, b.Publishers) && slices.Equal(a.Groups, b.Groups)
}

// Endpoint is a member of a topic as publishers reach it.
type Endpoint struct {
	Broker, TCPAddress, HTTPAddress string
}

// Assignment says where a publisher belongs.
type Assignment struct {
	Publisher string
	Endpoint  // zero: nowhere, for now
	// Epoch of the placement it is from.
	Epoch uint64
	// Unknown: the topic does not have the publisher. Only of Placement.Of.
	Unknown bool
	Paced   bool // it may ask what it may send
}

// Placement is where the publishers of a topic go. It is immutable: a change
// makes another one, with a greater epoch, so readers keep it without a lock
// and compare two to see what changed.
type Placement struct {
	epoch   uint64
	members []Endpoint
	spread  *spread
	paced   bool // publishers may ask what they may send
}

// spread is the part of a Placement that outlives a change of addresses.
type spread struct {
	*placement.Names
	member []int32 // member[i] of Placement.members has publisher i of Demand.Expand(), or unplaced
	// How many are unplaced.
	unplaced int
	// others is the member where publishers go that an open topic does not know; of
	// another, unknown.
	others int32
}

// In spread.member: the publisher has no place, and while a spread is made, nothing
// has been said of it.
const (
	unplaced int32 = -1
	unknown  int32 = -2
)

// Epoch grows with every change of the placement, over a deletion and
// re-creation of the topic too.
func (p *Placement) Epoch() uint64 { return p.epoch }

// Members returns the brokers, in the order of the plan. Not to be modified.
func (p *Placement) Members() []Endpoint { return p.members }

// Len returns the number of publishers.
func (p *Placement) Len() int { return p.spread.Len() }

// At returns the assignment of publisher i, 0 <= i < Len.
func (p *Placement) At(i int) Assignment { return p.at(i, p.spread.ID(i)) }

func (p *Placement) at(i int, id string) Assignment {
	a := Assignment{Publisher: id, Epoch: p.epoch, Paced: p.paced}
	if m := p.spread.member[i]; m != unplaced {
		a.Endpoint = p.members[m]
	}
	return a
}

// Of returns the assignment of the publisher with the id, which may be unknown.
func (p *Placement) Of(id string) Assignment {
	i, known := p.Index(id)
	if known {
		return p.at(i, id)
	}
	a := Assignment{Publisher: id, Epoch: p.epoch, Unknown: p.spread.others < 0, Paced: p.paced}
	if !a.Unknown {
		a.Endpoint = p.members[p.spread.others]
	}
	return a
}

// Unplaced returns how many publishers have no broker.
func (p *Placement) Unplaced() int { return p.spread.unplaced }

// Index returns which publisher has the id.
func (p *Placement) Index(id string) (int, bool) {
	return p.spread.Index(id)
}
