// Package reconcile is the state machine of a change to one topic. The machine brings the
// topic from its present state to its target, one difference at a time. The machine is pure: its
// owner, loaddistributor/controller, passes events in, carries out the effects, and
// reports the results. The catalog keeps the durable state of the topic. The machine
// holds only what one change needs, so after a crash a new machine resumes from the
// catalog.
//
// The phase follows from the catalog's state of the topic, the target, and whether the
// change has failed. Each phase handles its differences in this order:
//
//	phase      the topic is              steps, in order                              next phase
//	planning   to be placed anew         make and write a plan                        creating, moving
//	creating   placed, not active        brokers create it; the adaptor receives the  standing
//	                                     contract; TopicActivated
//	moving     active, with a next       new brokers create it; consumers read        standing
//	           plan                      there; the adaptor shares out the contract
//	                                     by the next plan; new brokers receive their
//	                                     shares; all connected brokers confirm a
//	                                     changed contract, if they can; TopicMoved,
//	                                     with the brokers that may use more;
//	                                     publishers are redirected
//	returning  moving, but failed        new brokers remove it unless they use it;    standing
//	                                     TopicMoveAborted, with the brokers that
//	                                     keep it
//	leaving    to be deleted             TopicDeleting                                deleting
//	deleting   deleting, or its          the adaptor forgets the contract; brokers    gone
//	           creation failed           remove it, unless its creation failed and
//	                                     they have messages of it; connected brokers
//	                                     give up their shares; TopicRemoved, with the
//	                                     brokers that have not removed it
//	retiring   on a broker outside       the broker removes it; MemberRetired         standing
//	           its plan
//	standing   on target                 the adaptor shares out the contract by the   standing
//	                                     plan, unless it is known to have done so
//	forgetting gone, but the adaptor     the adaptor forgets the contract; if no      gone
//	           may have its contract     broker holds the topic,
//	                                     LeftoverContractRemoved
//
// A failure in creating or moving undoes the change. Deleting and returning do not fail:
// the machine records the brokers that did not answer in time, and the controller
// later compares the topics of brokers with the plan.
//
// Invariants, checked by property_test.go with a restart at every point:
//   - One plan is in force at any time, and publishers learn of no other plan.
//   - The machine writes TopicMoved only after all brokers of the next plan have
//     confirmed the topic.
//   - Only deleting takes a share from a broker with a possible need for the share.
//   - After the journal has halted, the machine does nothing.
package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Target is the desired state of a topic.
type Target struct {
	Plan   bool   // make a new plan
	Gone   bool   // delete the topic
	Shared bool   // send the contract to the adaptor again
	Adopt  bool   // the adaptor lost the contract and recovers the brokers' shares
	Retire string // broker that the topic leaves, now outside the plan
	// Options of Retire. Forced removes the topic whatever the broker holds. Dead sends no
	// request to the broker. TakenOverBy first takes over the messages of the retiring broker,
	// which is gone.
	Forced, Dead bool
	TakenOverBy  string
	// Undo reverts a move that another controller began.
	Undo bool
	// Forget reports to the adaptor again that the topic is gone. OnBrokers means that brokers still
	// have the topic and may report its contract to the adaptor.
	Forget, OnBrokers bool
}

// Limits bounds the waits of a change.
type Limits struct {
	Answer    time.Duration // for a broker's answer
	Consumers time.Duration // for consumers to connect to new brokers
}

// Pauses between polls, and the longest waits. Without a share a new broker accepts
// messages but holds them back.
const (
	consumersPause = 20 * time.Millisecond
	sharesPause    = 2 * time.Millisecond
	sharesWait     = time.Second
	confirmPause   = 10 * time.Millisecond
	confirmWait    = time.Second // for connected brokers to confirm smaller shares
)

var (
	// ErrNoAnswer: the broker did not answer in time.
	ErrNoAnswer = errors.New("no answer in time")
	// ErrSettled is the result of a plan that changes nothing.
	ErrSettled = errors.New("nothing is to be done")
	errUndo    = errors.New("its controller did not live to end the move")
)

// BrokerError: a broker failed a step of the change.
type BrokerError struct {
	Broker string
	Cause  error
}

