package ledger_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Scenarios are files of commands, each with what came of it:
//
//	# a comment
//	hello b1 i1 t=1000/5@7     broker, instance, what it holds: topic=r_l/b_l@epoch
//	----
//	grant b1 t 101 2000/6 tokens=6000 base=1500/4
//
// A hello may name the policy after the instance, and the flexible part of what
// is held: t=1000/5+200/1@7. "clock 3s" lets so much time pass.
//
// Shares are in milli-msg/s and messages, tokens in thousandths. -rewrite
// writes what comes of the commands now.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			input, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			l := ledger.New(100, leases)
			answer, now := false, mono.Time(0)
			lines := bufio.NewScanner(bytes.NewReader(input))
			for n := 1; lines.Scan(); n++ {
				line := lines.Text()
				switch {
				case line == "----":
					answer = true
				case line == "":
					answer = false
					fmt.Fprintln(&out)
				case answer: // the old one
				case strings.HasPrefix(line, "#"):
					fmt.Fprintln(&out, line)
				case line == "restart": // of the adaptor: the memory is lost
					l = ledger.New(1000, leases)
					fmt.Fprintf(&out, "%s\n----\n", line)
				default:
					result, err := command(l, &now, strings.Fields(line))
					if err != nil {
						t.Fatalf("%s:%d: %v", file, n, err)
					}
					fmt.Fprintf(&out, "%s\n----\n%s", line, result)
					if err := l.CheckForm(); err != nil {
						t.Fatalf("%s:%d: %v", file, n, err)
					}
				}
			}
			testkit.Golden(t, file, out.Bytes())
		})
	}
}

var leases = ledger.Leases{Flex: 3 * time.Second, Session: 30 * time.Second, ClockBound: 100 * time.Millisecond}

var policies = map[string]ledger.Policy{"available": ledger.Available, "strict": ledger.Strict}

func command(l *ledger.Ledger, now *mono.Time, words []string) (string, error) {
	name, args := words[0], words[1:]
	need := map[string]int{"hello": 2, "bye": 1, "forget": 1, "set": 3, "adopt": 3, "change": 3, "propose": 1, "remove": 1, "ack": 4, "outstanding": 1, "view": 0, "renew": 1, "clock": 1}
	if n, ok := need[name]; !ok || len(args) < n {
		return "", fmt.Errorf("bad command %q", words)
	}
	var b strings.Builder
	var grants []ledger.Grant
	var err error
	switch name {
	case "hello":
		hello := ledger.Session{Broker: args[0], Instance: args[1]}
		rest := args[2:]
		if len(rest) > 0 && policies[rest[0]] > 0 {
			hello.Policy, rest = policies[rest[0]], rest[1:]
		}
		for _, a := range rest {
			h := ledger.Held{}
			topic, rest, _ := strings.Cut(a, "=")
			h.Topic = topic
			if rest, flex, some := strings.Cut(rest, "+"); some {
				if _, err := fmt.Sscanf(rest+" "+flex, "%d/%d %d/%d@%d", &h.Share.Rate, &h.Share.Burst, &h.Flex.Rate, &h.Flex.Burst, &h.Epoch); err != nil {
					return "", fmt.Errorf("%q: %w", a, err)
				}
				h.Share.Rate += h.Flex.Rate
				h.Share.Burst += h.Flex.Burst
			} else if _, err := fmt.Sscanf(rest, "%d/%d@%d", &h.Share.Rate, &h.Share.Burst, &h.Epoch); err != nil {
				return "", fmt.Errorf("%q: %w", a, err)
			}
			hello.Held = append(hello.Held, h)
		}
		grants, err = l.Hello(hello, *now)
	case "bye":
		grants = l.Disconnect(args[0])
	case "forget":
		var freed []ledger.Freed
		freed, grants, err = l.Forget(args[0])
		for _, f := range freed {
			fmt.Fprintf(&b, "freed %s %d/%d unknown=%v\n", f.Topic, f.Share.Rate, f.Share.Burst, f.Unknown)
		}
	case "renew":
		var renewed bool
		if renewed, grants = l.Renew(args[0], *now); !renewed {
			b.WriteString("not renewed\n")
		}
	case "clock":
		d, bad := time.ParseDuration(args[0])
		if bad != nil {
			return "", bad
		}
		*now = now.Add(d)
		over, granted := l.Expire(*now)
		for _, o := range over {
			fmt.Fprintf(&b, "over %s", o.Broker)
			for _, what := range []struct {
				name string
				is   bool
			}{{"session", o.Session}, {"flex", o.Flex}, {"base", o.Base}} {
				if what.is {
					b.WriteString(" " + what.name)
				}
			}
			b.WriteByte('\n')
		}
		grants = granted
	case "set", "adopt", "change":
		flex, others := ledger.Permille(0), []string(nil)
		if n, some := strings.CutPrefix(args[2], "flex="); some {
			if _, bad := fmt.Sscan(n, &flex); bad != nil {
				return "", bad
			}
			args = slices.Delete(args, 2, 3)
		}
		if ids, some := strings.CutPrefix(args[2], "others="); some {
			others, args = strings.Split(ids, ","), slices.Delete(args, 2, 3)
		}
		contract, target, bad := shares(args[1], args[2:])
		if bad != nil {
			return "", bad
		}
		terms := ledger.Terms{Contract: contract, Flex: flex}
		switch name {
		case "set":
			grants, err = l.SetContract(args[0], terms, target)
		case "adopt":
			grants, err = l.Adopt(args[0], terms, target, others)
		case "change":
			grants, err = l.Change(args[0], terms, target, others)
		}
	case "propose":
		_, target, bad := shares("0/0", args[1:])
		if bad != nil {
			return "", bad
		}
		grants, err = l.Propose(args[0], target)
	case "remove":
		grants = l.Remove(args[0])
	case "ack":
		var epoch uint64
		var released tokenbucket.Tokens
		s, _, bad := shares(args[3], nil)
		if bad != nil {
			return "", bad
		}
		if _, err := fmt.Sscan(strings.Join(append([]string{args[2]}, args[4:]...), " "), scan(&epoch, &released, len(args) > 4)...); err != nil {
			return "", err
		}
		grants, err = l.Ack(args[0], args[1], epoch, s, released)
	case "outstanding":
		grants = l.Outstanding(args[0])
	case "view":
		return view(l), nil
	}
	if err != nil {
		fmt.Fprintf(&b, "error: %v\n", err)
	}
	for _, g := range grants {
		fmt.Fprintf(&b, "grant %s %s %d %d/%d tokens=%d", g.Broker, g.Topic, g.Epoch, g.Share.Rate, g.Share.Burst, g.Tokens)
		if base := g.Base(); base != g.Share {
			fmt.Fprintf(&b, " base=%d/%d", base.Rate, base.Burst)
		}
		b.WriteByte('\n')
	}
	return b.String(), nil
}

