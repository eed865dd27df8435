package catalog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Scenarios of testdata. A topic has a number of publishers that send 1 msg/s each, half of them in a
// group, and a rate. Joins, moves and similar commands are events; "state", "brokers", "work",
// "resolve" and "placement" are queries. A refused event changes nothing.
func TestScenarios(t *testing.T) {
	testkit.Scenarios(t, "*.txt", func(t *testing.T) func([]string) (string, error) {
		s := &script{Catalog: New()}
		return func(words []string) (string, error) {
			s.out.Reset()
			do := commands[words[0]]
			if do == nil {
				return "", fmt.Errorf("no command %q", words[0])
			}
			before := fingerprint(s.Catalog)
			e, err := do(s, words[1:])
			if e != nil && err == nil {
				var effects []Effect
				effects, err = s.Apply(e)
				if s.check(); err != nil && (effects != nil || fingerprint(s.Catalog) != before) {
					t.Errorf("%q was refused with effects %v, and changed\n%sto\n%s", words, effects, before, fingerprint(s.Catalog))
				}
				for _, effect := range effects {
					switch e := effect.(type) {
					case PlacementChanged:
						s.printf("placement of %s changed", e.Topic)
					case ChannelsChanged:
						s.printf("channels of %s changed: %d, %s ...", e.Topic, len(e.Names), strings.Join(e.Names[:min(len(e.Names), 5)], " "))
					case StateChanged:
						s.printf("%s: %v -> %v %s", e.Topic, e.From, e.To, e.Reason)
					}
				}
			}
			if err != nil {
				s.printf("refused%s: %v", kind(err), err)
			}
			return s.out.String(), nil
		}
	})
}

// kind classifies errors as callers do.
func kind(err error) string {
	for name, is := range map[string]bool{
		"topic exists": errors.Is(err, ErrTopicExists), "topic unknown": errors.Is(err, ErrTopicUnknown), "state": errors.Is(err, ErrTopicState),
		"channel unknown": errors.Is(err, ErrChannelUnknown), "too many channels": errors.As(err, new(*ChannelsError)),
		"publisher unknown": errors.Is(err, ErrPublisherUnknown), "not active": errors.Is(err, ErrNotActive), "unplaced": errors.Is(err, ErrUnplaced),
		"key reused": errors.Is(err, ErrKeyReused), "broker unknown": errors.Is(err, ErrBrokerUnknown), "broker connected": errors.Is(err, ErrBrokerConnected),
		"broker in use": errors.Is(err, ErrBrokerInUse), "plan": errors.As(err, new(*PlanError)), "not ready": errors.As(err, new(*NotReadyError)),
	} {
		if is {
			return " (" + name + ")"
		}
	}
	return ""
}

type script struct {
	*Catalog
	before Dump
	out    strings.Builder
}

func (s *script) printf(format string, args ...any) {
	s.out.WriteString(strings.TrimRight(fmt.Sprintf(format, args...), " ") + "\n")
}

