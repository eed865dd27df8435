package placement_test

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Scenarios of testdata:
//
//	brokers a=60 b=50,10             mcap, and what is allocated of it; or "paper"
//	place srtm rate=100 burst=9      also exact=, at-least=, groups=key:count*rate,..,
//	                                 publishers=id:rate,.., sensors=n (groups of 25 at 10 msg/s)
//	replace srtm rate=110 burst=9    the plan before
//	shift b 0-50,7                   these of the first quota's publishers
//	unplace 1                        a publisher
//
// The answer is each quota with its share and publishers, and the publishers that moved.
func TestScenarios(t *testing.T) {
	testkit.Scenarios(t, "*.txt", func(t *testing.T) func([]string) (string, error) {
		s := &script{T: t}
		return func(words []string) (string, error) {
			rng := seeded(1)
			var plan placement.Plan
			var err error
			before := s.homes()
			switch words[0] {
			case "brokers":
				s.brokers = s.list(words[1:])
				return "", nil
			case "unplace":
				i := int(s.number(words[1]))
				s.plan.Unplaced, s.plan.Quotas[0].Publishers = []int{i}, s.plan.Quotas[0].Publishers[:i]
				return "", nil
			case "place":
				before, s.plan = nil, placement.Plan{}
				s.demand = s.parseDemand(words[2:])
				plan, err = placement.Place(words[1], s.brokers, s.demand, rng)
			case "replace":
				s.demand = s.parseDemand(words[2:])
				plan, err = placement.Replace(words[1], s.brokers, s.plan, func(id string) string { return before[id] }, s.demand, rng)
			case "shift":
				plan, err = placement.Shift(s.plan, s.demand, s.indices(words[2]), words[1])
			default:
				return "", fmt.Errorf("no command %q", words[0])
			}
			var bound *placement.Infeasible
			switch {
			case errors.As(err, &bound):
				return fmt.Sprintf("%v (%s: %d of %d)\n", err, bound.Bound, bound.Need, bound.Have), nil
			case err != nil:
				return strings.ReplaceAll(err.Error(), "; ", "\n") + "\n", nil
			}
			s.plan = plan
			var out strings.Builder
			for _, q := range plan.Quotas {
				fmt.Fprintf(&out, "%s %d share %d/%d publishers %d\n", q.Broker, q.Rate, q.Share.Rate, q.Share.Burst, len(q.Publishers))
			}
			if before != nil {
				moved := 0
				for id, broker := range s.homes() {
					if before[id] != "" && before[id] != broker {
						moved++
					}
				}
				fmt.Fprintf(&out, "%d moved\n", moved)
			}
			return out.String(), nil
		}
	})
}

type script struct {
	*testing.T
	brokers []placement.Broker
	demand  placement.Demand
	plan    placement.Plan
}

// homes returns the broker of each publisher of the plan.
func (s *script) homes() map[string]string {
	homes, publishers := map[string]string{}, s.demand.Expand()
	for _, q := range s.plan.Quotas {
		for _, i := range q.Publishers {
			homes[publishers[i].ID] = q.Broker
		}
	}
	return homes
}

func (s *script) number(word string) int64 {
	from := int64(0)
	if rest, isMax := strings.CutPrefix(word, "max"); isMax {
		word, from = cmp.Or(rest, "0"), math.MaxInt64
	}
	n := testkit.Result(strconv.ParseInt(word, 10, 64)).Must(s)
	return from + n
}

func (s *script) list(words []string) (brokers []placement.Broker) {
	for _, word := range words {
		if word == "paper" {
			return paper()
		}
		id, rest, _ := strings.Cut(word, "=")
		mcap, allocated, isRange := strings.Cut(rest, ",")
		b := placement.Broker{ID: id, Mcap: s.number(mcap)}
		if isRange {
			b.Allocated = s.number(allocated)
		}
		brokers = append(brokers, b)
	}
	return brokers
}

func (s *script) parseDemand(words []string) placement.Demand {
	d := placement.Demand{Topic: "t", Burst: 10}
	for _, word := range words {
		field, value, _ := strings.Cut(word, "=")
		switch field {
		case "topic":
			d.Topic = value
		case "rate":
			d.Rate = s.number(value)
		case "exact":
			d.RateMilli = s.number(value)
		case "burst":
			d.Burst = s.number(value)
		case "at-least":
			d.AtLeast = int(s.number(value))
		case "sensors":
			n := sensors(int(s.number(value)))
			d.Rate, d.Groups = n.Rate, n.Groups
		case "groups", "publishers":
			for _, item := range strings.Split(value, ",") {
				name, rest, _ := strings.Cut(item, ":")
				count, rate, grouped := strings.Cut(rest, "*")
				if field == "groups" && grouped {
					d.Groups = append(d.Groups, placement.Group{Key: name, Count: int(s.number(count)), Rate: float64(s.number(rate))})
				} else {
					d.Publishers = append(d.Publishers, placement.Publisher{ID: name, Rate: float64(s.number(rest))})
				}
			}
		default:
			s.Fatalf("no %q of a demand", field)
		}
	}
	return d
}

func (s *script) indices(word string) (list []int) {
	for _, item := range strings.Split(word, ",") {
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		for n := s.number(from); n <= s.number(to); n++ {
			i := int(n)
			if first := s.plan.Quotas[0].Publishers; i < len(first) {
				i = first[i]
			}
			list = append(list, i)
		}
	}
	return list
}
