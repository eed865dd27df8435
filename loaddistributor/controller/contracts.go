package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// contracts compares the adaptor's contracts with the catalog.
type contracts struct {
	// Set once.
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	topics  *topics
	life    *lifetime
	adaptor grants
	owners  *owners

	// Owned by run.
	agreed  agreement
	lacking []string // topics with liveTopic.reserved
}

// run restores contracts that the adaptor has lost by a restart, and removes contracts
// that were left there. While the adaptor does not answer, run tries less and less often.
func (c *contracts) run(ctx context.Context) {
	delay := c.cfg.ReportInterval
	longest := max(5*time.Second, c.cfg.ReportInterval)
	failing := false
	for clock.Sleep(ctx, delay) {
		err := c.compare(ctx)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err != nil:
			delay = min(2*delay, longest)
			if !failing {
				c.cfg.Log.Warn("the adaptor does not answer", obs.KeyError, err)
			}
		case failing:
			c.cfg.Log.Info("the adaptor answers again")
			fallthrough
		default:
			delay = c.cfg.ReportInterval
		}
		failing = err != nil
	}
}

// agreement records a comparison without differences, by the revision of the adaptor's
// shares and the version of the catalog. No comparison is needed until one of the two
// changes.
type agreement struct{ revision, version uint64 }

func (c *contracts) compare(ctx context.Context) error {
	c.mu.RLock()
	leftovers := c.cat.committed.LeftoverContracts()
	waiting := map[string]bool{} // leftovers that brokers still have
	brokers := c.cat.committed.Brokers()
	for _, name := range leftovers {
		if slices.ContainsFunc(brokers, func(b catalog.Broker) bool { return c.cat.committed.LeftOn(name, b.ID) }) {
			waiting[name] = true
		}
	}
	version, topics := c.cat.next.Version(), c.cat.committed.Len()+len(c.cat.next.UnconfirmedTopics())
	steady := len(leftovers)-len(waiting)+len(c.brokers.disconnectedSince)+len(c.cat.staged) == 0
	c.mu.RUnlock()
	if topics+len(leftovers) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	revision := c.agreed.revision
	if !steady || version != c.agreed.version {
		revision = 0
	}
	shares, err := c.adaptor.Shares(ctx, "", revision)
	if err != nil {
		return fmt.Errorf("list shares: %w", err)
	}
	if revision != 0 && shares.Revision == revision {
		return nil
	}
	c.agreed = agreement{}
	var topicNames []string
	c.cat.inTurns(c.mu.RLocker(), func(name string) (work int) {
		if active, _ := c.cat.committed.Active(name); active {
			topicNames = append(topicNames, name)
		}
		return 1
	})
	reported := map[string]*srtmv1.TopicShares{}
	for _, t := range shares.Topics {
		if t.Contract != nil {
			reported[t.Topic] = t
		}
	}
	c.noteReserved(reported)
	c.noteBrokers(ctx, shares)
	if !c.noteUnconfirmed(shares.Topics) {
		steady = false
	}
	for _, name := range topicNames {
		found := reported[name] != nil
		if found {
			agrees, changing := c.agrees(name, reported[name], shares.Freed)
			if steady = steady && !changing; agrees {
				continue
			}
		}
		steady = false
		// If the adaptor knows the contract but it differs, an earlier controller has
		// failed before it committed a move or rolled the move back. Shares that may
		// belong to a former contract are not adopted.
		c.mu.RLock()
		adopt := !found && len(c.cat.next.Unconfirmed(name)) == 0
		c.mu.RUnlock()
		if err := c.seeTo(operation{name: name, target: reconcile.Target{Shared: true, Adopt: adopt}}); err != nil {
			return err
		}
	}
	for _, name := range leftovers {
		// Remove the contract at once if the adaptor has it, and once more when no broker
		// has the topic: meanwhile the adaptor may have learned of shares that brokers
		// held before the removal.
		if waiting[name] && reported[name] == nil {
			continue
		}
		steady = false
		if err := c.seeTo(operation{name: name, target: reconcile.Target{Forget: true, OnBrokers: waiting[name]}}); err != nil {
			return err
		}
	}
	if steady {
		c.agreed = agreement{shares.Revision, version}
	}
	return nil
}

// seeTo runs an operation, unless the topic has an owner. An error means that the adaptor
// does not answer. seeTo ignores a refusal: the next comparison tries again, and other
// topics must not wait.
func (c *contracts) seeTo(op operation) error {
	c.mu.Lock()
	if c.topics.owned(op.name) || c.life.closing {
		c.mu.Unlock()
		return nil
	}
	err := c.owners.await(context.Background(), op)
	if code := status.Code(err); code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Canceled {
		return fmt.Errorf("contract of topic %s: %w", op.name, err)
	}
	if err == nil && op.target.Shared {
		c.cfg.Log.Info("contract brought back", obs.KeyTopic, op.name)
	}
	return nil
}