func scan(epoch *uint64, released *tokenbucket.Tokens, both bool) []any {
	if both {
		return []any{epoch, released}
	}
	return []any{epoch}
}

func shares(contract string, members []string) (c tokenbucket.Share, target []share.Assigned, err error) {
	if _, err := fmt.Sscanf(contract, "%d/%d", &c.Rate, &c.Burst); err != nil {
		return c, nil, fmt.Errorf("%q: %w", contract, err)
	}
	for _, m := range members {
		a := share.Assigned{}
		broker, s, _ := strings.Cut(m, "=")
		a.Broker = broker
		if _, err := fmt.Sscanf(s, "%d/%d", &a.Share.Rate, &a.Share.Burst); err != nil {
			return c, nil, fmt.Errorf("%q: %w", m, err)
		}
		target = append(target, a)
	}
	return c, target, nil
}

func view(l *ledger.Ledger) string {
	var b strings.Builder
	for _, t := range l.View() {
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

func TestErrorsCanBeTold(t *testing.T) {
	l := ledger.New(0, ledger.Leases{})
	must := func(grants []ledger.Grant, err error) []ledger.Grant {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return grants
	}
	c := tokenbucket.Share{Rate: 1000, Burst: 2}
	all := []share.Assigned{{Broker: "a", Share: c}}
	must(l.Hello(ledger.Session{Broker: "a", Instance: "a1"}, 0))
	g := must(l.SetContract("t", ledger.Terms{Contract: c}, all))[0]

	var conflict *ledger.Conflict
	if _, err := l.SetContract("t", ledger.Terms{Contract: tokenbucket.Share{Rate: 1000, Burst: 3}}, nil); !errors.As(err, &conflict) || conflict.Have != c {
		t.Errorf("another contract: %v", err)
	}
	if _, err := l.Propose("u", nil); !errors.Is(err, ledger.ErrUnknownTopic) {
		t.Errorf("unknown topic: %v", err)
	}
	if _, _, err := l.Forget("a"); !errors.Is(err, ledger.ErrConnected) {
		t.Errorf("forget a connected broker: %v", err)
	}
	l.Remove("t")
	var busy *ledger.Busy
	if _, err := l.SetContract("t", ledger.Terms{Contract: c}, all); !errors.As(err, &busy) || len(busy.Brokers) != 1 || busy.Brokers[0] != "a" {
		t.Errorf("set while being removed: %v", err)
	}
	if _, err := l.Propose("t", all); !errors.Is(err, ledger.ErrUnknownTopic) {
		t.Errorf("propose while being removed: %v", err)
	}
	must(l.Hello(ledger.Session{Broker: "a", Instance: "a2"}, 0))
	if _, err := l.Hello(ledger.Session{Broker: "a", Instance: "a1", Held: []ledger.Held{{Topic: "t", Share: c, Epoch: g.Epoch}}}, 0); !errors.Is(err, ledger.ErrReplaced) {
		t.Errorf("hello of a replaced instance: %v", err)
	}
	if _, known := l.Topic("t"); known {
		t.Error("the topic is still known, though its only holder was replaced")
	}
}

func TestBadInputChangesNothing(t *testing.T) {
	c := tokenbucket.Share{Rate: 3000, Burst: 9}
	part := tokenbucket.Share{Rate: 2000, Burst: 6}
	over := tokenbucket.Share{Rate: 2000, Burst: 1}
	half := tokenbucket.Share{Rate: 1000}
	at := func(broker string, s tokenbucket.Share) share.Assigned {
		return share.Assigned{Broker: broker, Share: s}
	}
	setup := func() (*ledger.Ledger, uint64) {
		l := ledger.New(0, ledger.Leases{})
		for _, id := range []string{"a", "b"} {
			if _, err := l.Hello(ledger.Session{Broker: id, Instance: id + "1"}, 0); err != nil {
				t.Fatal(err)
			}
		}
		grants, err := l.SetContract("t", ledger.Terms{Contract: c}, []share.Assigned{at("a", part)})
		if err != nil || len(grants) != 1 {
			t.Fatalf("%v, %v", grants, err)
		}
		return l, grants[0].Epoch
	}
	for _, bad := range []struct {
		name string
		call func(l *ledger.Ledger, epoch uint64) ([]ledger.Grant, error)
		want string
	}{
		{"no topic", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.SetContract("", ledger.Terms{Contract: c}, nil)
		}, "without a topic"},
		{"empty contract", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.SetContract("u", ledger.Terms{Contract: tokenbucket.Share{}}, nil)
		}, "is empty"},
		{"half a contract", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.SetContract("u", ledger.Terms{Contract: half}, nil)
		}, "burst 0"},
		{"half a share", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.SetContract("u", ledger.Terms{Contract: c}, []share.Assigned{at("a", half)})
		}, `share of broker "a": burst 0`},
		{"a broker twice", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.Propose("t", []share.Assigned{at("a", over), at("a", over)})
		}, "appears twice"},
		{"no broker", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.Propose("t", []share.Assigned{at("", over)})
		}, "without a broker"},
		{"more than the contract", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.Propose("t", []share.Assigned{at("a", part), at("b", over)})
		}, "sum to more than the contract of 3000 milli-msg/s, burst 9"},
		{"more than a new contract", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.SetContract("u", ledger.Terms{Contract: part}, []share.Assigned{at("a", c)})
		}, "sum to more"},
		{"hello of nobody", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.Hello(ledger.Session{Instance: "x"}, 0)
		}, "required"},
		{"hello without an instance", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.Hello(ledger.Session{Broker: "a"}, 0)
		}, "required"},
		{"held twice", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) {
			return l.Hello(ledger.Session{Broker: "a", Instance: "a1", Held: []ledger.Held{{Topic: "t", Share: part, Epoch: e}, {Topic: "t", Share: part, Epoch: e}}}, 0)
		}, "appears twice"},
		{"held without a topic", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) {
			return l.Hello(ledger.Session{Broker: "a", Instance: "a1", Held: []ledger.Held{{Share: part, Epoch: e}}}, 0)
		}, "without a topic"},
		{"held half", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) {
			return l.Hello(ledger.Session{Broker: "a", Instance: "a1", Held: []ledger.Held{{Topic: "t", Share: half, Epoch: e}}}, 0)
		}, "burst 0"},
		{"held without an epoch", func(l *ledger.Ledger, _ uint64) ([]ledger.Grant, error) {
			return l.Hello(ledger.Session{Broker: "a", Instance: "a1", Held: []ledger.Held{{Topic: "t", Share: part}}}, 0)
		}, "without an epoch"},
		{"an epoch never granted", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) { return l.Ack("a", "t", e+1, part, 0) }, "the newest is"},
		{"another share", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) { return l.Ack("a", "t", e, over, 0) }, "granted was"},
		{"tokens from nowhere", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) { return l.Ack("a", "t", e, part, 1) }, "outside 0 to 0"},
		{"negative tokens", func(l *ledger.Ledger, e uint64) ([]ledger.Grant, error) { return l.Ack("a", "t", e, part, -1) }, "outside 0 to 0"},
	} {
		l, epoch := setup()
		before := view(l)
		grants, err := bad.call(l, epoch)
		if err == nil || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("%s: error %v, want one that says %q", bad.name, err, bad.want)
		}
		if len(grants) > 0 || view(l) != before {
			t.Errorf("%s: granted %+v, and changed\n%sto\n%s", bad.name, grants, before, view(l))
		}
	}
}