func (e *BrokerError) Error() string { return fmt.Sprintf("broker %s: %v", e.Broker, e.Cause) }
func (e *BrokerError) Unwrap() error { return e.Cause }

// Event is an input of the machine: one of the types from Begun to Closing.
type Event any

// Begun is the first event.
type Begun struct{}

// Planned answers Plan with the topic as now decided. Missing lists the brokers of the new
// plan that have not confirmed the topic. AdaptorKnows means that the adaptor may have the
// contract of an earlier topic of this name.
type Planned struct {
	Topic        catalog.Topic
	Missing      []string
	AdaptorKnows bool
	Err          error // ErrSettled: the topic is already on target
}

// Answered is a broker's answer to Prepare, Remove or TakeOver.
type Answered struct {
	Broker string
	Err    error
}

// Granted answers Grant and Drop. Members are the brokers about to receive a share. Disconnected:
// a disconnected broker may hold a share and may report the share to a
// restarted adaptor.
type Granted struct {
	Members      []string
	Disconnected bool
	Err          error
}

// Shares answers LookShares with the brokers that have acknowledged a share.
type Shares struct{ Acknowledged []string }

// Unconfirmed answers LookUnconfirmed. Raising means that brokers have not confirmed all
// of a raised contract. Pending means that some of the shares are about to be confirmed.
type Unconfirmed struct {
	Shares  []catalog.UnconfirmedShare
	Raising bool
	Pending bool
}

// Consumers answers LookConsumers.
type Consumers struct {
	Read         map[string][]string // by broker with a report of the topic: channels with consumers there
	Listed       bool                // consumers can find the new brokers
	Disconnected bool                // a broker of the present plan is disconnected, so its publishers have waited long enough
}

// Written answers Write. Halted means that no later write is known to succeed.
type Written struct {
	Topic  catalog.Topic // as now decided
	Err    error
	Halted bool
}

// Tick means that Due has passed.
type Tick struct{}

// Cancelled means that the caller who requested the creation has given up. Cause is the
// reason.
type Cancelled struct{ Cause error }

// Closing means that the controller stops. The machine stops polling. If NoAnswers is set, the
// machine does not wait for brokers' answers either.
type Closing struct{ NoAnswers bool }

// Effect is an output of the machine: one of the types from Plan to Note.
type Effect any

// Plan requests that a plan be made and written. Planned answers.
type Plan struct{}

// Prepare requests that brokers create the topic with Spec. Each broker answers with
// Answered.
type Prepare struct {
	Spec    *catalog.Spec
	Brokers []string
}

// Remove requests that brokers remove the topic. If Unused is set, a broker that uses the
// topic keeps it. Each broker answers with Answered.
type Remove struct {
	Brokers []string
	Unused  bool
}

// TakeOver requests that Broker import the messages of the topic from From, a broker that
// is gone. Answered answers.
type TakeOver struct{ Broker, From string }

// Grant requests that the adaptor share out a contract. Granted answers. Update means
// that the adaptor already has a contract of the topic. Adopt means that the adaptor lost
// the contract while brokers hold shares.
type Grant struct {
	Spec          *catalog.Spec
	Plan          placement.Plan
	Retiring      []string
	Update, Adopt bool
}

// Drop requests that the adaptor forget the contract. Granted answers.
type Drop struct{}

// LookShares polls for Shares.
type LookShares struct{}

// LookUnconfirmed polls for the shares that brokers may still use beyond Contract.
// Unconfirmed answers. Contract is zero for a removed topic. A holder that the adaptor
// does not know may use up to Former. Raised means that Contract exceeds the previous or
// an earlier contract in rate or burst, and may not be in force yet.
type LookUnconfirmed struct {
	Contract, Former tokenbucket.Share
	Holders          []string
	Raised           bool
}

// LookConsumers polls for Consumers. Fresh are the brokers that are new to the topic.
type LookConsumers struct {
	Plan   placement.Plan // the present plan
	Fresh  []string
	Former []string // brokers that the topic has left
}

// Nudge requests that the broker make the consumers of the channels look up the topic
// again.
type Nudge struct {
	Broker   string
	Channels []string
}

// Write requests that Event become durable. Written answers. Unconfirmed, if not nil,
// becomes durable no later than Event.
type Write struct {
	Event       catalog.Event
	Unconfirmed *catalog.SharesUnconfirmed
}

