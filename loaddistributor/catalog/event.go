package catalog

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Event is an occurrence or a decision of the controller. Apply applies an event as a
// whole or refuses it. Every accepted event raises the version by one. So a store keeps
// every event, and the version is the event's position in the log.
type Event interface {
	apply(*Catalog) ([]Effect, error)
}

// BrokerJoined: a broker has opened a session. For the catalog, the broker holds only
// topics prepared in this session, so the broker must prepare all its topics again.
type BrokerJoined struct {
	ID, Instance            string
	TCPAddress, HTTPAddress string
	// For MQTT clients, without and with TLS; empty: none.
	MQTTAddress, MQTTSAddress string
	Hostname, Version         string
	Folder, Lock              string // see Broker
	// Maximum rate within the SLO, in msg/s; > 0. If Mcap is below the allocated rate, the
	// broker's topics become degraded, and the broker receives no new topic.
	Mcap int64
}

// BrokerLeft: the broker's session is over. Allocations stay.
type BrokerLeft struct{ ID string }

// TopicPlaced creates a topic and reserves the quotas of the plan. Apply refuses a plan
// that does not fit the present brokers. Make it with NewTopicPlaced.
type TopicPlaced struct {
	Spec *Spec
	Plan placement.Plan
	// Idempotency key of the request, or empty.
	Key    string
	spread *spread
}

// MemberPrepared: the broker has created the topic in its present session.
type MemberPrepared struct{ Topic, Broker string }

// TopicActivated: all members are prepared and hold their shares.
type TopicActivated struct{ Topic string }

// SLOJudged is a verdict over a window from a release before 0.2.0. Apply ignores the
// verdict, because only the leader keeps verdicts, in memory.
type SLOJudged struct{ Topic, Missed string }

// TopicDeleting: the topic's shares are being withdrawn; Resolve finds no publisher of
// the topic.
type TopicDeleting struct{ Topic string }

// TopicRemoved forgets a topic in any state and frees its reservations.
type TopicRemoved struct {
	Topic string
	// Left lists the brokers that may still hold the topic. They receive the removal when
	// they reconnect. If the topic was never active, they keep its messages until the topic
	// is created again (see MemberFound).
	Left []string
	// ContractLeft: the adaptor may still hold the contract.
	ContractLeft bool
}

// LeftoverRemoved: the broker has removed a topic that TopicRemoved listed as left.
type LeftoverRemoved struct{ Topic, Broker string }

// LeftoverContractRemoved: the adaptor has forgotten the contract.
type LeftoverContractRemoved struct{ Topic string }

// BrokerDraining starts or stops draining a broker. Forced may overload the other brokers
// and lose messages that consumers do not read.
type BrokerDraining struct {
	ID               string
	Draining, Forced bool
}

// BrokerCalibrated sets a measured mcap in msg/s, which overrides the mcap of the
// broker's hello; 0 removes the override. Mcap may be below the allocated rate, as in
// BrokerJoined. The override is lost when the catalog forgets the broker (MaxGone).
type BrokerCalibrated struct {
	ID   string
	Mcap int64
}

// BrokerAbsorbed: a fit has measured the broker's capacity within a latency.
type BrokerAbsorbed struct {
	ID string
	Absorption
}

// BrokerNoted records facts about a broker's shares for an adaptor that has forgotten the
// broker. Forgotten: the broker holds no share until it joins. Strict: no share of the
// broker outlives its lease.
type BrokerNoted struct {
	ID                string
	Forgotten, Strict bool
}

// SharesUnconfirmed records the brokers that may still use shares beyond a topic's
// contract, with these shares. The topic may be deleted. The contract was lowered or
// removed, or a raise was reverted after the adaptor may have received it, and these
// brokers have not confirmed the change to the adaptor, which has no durable memory. The
// event replaces the earlier record.
type SharesUnconfirmed struct {
	Topic  string
	Shares []UnconfirmedShare // by broker
	// Raising: the contract was raised, and brokers have not confirmed all of it.
	Raising bool
	// Vague: brokers may use an unknown amount above the contract, which was restored from
	// another log.
	Vague bool
}

// UnconfirmedShare is the largest share that a broker may still use.
type UnconfirmedShare struct {
	Broker string
	Share  tokenbucket.Share
}

// BrokerRemoved removes a disconnected broker without topics from the cluster until the
// broker joins again.
type BrokerRemoved struct{ ID string }

// TopicMoving begins a move of an active topic to another plan, possibly with another
// specification of the same name. It reserves the quotas of the new plan beside the old
// plan. Make it with NewTopicMoving.
type TopicMoving struct {
	Spec   *Spec
	Plan   placement.Plan
	spread *spread
	basis  *basis // nil: saved in full
}

