package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
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

// contracts compares what the adaptor has with what it should have.
type contracts struct {
	// Set once.
	cfg     *Config
	mu      *state
	adaptor ledger
	owners  *owners

	agreed agreement // owned by run
}

// run brings back the contracts that the adaptor does not have, because it has restarted,
// and removes those that were left there. While the adaptor does not answer it asks less
// and less often.
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

// agreement is a comparison that left nothing to do: of the adaptor's shares and the
// catalog as these were then. No other is needed until one of them has changed.
type agreement struct{ revision, version uint64 }

func (c *contracts) compare(ctx context.Context) error {
	c.mu.RLock()
	leftovers := c.mu.cat.LeftoverContracts()
	version, topics := c.mu.next.Version(), c.mu.cat.Len()
	steady := len(leftovers)+len(c.mu.away)+len(c.mu.staged) == 0
	c.mu.RUnlock()
	if topics+len(leftovers) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	before := c.agreed.revision
	if !steady || version != c.agreed.version {
		before = 0
	}
	shares, err := c.adaptor.ListShares(ctx, &srtmv1.ListSharesRequest{UnlessRevision: before})
	if err != nil {
		return fmt.Errorf("list shares: %w", err)
	}
	if before != 0 && shares.Revision == before {
		return nil
	}
	c.agreed = agreement{}
	var wanted []string
	c.mu.inTurns(c.mu.RLocker(), func(name string) (work int) {
		if active, _ := c.mu.cat.Active(name); active {
			wanted = append(wanted, name)
		}
		return 1
	})
	has := map[string]*srtmv1.TopicShares{}
	for _, t := range shares.Topics {
		if t.Contract != nil {
			has[t.Topic] = t
		}
	}
	c.noteReserved(has)
	c.noteBrokers(ctx, shares)
	for _, name := range wanted {
		known := has[name] != nil
		if known {
			agrees, changing := c.agrees(name, has[name], shares.Freed)
			if steady = steady && !changing; agrees {
				continue
			}
		}
		steady = false
		// What it knows already is what a controller left behind that did not live to
		// commit the move, or did not live to take it back.
		if err := c.seeTo(operation{name: name, target: reconcile.Target{Shared: true, Adopt: !known}}); err != nil {
			return err
		}
	}
	for _, name := range leftovers {
		// At once if it has one, and at last when no broker has the topic any more, for
		// what a broker held before it was told the adaptor may have learned of since.
		c.mu.RLock()
		held := slices.ContainsFunc(c.mu.cat.Brokers(), func(b catalog.Broker) bool { return c.mu.cat.LeftOn(name, b.ID) })
		c.mu.RUnlock()
		if held && has[name] == nil {
			continue
		}
		if err := c.seeTo(operation{name: name, target: reconcile.Target{Forget: true, Held: held}}); err != nil {
			return err
		}
	}
	if steady {
		c.agreed = agreement{shares.Revision, version}
	}
	return nil
}