// noteReserved records, for people, which topics lack shares because of brokers that are
// gone, with the remedy.
func (c *contracts) noteReserved(reported map[string]*srtmv1.TopicShares) {
	const remedy = "; restart it, or `srtm share forget %s`"
	c.mu.RLock()
	disconnectedSince := maps.Clone(c.brokers.disconnectedSince)
	c.mu.RUnlock()
	reasons := map[string]string{}
	for name, t := range reported {
		var list []string
		for _, m := range t.Members {
			// While the lease runs, the broker may return before an operator reads this.
			ended := m.Lapsed || m.Policy == srtmv1.LeasePolicy_LEASE_POLICY_UNSPECIFIED
			if rate := m.Reserved.GetRateMilli(); !m.Connected && ended && rate > 0 {
				list = append(list, fmt.Sprintf("%s msg/s are reserved for %s, gone since %s"+remedy,
					strconv.FormatFloat(float64(rate)/1000, 'f', -1, 64), m.BrokerId, condition.Moment(m.AwaySince.AsTime()), m.BrokerId))
			}
		}
		for _, id := range t.Awaited {
			if since, disconnected := disconnectedSince[id]; disconnected && time.Since(since) >= c.cfg.EvacuateAfter {
				list = append(list, fmt.Sprintf("no share grows before %s, gone since %s or earlier, reports what it holds"+remedy, id, condition.Moment(since), id))
			}
		}
		if list != nil {
			reasons[name] = strings.Join(list, "; ")
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.lacking {
		if l := c.topics.byName[name]; l != nil {
			l.reserved = ""
		}
	}
	c.lacking = slices.Sorted(maps.Keys(reasons))
	for _, name := range c.lacking {
		c.topics.entry(name).reserved = reasons[name]
	}
}

// agrees reports whether the adaptor has the topic's contract and members. A topic that
// is changing has an owner already. A freed broker has no shares and no session: it
// becomes a member when it reconnects.
func (c *contracts) agrees(name string, reported *srtmv1.TopicShares, freed []string) (agrees, changing bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	topic, ok := c.cat.next.Topic(name)
	if !ok || topic.Next != nil || c.topics.owned(name) {
		return true, true
	}
	if c.topics.peek(name).unsynced {
		return false, false
	}
	if used := usedOf(topic.Plan); reported.Contract.RateMilli != int64(used.Rate) || reported.Contract.Burst != used.Burst {
		return false, false
	}
	members := map[string]bool{}
	for _, m := range reported.Members {
		// A member with an empty target may still have to confirm.
		members[m.BrokerId] = m.Granted.GetRateMilli() > 0 || m.Acknowledged.GetRateMilli() > 0
	}
	inTurn := scarce(topic.Plan, topic.Retiring)
	for _, id := range topic.Holders() {
		if _, member := members[id]; !member && !inTurn && !slices.Contains(freed, id) { // reconcile handles turns
			return false, false
		}
		delete(members, id)
	}
	for _, holdsShare := range members {
		if holdsShare {
			return false, false
		}
	}
	return true, false
}

// noteBrokers stores the adaptor's information about brokers that are gone, because the
// adaptor's memory is not durable. It also repeats to the adaptor that a broker is
// forgotten. It waits for EvacuateAfter after a start: a living broker has connected by
// then, and a broker with a session is not forgotten.
func (c *contracts) noteBrokers(ctx context.Context, shares *srtmv1.ListSharesResponse) {
	awaited, holding, strict := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, t := range shares.Topics {
		for _, id := range t.Awaited {
			awaited[id] = true
		}
		for _, m := range t.Members {
			if m.Connected {
				holding[m.BrokerId], strict[m.BrokerId] = true, m.Policy == srtmv1.LeasePolicy_LEASE_POLICY_STRICT
			}
		}
	}
	now := time.Now()
	var forget []string
	c.mu.Lock()
	for _, b := range c.cat.next.Brokers() {
		note := catalog.BrokerNoted{ID: b.ID, Forgotten: b.Forgotten || !b.Connected && slices.Contains(shares.Freed, b.ID), Strict: b.Strict}
		if holding[b.ID] {
			note.Forgotten, note.Strict = false, strict[b.ID]
		}
		if note.Forgotten != b.Forgotten || note.Strict != b.Strict {
			_, err := c.cat.stage(note)
			_ = mustSucceed("note on broker "+b.ID, err) // the next comparison repeats the note
		}
		if since, disconnected := c.brokers.disconnectedSince[b.ID]; b.Forgotten && awaited[b.ID] && disconnected && now.Sub(since) >= c.cfg.EvacuateAfter {
			forget = append(forget, b.ID)
		}
	}
	c.mu.Unlock()
	for _, id := range forget {
		if _, err := c.adaptor.Forget(ctx, id); err != nil {
			c.cfg.Log.Warn("the adaptor waits for a broker that was forgotten", obs.KeyBroker, id, obs.KeyError, err)
		}
	}
}
