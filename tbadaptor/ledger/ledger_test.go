package ledger_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

var policies = map[string]ledger.Policy{"available": ledger.Available, "strict": ledger.Strict}

// Scenarios of testdata. Shares are r_l/b_l in milli-msg/s and messages, tokens in thousandths. A
// share in a hello may have a flexible part, as in t=1000/5+200/1@7. The policy follows the instance,
// then lock=x if its data folder is not the id's, and said=7 if it has a time. "clock 3s a" advances
// the time, during which a's lease is renewed; "restart" loses the ledger's memory. A refused call
// changes nothing.
func TestScenarios(t *testing.T) {
	testkit.Scenarios(t, "*.txt", func(t *testing.T) func([]string) (string, error) {
		leases := ledger.Leases{Flex: 3 * time.Second, Session: 30 * time.Second, ClockBound: 100 * time.Millisecond}
		s := &script{ledger: ledger.New(100, leases)}
		return func(words []string) (string, error) {
			if words[0] == "restart" {
				if len(words) > 1 {
					leases.PresumeDead = s.duration(words[1])
				}
				s.ledger = ledger.New(1000, leases)
				return "", s.err
			}
			s.out.Reset()
			before := s.view()
			grants, err := s.command(words[0], words[1:])
			if s.err == nil {
				s.err = s.ledger.CheckForm()
			}
			if err != nil {
				fmt.Fprintf(&s.out, "error%s: %v\n", kind(err), err)
				if after := s.view(); len(grants) > 0 || after != before {
					t.Errorf("%q: granted %+v, and changed\n%sto\n%s", words, grants, before, after)
				}
			}
			for _, g := range grants {
				fmt.Fprintf(&s.out, "grant %s %s %d %d/%d tokens=%d", g.Broker, g.Topic, g.Epoch, g.Share.Rate, g.Share.Burst, g.Tokens)
				if base := g.Base(); base != g.Share {
					fmt.Fprintf(&s.out, " base=%d/%d", base.Rate, base.Burst)
				}
				s.out.WriteByte('\n')
			}
			return s.out.String(), s.err
		}
	})
}

// kind classifies errors as callers do.
func kind(err error) string {
	switch {
	case errors.As(err, new(*ledger.Busy)):
		return " (busy)"
	case errors.As(err, new(*ledger.Conflict)):
		return " (conflict)"
	case errors.As(err, new(*identity.InUse)):
		return " (in use)"
	case errors.As(err, new(*identity.Lost)):
		return " (lost)"
	}
	for name, sentinel := range map[string]error{
		"unknown topic": ledger.ErrUnknownTopic, "unknown broker": ledger.ErrUnknownBroker, "replaced": identity.ErrReplaced,
		"connected": ledger.ErrConnected, "may go on": ledger.ErrMayGoOn,
	} {
		if errors.Is(err, sentinel) {
			return " (" + name + ")"
		}
	}
	return ""
}

// script carries out commands; bad is a fault of the scenario itself.
type script struct {
	ledger *ledger.Ledger
	now    mono.Time
	out    strings.Builder
	err    error
}

