package loop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

// SetContract implements srtmv1.GrantServiceServer.
func (s *Server) SetContract(ctx context.Context, req *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error) {
	c := &adaptor.Contract{
		Topic: req.Topic, Total: service.ShareOf(req.Contract), Rule: cmp.Or(req.ShareRule, share.Default), Awaited: req.Awaited, Strict: req.Strict,
		Former: service.ShareOf(req.Former), Holders: req.Holders,
	}
	for _, m := range req.Members {
		c.Placed = append(c.Placed, share.Placed{
			Broker: m.BrokerId, Publishers: int(min(m.Publishers, 1<<30)), Quota: service.ShareOf(m.Share), Retiring: m.Retiring,
		})
	}
	mode := adaptor.Create
	switch {
	case req.Adopt && req.Update:
		bad := checkContract(c)
		bad.Add("update", "not together with adopt")
		return nil, toStatus(bad.Err())
	case req.Adopt:
		mode = adaptor.Adopt
	case req.Update:
		mode = adaptor.Update
	}
	if err := s.Set(ctx, c, mode); err != nil {
		return nil, err
	}
	return &srtmv1.SetContractResponse{}, nil
}

// Set puts a contract in force. Set takes ownership of c. The error is a gRPC status.
func (s *Server) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	c.Rule = cmp.Or(c.Rule, share.Default)
	err := checkContract(c).Err()
	if err != nil {
		return toStatus(err)
	}
	switch mode {
	case adaptor.Adopt:
		err = s.change(reasonContract, func(m *adaptor.Machine) ([]ledger.Grant, error) { return m.Restore(clock.Mono(), c) })
	case adaptor.Update:
		err = s.change(reasonContract, func(m *adaptor.Machine) ([]ledger.Grant, error) { return m.Update(clock.Mono(), c) })
	default:
		timeout := s.cfg.AckTimeout
		if deadline, ok := ctx.Deadline(); ok {
			// Answer before the caller gives up, so that the caller receives the reason.
			timeout = min(timeout, time.Until(deadline)*9/10)
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		err = s.set(ctx, c)
	}
	if err != nil {
		s.cfg.Log.Warn("contract not set", obs.KeyTopic, c.Topic, "adopt", mode == adaptor.Adopt, obs.KeyError, err)
		return toStatus(err)
	}
	s.expire(clock.Mono()) // starts the leases of awaited brokers
	s.cfg.Log.Info("contract set", obs.KeyTopic, c.Topic, "adopt", mode == adaptor.Adopt, "rule", c.Rule, "members", len(c.Placed))
	return nil
}

// checkContract returns all faults of a contract, by the fields of SetContractRequest.
func checkContract(c *adaptor.Contract) (bad badRequest) {
	bad.Name("topic", c.Topic)
	if !slices.Contains(share.Rules(), c.Rule) {
		bad.Add("share_rule", "%q is not one of %s", c.Rule, strings.Join(share.Rules(), ", "))
	}
	if err := c.Total.Validate(); err != nil {
		bad.Add("contract", "%v", err)
	} else if c.Total.IsZero() {
		bad.Add("contract", "it is empty")
	}
	if err := c.Former.Validate(); err != nil {
		bad.Add("former", "%v", err)
	}
	if len(c.Placed) == 0 {
		bad.Add("members", "there are none")
	}
	rest := c.Total
	members := map[string]bool{}
	for i := range c.Placed {
		p := &c.Placed[i]
		field := func(name string) string { return fmt.Sprintf("members[%d].%s", i, name) }
		if bad.Name(field("broker_id"), p.Broker) && members[p.Broker] {
			bad.Add(field("broker_id"), "%q appears twice", p.Broker)
		}
		if err := p.Quota.Validate(); err != nil {
			bad.Add(field("share"), "%v", err)
		} else if p.Quota.IsZero() {
			bad.Add(field("share"), "it is empty")
		} else {
			rest = rest.Less(p.Quota)
		}
		members[p.Broker] = true
		// A member without declared publishers counts as one publisher: its publishers are unknown, not
		// absent.
		p.Publishers = max(1, p.Publishers)
	}
	for i, broker := range c.Awaited {
		field := fmt.Sprintf("awaited[%d]", i)
		if bad.Name(field, broker) && (members[broker] || slices.Contains(c.Awaited[:i], broker)) {
			bad.Add(field, "%q appears twice", broker)
		}
	}
	for i, broker := range c.Holders {
		bad.Name(fmt.Sprintf("holders[%d]", i), broker)
	}
	if len(bad) == 0 && !rest.IsZero() {
		bad.Add("members", "their shares fall short of the contract by %d milli-msg/s and %d messages", rest.Rate, rest.Burst)
	}
	return bad
}

