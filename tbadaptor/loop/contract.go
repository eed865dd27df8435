package loop

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/shareproto"
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
	s.cfg.Log.Info("contract set", obs.KeyTopic, t.name, "adopt", req.Adopt, "rule", t.rule, "members", len(t.placed))
	return &srtmv1.SetContractResponse{}, nil
}

func checkContract(req *srtmv1.SetContractRequest) (*topic, error) {
	var bad badRequest
	t := &topic{name: req.Topic, contract: req.Contract, rule: req.ShareRule}
	if !validName(t.name) {
		bad.Add("topic", "%q: want 1 to 64 of [.a-zA-Z0-9_-]", t.name)
	}
	if t.rule == "" {
		t.rule = share.Default
	}
	if !slices.Contains(share.Rules(), t.rule) {
		bad.Add("share_rule", "%q is not one of %s", t.rule, strings.Join(share.Rules(), ", "))
	}
	total := t.total()
	if err := total.Validate(); err != nil {
		bad.Add("contract", "%v", err)
	} else if total.IsZero() {
		bad.Add("contract", "it is empty")
	}
	if req.Adopt && req.Update {
		bad.Add("update", "not together with adopt")
	}
	if len(req.Members) == 0 {
		bad.Add("members", "there are none")
	}
	left := total
	members := map[string]bool{}
	for i, m := range req.Members {
		at := func(field string) string { return fmt.Sprintf("members[%d].%s", i, field) }
		one := shareproto.From(m.Share)
		if !validName(m.BrokerId) {
			bad.Add(at("broker_id"), "%q: want 1 to 64 of [.a-zA-Z0-9_-]", m.BrokerId)
		} else if members[m.BrokerId] {
			bad.Add(at("broker_id"), "%q appears twice", m.BrokerId)
		}
		if err := one.Validate(); err != nil {
			bad.Add(at("share"), "%v", err)
		} else if one.IsZero() {
			bad.Add(at("share"), "it is empty")
		} else {
			left.Rate -= one.Rate
			left.Burst -= one.Burst
		}
		// A member without declared publishers is one all the same: its
		// publishers are not known, not absent.
		members[m.BrokerId] = true
		t.placed = append(t.placed, share.Placed{
			Broker: m.BrokerId, Publishers: int(max(1, min(m.Publishers, 1<<30))), Quota: one, Retiring: m.Retiring,
		})
		t.initial = append(t.initial, share.Assigned{Broker: m.BrokerId, Share: one})
	}
	for i, broker := range req.Awaited {
		at := fmt.Sprintf("awaited[%d]", i)
		if !validName(broker) {
			bad.Add(at, "%q: want 1 to 64 of [.a-zA-Z0-9_-]", broker)
		} else if members[broker] || slices.Contains(req.Awaited[:i], broker) {
			bad.Add(at, "%q appears twice", broker)
		}
	}
	t.awaited, t.strict = req.Awaited, req.Strict
	if len(bad) == 0 && !left.IsZero() {
		bad.Add("members", "their shares fall short of the contract by %d milli-msg/s and %d messages", left.Rate, left.Burst)
	}
	return t, bad.Err()
}

func (t *topic) total() tokenbucket.Share {
	return shareproto.From(t.contract)
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
			grants, err := l.SetContract(t.name, s.terms(t), t.initial)
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

// update gives a topic another contract or other members. It does not wait.
func (s *Server) update(t *topic) error {
	return s.change(reasonContract, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		l.Strict(t.strict)
		s.placeLocked(t)
		first := t.initial
		// What is known of its publishers holds where they go, too.
		if view, known := l.Topic(t.name); known && t.rule != share.Static {
			if target, err := s.proposeLocked(t, view); err == nil && target != nil {
				first = target
			}
		}
		grants, err := l.Change(t.name, s.terms(t), first, t.awaited)
		if err != nil {
			return nil, err
		}
		t.settled = true // its members may be tuned: what they lack is on its way
		s.mu.topics[t.name] = t
		return grants, nil
	})
}

// dropLocked forgets what the ledger does not know of a topic. Requires: mu held.
func (s *Server) dropLocked(name string) {
	delete(s.mu.topics, name)
	delete(s.mu.histories, name)
}

// terms are those of t's contract.
func (s *Server) terms(t *topic) ledger.Terms {
	terms := ledger.Terms{Contract: t.total(), Flex: s.cfg.Flex}
	if t.rule == share.Static {
		terms.Flex = 0 // nothing is to move
	}
	return terms
}

// placeLocked has t go on with what is known of the topic's traffic. Requires: mu
// held.
func (s *Server) placeLocked(t *topic) {
	var old *share.Tuner
	if known := s.mu.topics[t.name]; known != nil {
		old = known.tuner
	}
	t.tuner = old.Place(clock.Mono(), t.rule, s.cfg.Window, t.placed)
}

