package engine

import (
	"fmt"
	"strconv"

	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// steps are what a broker reports of a topic: what was offered and the greatest
// backlog, of the step under way and of the last ones.
type steps struct {
	offered    int64
	maxBacklog int
	past       []step // a ring of the window's length
	next       int
}

type step struct {
	offered    int64
	maxBacklog int
}

func (s *steps) backlog(n int) { s.maxBacklog = max(s.maxBacklog, n) }

// turn ends a step; window is the number of steps kept.
func (s *steps) turn(window, backlog int) {
	ended := step{s.offered, s.maxBacklog}
	if len(s.past) < window {
		s.past = append(s.past, ended)
	} else {
		s.past[s.next] = ended
		s.next = (s.next + 1) % window
	}
	s.offered, s.maxBacklog = 0, backlog
}

// Adaptor retunes one topic's shares by a rule, as tbadaptor does by what
// brokers report: Turn is called at the end of every step, and every Every-th of
// them applies the rule to the window.
type Adaptor struct {
	Topic int
	Rule  string // one of share.Rules
	// Contract is what the shares sum to.
	Contract tokenbucket.Share
	// StepSeconds is the length of a step, Window the number of steps that are
	// looked at, Every how many steps lie between two changes.
	StepSeconds   float64
	Window, Every int
	// Members are the brokers that may hold a share, and how many publishers the
	// placement gave each.
	Members map[int]int

	turns int
}

// Turn ends a step at the cluster's present time; it returns the shares after a
// change, nil without one.
func (a *Adaptor) Turn(c *Cluster) ([]tokenbucket.Share, error) {
	for l := range c.brokers {
		lane := &c.brokers[l].lanes[a.Topic]
		lane.steps.turn(a.Window, lane.line.len())
	}
	if a.turns++; a.turns%a.Every != 0 {
		return nil, nil
	}
	var loads []share.Load
	for l := range c.brokers {
		publishers, member := a.Members[l]
		if !member {
			continue
		}
		lane := &c.brokers[l].lanes[a.Topic]
		load := share.Load{
			// Sorted by name they are sorted by number.
			Broker: fmt.Sprintf("%09d", l), Share: lane.bucket.Share(),
			Publishers: publishers, Backlog: int64(lane.line.len()),
		}
		offered := int64(0)
		for _, s := range lane.steps.past {
			offered += s.offered
			load.MaxBacklog = max(load.MaxBacklog, int64(s.maxBacklog))
		}
		load.Rate = float64(offered) / (a.StepSeconds * float64(len(lane.steps.past)))
		loads = append(loads, load)
	}
	assigned, err := share.Split(a.Rule, a.Contract, loads)
	if err != nil {
		return nil, fmt.Errorf("adapt topic %d: %w", a.Topic, err)
	}
	shares := make([]tokenbucket.Share, len(c.brokers))
	for _, s := range assigned {
		l, err := strconv.Atoi(s.Broker)
		if err != nil {
			panic(fmt.Sprintf("engine: share rule %s answered for broker %q", a.Rule, s.Broker))
		}
		shares[l] = s.Share
	}
	return shares, c.Retune(a.Topic, shares)
}