func (s *script) command(name string, args []string) (grants []ledger.Grant, err error) {
	minArgs := map[string]int{"hello": 2, "bye": 1, "forget": 1, "ended": 2, "set": 2, "adopt": 2, "change": 2, "propose": 1, "remove": 1, "ack": 4, "outstanding": 1, "renew": 1, "clock": 1, "strict": 1, "ends": 1, "view": 0}
	if n, found := minArgs[name]; !found || len(args) < n {
		s.err = fmt.Errorf("bad command %s %q", name, args)
		return nil, nil
	}
	l := s.ledger
	switch name {
	case "hello":
		hello := ledger.Session{Broker: args[0], Stamp: mono.Stamp{Process: args[1]}, Place: identity.Place{Lock: args[0]}}
		rest := args[2:]
		if len(rest) > 0 && policies[rest[0]] > 0 {
			hello.Policy, rest = policies[rest[0]], rest[1:]
		}
		if lock, present := cut(&rest, "lock="); present {
			hello.Place.Lock = lock
		}
		if process, present := cut(&rest, "said="); present {
			s.scan(process, &hello.Stamp.At)
		}
		for _, a := range rest {
			topic, holds, _ := strings.Cut(a, "=")
			h := ledger.HeldShare{Topic: topic}
			holds, epoch, _ := strings.Cut(holds, "@")
			base, flex, present := strings.Cut(holds, "+")
			if h.Share = s.share(base); present {
				h.Flex = s.share(flex)
				h.Share.Rate += h.Flex.Rate
				h.Share.Burst += h.Flex.Burst
			}
			s.scan(epoch, &h.Epoch)
			hello.Shares = append(hello.Shares, h)
		}
		return l.Hello(hello, s.now)
	case "bye":
		return l.Disconnect(args[0]), nil
	case "forget", "ended":
		var freed []ledger.Freed
		if name == "forget" {
			freed, grants, err = l.Forget(args[0])
		} else {
			freed, grants, err = l.Ended(args[0], args[1], s.now)
		}
		for _, f := range freed {
			fmt.Fprintf(&s.out, "freed %s %d/%d unknown=%v\n", f.Topic, f.Share.Rate, f.Share.Burst, f.Unknown)
		}
		return grants, err
	case "renew":
		renewed, grants := l.Renew(args[0], s.now)
		if !renewed {
			s.out.WriteString("not renewed\n")
		}
		return grants, nil
	case "clock":
		s.now = s.now.Add(s.duration(args[0]))
		for _, id := range args[1:] {
			l.Renew(id, s.now)
		}
		over, grants := l.Expire(s.now)
		for _, o := range over {
			fmt.Fprintf(&s.out, "over %s", o.Broker)
			for i, ended := range []bool{o.Session, o.Flex, o.Base} {
				if ended {
					s.out.WriteString([]string{" session", " flex", " base"}[i])
				}
			}
			s.out.WriteByte('\n')
		}
		return grants, nil
	case "set", "adopt", "change":
		terms, awaited := ledger.Terms{Contract: s.share(args[1])}, []string(nil)
		rest := args[2:]
		if n, present := cut(&rest, "flex="); present {
			s.scan(n, &terms.Flex)
		}
		if total, present := cut(&rest, "former="); present {
			terms.Former = s.share(total)
		}
		if ids, present := cut(&rest, "others="); present {
			awaited = strings.Split(ids, ",")
		}
		switch name {
		case "adopt":
			return l.Adopt(args[0], terms, s.target(rest), awaited)
		case "change":
			return l.Change(args[0], terms, s.target(rest), awaited)
		}
		return l.SetContract(args[0], terms, s.target(rest))
	case "propose":
		return l.Propose(args[0], s.target(args[1:]))
	case "remove":
		var awaited []string
		rest := args[1:]
		if ids, present := cut(&rest, "others="); present {
			awaited = strings.Split(ids, ",")
		}
		return l.Remove(args[0], awaited), nil
	case "ack":
		var epoch uint64
		var released tokenbucket.Tokens
		if s.scan(args[2], &epoch); len(args) > 4 {
			s.scan(args[4], &released)
		}
		return l.Ack(args[0], args[1], epoch, s.share(args[3]), released)
	case "outstanding":
		return l.Outstanding(args[0]), nil
	case "strict":
		l.Strict(args)
		return nil, nil
	case "ends":
		end, found := l.Ends(args[0])
		fmt.Fprintf(&s.out, "ends in %v, known=%v\n", max(0, end.Sub(s.now)), found)
		return nil, nil
	}
	s.out.WriteString(s.view())
	return nil, nil
}

// cut removes the first word if it has the prefix.
func cut(words *[]string, prefix string) (rest string, present bool) {
	if len(*words) > 0 {
		if rest, present = strings.CutPrefix((*words)[0], prefix); present {
			*words = (*words)[1:]
		}
	}
	return rest, present
}

func (s *script) scan(word string, value any) {
	if _, err := fmt.Sscan(word, value); err != nil {
		s.err = fmt.Errorf("%q: %w", word, err)
	}
}

func (s *script) duration(word string) (d time.Duration) {
	d, err := time.ParseDuration(word)
	if err != nil {
		s.err = err
	}
	return d
}

func (s *script) share(word string) (got tokenbucket.Share) {
	if _, err := fmt.Sscanf(word, "%d/%d", &got.Rate, &got.Burst); err != nil {
		s.err = fmt.Errorf("%q: %w", word, err)
	}
	return got
}

func (s *script) target(words []string) (target []share.Assigned) {
	for _, word := range words {
		broker, part, _ := strings.Cut(word, "=")
		target = append(target, share.Assigned{Broker: broker, Share: s.share(part)})
	}
	return target
}

func (s *script) view() string {
	var b strings.Builder
	for _, t := range s.ledger.View() {
		fmt.Fprintf(&b, "topic %s contract %d/%d pool=%d", t.Topic, t.Contract.Rate, t.Contract.Burst, t.Pool)
		if t.Settled {
			b.WriteString(" settled")
		}
		if len(t.Awaited) > 0 {
			b.WriteString(" awaits " + strings.Join(t.Awaited, ","))
		}
		if t.Removing {
			b.WriteString(" removing")
		}
		b.WriteByte('\n')
		for _, m := range t.Members {
			fmt.Fprintf(&b, "  %s target %d/%d granted %d/%d@%d acknowledged %d/%d@%d reserved %d/%d",
				m.Broker, m.Target.Rate, m.Target.Burst, m.Granted.Rate, m.Granted.Burst, m.GrantedEpoch,
				m.Acknowledged.Rate, m.Acknowledged.Burst, m.AcknowledgedEpoch, m.Reserved.Rate, m.Reserved.Burst)
			if !m.Connected {
				b.WriteString(" away")
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}