func number(word string) int64 {
	n, err := strconv.ParseInt(word, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func hasFlag(args []string, flag string) bool {
	return strings.Contains(" "+strings.Join(args, " ")+" ", " "+flag+" ")
}

func joins(args []string) BrokerJoined {
	e := joined(args[0], number(args[1]))
	for _, arg := range args[2:] {
		switch what, value, _ := strings.Cut(arg, "="); what {
		case "at":
			e.TCPAddress = value + ":4150"
		case "host":
			e.Hostname = value
		case "version":
			e.Version = value
		}
	}
	return e
}

// channelsOf reads channel names. A "!" after a name marks a paused channel, and n*3 stands for n0 to
// n2.
func channelsOf(args []string) (channels []Channel) {
	for _, arg := range args {
		name, paused := strings.CutSuffix(arg, "!")
		if prefix, count, many := strings.Cut(name, "*"); many {
			for i := range number(count) {
				channels = append(channels, Channel{Name: fmt.Sprint(prefix, i), Paused: paused})
			}
			continue
		}
		channels = append(channels, Channel{Name: name, Paused: paused})
	}
	return channels
}

// planned makes a plan from quotas: b1=5:0,1 means 5 msg/s and the publishers 0 and 1, and out=2,5
// names publishers without a place. Without quotas, planned gets a plan from the policy.
func planned(s *script, of *Spec, moving string, quotas []string) (placement.Plan, error) {
	if len(quotas) == 0 {
		return placement.Place(of.Policy, s.Snapshot(moving), of.Demand, rand.New(rand.NewPCG(1, 1)))
	}
	var plan placement.Plan
	for _, quota := range quotas {
		broker, rest, _ := strings.Cut(quota, "=")
		rate, list, some := strings.Cut(rest, ":")
		if broker == "out" {
			list, some = rest, true
		}
		var publishers []int
		for _, n := range strings.FieldsFunc(list, func(c rune) bool { return c == ',' && some }) {
			publishers = append(publishers, int(number(n)))
		}
		if broker == "out" {
			plan.Unplaced = publishers
			continue
		}
		plan.Quotas = append(plan.Quotas, placement.Quota{Broker: broker, Rate: number(rate), Publishers: publishers})
	}
	plan.K = len(plan.Quotas)
	return plan, nil
}

func places(s *script, args []string, key string) (Event, error) {
	of := spec(args[0], int(number(args[1])), number(args[2]))
	plan, err := planned(s, of, "", args[3:])
	if err != nil {
		return nil, err
	}
	return NewTopicPlaced(of, plan, key)
}

var commands = map[string]func(*script, []string) (Event, error){
	"join":  func(_ *script, a []string) (Event, error) { return joins(a), nil },
	"leave": func(_ *script, a []string) (Event, error) { return BrokerLeft{a[0]}, nil },
	"place": func(s *script, a []string) (Event, error) { return places(s, a, "") },
	"keyed": func(s *script, a []string) (Event, error) { return places(s, a[1:], a[0]) },
	"activate": func(s *script, a []string) (Event, error) {
		t, _ := s.Topic(a[0])
		for _, q := range t.Plan.Quotas {
			if _, err := s.Apply(MemberPrepared{a[0], q.Broker}); err != nil {
				return nil, err
			}
		}
		return TopicActivated{a[0]}, nil
	},
	"activated": func(_ *script, a []string) (Event, error) { return TopicActivated{a[0]}, nil },
	"prepared":  func(_ *script, a []string) (Event, error) { return MemberPrepared{a[0], a[1]}, nil },
	"judged":    func(_ *script, a []string) (Event, error) { return SLOJudged{a[0], "late"}, nil },
	"delete":    func(_ *script, a []string) (Event, error) { return TopicDeleting{a[0]}, nil },
	"remove": func(_ *script, a []string) (Event, error) {
		left := slices.DeleteFunc(slices.Clone(a[1:]), func(arg string) bool { return arg == "contract" })
		return TopicRemoved{Topic: a[0], Left: left, ContractLeft: hasFlag(a, "contract")}, nil
	},
	"channels-created": func(_ *script, a []string) (Event, error) { return ChannelsCreated{a[0], channelsOf(a[1:])}, nil },
	"channels-set":     func(_ *script, a []string) (Event, error) { return ChannelsSet{a[0], channelsOf(a[1:])}, nil },
	"channels-deleted": func(_ *script, a []string) (Event, error) { return ChannelsDeleted{a[0], channelsOf(a[1:])}, nil },
	"channels": func(s *script, a []string) (Event, error) {
		t, _ := s.Topic(a[0])
		for _, one := range t.Channels {
			s.printf("%s, created at %d, paused %v", one.Name, one.Created, one.Paused)
		}
		return nil, nil
	},
	"restore": func(s *script, a []string) (Event, error) { // a topic that was removed, from the dump before
		for _, d := range s.before.Topics {
			if d.Spec.Name() == a[0] {
				return TopicRestored{d}, nil
			}
		}
		return nil, ErrTopicUnknown
	},
	"dump":             func(s *script, _ []string) (Event, error) { s.before = s.Dump(); return nil, nil },
	"removed-leftover": func(_ *script, a []string) (Event, error) { return LeftoverRemoved{a[0], a[1]}, nil },
	"removed-contract": func(_ *script, a []string) (Event, error) { return LeftoverContractRemoved{a[0]}, nil },
	"drain": func(_ *script, a []string) (Event, error) {
		return BrokerDraining{ID: a[0], Draining: !hasFlag(a, "off"), Forced: hasFlag(a, "forced")}, nil
	},
	"calibrate": func(_ *script, a []string) (Event, error) { return BrokerCalibrated{a[0], number(a[1])}, nil },
	"absorb": func(_ *script, a []string) (Event, error) {
		return BrokerAbsorbed{a[0], Absorption{time.Duration(number(a[1])), number(a[2]), number(a[3])}}, nil
	},
	"forget": func(_ *script, a []string) (Event, error) { return BrokerRemoved{a[0]}, nil },
	"move": func(s *script, a []string) (Event, error) {
		of := spec(a[0], int(number(a[1])), number(a[2]))
		plan, err := planned(s, of, a[0], a[3:])
		if err != nil {
			return nil, err
		}
		return NewTopicMoving(of, plan)
	},
	"moved":   func(_ *script, a []string) (Event, error) { return TopicMoved{a[0]}, nil },
	"abort":   func(_ *script, a []string) (Event, error) { return TopicMoveAborted{a[0], a[1:]}, nil },
	"found":   func(_ *script, a []string) (Event, error) { return MemberFound{a[0], a[1]}, nil },
	"retired": func(_ *script, a []string) (Event, error) { return MemberRetired{a[0], a[1]}, nil },
	"restart": func(*script, []string) (Event, error) { return Restarted{}, nil },
	"reload": func(s *script, _ []string) (_ Event, err error) { // from a dump
		s.Catalog, err = Load(s.Dump())
		return nil, err
	},

	"state": func(s *script, a []string) (Event, error) {
		t, ok := s.Topic(a[0])
		if s.printf("%v %s", t.State, t.Reason); ok {
			s.printf("%d msg/s, key %q, retiring %v, moves: %v, unplaced %d", t.Spec.Demand.Rate, t.Key, t.Retiring, t.Next != nil, t.Placement.Unplaced())
			s.printf("ordered: %d msg/s, %d publishers", t.Ordered.Demand.Rate, t.Placement.Len())
			for _, u := range t.Unconfirmed {
				s.printf("%s may use %v msg/s, burst %d", u.Broker, u.Share.Rate.PerSecond(), u.Share.Burst)
			}
		}
		return nil, nil
	},
	"brokers": func(s *script, _ []string) (Event, error) {
		for _, b := range s.Brokers() {
			s.printf("%s: allocated %d of %d (configured %d, calibrated %d), connected %v, absorbs %v", b.ID, b.Allocated, b.Mcap, b.Configured, b.Calibrated, b.Connected, b.Absorbed)
		}
		for _, b := range s.Snapshot("") {
			s.printf("to be placed on: %s, %d", b.ID, b.Mcap)
		}
		return nil, nil
	},
	"work": func(s *script, _ []string) (Event, error) {
		for _, b := range s.Brokers() {
			remove, prepare := s.Work(b.ID)
			s.printf("%s: remove %v, prepare %v, placed %v, empty %v", b.ID, remove, prepare, s.Placed(b.ID), s.Empty(b.ID))
		}
		s.printf("contracts: %v", s.LeftoverContracts())
		return nil, nil
	},
	"left": func(s *script, a []string) (Event, error) {
		for _, b := range s.Brokers() {
			if s.LeftOn(a[0], b.ID) {
				s.printf("on %s, which keeps its messages: %v", b.ID, s.Keeps(a[0], b.ID))
			}
		}
		return nil, nil
	},
	"resolve": func(s *script, a []string) (Event, error) {
		assignment, err := s.Resolve(a[0], a[1])
		if err == nil {
			s.printf("%s, %s, %s, epoch %d", assignment.Broker, assignment.TCPAddress, assignment.HTTPAddress, assignment.Epoch)
		}
		return nil, err
	},
	"placement": func(s *script, a []string) (Event, error) { // how many publishers are where
		t, _ := s.Topic(a[0])
		per := map[string]int{}
		for i := range t.Placement.Len() {
			per[t.Placement.At(i).Broker]++
		}
		s.printf("%v, epoch %d", per, t.Placement.Epoch())
		return nil, nil
	},
}
