package catalog

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Event is something that happened, or that the controller decided; Apply
// makes it so or refuses it as a whole. Every accepted event raises the version
// by one, so a store keeps all of them, and the version is an event's place in
// its log.
type Event interface {
	apply(*Catalog) ([]Effect, error)
}

// BrokerJoined: a broker has opened a session. It holds nothing that it was
// not told in this session, as far as the catalog is concerned: all its topics
// are prepared again.
type BrokerJoined struct {
	ID, Instance            string
	TCPAddress, HTTPAddress string
	Hostname, Version       string
	Folder, Lock            string // as of Broker
	// Maximum rate within the SLO, msg/s; > 0. It may be lower than what is
	// allocated already: that degrades the topics, and nothing new is placed.
	Mcap int64
}

// BrokerLeft: its session is over. What is allocated stays allocated.
type BrokerLeft struct{ ID string }

// TopicPlaced reserves what the plan takes. It is refused when the plan does
// not fit the present brokers. Make it with NewTopicPlaced.
type TopicPlaced struct {
	Spec *Spec
	Plan placement.Plan
	// Idempotency key of the request, empty for none.
	Key    string
	spread *spread
}

// MemberPrepared: the broker has created the topic, in its present session.
type MemberPrepared struct{ Topic, Broker string }

// TopicActivated: all members are prepared and hold their shares.
type TopicActivated struct{ Topic string }

// SLOJudged is a verdict over a window, as releases before 0.2.0 kept it. It changes
// nothing: verdicts are the leader's, and not kept.
type SLOJudged struct{ Topic, Missed string }

// TopicDeleting: its shares are being withdrawn; nothing resolves any more.
type TopicDeleting struct{ Topic string }

// TopicRemoved forgets a topic in whatever state and frees what it reserved.
type TopicRemoved struct {
	Topic string
	// Brokers that may still hold it and are to be told when they are back.
	Left []string
	// The adaptor may still hold its contract.
	ContractLeft bool
}

// LeftoverRemoved: the broker has removed what TopicRemoved left on it.
type LeftoverRemoved struct{ Topic, Broker string }

// LeftoverContractRemoved: the adaptor has forgotten the contract.
type LeftoverContractRemoved struct{ Topic string }

// BrokerDraining says whether the broker is to give up what it has; Forced, at the
// cost of the other brokers' capacity and of what consumers do not take.
type BrokerDraining struct {
	ID               string
	Draining, Forced bool
}

// BrokerCalibrated: an mcap, msg/s, that stands over the one the broker says hello
// with; 0 ends that. It may be lower than what is allocated already, as that of
// BrokerJoined may. It is forgotten with the broker (MaxGone).
type BrokerCalibrated struct {
	ID   string
	Mcap int64
}

// BrokerAbsorbed: a fit has learned what the broker gets through within a latency.
type BrokerAbsorbed struct {
	ID string
	Absorption
}

// BrokerNoted: what is to be known of a broker's shares when the adaptor has
// forgotten it. Forgotten: it holds nothing, until it joins. Strict: nothing it holds
// outlives its lease.
type BrokerNoted struct {
	ID                string
	Forgotten, Strict bool
}

// SharesUnconfirmed says which brokers may still use shares of a topic, alive or deleted,
// beyond its contract, and how much: the contract was lowered or removed, and the adaptor,
// whose memory is not durable, has no word from them. It replaces what was said before.
type SharesUnconfirmed struct {
	Topic  string
	Shares []UnconfirmedShare // by broker
	// Raising: the contract was raised, and brokers have not confirmed all of it.
	Raising bool
	// Vague: brokers may use more than the contract, and how much is not known: the contract was
	// brought back from another log, or a raise was taken back after the adaptor knew of it.
	Vague bool
}

// UnconfirmedShare is the most that a broker may still use.
type UnconfirmedShare struct {
	Broker string
	Share  tokenbucket.Share
}

// BrokerRemoved: a broker that is away, and on which no topic is placed, is none of
// the cluster any more, until it joins anew.
type BrokerRemoved struct{ ID string }

// TopicMoving begins a move of an active topic to another plan, perhaps of
// another specification under the same name: it reserves what the new plan
// takes beside the old one. Make it with NewTopicMoving.
type TopicMoving struct {
	Spec   *Spec
	Plan   placement.Plan
	spread *spread
	basis  *basis // nil: it is kept whole
}

// TopicMoved: all members of the new plan are prepared; from now on publishers
// belong where it says. Members that are not in it retire.
type TopicMoved struct{ Topic string }

// TopicMoveAborted: the old plan stays.
type TopicMoveAborted struct {
	Topic string
	// Brokers of the new plan alone that may hold messages of the topic: they
	// retire.
	Left []string
}

// MemberRetired: the topic is gone from a broker that it moved away from, or did
// not move to.
type MemberRetired struct{ Topic, Broker string }

// Restarted: another controller has taken over; it has no session yet, and what
// brokers did in those before has to be said again.
type Restarted struct{}

// TopicRestored brings a topic back that another log had, as active and as it was then:
// its name must be free and its brokers known. One that moved stays where it was, and
// brokers that it moved to retire. Its epochs go on from the one that it had, and
// beyond any that were given out after that. Its key is gone if another topic has it.
type TopicRestored struct{ TopicDump }

// BrokerRestored is a broker that another log knew, as being away: what it may hold, and
// what operators have said of it. One that is known already gets what of that it lacks.
type BrokerRestored struct{ BrokerDump }