// Moved means that publishers now belong to other brokers.
type Moved struct{ From, To catalog.Topic }

// Note is a log line.
type Note struct {
	Text, Broker string // empty if the note concerns no broker
	Names        []string
	Err          error
	Warn         bool
}

type phase uint8

const (
	planning phase = iota
	creating
	moving
	returning
	leaving
	deleting
	retiring
	standing
	forgetting
	gone
)

// difference is a gap between the present state and the target.
type difference uint8

const (
	none        difference = iota
	unplanned              // no plan exists
	unprepared             // brokers lack the topic
	unread                 // consumers do not read the topic on the new brokers
	ungranted              // the adaptor has another contract, or shares the contract out differently
	unshared               // the new brokers lack their shares
	unremoved              // brokers outside the target have the topic
	unconfirmed            // brokers may use more than the contract, or have less
	unwritten              // the journal lacks the outcome
)

// steps lists the differences of each phase in the order of the package comment.
var steps = [...][]difference{
	planning:   {unplanned},
	creating:   {unprepared, ungranted, unwritten},
	moving:     {unprepared, unread, ungranted, unshared, unconfirmed, unwritten},
	returning:  {unremoved, unwritten},
	leaving:    {unwritten},
	deleting:   {ungranted, unremoved, unconfirmed, unwritten},
	retiring:   {unremoved, unwritten},
	standing:   {ungranted},
	forgetting: {ungranted, unwritten},
	gone:       {},
}

// Topic is the machine of one change. Make it with New. Its first event is Begun.
type Topic struct {
	// Set by New.
	name   string
	target Target
	limits Limits

	// State.
	current      catalog.Topic // as decided
	planned      bool
	missing      []string                   // brokers of the plan that have not confirmed the topic
	adaptorKnows bool                       // the adaptor may know of the change
	stale        bool                       // the adaptor may have another contract than the topic
	failed       error                      // why the target is not reached
	members      []string                   // brokers about to receive a share
	unremoved    []string                   // brokers that have not removed the topic
	excess       []catalog.UnconfirmedShare // shares that brokers may use beyond the contract
	raising      bool                       // brokers have not confirmed all of a raised contract
	confirmKnown bool                       // excess and raising are known
	read         map[string]bool            // channels that had consumers
	closing      bool
	noAnswers    bool // wait for no answer

	// The present step.
	phase      phase
	done       [unwritten + 1]bool
	handling   difference
	unanswered []string         // brokers without an answer yet
	refused    map[string]error // brokers with a refusal
	due        time.Time        // time of the next Tick; zero: none
	pollEnd    time.Time        // end of polling
	nudge      time.Time        // time of the next Nudge
	waiting    string
	finished   bool
}

// New returns the machine for a topic as decided. A topic without a Spec is unknown.
func New(name string, current catalog.Topic, target Target, limits Limits) *Topic {
	t := &Topic{name: name, current: current, target: target, limits: limits, stale: target.Shared, planned: !target.Plan}
	// The adaptor may know of a change that another controller began.
	t.adaptorKnows = current.State == catalog.Deleting || target.Gone
	switch {
	case target.Undo && current.Next != nil:
		t.failed = errUndo
	case target.Gone && current.Spec == nil:
		t.failed = fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
	}
	return t
}

// Over reports whether the change is over.
func (t *Topic) Over() bool { return t.finished }

// Err returns why the target was not reached. It returns nil while the change is not
// over.
func (t *Topic) Err() error {
	if !t.finished || errors.Is(t.failed, errUndo) {
		return nil
	}
	return t.failed
}

// Due returns the time of the next Tick, or zero if no Tick is needed.
func (t *Topic) Due() time.Time { return t.due }

// Waiting describes what a move waits for. People read the text.
func (t *Topic) Waiting() string { return t.waiting }

// Step takes an event and returns the effects, to be carried out in order. An event that
// answers no pending request belongs to an abandoned step.
func (t *Topic) Step(e Event, now time.Time) []Effect {
	if t.finished {
		return nil
	}
	effects := t.handle(e, now)
	for !t.finished && t.handling == none {
		if p := t.phaseNow(); p != t.phase {
			t.phase, t.done = p, [unwritten + 1]bool{}
		}
		t.handling = t.difference()
		if t.handling == none {
			t.finished = true
			break
		}
		effects = append(effects, t.begin(now)...)
	}
	return effects
}

