package loop

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// SetContract implements srtmv1.GrantServiceServer.
func (s *Server) SetContract(ctx context.Context, req *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error) {
	t, err := checkContract(req)
	if err != nil {
		return nil, toStatus(err)
	}
	switch {
	case req.Adopt:
		err = s.adopt(t)
	case req.Update:
		err = s.update(t)
	default:
		wait := s.cfg.AckTimeout
		if deadline, ok := ctx.Deadline(); ok {
			// Answer before the caller gives up, so that the reason reaches it.
			wait = min(wait, time.Until(deadline)*9/10)
		}
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		err = s.set(ctx, t)
	}
	if err != nil {
		s.cfg.Log.Warn("contract not set", obs.KeyTopic, t.name, "adopt", req.Adopt, obs.KeyError, err)
		return nil, toStatus(err)
	}
	s.cfg.Log.Info("contract set", obs.KeyTopic, t.name, "adopt", req.Adopt, "rule", t.rule, "members", len(t.members))
	return &srtmv1.SetContractResponse{}, nil
}

func checkContract(req *srtmv1.SetContractRequest) (*topic, error) {
	var bad badRequest
	t := &topic{name: req.Topic, contract: req.Contract, rule: req.ShareRule, members: map[string]*member{}}
	if !validName(t.name) {
		bad.add("topic", "%q: want 1 to 64 of [.a-zA-Z0-9_-]", t.name)
	}
	if t.rule == "" {
		t.rule = share.Default
	}
	if !slices.Contains(share.Rules(), t.rule) {
		bad.add("share_rule", "%q is not one of %s", t.rule, strings.Join(share.Rules(), ", "))
	}
	total := t.total()
	if err := total.Validate(); err != nil {
		bad.add("contract", "%v", err)
	} else if total.IsZero() {
		bad.add("contract", "it is empty")
	}
	if req.Adopt && req.Update {
		bad.add("update", "not together with adopt")
	}
	if len(req.Members) == 0 {
		bad.add("members", "there are none")
	}
	left := total
	for i, m := range req.Members {
		at := func(field string) string { return fmt.Sprintf("members[%d].%s", i, field) }
		one := shareFrom(m.Share)
		if !validName(m.BrokerId) {
			bad.add(at("broker_id"), "%q: want 1 to 64 of [.a-zA-Z0-9_-]", m.BrokerId)
		} else if t.members[m.BrokerId] != nil {
			bad.add(at("broker_id"), "%q appears twice", m.BrokerId)
		}
		if err := one.Validate(); err != nil {
			bad.add(at("share"), "%v", err)
		} else if one.IsZero() {
			bad.add(at("share"), "it is empty")
		} else {
			left.Rate -= one.Rate
			left.Burst -= one.Burst
		}
		// A member without declared publishers is one all the same: its
		// publishers are not known, not absent.
		t.members[m.BrokerId] = &member{publishers: int(max(1, min(m.Publishers, 1<<30)))}
		t.initial = append(t.initial, share.Assigned{Broker: m.BrokerId, Share: one})
	}
	for i, broker := range req.Awaited {
		at := fmt.Sprintf("awaited[%d]", i)
		if !validName(broker) {
			bad.add(at, "%q: want 1 to 64 of [.a-zA-Z0-9_-]", broker)
		} else if t.members[broker] != nil || slices.Contains(req.Awaited[:i], broker) {
			bad.add(at, "%q appears twice", broker)
		}
	}
	t.awaited = req.Awaited
	if len(bad) == 0 && !left.IsZero() {
		bad.add("members", "their shares fall short of the contract by %d milli-msg/s and %d messages", left.Rate, left.Burst)
	}
	return t, bad.err()
}

func (t *topic) total() tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(t.contract.GetRateMilli()), Burst: t.contract.GetBurst()}
}

// set puts a contract in the ledger and waits until its members have their
// shares. It leaves nothing behind when it fails, but for a contract that was
// there before.
func (s *Server) set(ctx context.Context, t *topic) error {
	var before bool
	for {
		var changed <-chan struct{}
		err := s.change(reasonContract, func(l *ledger.Ledger) ([]ledger.Grant, error) {
			known := s.mu.topics[t.name]
			before = known != nil
			grants, err := l.SetContract(t.name, s.terms(t, false), t.initial)
			if err != nil {
				changed = s.mu.changed
				return nil, err
			}
			if before && known.rule == t.rule && slices.Equal(known.initial, t.initial) {
				t = known // a repetition waits with the first
			} else {
				s.keepLocked(t)
			}
			return grants, nil
		})
		var busy *ledger.Busy
		if errors.As(err, &busy) {
			// The one before under that name: its brokers are giving it up.
			select {
			case <-changed:
				continue
			case <-s.closed:
				return errClosing
			case <-ctx.Done():
				return err
			}
		}
		if err != nil {
			return err
		}
		break
	}
	err := s.settle(ctx, t)
	if err == nil || before || errors.Is(err, errRemoved) {
		return err
	}
	return errors.Join(err, s.change(reasonRemoved, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		if s.mu.topics[t.name] != t {
			return nil, nil // removed, and perhaps set again, meanwhile
		}
		s.dropLocked(t.name)
		return l.Remove(t.name), nil
	}))
}

