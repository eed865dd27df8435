// Package reconcile is one topic under control: a machine that brings it from what it
// is to what it is to be, one difference at a time. It is pure: its owner
// (loaddistributor/controller) hands it what has happened, carries out what it wants,
// and tells it what came of that. What is durable of a topic is the catalog's; the
// machine has no more than one change needs, so that after a crash another one is made
// from the catalog and goes on.
//
// What a topic is to be follows from what the catalog has of it, and from whether the
// change has failed; each phase has differences that are seen to in this order:
//
//	phase      the topic is              seen to, one after the other                 then
//	planning   to be placed anew         a plan is made and written                   creating, moving
//	creating   placed, and not active    brokers have it; the adaptor has its         standing
//	                                     contract; TopicActivated
//	moving     active, and has a         the new brokers have it; consumers read      standing
//	           next plan                 there; the contract is shared out as the
//	                                     next plan says; the new brokers have their
//	                                     shares; a contract that changes is in force on
//	                                     all connected brokers, as far as others allow;
//	                                     TopicMoved, with the brokers that may use more;
//	                                     publishers are told
//	returning  moving, and that failed   new brokers remove it unless they use it;    standing
//	                                     TopicMoveAborted, with those that do
//	leaving    to be deleted             TopicDeleting                                deleting
//	deleting   deleting, or creating     the adaptor forgets the contract; brokers    gone
//	           failed                    remove it; connected brokers give up their
//	                                     shares; TopicRemoved, with the brokers that
//	                                     have not
//	retiring   on a broker that it       the broker removes it; MemberRetired         standing
//	           has left
//	standing   as it is to be            the contract is shared out as its plan
//	                                     says, if it is not known to be
//	forgetting gone, and the adaptor     the adaptor forgets it; if no broker holds     gone
//	           may have its contract     the topic, LeftoverContractRemoved
//
// What fails in creating or moving is undone; in deleting and returning nothing fails:
// who has not answered in time is written down, for the controller's comparison of what
// brokers have with what they should have.
//
// Invariants: at any time one plan is in force, and publishers are told of no other;
// TopicMoved is written only once the brokers of the next plan have said that they have
// the topic; a share is taken back from a broker that may still need it in no phase but
// deleting; once nothing is written any more, for want of a journal, nothing is done
// either. property_test.go looks, with a restart at every point.
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

// Target is what a topic is to be.
type Target struct {
	Plan   bool   // where a plan says that is to be made now
	Gone   bool   // deleted
	Shared bool   // its contract is told the adaptor again
	Adopt  bool   // which does not have it: then it takes up what brokers hold
	Retire string // not on this broker any more, which it has left
	// How it retires. Forced: whatever the broker holds; Dead: without asking it; By: after
	// this one has taken over what it has, which is gone.
	Forced, Dead bool
	By           string
	// Undo: a move that another controller has begun is taken back.
	Undo bool
	// Forget: the adaptor is told again that the topic is gone; Held: brokers have it
	// still, and may tell the adaptor of it.
	Forget, Held bool
}

// Limits are how long is waited.
type Limits struct {
	Answer    time.Duration // for brokers
	Consumers time.Duration // for consumers to come to new brokers
}

// How often it is looked for what comes by itself, and for how long for the shares of
// the new brokers: without one a broker accepts messages, and holds them.
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
	// ErrSettled, of a plan: nothing is to be done.
	ErrSettled = errors.New("nothing is to be done")
	errUndo    = errors.New("its controller did not live to end the move")
)

// BrokerError: a broker did not do what a topic needs.
type BrokerError struct {
	Broker string
	Cause  error
}

func (e *BrokerError) Error() string { return fmt.Sprintf("broker %s: %v", e.Broker, e.Cause) }
func (e *BrokerError) Unwrap() error { return e.Cause }

// Event is what has happened: one of the types from Begun to Closing.
type Event any

// Begun is the first event.
type Begun struct{}

// Planned answers Plan: the topic as it is now decided, and the brokers of the new plan
// that have not said that they have it. Told: the adaptor may have the contract of one
// that had the name before.
type Planned struct {
	Topic catalog.Topic
	Lack  []string
	Told  bool
	Err   error // ErrSettled: the topic is where it is to be
}

// Answered is a broker's answer to Prepare, Remove or TakeOver.
type Answered struct {
	Broker string
	Err    error
}