func (t *Topic) phaseNow() phase {
	switch {
	case !t.planned:
		return planning
	case t.current.Spec == nil && t.target.Forget && !t.done[unwritten]:
		return forgetting
	case t.current.Spec == nil:
		return gone
	case t.current.State == catalog.Deleting, t.current.State == catalog.Preparing && t.failed != nil:
		return deleting
	case t.target.Gone:
		return leaving
	case t.current.State == catalog.Preparing:
		return creating
	case t.current.Next != nil && t.failed != nil:
		return returning
	case t.current.Next != nil:
		return moving
	case t.failed == nil && slices.Contains(t.current.Retiring, t.target.Retire):
		return retiring
	default:
		return standing
	}
}

// difference returns the first difference of the phase that is not handled.
func (t *Topic) difference() difference {
	for _, d := range steps[t.phase] {
		if !t.done[d] {
			return d
		}
	}
	return none
}

// finishStep ends the present step.
func (t *Topic) finishStep() {
	t.done[t.handling], t.handling, t.due, t.waiting = true, none, time.Time{}, ""
}

// fail ends the present step and makes the machine undo the change.
func (t *Topic) fail(err error) {
	t.finishStep()
	t.failed = errors.Join(t.failed, err)
	t.finished = !t.planned
}

// end ends the change without undoing it.
func (t *Topic) end(err error) {
	t.fail(err)
	t.finished = true
}

// begin starts a step.
func (t *Topic) begin(now time.Time) []Effect {
	switch t.handling {
	case unplanned:
		return []Effect{Plan{}}
	case unprepared:
		spec := t.current.Spec
		if t.current.Next != nil {
			spec = t.current.Next.Spec
		}
		return t.request(t.missing, Prepare{spec, t.missing}, now)
	case unread:
		t.read, t.nudge, t.pollEnd = map[string]bool{}, now, now.Add(t.limits.Consumers)
		return t.lookConsumers()
	case ungranted:
		return t.grant()
	case unshared:
		t.members = slices.DeleteFunc(t.fresh(), func(id string) bool { return !slices.Contains(t.members, id) })
		if t.pollEnd = now.Add(sharesWait); len(t.members) > 0 {
			return []Effect{LookShares{}}
		}
		t.finishStep()
	case unremoved:
		switch t.phase {
		case returning: // a publisher may have published there already, over HTTP for example
			fresh := slices.DeleteFunc(t.fresh(), func(id string) bool { return slices.Contains(t.current.Retiring, id) })
			return t.request(fresh, Remove{fresh, true}, now)
		case retiring:
			if t.target.Dead {
				t.finishStep()
				return nil
			}
			if taker := t.target.TakenOverBy; taker != "" {
				return t.request([]string{taker}, TakeOver{taker, t.target.Retire}, now)
			}
			return t.request([]string{t.target.Retire}, Remove{[]string{t.target.Retire}, !t.target.Forced}, now)
		default:
			return t.request(t.current.Holders(), Remove{t.current.Holders(), t.current.Uncreated}, now)
		}
	case unconfirmed:
		t.pollEnd = now.Add(confirmWait)
		return t.lookUnconfirmed()
	case unwritten:
		if t.phase == forgetting && t.target.OnBrokers {
			t.finishStep()
			return nil
		}
		return []Effect{Write{t.outcome(), t.excessNow()}}
	}
	return nil
}

// request sends a request to the brokers and waits for their answers.
func (t *Topic) request(brokers []string, request Effect, now time.Time) []Effect {
	if len(brokers) == 0 {
		t.finishStep()
		return nil
	}
	t.unanswered, t.refused, t.due = slices.Clone(brokers), map[string]error{}, now.Add(t.limits.Answer)
	if t.noAnswers {
		t.due = now
	}
	return []Effect{request}
}