// update gives a topic another contract or other members. It does not wait. One that
// is not known, and that brokers without a part of it may be using, is adopted: the
// ledger does not know what it must keep for them.
func (s *Server) update(t *topic) error {
	return s.change(reasonContract, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		if s.mu.topics[t.name] == nil && len(t.awaited) > 0 {
			s.mu.adopting[t.name] = t
			return s.adoptLocked(t), nil
		}
		grants, err := l.Change(t.name, s.terms(t, false), t.initial)
		if err != nil {
			return nil, err
		}
		t.settled = true // its members may be tuned: what they lack is on its way
		s.keepLocked(t)
		return grants, nil
	})
}

// dropLocked forgets what the ledger does not know of a topic. Requires: mu held.
func (s *Server) dropLocked(name string) {
	delete(s.mu.topics, name)
	delete(s.mu.adopting, name)
	delete(s.mu.histories, name)
}

// terms are those of t's contract; used if somebody may have used it.
func (s *Server) terms(t *topic, used bool) ledger.Terms {
	terms := ledger.Terms{Contract: t.total(), Flex: s.cfg.Flex, Used: used}
	if t.rule == share.Static {
		terms.Flex = 0 // nothing is to move
	}
	return terms
}

// keepLocked makes t the topic's contract. Requires: mu held; the ledger has it.
func (s *Server) keepLocked(t *topic) {
	delete(s.mu.adopting, t.name)
	if old := s.mu.topics[t.name]; old != nil {
		for broker, m := range t.members {
			if was := old.members[broker]; was != nil {
				m.window = was.window
			}
		}
	}
	s.mu.topics[t.name] = t
}

// settle waits until every member of t has acknowledged its share.
func (s *Server) settle(ctx context.Context, t *topic) error {
	for {
		s.mu.Lock()
		changed := s.mu.changed
		view, ok := s.mu.ledger.Topic(t.name)
		ours := s.mu.topics[t.name] == t
		if ok && ours && view.Settled {
			t.settled = true
		}
		settled := t.settled
		s.mu.Unlock()
		switch {
		case !ok || view.Removing || !ours:
			return fmt.Errorf("topic %s: %w", t.name, errRemoved)
		case settled:
			return nil
		}
		select {
		case <-changed:
		case <-s.closed:
			return errClosing
		case <-ctx.Done():
			return &unsettled{topic: t.name, members: lacking(view), cause: ctx.Err()}
		}
	}
}

// lacking says which members have not got their share, and why.
func lacking(v ledger.TopicView) []string {
	var list []string
	for _, m := range v.Members {
		switch {
		case !m.Connected:
			list = append(list, m.Broker+" (not connected)")
		case m.Acknowledged != m.Target:
			list = append(list, m.Broker)
		}
	}
	return list
}

// adopt takes back a contract that may be in use. It does not wait.
func (s *Server) adopt(t *topic) error {
	return s.change(reasonContract, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		if known := s.mu.topics[t.name]; known != nil {
			if known.total() != t.total() {
				return nil, &ledger.Conflict{Topic: t.name, Have: known.total(), Got: t.total()}
			}
			return nil, nil
		}
		if view, ok := l.Topic(t.name); ok && view.Removing {
			return nil, &ledger.Busy{Topic: t.name, Brokers: lacking(view)}
		}
		s.mu.adopting[t.name] = t
		return s.adoptLocked(t), nil
	})
}

// adoptLocked hands t to the ledger once all its members have said hello.
// Requires: mu held.
func (s *Server) adoptLocked(t *topic) []ledger.Grant {
	for broker := range t.members {
		if !s.mu.seen[broker] {
			return nil
		}
	}
	for _, broker := range t.awaited {
		if !s.mu.seen[broker] {
			return nil
		}
	}
	initial := t.initial
	if view, ok := s.mu.ledger.Topic(t.name); ok {
		if held := kept(t, view); held != nil {
			initial = held
		}
	}
	grants, err := s.mu.ledger.SetContract(t.name, s.terms(t, true), initial)
	if err != nil {
		// Not Busy and not Conflict: the ledger has no contract of it. Not bad
		// input either: checkContract saw it.
		panic(fmt.Sprintf("tbadaptor: adopt %s: %v", t.name, err))
	}
	s.keepLocked(t)
	t.settled = true // it was before the restart
	return grants
}

// heardLocked notes that it is known what a broker holds, and adopts what waited for
// that. Requires: mu held; the ledger knows it.
func (s *Server) heardLocked(broker string) (grants []ledger.Grant) {
	s.mu.seen[broker] = true
	for _, name := range sortedNames(s.mu.adopting) {
		if t := s.mu.adopting[name]; t.members[broker] != nil || slices.Contains(t.awaited, broker) {
			grants = append(grants, s.adoptLocked(t)...)
		}
	}
	return grants
}