// Granted answers Grant and Drop. Members have a share to come. Away: a broker was not there
// that may hold a share, and tell an adaptor that restarts of it.
type Granted struct {
	Members []string
	Away    bool
	Err     error
}

// Shares answers LookShares: brokers that have acknowledged a share.
type Shares struct{ Held []string }

// Unconfirmed answers LookUnconfirmed. Raising: brokers have not confirmed all of a raised
// contract. Soon: some of the shares are about to be confirmed.
type Unconfirmed struct {
	Shares  []catalog.UnconfirmedShare
	Raising bool
	Soon    bool
}

// Consumers answers LookConsumers.
type Consumers struct {
	Read  map[string][]string // by broker: the channels that are read there, if it has reported of the topic
	Shown bool                // consumers find the new brokers
	Away  bool                // a broker of the present plan is: its publishers have waited long enough
}

// Written answers Write. Halted: nothing is known to be written any more.
type Written struct {
	Topic  catalog.Topic // as it is now decided
	Err    error
	Halted bool
}

// Tick is Due.
type Tick struct{}

// Cancelled: the caller that asked for a creation is gone, for that reason.
type Cancelled struct{ Cause error }

// Closing: the controller ends. Nothing is waited for that comes by itself. Late: no answer of a
// broker is waited for either.
type Closing struct{ Late bool }

// Effect is what is to be done: one of the types from Plan to Note.
type Effect any

// Plan wants a plan to be made and written: Planned.
type Plan struct{}

// Prepare has brokers create the topic as it is to be there: Answered, of each.
type Prepare struct {
	Spec    *catalog.Spec
	Brokers []string
}

// Remove has brokers remove the topic, Unused: unless they use it; Answered, of each.
type Remove struct {
	Brokers []string
	Unused  bool
}

// TakeOver has a broker bring in what another, which is gone, had of the topic: Answered.
type TakeOver struct{ Broker, From string }

// Grant has the adaptor share out a contract: Granted. Update: it has one already; Adopt:
// it had one, and brokers hold their shares.
type Grant struct {
	Spec          *catalog.Spec
	Plan          placement.Plan
	Retiring      []string
	Update, Adopt bool
}

// Drop has the adaptor forget the contract: Granted.
type Drop struct{}

// LookShares wants Shares.
type LookShares struct{}

// LookUnconfirmed wants Unconfirmed: the shares that brokers may still use beyond Contract;
// of a topic that is gone, Contract is zero. A holder of which the adaptor knows nothing may
// use up to Former. Raised: Contract is in part above the contract before, or above an earlier
// contract, and may not be in force.
type LookUnconfirmed struct {
	Contract, Former tokenbucket.Share
	Holders          []string
	Raised           bool
}

// LookConsumers wants Consumers. Fresh brokers are new to the topic.
type LookConsumers struct {
	Plan  placement.Plan // the present one
	Fresh []string
	Other []string // those it has left
}

// Nudge has brokers have the consumers of channels look for the topic again.
type Nudge struct {
	Broker   string
	Channels []string
}

// Write wants the event to be durable: Written. Unconfirmed is to be durable no later than
// Event; nil: there is none.
type Write struct {
	Event       catalog.Event
	Unconfirmed *catalog.SharesUnconfirmed
}

// Moved: publishers belong to other brokers than before.
type Moved struct{ From, To catalog.Topic }