// TopicMoved: all members of the new plan are prepared. From now on the new plan assigns
// the publishers. Former members retire.
type TopicMoved struct{ Topic string }

// TopicMoveAborted ends a move; the old plan stays.
type TopicMoveAborted struct {
	Topic string
	// Left lists the brokers only in the new plan that may hold messages of the topic.
	// They retire.
	Left []string
}

// MemberFound: a broker outside the topic's plan has the topic, for example from before the
// control plane's store was lost. The broker may hold messages, so the topic retires from it.
type MemberFound struct{ Topic, Broker string }

// MemberRetired: the topic is gone from a retiring broker.
type MemberRetired struct{ Topic, Broker string }

// Restarted: another controller has taken over. It has no session yet, and each broker
// must prepare its topics again.
type Restarted struct{}

// TopicRestored restores a topic from a backup of another log, in the state of the
// backup. Its name must be free and its brokers known. A topic in a move stays in its old
// place, and the brokers of the move retire. Its epochs continue from the backup's epoch,
// beyond any epoch assigned since. The topic loses its key if another topic has the key.
type TopicRestored struct{ TopicDump }

// BrokerRestored adds a broker from a backup, as disconnected, with its possible shares
// and its operator settings. If the catalog already has the broker, BrokerRestored only
// fills in the missing fields.
type BrokerRestored struct{ BrokerDump }

// Effect is a consequence of an event for the outside.
type Effect interface{ effect() }

// StateChanged: the topic has a new state or reason. To is Absent after the removal.
type StateChanged struct {
	Topic    string
	From, To State
	Reason   string
}

// PlacementChanged: the topic has a new placement or none.
type PlacementChanged struct{ Topic string }

func (StateChanged) effect()     {}
func (PlacementChanged) effect() {}

// Errors of Apply and the queries.
var (
	ErrTopicExists      = errors.New("topic exists")
	ErrTopicUnknown     = errors.New("no such topic")
	ErrTopicState       = errors.New("the topic's state does not allow it")
	ErrChannelUnknown   = errors.New("no such channel in the topic")
	ErrPublisherUnknown = errors.New("no such publisher in the topic")
	ErrNotActive        = errors.New("the topic is not active")
	// ErrUnplaced: the publisher has no broker at present, because a fit is measuring how
	// many publishers each broker can serve.
	ErrUnplaced      = errors.New("the publisher is not placed yet: the topic is being fitted")
	ErrKeyReused     = errors.New("the idempotency key belongs to another request")
	ErrBrokerUnknown = errors.New("no such broker")
	// ErrBrokerConnected: a connected broker cannot be removed.
	ErrBrokerConnected = errors.New("the broker is connected")
	// ErrBrokerInUse: a broker with topics cannot be removed.
	ErrBrokerInUse = errors.New("topics of the broker fit on no other broker or have not been moved yet")
	// ErrUnread: this replica has not read the committed state yet, or its log was lost
	// and is being rebuilt.
	ErrUnread = errors.New("the loaddistributor does not know yet what there is")
)

// PlanError: the brokers have changed since the plan was made, or the plan is for another
// demand. A new plan may fit.
type PlanError struct{ Broker, Problem string }

func (e *PlanError) Error() string {
	if e.Broker == "" {
		return "plan: " + e.Problem
	}
	return fmt.Sprintf("plan for broker %s: %s", e.Broker, e.Problem)
}

// NotReadyError: the topic cannot become active, because a member is not prepared.
type NotReadyError struct{ Topic, Reason string }

func (e *NotReadyError) Error() string { return fmt.Sprintf("topic %s: %s", e.Topic, e.Reason) }

// NewTopicPlaced checks that plan places every publisher exactly once. It does the work
// that grows with the number of publishers, to keep this work out of the committer's
// lock.
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
	s.memberOfUnknown = unknown
	if spec.Demand.Open {
		s.memberOfUnknown = newcomers(plan, spec.Demand.Expand())
	}
	return s, nil
}

// newcomers returns the member for unknown publishers of an open topic. Among the members
// with at least a tenth of their quota free, newcomers picks the member with the most
// used quota, to keep the publishers together as long as possible. If no member has a
// tenth free, newcomers picks the member with the most free quota.
func newcomers(plan placement.Plan, publishers []placement.Publisher) (index int32) {
	largest, room := -1.0, math.Inf(-1)
	for m, q := range plan.Quotas {
		used := 0.0
		for _, i := range q.Publishers {
			used += publishers[i].Rate
		}
		free := float64(q.Rate) - used
		switch hasRoom := free >= 0.1*float64(q.Rate); {
		case hasRoom && used > largest || hasRoom && used == largest && free > room:
			index, largest, room = int32(m), used, free
		case !hasRoom && largest < 0 && free > room:
			index, room = int32(m), free
		}
	}
	return index
}