// kept returns what the members hold, and what is missing to the contract in
// proportion to it: flexible parts that have ended, or a share that was on its way
// from one to another. So what was tuned stays as it is. nil: a member holds
// nothing, or all hold more than the contract.
func kept(t *topic, v ledger.TopicView) []share.Assigned {
	left := t.total()
	var held []share.Load
	for _, m := range v.Members {
		if t.members[m.Broker] == nil || m.Reserved != m.Acknowledged || m.Acknowledged.IsZero() {
			return nil
		}
		left.Rate -= m.Acknowledged.Rate
		left.Burst -= m.Acknowledged.Burst
		held = append(held, share.Load{Broker: m.Broker, Share: m.Acknowledged})
	}
	if left.Rate < 0 || left.Burst < 0 || len(held) != len(t.members) {
		return nil
	}
	shares, err := share.Split(share.Static, t.total(), held)
	if err != nil {
		return nil
	}
	return shares
}

// RemoveContract implements srtmv1.GrantServiceServer.
func (s *Server) RemoveContract(_ context.Context, req *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error) {
	err := s.change(reasonRemoved, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		s.dropLocked(req.Topic)
		return l.Remove(req.Topic), nil
	})
	if err != nil {
		return nil, toStatus(err)
	}
	s.cfg.Log.Info("contract removed", obs.KeyTopic, req.Topic)
	return &srtmv1.RemoveContractResponse{}, nil
}

// ForgetBroker implements srtmv1.GrantServiceServer.
func (s *Server) ForgetBroker(_ context.Context, req *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error) {
	if !validName(req.BrokerId) {
		var bad badRequest
		bad.add("broker_id", "%q: want 1 to 64 of [.a-zA-Z0-9_-]", req.BrokerId)
		return nil, toStatus(bad)
	}
	err := s.change(reasonForgotten, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		grants, err := l.Forget(req.BrokerId)
		if err == nil {
			s.noteLapseLocked(ledger.Lapse{Broker: req.BrokerId, Base: true})
			// It has nothing to say any more.
			grants = append(grants, s.heardLocked(req.BrokerId)...)
		}
		return grants, err
	})
	if err != nil {
		return nil, toStatus(err)
	}
	s.cfg.Log.Warn("broker forgotten, on an operator's word", obs.KeyBroker, req.BrokerId)
	return &srtmv1.ForgetBrokerResponse{}, nil
}

// ListShares implements srtmv1.GrantServiceServer.
func (s *Server) ListShares(_ context.Context, req *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var views []ledger.TopicView
	if req.Topic == "" {
		views = s.mu.ledger.View()
	} else if v, ok := s.mu.ledger.Topic(req.Topic); ok {
		views = append(views, v)
	}
	response := &srtmv1.ListSharesResponse{}
	listed := map[string]bool{}
	for _, v := range views {
		if v.Removing {
			continue
		}
		listed[v.Topic] = true
		response.Topics = append(response.Topics, s.sharesLocked(v, req.History))
	}
	for _, name := range sortedNames(s.mu.adopting) {
		if !listed[name] && (req.Topic == "" || req.Topic == name) {
			response.Topics = append(response.Topics, s.sharesLocked(ledger.TopicView{Topic: name}, 0))
		}
	}
	return response, nil
}

// sharesLocked shows v, and members that are only waited for. A topic that
// brokers hold and nobody set has no contract. Requires: mu held.
func (s *Server) sharesLocked(v ledger.TopicView, history uint32) *srtmv1.TopicShares {
	p := &srtmv1.TopicShares{Topic: v.Topic, History: s.mu.histories[v.Topic].latest(history)}
	listed := map[string]bool{}
	for _, m := range v.Members {
		listed[m.Broker] = true
		p.Members = append(p.Members, &srtmv1.MemberShare{
			BrokerId: m.Broker,
			Granted:  shareProto(m.Granted), GrantedEpoch: m.GrantedEpoch,
			Acknowledged: shareProto(m.Acknowledged), AcknowledgedEpoch: m.AcknowledgedEpoch,
			Base: shareProto(m.Base), Target: shareProto(m.Target), Reserved: shareProto(m.Reserved),
			Connected: m.Connected, Policy: policyProto(m.Policy), Lapsed: m.Lapsed,
		})
	}
	t := s.mu.topics[v.Topic]
	if t == nil {
		t = s.mu.adopting[v.Topic]
	}
	if t != nil {
		p.Contract, p.ShareRule = t.contract, t.rule
		for _, broker := range sortedNames(t.members) {
			if !listed[broker] {
				p.Members = append(p.Members, &srtmv1.MemberShare{BrokerId: broker, Connected: s.mu.sessions[broker] != nil})
			}
		}
	}
	return p
}