// set puts a contract in the ledger and waits until its members have their shares. If set fails, it
// removes the contract, unless the contract existed before.
func (s *Server) set(ctx context.Context, c *adaptor.Contract) error {
	var before, expired bool
	holders := c.Holders
	for {
		var changed <-chan struct{}
		err := s.change(reasonContract, func(m *adaptor.Machine) (withdrawn []ledger.Grant, err error) {
			// In every round: between two rounds another term with an empty ledger may have begun.
			if before = m.Contract(c.Topic) != nil; !before && len(holders) > 0 {
				withdrawn = s.removeLocked(c.Topic, holders, c.Strict)
			}
			inForce, grants, err := m.Set(clock.Mono(), c)
			if err != nil {
				changed = s.mu.changed
				return withdrawn, err
			}
			c = inForce // a repetition waits with the first call
			return append(withdrawn, grants...), nil
		})
		var busy *ledger.Busy
		if errors.As(err, &busy) {
			if holders != nil && !expired {
				expired = true
				s.expire(clock.Mono()) // starts the leases of the holders
			}
			// Brokers are still giving up the previous contract of this name.
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
	err := s.settle(ctx, c)
	if err == nil || before || errors.Is(err, errRemoved) {
		return err
	}
	return errors.Join(err, s.change(reasonRemoved, func(m *adaptor.Machine) ([]ledger.Grant, error) {
		if m.Contract(c.Topic) != c {
			return nil, nil // removed, and perhaps set again, meanwhile
		}
		return s.removeLocked(c.Topic, nil, nil), nil
	}))
}

// removeLocked ends a contract, and forgets its history. Requires: mu held.
func (s *Server) removeLocked(topic string, awaited, strict []string) []ledger.Grant {
	delete(s.mu.histories, topic)
	return s.mu.machine.Remove(topic, awaited, strict)
}

// settle waits until every member of c has acknowledged its share.
func (s *Server) settle(ctx context.Context, c *adaptor.Contract) error {
	for {
		s.mu.Lock()
		changed, stopped := s.mu.changed, s.mu.stopped
		view, found := s.mu.machine.Ledger.Topic(c.Topic)
		current := found && !view.Removing && s.mu.machine.Contract(c.Topic) == c
		settled := s.mu.machine.Settled(c)
		s.mu.Unlock()
		switch {
		case stopped:
			return errNotLeading
		case !current:
			return fmt.Errorf("topic %s: %w", c.Topic, errRemoved)
		case settled:
			return nil
		}
		select {
		case <-changed:
		case <-s.closed:
			return errClosing
		case <-ctx.Done():
			return &unsettled{topic: c.Topic, members: lacking(view), cause: ctx.Err()}
		}
	}
}

// lacking returns the members without their share, and why.
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

// RemoveContract implements srtmv1.GrantServiceServer.
func (s *Server) RemoveContract(ctx context.Context, req *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error) {
	shares, err := s.Remove(ctx, req.Topic, req.Awaited, req.Strict)
	if err != nil {
		return nil, err
	}
	return &srtmv1.RemoveContractResponse{Shares: shares}, nil
}

// Remove ends a contract, and returns the shares that brokers still hold; nil: none. The awaited
// brokers may use shares of the contract. The strict brokers among them stop when their lease ends. The
// error is a gRPC status.
func (s *Server) Remove(_ context.Context, topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	var bad badRequest
	bad.Name("topic", topic)
	for i, broker := range awaited {
		bad.Name(fmt.Sprintf("awaited[%d]", i), broker)
	}
	if err := bad.Err(); err != nil {
		return nil, toStatus(err)
	}
	existed := false // false: a repeated call, made to see which brokers still hold shares
	err := s.change(reasonRemoved, func(m *adaptor.Machine) ([]ledger.Grant, error) {
		existed = m.Contract(topic) != nil
		return s.removeLocked(topic, awaited, strict), nil
	})
	if err != nil {
		return nil, toStatus(err)
	}
	s.expire(clock.Mono()) // starts the leases of awaited brokers
	if existed {
		s.cfg.Log.Info("contract removed", obs.KeyTopic, topic)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if v, found := s.mu.machine.Ledger.Topic(topic); found {
		return s.sharesLocked(v, 0), nil
	}
	return nil, nil
}

// ForgetBroker implements srtmv1.GrantServiceServer.
func (s *Server) ForgetBroker(ctx context.Context, req *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error) {
	freed, err := s.Forget(ctx, req.BrokerId)
	if err != nil {
		return nil, err
	}
	return &srtmv1.ForgetBrokerResponse{Freed: freed}, nil
}

// Forget frees the shares of a broker that an operator declares dead. The error is a gRPC status.
func (s *Server) Forget(_ context.Context, broker string) ([]*srtmv1.FreedShare, error) {
	var bad badRequest
	if !bad.Name("broker_id", broker) {
		return nil, toStatus(bad.Err())
	}
	freed, err := s.free(reasonForgotten, broker, func(m *adaptor.Machine) ([]ledger.Freed, []ledger.Grant, error) { return m.Ledger.Forget(broker) })
	return freed, toStatus(err)
}

// ReportEnd implements srtmv1.GrantServiceServer.
func (s *Server) ReportEnd(ctx context.Context, req *srtmv1.ReportEndRequest) (*srtmv1.ReportEndResponse, error) {
	freed, err := s.End(ctx, req.BrokerId, req.Instance)
	if err != nil {
		return nil, err
	}
	return &srtmv1.ReportEndResponse{Freed: freed}, nil
}

// End frees the shares of a broker's process that has ended. The error is a gRPC status.
func (s *Server) End(_ context.Context, broker, instance string) ([]*srtmv1.FreedShare, error) {
	freed, err := s.free(reasonEnded, broker, func(m *adaptor.Machine) ([]ledger.Freed, []ledger.Grant, error) {
		return m.Ledger.Ended(broker, instance, clock.Mono())
	})
	return freed, toStatus(err)
}

// free frees a broker's shares. The loaddistributor logs its reason.
func (s *Server) free(reason, broker string, release func(*adaptor.Machine) ([]ledger.Freed, []ledger.Grant, error)) (list []*srtmv1.FreedShare, err error) {
	err = s.change(reason, func(m *adaptor.Machine) ([]ledger.Grant, error) {
		freed, grants, err := release(m)
		if err != nil {
			return nil, err
		}
		s.noteLapseLocked(ledger.Lapse{Broker: broker, Base: true})
		for _, f := range freed {
			share := &srtmv1.FreedShare{Topic: f.Topic}
			if !f.Unknown {
				share.Share = service.ShareProto(f.Share)
			}
			list = append(list, share)
		}
		return grants, nil
	})
	if err == nil {
		s.cfg.Log.Info("the broker's shares are free", obs.KeyBroker, broker, obs.KeyReason, reason, "topics", len(list))
	}
	return list, err
}

// ListShares implements srtmv1.GrantServiceServer.
func (s *Server) ListShares(_ context.Context, req *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.leadsLocked(); err != nil {
		return nil, toStatus(err)
	}
	if req.UnlessRevision == s.mu.revision {
		return &srtmv1.ListSharesResponse{Revision: s.mu.revision}, nil
	}
	var views []ledger.TopicView
	if req.Topic == "" {
		views = s.mu.machine.Ledger.View()
	} else if v, ok := s.mu.machine.Ledger.Topic(req.Topic); ok {
		views = append(views, v)
	}
	response := &srtmv1.ListSharesResponse{Freed: s.mu.machine.Ledger.Freed(), Revision: s.mu.revision}
	for _, v := range views {
		response.Topics = append(response.Topics, s.sharesLocked(v, req.History))
	}
	return response, nil
}

// Shares returns the shares of a topic; of all topics without a name. If the revision of the shares is
// unless, Shares returns only the revision. The error is a gRPC status.
func (s *Server) Shares(ctx context.Context, topic string, unless uint64) (*srtmv1.ListSharesResponse, error) {
	return s.ListShares(ctx, &srtmv1.ListSharesRequest{Topic: topic, UnlessRevision: unless})
}

// sharesLocked converts v. A topic that brokers hold but that was not set has no contract. Requires: mu
// held.
func (s *Server) sharesLocked(v ledger.TopicView, history uint32) *srtmv1.TopicShares {
	p := &srtmv1.TopicShares{Topic: v.Topic, History: s.mu.histories[v.Topic].latest(history), Awaited: v.Awaited, Removing: v.Removing}
	ends := func(broker string) {
		if end, found := s.mu.machine.Ledger.Ends(broker); found {
			if p.Left == nil {
				p.Left = map[string]*durationpb.Duration{}
			}
			p.Left[broker] = durationpb.New(end.Sub(clock.Mono()))
		}
	}
	for _, broker := range v.Awaited {
		ends(broker)
	}
	for _, m := range v.Members {
		member := &srtmv1.MemberShare{
			BrokerId: m.Broker,
			Granted:  service.ShareProto(m.Granted), GrantedEpoch: m.GrantedEpoch,
			Acknowledged: service.ShareProto(m.Acknowledged), AcknowledgedEpoch: m.AcknowledgedEpoch,
			Base: service.ShareProto(m.Base), Target: service.ShareProto(m.Target), Reserved: service.ShareProto(m.Reserved),
			Connected: m.Connected, Policy: policies.Number(m.Policy), Lapsed: m.Lapsed,
		}
		if !m.Connected {
			since, found := s.mu.disconnectedSince[m.Broker]
			if !found {
				since = s.mu.ledgerStart
			}
			member.AwaySince = timestamppb.New(since)
		}
		p.Members = append(p.Members, member)
		ends(m.Broker)
	}
	if c := s.mu.machine.Contract(v.Topic); c != nil {
		p.Contract, p.ShareRule = &srtmv1.Contract{RateMilli: int64(c.Total.Rate), Burst: c.Total.Burst}, c.Rule
	}
	return p
}