// grant sends the contract to the adaptor, or has it forget the contract, if the phase
// needs either.
func (t *Topic) grant() []Effect {
	switch {
	case t.phase == deleting && t.adaptorKnows, t.phase == forgetting:
		return []Effect{Drop{}}
	case t.phase == deleting, t.phase == standing && !t.stale:
		t.finishStep()
		return nil
	case t.phase == moving:
		t.adaptorKnows = true
		return []Effect{Grant{t.current.Next.Spec, t.current.Next.Plan, Retiring(t.current.Next.Plan, t.current), true, false}}
	default:
		t.adaptorKnows = true
		return []Effect{Grant{t.current.Spec, t.current.Plan, t.current.Retiring, t.phase == standing && !t.target.Adopt, t.target.Adopt}}
	}
}

// outcome returns the event that ends the phase.
func (t *Topic) outcome() catalog.Event {
	switch t.phase {
	case creating:
		return catalog.TopicActivated{Topic: t.name}
	case moving:
		return catalog.TopicMoved{Topic: t.name}
	case returning:
		return catalog.TopicMoveAborted{Topic: t.name, Left: t.unremoved}
	case leaving:
		return catalog.TopicDeleting{Topic: t.name}
	case retiring:
		return catalog.MemberRetired{Topic: t.name, Broker: t.target.Retire}
	case forgetting:
		return catalog.LeftoverContractRemoved{Topic: t.name}
	default:
		// A broker that still holds the topic may report the contract to an adaptor that
		// has forgotten the contract.
		return catalog.TopicRemoved{Topic: t.name, Left: t.unremoved, ContractLeft: t.stale || len(t.unremoved) > 0}
	}
}

// lookUnconfirmed polls for shares beyond the contract if such shares may exist.
func (t *Topic) lookUnconfirmed() []Effect {
	query := LookUnconfirmed{Former: t.current.Spec.Contract(), Holders: t.current.Holders()}
	if t.phase == moving {
		query.Contract = t.current.Next.Spec.Contract()
		query.Raised = t.current.Raising || query.Contract.Rate > query.Former.Rate || query.Contract.Burst > query.Former.Burst
		if query.Contract == query.Former && !query.Raised && len(t.current.Unconfirmed) == 0 {
			t.finishStep()
			return nil
		}
	} else if !t.adaptorKnows {
		t.finishStep() // this topic was granted nothing; the record of an earlier topic stays
		return nil
	}
	return []Effect{query}
}

// excessNow returns the event that records excess and raising, or nil if the catalog
// already has them.
func (t *Topic) excessNow() *catalog.SharesUnconfirmed {
	unchanged := len(t.excess)+len(t.current.Unconfirmed) == 0 && t.raising == t.current.Raising
	if !t.confirmKnown || t.phase != moving && t.phase != deleting || unchanged {
		return nil
	}
	return &catalog.SharesUnconfirmed{Topic: t.name, Shares: t.excess, Raising: t.raising, Vague: t.current.Vague}
}

func (t *Topic) handle(e Event, now time.Time) []Effect {
	switch e := e.(type) {
	case Planned:
		if t.handling == unplanned {
			t.handlePlan(e)
		}
	case Answered:
		if i := slices.Index(t.unanswered, e.Broker); i >= 0 && (t.handling == unprepared || t.handling == unremoved) {
			if t.unanswered = slices.Delete(t.unanswered, i, i+1); e.Err != nil {
				t.refused[e.Broker] = e.Err
			}
			return t.answered()
		}
	case Granted:
		if t.handling == ungranted {
			return t.handleGrant(e)
		}
	case Shares:
		if t.handling == unshared {
			return t.handleShares(e, now)
		}
	case Unconfirmed:
		if t.handling == unconfirmed {
			t.handleUnconfirmed(e, now)
		}
	case Consumers:
		if t.handling == unread {
			return t.handleConsumers(e, now)
		}
	case Written:
		if t.handling == unwritten {
			return t.handleWritten(e)
		}
	case Tick:
		if !t.due.IsZero() && !now.Before(t.due) {
			return t.tick()
		}
	case Cancelled:
		if t.handling == unprepared && t.phase == creating {
			return t.giveUp(e.Cause)
		}
	case Closing:
		if t.closing = true; t.handling == unread || t.handling == unshared || t.handling == unconfirmed && t.confirmKnown {
			t.finishStep()
		}
		if t.noAnswers = t.noAnswers || e.NoAnswers; t.noAnswers && len(t.unanswered) > 0 {
			return t.giveUp(ErrNoAnswer)
		}
	}
	return nil
}