// Effect is what follows from an event for the outside.
type Effect interface{ effect() }

// StateChanged: the topic shows another state or reason. To is Absent when it
// has been removed.
type StateChanged struct {
	Topic    string
	From, To State
	Reason   string
}

// PlacementChanged: Placement of the topic is another one, or gone.
type PlacementChanged struct{ Topic string }

func (StateChanged) effect()     {}
func (PlacementChanged) effect() {}

// Refusals of Apply and of the queries.
var (
	ErrTopicExists      = errors.New("topic exists")
	ErrTopicUnknown     = errors.New("no such topic")
	ErrTopicState       = errors.New("the topic's state does not allow it")
	ErrChannelUnknown   = errors.New("no such channel in the topic")
	ErrPublisherUnknown = errors.New("no such publisher in the topic")
	ErrNotActive        = errors.New("the topic is not active")
	// ErrUnplaced: the publisher has no broker now, because a fit finds out how many
	// each can take.
	ErrUnplaced      = errors.New("the publisher is not placed yet: the topic is being fitted")
	ErrKeyReused     = errors.New("the idempotency key belongs to another request")
	ErrBrokerUnknown = errors.New("no such broker")
	// ErrBrokerConnected: it cannot be removed.
	ErrBrokerConnected = errors.New("the broker is connected")
	// ErrBrokerInUse: it cannot be removed.
	ErrBrokerInUse = errors.New("topics are placed on the broker, which fit on no other or have not been moved yet")
	// ErrUnread: this replica has not read yet what is committed, or its log was lost and
	// is being rebuilt.
	ErrUnread = errors.New("the loaddistributor does not know yet what there is")
)

// PlanError: the plan does not fit the brokers as they are now, because they
// changed after it was made, or it is not a plan for this demand. Making a new
// plan may help.
type PlanError struct{ Broker, Problem string }

func (e *PlanError) Error() string {
	if e.Broker == "" {
		return "plan: " + e.Problem
	}
	return fmt.Sprintf("plan for broker %s: %s", e.Broker, e.Problem)
}

// NotReadyError: the topic cannot be active, for a member is not prepared.
type NotReadyError struct{ Topic, Reason string }

func (e *NotReadyError) Error() string { return fmt.Sprintf("topic %s: %s", e.Topic, e.Reason) }

// NewTopicPlaced checks that plan places every publisher of the demand exactly
// once, and does the part of the work that grows with their number, so that
// the committer need not do it under its lock.
func NewTopicPlaced(spec *Spec, plan placement.Plan, key string) (TopicPlaced, error) {
	e := TopicPlaced{Spec: spec, Plan: plan, Key: key}
	s, err := newSpread(spec, plan)
	if err != nil {
		return TopicPlaced{}, err
	}
	e.spread = s
	return e, nil
}

// NewTopicMoving is NewTopicPlaced for a move.
func NewTopicMoving(spec *Spec, plan placement.Plan) (TopicMoving, error) {
	s, err := newSpread(spec, plan)
	if err != nil {
		return TopicMoving{}, err
	}
	return TopicMoving{Spec: spec, Plan: plan, spread: s}, nil
}

func newSpread(spec *Spec, plan placement.Plan) (*spread, error) {
	if len(plan.Quotas) == 0 {
		return nil, &PlanError{Problem: "it uses no broker"}
	}
	names, twice := placement.NewNames(spec.Demand)
	if names == nil {
		return nil, &PlanError{Problem: fmt.Sprintf("publisher %q appears twice", twice)}
	}
	n := names.Len()
	s := &spread{Names: names, member: slices.Repeat([]int32{unknown}, n)}
	placed := 0
	s.unplaced = len(plan.Unplaced)
	for _, i := range plan.Unplaced {
		if i < 0 || i >= n || s.member[i] != unknown {
			return nil, &PlanError{Problem: fmt.Sprintf("publisher %d of %d is left without a place, perhaps twice", i, n)}
		}
		s.member[i] = unplaced
	}
	for m, q := range plan.Quotas {
		for _, i := range q.Publishers {
			if i < 0 || i >= n {
				return nil, &PlanError{q.Broker, fmt.Sprintf("publisher %d of %d", i, n)}
			}
			if s.member[i] != unknown {
				return nil, &PlanError{q.Broker, fmt.Sprintf("publisher %q is placed twice, or left without a place", s.ID(i))}
			}
			s.member[i] = int32(m)
			placed++
		}
	}
	if placed+s.unplaced != n {
		return nil, &PlanError{Problem: fmt.Sprintf("%d of %d publishers are placed, and %d left without a place", placed, n, s.unplaced)}
	}
	s.others = unknown
	if spec.Demand.Open {
		s.others = newcomers(plan, spec.Demand.Expand())
	}
	return s, nil
}

// newcomers says which member of an open topic gets publishers that it does not know: the
// one that has the most already, while a tenth of its quota is free, so that they are
// together for as long as can be; else the one that has most free.
func newcomers(plan placement.Plan, publishers []placement.Publisher) (at int32) {
	most, room := -1.0, math.Inf(-1)
	for m, q := range plan.Quotas {
		used := 0.0
		for _, i := range q.Publishers {
			used += publishers[i].Rate
		}
		free := float64(q.Rate) - used
		switch enough := free >= 0.1*float64(q.Rate); {
		case enough && used > most || enough && used == most && free > room:
			at, most, room = int32(m), used, free
		case !enough && most < 0 && free > room:
			at, room = int32(m), free
		}
	}
	return at
}