// seeTo has an operation done unless something is done about its topic. An error says
// that the adaptor does not answer: of what it refuses, the next comparison asks again
// all the same, and other topics must not wait for that.
func (c *contracts) seeTo(op operation) error {
	c.mu.Lock()
	if c.mu.owned(op.name) || c.mu.closing {
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

// noteReserved notes, for people, which topics lack shares because of brokers that
// are gone, and what helps.
func (c *contracts) noteReserved(has map[string]*srtmv1.TopicShares) {
	const remedy = "; restart it, or `srtm share forget %s`"
	c.mu.RLock()
	away := maps.Clone(c.mu.away)
	c.mu.RUnlock()
	lacks := map[string]string{}
	for name, t := range has {
		var list []string
		for _, m := range t.Members {
			// While a lease runs it may be back before anybody has read this.
			ended := m.Lapsed || m.Policy == srtmv1.LeasePolicy_LEASE_POLICY_UNSPECIFIED
			if rate := m.Reserved.GetRateMilli(); !m.Connected && ended && rate > 0 {
				list = append(list, fmt.Sprintf("%s msg/s are reserved for %s, gone since %s"+remedy,
					strconv.FormatFloat(float64(rate)/1000, 'f', -1, 64), m.BrokerId, condition.Moment(m.AwaySince.AsTime()), m.BrokerId))
			}
		}
		for _, id := range t.Awaited {
			if at, gone := away[id]; gone && time.Since(at) >= c.cfg.EvacuateAfter {
				list = append(list, fmt.Sprintf("no share changes before %s, gone since %s or earlier, says what it holds"+remedy, id, condition.Moment(at), id))
			}
		}
		if list != nil {
			lacks[name] = strings.Join(list, "; ")
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.mu.lacking {
		if l := c.mu.topics[name]; l != nil {
			l.reserved = ""
		}
	}
	c.mu.lacking = slices.Sorted(maps.Keys(lacks))
	for _, name := range c.mu.lacking {
		c.mu.topics.at(name).reserved = lacks[name]
	}
}

// agrees reports whether the adaptor has the topic's contract and members. One that is
// changing has an owner already. A freed broker has nothing and no session: it
// becomes a member when it is back.
func (c *contracts) agrees(name string, has *srtmv1.TopicShares, freed []string) (agrees, changing bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	topic, ok := c.mu.next.Topic(name)
	if !ok || topic.Next != nil || c.mu.owned(name) {
		return true, true
	}
	if c.mu.topics.see(name).unsynced {
		return false, false
	}
	if used := usedOf(topic.Plan); has.Contract.RateMilli != int64(used.Rate) || has.Contract.Burst != used.Burst {
		return false, false
	}
	members := map[string]bool{}
	for _, m := range has.Members {
		// One that is to have nothing may still have to say so.
		members[m.BrokerId] = m.Granted.GetRateMilli() > 0 || m.Acknowledged.GetRateMilli() > 0
	}
	inTurn := scarce(topic.Plan, topic.Retiring)
	for _, id := range topic.Holders() {
		if _, is := members[id]; !is && !inTurn && !slices.Contains(freed, id) { // whose turn it is, reconcile sees to
			return false, false
		}
		delete(members, id)
	}
	for _, holds := range members {
		if holds {
			return false, false
		}
	}
	return true, false
}

// noteBrokers keeps what the adaptor, whose memory is not durable, knows of brokers
// that are gone, and tells it when it has forgotten. Not at once after a start: one
// that lives calls by then, and one that has a session is not forgotten.
func (c *contracts) noteBrokers(ctx context.Context, shares *srtmv1.ListSharesResponse) {
	awaited, holds, strict := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, t := range shares.Topics {
		for _, id := range t.Awaited {
			awaited[id] = true
		}
		for _, m := range t.Members {
			if m.Connected {
				holds[m.BrokerId], strict[m.BrokerId] = true, m.Policy == srtmv1.LeasePolicy_LEASE_POLICY_STRICT
			}
		}
	}
	now := time.Now()
	var forget []string
	c.mu.Lock()
	for _, b := range c.mu.next.Brokers() {
		note := catalog.BrokerNoted{ID: b.ID, Forgotten: b.Forgotten || !b.Connected && slices.Contains(shares.Freed, b.ID), Strict: b.Strict}
		if holds[b.ID] {
			note.Forgotten, note.Strict = false, strict[b.ID]
		}
		if note.Forgotten != b.Forgotten || note.Strict != b.Strict {
			_, err := c.mu.stage(note)
			_ = must("note on broker "+b.ID, err) // the next comparison finds it again
		}
		if at, away := c.mu.away[b.ID]; b.Forgotten && awaited[b.ID] && away && now.Sub(at) >= c.cfg.EvacuateAfter {
			forget = append(forget, b.ID)
		}
	}
	c.mu.Unlock()
	for _, id := range forget {
		if _, err := c.adaptor.ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: id}); err != nil {
			c.cfg.Log.Warn("the adaptor waits for a broker that was forgotten", obs.KeyBroker, id, obs.KeyError, err)
		}
	}
}