func (t *Topic) handlePlan(e Planned) {
	if e.Err != nil {
		if errors.Is(e.Err, ErrSettled) {
			e.Err = nil
		}
		t.end(e.Err)
		return
	}
	t.finishStep()
	t.planned, t.current, t.missing, t.adaptorKnows = true, e.Topic, e.Missing, e.AdaptorKnows
}

// giveUp records cause for each broker that has not answered.
func (t *Topic) giveUp(cause error) []Effect {
	for _, id := range t.unanswered {
		t.refused[id] = cause
	}
	t.unanswered = nil
	return t.answered()
}

// answered ends the step after the last broker's answer.
func (t *Topic) answered() []Effect {
	if len(t.unanswered) > 0 {
		return nil
	}
	failed := slices.Sorted(maps.Keys(t.refused))
	if t.handling == unprepared {
		var errs []error
		for _, id := range t.missing { // in the order of the plan
			if err := t.refused[id]; err != nil {
				errs = append(errs, &BrokerError{id, err})
			}
		}
		if err := errors.Join(errs...); err != nil {
			t.fail(err)
			return nil
		}
		t.finishStep()
		return nil
	}
	t.unremoved = failed
	var notes []Effect
	for _, id := range failed {
		text := map[phase]string{
			returning: "cannot remove the topic from a broker to which it did not move; retrying later",
			retiring:  "cannot remove the topic from a broker that it has left; retrying later",
			deleting:  "cannot remove the deleted topic from a broker; retrying later",
		}[t.phase]
		if t.current.Uncreated {
			text = "cannot remove the topic, whose creation failed, from a broker; if the broker has acknowledged messages of the topic, it keeps them until the topic is created again"
		}
		notes = append(notes, Note{Text: text, Broker: id, Err: t.refused[id], Warn: t.phase == deleting})
	}
	if t.finishStep(); t.phase == retiring && len(failed) > 0 {
		t.finished = true // the controller tries again once the broker is seen to be empty
	}
	return notes
}

func (t *Topic) handleGrant(e Granted) []Effect {
	t.members = e.Members
	switch {
	case t.phase == creating && e.Err != nil, t.phase == moving && e.Err != nil:
		t.fail(e.Err)
		return nil
	case t.phase == deleting && e.Err != nil:
		t.stale = true
		t.finishStep()
		return []Effect{Note{Text: "cannot remove the contract from the adaptor; retrying later", Err: e.Err, Warn: true}}
	case t.phase == forgetting && e.Err != nil:
		t.end(e.Err)
		return nil
	case e.Err != nil:
		if t.finishStep(); t.failed != nil || t.target.Shared {
			t.failed = errors.Join(t.failed, e.Err)
		}
		return []Effect{Note{Text: "share update failed; keeping current", Err: e.Err, Warn: true}}
	}
	t.stale = e.Disconnected
	t.finishStep()
	return nil
}

func (t *Topic) handleShares(e Shares, now time.Time) []Effect {
	t.members = slices.DeleteFunc(t.members, func(id string) bool { return slices.Contains(e.Acknowledged, id) })
	switch {
	case len(t.members) == 0:
		t.finishStep()
	case !now.Before(t.pollEnd) || t.closing:
		// A disconnected broker holds its part until its lease ends. The topic moves
		// without the share, because waiting for the lease would take longer.
		t.finishStep()
		return []Effect{Note{Text: "moving before all shares are granted", Names: t.members, Warn: true}}
	default:
		t.due = now.Add(sharesPause)
	}
	return nil
}

// handleUnconfirmed waits for the brokers that are about to confirm.
func (t *Topic) handleUnconfirmed(e Unconfirmed, now time.Time) {
	t.excess, t.raising, t.confirmKnown = e.Shares, e.Raising, true
	if !e.Pending || !now.Before(t.pollEnd) || t.closing {
		t.finishStep()
		return
	}
	t.due = now.Add(confirmPause)
}