// keepLocked makes t the topic's contract. Requires: mu held; the ledger has it.
func (s *Server) keepLocked(t *topic) {
	s.placeLocked(t)
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
		settled, over := t.settled, s.mu.over
		s.mu.Unlock()
		switch {
		case over:
			return errNotLeading
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
		l.Strict(t.strict)
		grants, err := l.Adopt(t.name, s.terms(t), t.initial, t.awaited)
		if err != nil {
			return nil, err
		}
		if s.mu.topics[t.name] == nil {
			t.settled = true // it was before the restart
			s.keepLocked(t)
		}
		return grants, nil
	})
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
		bad.Add("broker_id", "%q: want 1 to 64 of [.a-zA-Z0-9_-]", req.BrokerId)
		return nil, toStatus(bad)
	}
	var freed []ledger.Freed
	err := s.change(reasonForgotten, func(l *ledger.Ledger) (grants []ledger.Grant, err error) {
		freed, grants, err = l.Forget(req.BrokerId)
		if err == nil {
			s.noteLapseLocked(ledger.Lapse{Broker: req.BrokerId, Base: true})
		}
		return grants, err
	})
	if err != nil {
		return nil, toStatus(err)
	}
	s.cfg.Log.Warn("broker forgotten, on an operator's word", obs.KeyBroker, req.BrokerId, "topics", len(freed))
	return &srtmv1.ForgetBrokerResponse{Freed: freedProto(freed)}, nil
}

func freedProto(freed []ledger.Freed) (list []*srtmv1.FreedShare) {
	for _, f := range freed {
		one := &srtmv1.FreedShare{Topic: f.Topic}
		if !f.Unknown {
			one.Share = shareproto.To(f.Share)
		}
		list = append(list, one)
	}
	return list
}

// ReportEnd implements srtmv1.GrantServiceServer.
func (s *Server) ReportEnd(_ context.Context, req *srtmv1.ReportEndRequest) (*srtmv1.ReportEndResponse, error) {
	var freed []ledger.Freed
	err := s.change(reasonEnded, func(l *ledger.Ledger) (grants []ledger.Grant, err error) {
		freed, grants, err = l.Ended(req.BrokerId, req.Instance, clock.Mono())
		if err == nil {
			s.noteLapseLocked(ledger.Lapse{Broker: req.BrokerId, Base: true})
		}
		return grants, err
	})
	if err != nil {
		return nil, toStatus(err)
	}
	s.cfg.Log.Warn("a broker's process has ended: what it held is free", obs.KeyBroker, req.BrokerId, "topics", len(freed))
	return &srtmv1.ReportEndResponse{Freed: freedProto(freed)}, nil
}

// ListShares implements srtmv1.GrantServiceServer.
func (s *Server) ListShares(_ context.Context, req *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.leadsLocked(); err != nil {
		return nil, toStatus(err)
	}
	var views []ledger.TopicView
	if req.Topic == "" {
		views = s.mu.ledger.View()
	} else if v, ok := s.mu.ledger.Topic(req.Topic); ok {
		views = append(views, v)
	}
	response := &srtmv1.ListSharesResponse{Freed: s.mu.ledger.Freed()}
	for _, v := range views {
		if !v.Removing {
			response.Topics = append(response.Topics, s.sharesLocked(v, req.History))
		}
	}
	return response, nil
}

// sharesLocked shows v. A topic that brokers hold and nobody set has no contract.
// Requires: mu held.
func (s *Server) sharesLocked(v ledger.TopicView, history uint32) *srtmv1.TopicShares {
	p := &srtmv1.TopicShares{Topic: v.Topic, History: s.mu.histories[v.Topic].latest(history), Awaited: v.Awaited}
	for _, m := range v.Members {
		one := &srtmv1.MemberShare{
			BrokerId: m.Broker,
			Granted:  shareproto.To(m.Granted), GrantedEpoch: m.GrantedEpoch,
			Acknowledged: shareproto.To(m.Acknowledged), AcknowledgedEpoch: m.AcknowledgedEpoch,
			Base: shareproto.To(m.Base), Target: shareproto.To(m.Target), Reserved: shareproto.To(m.Reserved),
			Connected: m.Connected, Policy: policyProto(m.Policy), Lapsed: m.Lapsed,
		}
		if !m.Connected {
			since, known := s.mu.away[m.Broker]
			if !known {
				since = s.mu.began
			}
			one.AwaySince = timestamppb.New(since)
		}
		p.Members = append(p.Members, one)
	}
	if t := s.mu.topics[v.Topic]; t != nil {
		p.Contract, p.ShareRule = t.contract, t.rule
	}
	return p
}