// Note is for the log.
type Note struct {
	Text, Broker string // of no broker: empty
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

// difference is one of what is to be from what is.
type difference uint8

const (
	none        difference = iota
	unplanned              // there is no plan
	unprepared             // brokers lack the topic
	unread                 // its consumers do not read it on the new brokers
	ungranted              // the adaptor has another contract, or shares it out otherwise
	unshared               // the new brokers lack their shares
	unremoved              // brokers have the topic that are not to have it
	unconfirmed            // brokers may use more than the contract, or have less of it
	unwritten              // the journal lacks what has come of it
)

// seenTo is the order of the phases, as the package comment has it.
var seenTo = [...][]difference{
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

// Topic is the machine of one change. Make it with New; its first event is Begun.
type Topic struct {
	// Set once.
	name   string
	target Target
	limits Limits

	// What is so.
	is      catalog.Topic // as decided
	planned bool
	lack    []string                   // brokers of the plan that have not said that they have it
	told    bool                       // the adaptor may have heard of the change
	stale   bool                       // the adaptor may have another contract than the topic
	failed  error                      // why the target is not reached
	members []string                   // brokers with a share to come
	left    []string                   // brokers that have not removed the topic
	excess  []catalog.UnconfirmedShare // what brokers may use beyond the contract
	raising bool                       // brokers have not confirmed all of a raised contract
	looked  bool                       // excess and raising are known
	read    map[string]bool            // channels that had consumers
	closing bool
	late    bool // no answer is waited for

	// What is being seen to.
	phase   phase
	done    [unwritten + 1]bool
	seeing  difference
	waits   []string         // brokers that have not answered
	refused map[string]error // those that have refused
	due     time.Time        // of the next Tick; zero: none
	until   time.Time        // of looking for what comes by itself
	nudge   time.Time        // when consumers are told again
	waiting string
	over    bool
}

// New returns the machine for a topic as it is decided; one that is not known has no
// Spec.
func New(name string, is catalog.Topic, target Target, limits Limits) *Topic {
	t := &Topic{name: name, is: is, target: target, limits: limits, stale: target.Shared, planned: !target.Plan}
	// Even what another controller began, the adaptor may know of.
	t.told = is.State == catalog.Deleting || target.Gone
	switch {
	case target.Undo && is.Next != nil:
		t.failed = errUndo
	case target.Gone && is.Spec == nil:
		t.failed = fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
	}
	return t
}

// Over reports whether the change is over, and Err why the target was not reached.
func (t *Topic) Over() bool { return t.over }

// Err is nil while the change is not over.
func (t *Topic) Err() error {
	if !t.over || errors.Is(t.failed, errUndo) {
		return nil
	}
	return t.failed
}

// Due is when it wants a Tick; zero: not at all.
func (t *Topic) Due() time.Time { return t.due }

// Waiting says what a move waits for, for people.
func (t *Topic) Waiting() string { return t.waiting }

// Step takes an event and returns what is to be done, in this order. An event that
// answers nothing that was asked last is of something that was given up.
func (t *Topic) Step(e Event, now time.Time) []Effect {
	if t.over {
		return nil
	}
	effects := t.take(e, now)
	for !t.over && t.seeing == none {
		if p := t.phaseNow(); p != t.phase {
			t.phase, t.done = p, [unwritten + 1]bool{}
		}
		t.seeing = t.difference()
		if t.seeing == none {
			t.over = true
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
	case t.is.Spec == nil && t.target.Forget && !t.done[unwritten]:
		return forgetting
	case t.is.Spec == nil:
		return gone
	case t.is.State == catalog.Deleting, t.is.State == catalog.Preparing && t.failed != nil:
		return deleting
	case t.target.Gone:
		return leaving
	case t.is.State == catalog.Preparing:
		return creating
	case t.is.Next != nil && t.failed != nil:
		return returning
	case t.is.Next != nil:
		return moving
	case t.failed == nil && slices.Contains(t.is.Retiring, t.target.Retire):
		return retiring
	default:
		return standing
	}
}

// difference returns the first that is not seen to.
func (t *Topic) difference() difference {
	for _, d := range seenTo[t.phase] {
		if !t.done[d] {
			return d
		}
	}
	return none
}

// seen ends what is being seen to.
func (t *Topic) seen() {
	t.done[t.seeing], t.seeing, t.due, t.waiting = true, none, time.Time{}, ""
}

// fail has what was done undone.
func (t *Topic) fail(err error) {
	t.seen()
	t.failed = errors.Join(t.failed, err)
	t.over = !t.planned
}

// end leaves all as it is.
func (t *Topic) end(err error) {
	t.fail(err)
	t.over = true
}

// begin sees to a difference.
func (t *Topic) begin(now time.Time) []Effect {
	switch t.seeing {
	case unplanned:
		return []Effect{Plan{}}
	case unprepared:
		spec := t.is.Spec
		if t.is.Next != nil {
			spec = t.is.Next.Spec
		}
		return t.ask(t.lack, Prepare{spec, t.lack}, now)
	case unread:
		t.read, t.nudge, t.until = map[string]bool{}, now, now.Add(t.limits.Consumers)
		return t.lookConsumers()
	case ungranted:
		return t.grant()
	case unshared:
		t.members = slices.DeleteFunc(t.fresh(), func(id string) bool { return !slices.Contains(t.members, id) })
		if t.until = now.Add(sharesWait); len(t.members) > 0 {
			return []Effect{LookShares{}}
		}
		t.seen()
	case unremoved:
		switch t.phase {
		case returning: // a publisher may have published there already, over HTTP say
			fresh := slices.DeleteFunc(t.fresh(), func(id string) bool { return slices.Contains(t.is.Retiring, id) })
			return t.ask(fresh, Remove{fresh, true}, now)
		case retiring:
			if t.target.Dead {
				t.seen()
				return nil
			}
			if by := t.target.By; by != "" {
				return t.ask([]string{by}, TakeOver{by, t.target.Retire}, now)
			}
			return t.ask([]string{t.target.Retire}, Remove{[]string{t.target.Retire}, !t.target.Forced}, now)
		default:
			return t.ask(t.is.Holders(), Remove{t.is.Holders(), false}, now)
		}
	case unconfirmed:
		t.until = now.Add(confirmWait)
		return t.lookUnconfirmed()
	case unwritten:
		if t.phase == forgetting && t.target.Held {
			t.seen()
			return nil
		}
		return []Effect{Write{t.outcome(), t.excessNow()}}
	}
	return nil
}

// ask waits for the brokers' answers.
func (t *Topic) ask(brokers []string, question Effect, now time.Time) []Effect {
	if len(brokers) == 0 {
		t.seen()
		return nil
	}
	t.waits, t.refused, t.due = slices.Clone(brokers), map[string]error{}, now.Add(t.limits.Answer)
	if t.late {
		t.due = now
	}
	return []Effect{question}
}

// grant tells the adaptor of the contract, where it is to.
func (t *Topic) grant() []Effect {
	switch {
	case t.phase == deleting && t.told, t.phase == forgetting:
		return []Effect{Drop{}}
	case t.phase == deleting, t.phase == standing && !t.stale:
		t.seen()
		return nil
	case t.phase == moving:
		t.told = true
		return []Effect{Grant{t.is.Next.Spec, t.is.Next.Plan, Retiring(t.is.Next.Plan, t.is), true, false}}
	default:
		t.told = true
		return []Effect{Grant{t.is.Spec, t.is.Plan, t.is.Retiring, t.phase == standing && !t.target.Adopt, t.target.Adopt}}
	}
}

// outcome is what the phase ends with.
func (t *Topic) outcome() catalog.Event {
	switch t.phase {
	case creating:
		return catalog.TopicActivated{Topic: t.name}
	case moving:
		return catalog.TopicMoved{Topic: t.name}
	case returning:
		return catalog.TopicMoveAborted{Topic: t.name, Left: t.left}
	case leaving:
		return catalog.TopicDeleting{Topic: t.name}
	case retiring:
		return catalog.MemberRetired{Topic: t.name, Broker: t.target.Retire}
	case forgetting:
		return catalog.LeftoverContractRemoved{Topic: t.name}
	default:
		// What a broker still holds, it may tell an adaptor that has forgotten the contract.
		return catalog.TopicRemoved{Topic: t.name, Left: t.left, ContractLeft: t.stale || len(t.left) > 0}
	}
}

// lookUnconfirmed looks for shares beyond the contract, where there may be any.
func (t *Topic) lookUnconfirmed() []Effect {
	look := LookUnconfirmed{Former: t.is.Spec.Contract(), Holders: t.is.Holders()}
	if t.phase == moving {
		look.Contract = t.is.Next.Spec.Contract()
		look.Raised = t.is.Raising || look.Contract.Rate > look.Former.Rate || look.Contract.Burst > look.Former.Burst
		if look.Contract == look.Former && !look.Raised && len(t.is.Unconfirmed) == 0 {
			t.seen()
			return nil
		}
	} else if !t.told {
		t.seen() // this topic was granted nothing; what is known of a former one stands
		return nil
	}
	return []Effect{look}
}

// excessNow returns the event that notes excess; nil: nothing changes.
func (t *Topic) excessNow() *catalog.SharesUnconfirmed {
	same := len(t.excess)+len(t.is.Unconfirmed) == 0 && t.raising == t.is.Raising
	if !t.looked || t.phase != moving && t.phase != deleting || same {
		return nil
	}
	return &catalog.SharesUnconfirmed{Topic: t.name, Shares: t.excess, Raising: t.raising, Vague: t.is.Vague}
}

func (t *Topic) take(e Event, now time.Time) []Effect {
	switch e := e.(type) {
	case Planned:
		if t.seeing == unplanned {
			t.takePlan(e)
		}
	case Answered:
		if i := slices.Index(t.waits, e.Broker); i >= 0 && (t.seeing == unprepared || t.seeing == unremoved) {
			if t.waits = slices.Delete(t.waits, i, i+1); e.Err != nil {
				t.refused[e.Broker] = e.Err
			}
			return t.answered()
		}
	case Granted:
		if t.seeing == ungranted {
			return t.takeGrant(e)
		}
	case Shares:
		if t.seeing == unshared {
			return t.takeShares(e, now)
		}
	case Unconfirmed:
		if t.seeing == unconfirmed {
			t.takeUnconfirmed(e, now)
		}
	case Consumers:
		if t.seeing == unread {
			return t.takeConsumers(e, now)
		}
	case Written:
		if t.seeing == unwritten {
			return t.takeWritten(e)
		}
	case Tick:
		if !t.due.IsZero() && !now.Before(t.due) {
			return t.tick()
		}
	case Cancelled:
		if t.seeing == unprepared && t.phase == creating {
			return t.giveUp(e.Cause)
		}
	case Closing:
		if t.closing = true; t.seeing == unread || t.seeing == unshared || t.seeing == unconfirmed && t.looked {
			t.seen()
		}
		if t.late = t.late || e.Late; t.late && len(t.waits) > 0 {
			return t.giveUp(ErrNoAnswer)
		}
	}
	return nil
}

func (t *Topic) takePlan(e Planned) {
	if e.Err != nil {
		if errors.Is(e.Err, ErrSettled) {
			e.Err = nil
		}
		t.end(e.Err)
		return
	}
	t.seen()
	t.planned, t.is, t.lack, t.told = true, e.Topic, e.Lack, e.Told
}

// giveUp takes it that those who have not answered will not.
func (t *Topic) giveUp(cause error) []Effect {
	for _, id := range t.waits {
		t.refused[id] = cause
	}
	t.waits = nil
	return t.answered()
}

// answered goes on once all have.
func (t *Topic) answered() []Effect {
	if len(t.waits) > 0 {
		return nil
	}
	failed := slices.Sorted(maps.Keys(t.refused))
	if t.seeing == unprepared {
		var errs []error
		for _, id := range t.lack { // in the order of the plan
			if err := t.refused[id]; err != nil {
				errs = append(errs, &BrokerError{id, err})
			}
		}
		if err := errors.Join(errs...); err != nil {
			t.fail(err)
			return nil
		}
		t.seen()
		return nil
	}
	t.left = failed
	var notes []Effect
	for _, id := range failed {
		text := map[phase]string{
			returning: "topic stays for now on a broker that it has not moved to",
			retiring:  "topic stays on a broker that it has moved away from",
			deleting:  "topic left behind for now",
		}[t.phase]
		notes = append(notes, Note{Text: text, Broker: id, Err: t.refused[id], Warn: t.phase == deleting})
	}
	if t.seen(); t.phase == retiring && len(failed) > 0 {
		t.over = true // it is asked again once it is seen to be empty
	}
	return notes
}

func (t *Topic) takeGrant(e Granted) []Effect {
	t.members = e.Members
	switch {
	case t.phase == creating && e.Err != nil, t.phase == moving && e.Err != nil:
		t.fail(e.Err)
		return nil
	case t.phase == deleting && e.Err != nil:
		t.stale = true
		t.seen()
		return []Effect{Note{Text: "contract left behind for now", Err: e.Err, Warn: true}}
	case t.phase == forgetting && e.Err != nil:
		t.end(e.Err)
		return nil
	case e.Err != nil:
		if t.seen(); t.failed != nil || t.target.Shared {
			t.failed = errors.Join(t.failed, e.Err)
		}
		return []Effect{Note{Text: "share update failed; keeping current", Err: e.Err, Warn: true}}
	}
	t.stale = e.Away
	t.seen()
	return nil
}

func (t *Topic) takeShares(e Shares, now time.Time) []Effect {
	t.members = slices.DeleteFunc(t.members, func(id string) bool { return slices.Contains(e.Held, id) })
	switch {
	case len(t.members) == 0:
		t.seen()
	case !now.Before(t.until) || t.closing:
		// A broker that is gone holds its part until its lease ends: better to move
		// without than to stay with it.
		t.seen()
		return []Effect{Note{Text: "moving before all shares are granted", Names: t.members, Warn: true}}
	default:
		t.due = now.Add(sharesPause)
	}
	return nil
}

// takeUnconfirmed waits until all brokers have confirmed that are about to.
func (t *Topic) takeUnconfirmed(e Unconfirmed, now time.Time) {
	t.excess, t.raising, t.looked = e.Shares, e.Raising, true
	if !e.Soon || !now.Before(t.until) || t.closing {
		t.seen()
		return
	}
	t.due = now.Add(confirmPause)
}

func (t *Topic) takeWritten(e Written) []Effect {
	was, p := t.is, t.phase
	switch {
	case e.Halted:
		t.end(e.Err) // what has become of it, the next controller finds out
		return nil
	case e.Err != nil && (p == creating || p == moving):
		t.fail(e.Err)
		return nil
	case e.Err != nil:
		t.end(e.Err)
		return nil
	}
	t.seen()
	t.is, t.left = e.Topic, nil
	switch p {
	case moving:
		return []Effect{Moved{was, t.is}}
	case returning:
		t.stale = t.told
	case retiring:
		t.stale = true
	}
	return nil
}

// tick is for what is due.
func (t *Topic) tick() []Effect {
	t.due = time.Time{}
	switch t.seeing {
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

// fresh returns the brokers of the next plan that are not of the present one.
func (t *Topic) fresh() []string {
	present := t.is.Plan.Brokers()
	return slices.DeleteFunc(t.is.Next.Plan.Brokers(), func(id string) bool { return slices.Contains(present, id) })
}

// Retiring returns the brokers that may have messages of the topic and are not in the
// plan, by id.
func Retiring(plan placement.Plan, topic catalog.Topic) []string {
	planned := plan.Brokers()
	ids := slices.DeleteFunc(append(topic.Plan.Brokers(), topic.Retiring...), func(id string) bool { return slices.Contains(planned, id) })
	slices.Sort(ids)
	return slices.Compact(ids)
}

func (t *Topic) lookConsumers() []Effect {
	return []Effect{LookConsumers{t.is.Plan, t.fresh(), t.is.Retiring}}
}

// takeConsumers waits until each channel that is read on a broker of the topic is read
// on those that are new to it. A consumer that looks again is nowhere for a moment, so
// what was read once counts.
func (t *Topic) takeConsumers(e Consumers, now time.Time) []Effect {
	fresh := t.fresh()
	for _, id := range append(t.is.Plan.Brokers(), t.is.Retiring...) {
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
	all := slices.Sorted(maps.Keys(missing))
	var effects []Effect
	if len(all) > 0 && e.Shown && !now.Before(t.nudge) {
		effects = t.nudges(all, fresh, e)
		t.nudge = t.nudge.Add(t.limits.Consumers / 2) // for those that were busy
	}
	switch {
	case len(all) == 0 || e.Away || t.closing:
		t.seen()
	case !now.Before(t.until):
		t.seen()
		effects = append(effects, Note{Text: "moving before all consumers have come", Names: append(FirstFew(all), missing[all[0]]...), Warn: true})
	default:
		t.due = now.Add(consumersPause)
		t.waiting = fmt.Sprintf("before its publishers move, until %s: for consumers of %s on %s, which have to ask nsqlookupd again",
			t.until.Format(time.TimeOnly), strings.Join(FirstFew(all), ", "), strings.Join(missing[all[0]], ", "))
	}
	return effects
}

// nudges has consumers of these channels look again, each channel's on one broker, for
// most are connected to all: rather on one that the topic leaves.
func (t *Topic) nudges(channels, fresh []string, e Consumers) []Effect {
	order := slices.DeleteFunc(append(Retiring(t.is.Next.Plan, t.is), t.is.Plan.Brokers()...), func(id string) bool { return slices.Contains(fresh, id) })
	of := map[string][]string{}
	for _, channel := range channels {
		if i := slices.IndexFunc(order, func(id string) bool { return slices.Contains(e.Read[id], channel) }); i >= 0 {
			of[order[i]] = append(of[order[i]], channel)
		}
	}
	var effects []Effect
	for _, id := range slices.Sorted(maps.Keys(of)) {
		effects = append(effects, Nudge{id, of[id]})
	}
	return effects
}

// FirstFew keeps a list short enough to be read.
func FirstFew(names []string) []string {
	const few = 5
	if len(names) > few {
		names = append(slices.Clone(names[:few]), "...")
	}
	return names
}