func (t *Topic) handleWritten(e Written) []Effect {
	previous, p := t.current, t.phase
	switch {
	case e.Halted:
		t.end(e.Err) // the next controller finds out whether the write succeeded
		return nil
	case e.Err != nil && (p == creating || p == moving):
		t.fail(e.Err)
		return nil
	case e.Err != nil:
		t.end(e.Err)
		return nil
	}
	t.finishStep()
	t.current, t.unremoved = e.Topic, nil
	switch p {
	case moving:
		return []Effect{Moved{previous, t.current}}
	case returning:
		t.stale = t.adaptorKnows
	case retiring:
		t.stale = true
	}
	return nil
}

// tick handles the end of the present wait.
func (t *Topic) tick() []Effect {
	t.due = time.Time{}
	switch t.handling {
	case unprepared, unremoved:
		return t.giveUp(ErrNoAnswer)
	case unread:
		return t.lookConsumers()
	case unshared:
		return []Effect{LookShares{}}
	case unconfirmed:
		return t.lookUnconfirmed()
	}
	return nil
}

// fresh returns the brokers of the next plan that are not in the present plan.
func (t *Topic) fresh() []string {
	present := t.current.Plan.Brokers()
	return slices.DeleteFunc(t.current.Next.Plan.Brokers(), func(id string) bool { return slices.Contains(present, id) })
}

// Retiring returns, by id, the brokers outside the plan that may have messages of the
// topic.
func Retiring(plan placement.Plan, topic catalog.Topic) []string {
	planned := plan.Brokers()
	ids := slices.DeleteFunc(append(topic.Plan.Brokers(), topic.Retiring...), func(id string) bool { return slices.Contains(planned, id) })
	slices.Sort(ids)
	return slices.Compact(ids)
}

func (t *Topic) lookConsumers() []Effect {
	return []Effect{LookConsumers{t.current.Plan, t.fresh(), t.current.Retiring}}
}

// handleConsumers waits until each channel with consumers on an old broker has consumers on
// every new broker. A consumer that looks up the topic again is briefly connected to no
// broker, so a channel that had consumers once counts.
func (t *Topic) handleConsumers(e Consumers, now time.Time) []Effect {
	fresh := t.fresh()
	for _, id := range append(t.current.Plan.Brokers(), t.current.Retiring...) {
		if !slices.Contains(fresh, id) {
			for _, channel := range e.Read[id] {
				t.read[channel] = true
			}
		}
	}
	missing := map[string][]string{}
	channels := slices.Sorted(maps.Keys(t.read))
	for _, id := range fresh {
		for _, channel := range channels {
			if !slices.Contains(e.Read[id], channel) {
				missing[channel] = append(missing[channel], id)
			}
		}
	}
	waiting := slices.Sorted(maps.Keys(missing))
	var effects []Effect
	if len(waiting) > 0 && e.Listed && !now.Before(t.nudge) {
		effects = t.nudges(waiting, fresh, e)
		t.nudge = t.nudge.Add(t.limits.Consumers / 2) // for consumers that were busy
	}
	switch {
	case len(waiting) == 0 || t.closing:
		t.finishStep()
	case e.Disconnected:
		t.finishStep()
		effects = append(effects, Late{missing})
	case !now.Before(t.pollEnd):
		t.finishStep()
		effects = append(effects, Late{missing}, Note{Text: "moving before all consumers have come", Names: append(FirstFew(waiting), missing[waiting[0]]...), Warn: true})
	default:
		t.due = now.Add(consumersPause)
		t.waiting = fmt.Sprintf("before its publishers move, until %s: for consumers of %s on %s, which have to look up the topic again",
			t.pollEnd.Format(time.TimeOnly), strings.Join(FirstFew(waiting), ", "), strings.Join(missing[waiting[0]], ", "))
	}
	return effects
}

// nudges makes the consumers of these channels look up the topic again, preferably the
// consumers of a broker that the topic leaves.
func (t *Topic) nudges(channels, fresh []string, e Consumers) (effects []Effect) {
	brokers := slices.DeleteFunc(append(Retiring(t.current.Next.Plan, t.current), t.current.Plan.Brokers()...), func(id string) bool { return slices.Contains(fresh, id) })
	for _, n := range nudgesFor(channels, brokers, e.Read) {
		effects = append(effects, n)
	}
	return effects
}

// FirstFew shortens a list for people.
func FirstFew(names []string) []string {
	const shown = 5
	if len(names) > shown {
		names = append(slices.Clone(names[:shown]), "...")
	}
	return names
}
