package balance_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

func rng() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

func at(d time.Duration) mono.Time { return mono.Time(d) }

// servers returns the balancer's server numbers.
func servers(b *balance.Balancer) (numbers []int) {
	for _, s := range b.Stats(0, nil) {
		numbers = append(numbers, s.Server)
	}
	return numbers
}

// request sends a request to server, and ends the request after took.
func request(b *balance.Balancer, server int, from, took time.Duration, failed bool) {
	b.Sent(server, at(from))
	b.Ended(server, at(from+took), outcome(failed))
}

func stat(b *balance.Balancer, server int, now time.Duration) balance.Stat {
	for _, s := range b.Stats(at(now), nil) {
		if s.Server == server {
			return s
		}
	}
	return balance.Stat{Server: -1}
}

// The worked example: T is the time between departures, or since an idle server got work. So the
// balancer also measures a server with one request at a time.
func TestIntervalIsTimeBetweenDepartures(t *testing.T) {
	b := balance.New(balance.JBQ, 2, rng())
	want := func(server int, now, interval, answer time.Duration) {
		t.Helper()
		if s := stat(b, server, now); s.Interval != interval || s.Answer != answer {
			t.Errorf("at %v server %d has T %v, R %v; want %v, %v", now, server, s.Interval, s.Answer, interval, answer)
		}
	}
	ms := time.Millisecond
	want(0, 0, 100*ms, 100*ms)
	b.Sent(0, at(0))
	b.Sent(0, at(10*ms))
	want(0, 10*ms, 100*ms, 300*ms)
	b.Ended(0, at(40*ms), balance.Answered) // alone since 0
	want(0, 40*ms, 40*ms, 80*ms)
	want(1, 40*ms, 40*ms, 40*ms) // unmeasured: as the other servers
	b.Ended(0, at(60*ms), balance.Answered)
	want(0, 60*ms, 30*ms, 30*ms)         // (40+20)/2
	request(b, 0, 1000*ms, 60*ms, false) // not since the previous departure: the server was idle
	want(0, 1060*ms, 40*ms, 40*ms)       // (40+20+60)/3
	for i := range 7 {
		request(b, 0, time.Duration(2000+100*i)*ms, 40*ms, false)
	}
	request(b, 0, 4000*ms, 90*ms, false)
	want(0, 4090*ms, 45*ms, 45*ms) // 0.9*40 + 0.1*90
	b.Sent(0, at(5000*ms))
	b.Reported(0, 5, at(5000*ms)) // one of the five requests is ours
	want(0, 5000*ms, 45*ms, 6*45*ms)
	b.Sent(0, at(5001*ms))
	want(0, 5999*ms, 45*ms, 7*45*ms)
	want(0, 6000*ms, 45*ms, 3*45*ms)
	if s := stat(b, 0, 5001*ms); s.InFlight != 2 || s.Others != 4 || s.Sent != 13 || s.Departed != 11 {
		t.Errorf("%+v", s)
	}
}

// model is JBQ as its definition states it: each answer is computed from all events.
type model struct {
	events []event
	n      int
}

type event struct {
	server int
	what   byte // 's'ent, 'd'eparted, 'q': refused, 'f'ailed, 'a'borted, 'r'eported
	others int
	at     mono.Time
}

func (m *model) of(server int) (all []event) {
	for _, e := range m.events {
		if e.server == server {
			all = append(all, e)
		}
	}
	return all
}

func (m *model) inFlight(server int) int {
	q := 0
	for _, e := range m.of(server) {
		switch e.what {
		case 's':
			q++
		case 'd', 'q', 'f', 'a':
			q--
		}
	}
	return q
}

// interval replays the departures; ok is false without a departure.
func (m *model) interval(server int) (t float64, ok bool) {
	q, n := 0, 0.0
	var began, departed mono.Time
	for _, e := range m.of(server) {
		switch e.what {
		case 's':
			if q++; q == 1 {
				began = e.at
			}
		case 'f', 'a':
			q--
		case 'q':
			q--
			departed = e.at
		case 'd':
			q--
			n++
			w := max(0.1, 1/n)
			t = max((1-w)*t+w*float64(e.at.Sub(max(began, departed))), 1000)
			departed = e.at
		}
	}
	return t, n > 0
}

// refuses reports whether the last five or more answers of a server were all failures and refusals.
func (m *model) refuses(server int) bool {
	row := 0
	for _, e := range m.of(server) {
		switch e.what {
		case 'd':
			row = 0
		case 'q', 'f':
			row++
		}
	}
	return row >= 5
}

func (m *model) t(server int) float64 {
	own, ok := m.interval(server)
	if ok && !m.refuses(server) {
		return own
	}
	return max(own, m.median())
}

func (m *model) median() float64 {
	var known []float64
	for i := range m.n {
		if t, ok := m.interval(i); ok && !m.refuses(i) {
			known = append(known, t)
		}
	}
	slices.Sort(known)
	switch n := len(known); {
	case n == 0:
		return 1e8
	case n%2 == 1:
		return known[n/2]
	default:
		return (known[n/2-1] + known[n/2]) / 2
	}
}

// ejected replays the failures. It returns whether the server is ejected, since when, for how long,
// and whether its probe is in progress.
func (m *model) ejected(server int) (out bool, since mono.Time, period time.Duration, trying bool) {
	row := 0
	for _, e := range m.of(server) {
		switch e.what {
		case 's':
			trying = trying || out
		case 'a':
			trying = false
		case 'd', 'q':
			row = 0
			if out && trying {
				out, period, trying = false, 0, false
			}
		case 'f':
			row++
			if out && trying || !out && row >= 5 {
				out, since, trying = true, e.at, false
				period = min(max(2*period, time.Second), 30*time.Second)
			}
		}
	}
	return out, since, period, trying
}

// answer is R, plus the debt for failures and the requests of other gateways there.
func (m *model) answer(server int, now mono.Time) float64 {
	q, owed, others := float64(m.inFlight(server)), 0.0, 0
	var last, until, began, departed mono.Time
	sent := 0
	for i, e := range m.events {
		if e.server != server {
			continue
		}
		before := model{events: m.events[:i], n: m.n}
		switch e.what {
		case 'f':
			owed, last = max(owed-float64(e.at.Sub(last))/before.t(server), 0)+1, e.at
			sent--
		case 'a':
			sent--
		case 's':
			if sent++; sent == 1 {
				began = e.at
			}
		case 'd', 'q':
			// Time that the server worked does not reduce the debt.
			took := e.at.Sub(max(began, departed))
			owed = max(owed-max(float64(e.at.Sub(last)-took), 0)/before.t(server), 0)
			last, departed = e.at, e.at
			sent--
			if out, _, _, trying := before.ejected(server); out && trying {
				owed = 0
			}
			if e.what == 'q' {
				owed += max(1-float64(took)/before.t(server), 0)
			}
		case 'r':
			others, until = e.others, e.at.Add(time.Second)
		}
	}
	owed = max(owed-float64(now.Sub(last))/m.t(server), 0)
	if now < until {
		q += float64(others)
	}
	return (1 + q + owed) * m.t(server)
}

func (m *model) idle(server int, now mono.Time) time.Duration {
	if m.inFlight(server) > 0 {
		return 0
	}
	var sampled mono.Time
	q := 0
	for _, e := range m.of(server) {
		switch e.what {
		case 's':
			if q++; q == 1 && e.at.Sub(sampled) >= 10*time.Second {
				if out, _, _, _ := (&model{events: m.before(e), n: m.n}).ejected(server); !out {
					sampled = e.at
				}
			}
		case 'd', 'q':
			q--
			sampled = e.at
		case 'f', 'a':
			q--
		}
	}
	return now.Sub(sampled)
}

func (m *model) before(e event) []event { return m.events[:slices.Index(m.events, e)] }

const rounding = 4.0 // ns, of an answer

// picks returns the servers that may be chosen.
func (m *model) picks(now mono.Time) []int {
	var best []int
	least := math.Inf(1)
	all := true
	probing := false
	for i := range m.n {
		out, since, period, trying := m.ejected(i)
		if out && !trying && now.Sub(since) >= period+time.Second || !out && m.idle(i, now) >= 20*time.Second {
			return []int{i}
		}
		probing = probing || trying
		if out {
			continue
		}
		all = false
		// The balancer counts in nanoseconds.
		if r := m.answer(i, now); r < least*(1-1e-6)-rounding {
			best, least = []int{i}, r
		} else if r <= least*(1+1e-6)+rounding {
			best = append(best, i)
		}
	}
	if !all || probing {
		return best
	}
	first := 0
	for i := range m.n {
		_, a, _, _ := m.ejected(i)
		if _, b, _, _ := m.ejected(first); a < b {
			first = i
		}
	}
	return []int{first}
}

func (m *model) probes(now mono.Time) (due []int) {
	for i := range m.n {
		out, since, period, trying := m.ejected(i)
		if out && !trying && now.Sub(since) >= period || !out && m.idle(i, now) >= 10*time.Second {
			due = append(due, i)
		}
	}
	return due
}

// The balancer remembers a few numbers; the model has the whole history.
func TestReplayAgainstASlowModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 4).Draw(t, "servers")
		b := balance.New(balance.JBQ, n, rng())
		m := &model{n: n}
		var now mono.Time
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				got, want := b.Pick(now, servers(b)), m.picks(now)
				if got < 0 && len(want) > 0 || got >= 0 && !slices.Contains(want, got) {
					t.Fatalf("picked %d of %v: %+v", got, want, b.Stats(now, nil))
				}
				server, due := b.Probe(now, servers(b))
				if want := m.probes(now); due != (len(want) > 0) || due && server != want[0] {
					t.Fatalf("probe %d, %v; want %v", server, due, want)
				}
				for _, s := range b.Stats(now, nil) {
					out, _, _, _ := m.ejected(s.Server)
					if s.InFlight != m.inFlight(s.Server) || s.Ejected != out || math.Abs(float64(s.Interval)/m.t(s.Server)-1) > 1e-4 ||
						math.Abs(float64(s.Answer)/m.answer(s.Server, now)-1) > 1e-3 {
						t.Fatalf("%+v; want Q %d, T %v, R %v, ejected %v", s, m.inFlight(s.Server), m.t(s.Server), m.answer(s.Server, now), out)
					}
				}
			},
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.SampledFrom([]int{1e5, 1e7, 3e8, 1e9, 11e9, 31e9}).Draw(t, "time")))
			},
			"send": func(t *rapid.T) {
				server, ok := b.Probe(now, servers(b))
				if !ok || rapid.Bool().Draw(t, "not to be repeated") {
					server = b.Pick(now, servers(b))
				}
				if server < 0 {
					t.Skip("none")
				}
				b.Sent(server, now)
				m.events = append(m.events, event{server: server, what: 's', at: now})
				now++
			},
			"end": func(t *rapid.T) {
				server := rapid.IntRange(0, n-1).Draw(t, "server")
				if m.inFlight(server) == 0 {
					t.Skip("idle")
				}
				how := rapid.SampledFrom([]byte("ddqqfffra")).Draw(t, "how")
				e := event{server: server, what: how, at: now}
				switch how {
				case 'd', 'f':
					b.Ended(server, now, outcome(how == 'f'))
				case 'a':
					b.Ended(server, now, balance.Aborted)
				case 'q':
					b.Ended(server, now, balance.Refused)
				case 'r':
					n := rapid.IntRange(0, 20).Draw(t, "in flight")
					e.others = max(n-m.inFlight(server), 0)
					b.Reported(server, n, now)
				}
				m.events = append(m.events, e)
				now++
			},
		})
	})
}

// closed keeps load requests in flight for a while. A server answers in its service time (one request
// at a time), or fails, as fate decides. closed returns how many requests each server got.
func closed(t *testing.T, b *balance.Balancer, load int, long time.Duration, service func(server int) (time.Duration, bool), n int) []int {
	t.Helper()
	type under struct {
		server int
		end    mono.Time
		failed bool
	}
	var now mono.Time
	var all []under
	free := make([]mono.Time, n)
	got := make([]int, n)
	for now < at(long) {
		for len(all) < load {
			server, ok := b.Probe(now, servers(b))
			if !ok {
				server = b.Pick(now, servers(b))
			}
			if server < 0 {
				break
			}
			took, failed := service(server)
			end := now.Add(took)
			if !failed {
				end = max(now, free[server]).Add(took)
				free[server] = end
			}
			b.Sent(server, now)
			got[server]++
			all = append(all, under{server, end, failed})
		}
		if len(all) == 0 {
			t.Fatal("nothing goes")
		}
		slices.SortStableFunc(all, func(a, b under) int { return int(a.end - b.end) })
		now = max(now, all[0].end)
		b.Ended(all[0].server, now, outcome(all[0].failed))
		all = all[1:]
	}
	return got
}

// A server that refuses immediately is always the idle server. The server must get no more requests
// than before, whether it refuses all, or too few in a row to be ejected.
func TestWhoFailsFastGainsNoTraffic(t *testing.T) {
	for _, good := range []int{0, 2, 5} { // one request in good is answered
		t.Run(fmt.Sprint(good), func(t *testing.T) {
			run := func(failing bool) []int {
				n := 0
				return closed(t, balance.New(balance.JBQ, 3, rng()), 12, time.Minute, func(server int) (time.Duration, bool) {
					if n++; server == 1 && failing && (good == 0 || n%good != 0) {
						return 100 * time.Microsecond, true
					}
					return 10 * time.Millisecond, false
				}, 3)
			}
			before, after := run(false), run(true)
			if float64(after[1]) > 1.1*float64(before[1]) {
				t.Errorf("the failing server got %d requests, %d when it did not fail; the others %d and %d", after[1], before[1], after[0], before[0])
			}
			if good == 0 && after[1] > 50 {
				t.Errorf("a server that never answers got %d requests in a minute", after[1])
			}
		})
	}
}

// A server that refuses immediately gets at most an even part of the requests, even if the other
// servers are at their limit and only this server has room.
func TestWhoRefusesFastGetsAnEvenPartAtMost(t *testing.T) {
	const limit = 4
	for _, before := range []bool{true, false} { // the server had answered before, and quickly
		for _, load := range []int{1, 3, 12, 100} {
			b := balance.New(balance.JBQ, 3, rng())
			type under struct {
				server int
				end    mono.Time
			}
			var now mono.Time
			var all []under
			var free [3]mono.Time
			var got [3]float64
			if before {
				for range 20 {
					b.Sent(1, now)
					now = now.Add(time.Millisecond)
					b.Ended(1, now, balance.Answered)
				}
			}
			for end := now.Add(time.Minute); now < end; {
				for len(all) < load {
					var fits []int
					for _, s := range b.Stats(now, nil) {
						if s.InFlight < limit {
							fits = append(fits, s.Server)
						}
					}
					server, ok := b.Probe(now, fits)
					if !ok {
						server = b.Pick(now, fits)
					}
					if server < 0 {
						break
					}
					b.Sent(server, now)
					got[server]++
					if server == 1 {
						all = append(all, under{server, now.Add(100 * time.Microsecond)})
					} else {
						free[server] = max(now, free[server]).Add(10 * time.Millisecond)
						all = append(all, under{server, free[server]})
					}
				}
				if len(all) == 0 {
					t.Fatal("nothing goes, and nothing is under way")
				}
				slices.SortStableFunc(all, func(a, b under) int { return int(a.end - b.end) })
				now = max(now, all[0].end)
				how := balance.Answered
				if all[0].server == 1 {
					how = balance.Refused
				}
				b.Ended(all[0].server, now, how)
				all = all[1:]
			}
			if share := got[1] / (got[0] + got[1] + got[2]); share > .37 {
				t.Errorf("%d requests at a time: the server that refuses got %.2f of %v", load, share, got)
			}
		}
	}
}

// A single server gets all requests, whatever it answers.
func TestWhoRefusesAloneGetsAll(t *testing.T) {
	b := balance.New(balance.JBQ, 1, rng())
	for i := range 1000 {
		testkit.MustEqual(t, b.Pick(at(0), []int{0}), 0, "request %d", i)
		b.Sent(0, 0)
		b.Ended(0, 0, balance.Refused)
	}
}

// A faster server gets more, and each server gets as much as it can serve: 1:2:4.
func TestSharesFollowSpeed(t *testing.T) {
	service := []time.Duration{40 * time.Millisecond, 20 * time.Millisecond, 10 * time.Millisecond}
	got := closed(t, balance.New(balance.JBQ, 3, rng()), 14, time.Minute, func(server int) (time.Duration, bool) { return service[server], false }, 3)
	for i, want := range []float64{1.0 / 7, 2.0 / 7, 4.0 / 7} {
		if share := float64(got[i]) / float64(got[0]+got[1]+got[2]); math.Abs(share-want) > 0.03 {
			t.Errorf("server %d got %.3f of %v, want %.3f", i, share, got, want)
		}
	}
}

// A server that was slow once, however slow, is tried again and recovers, even if no request may be
// repeated.
func TestWhoWasSlowDoesNotStarve(t *testing.T) {
	for _, repeatable := range []bool{true, false} {
		b := balance.New(balance.JBQ, 2, rng())
		request(b, 1, 0, time.Hour, false)
		now, last := time.Hour, uint64(0)
		for now < 2*time.Hour {
			server, ok := b.Probe(at(now), servers(b))
			if !ok || !repeatable {
				server = b.Pick(at(now), servers(b))
			}
			request(b, server, now, 10*time.Millisecond, false)
			now += 20 * time.Millisecond
			last = stat(b, 1, now).Sent
		}
		if s := stat(b, 1, now); last < 100 || s.Interval > 20*time.Millisecond {
			t.Errorf("repeatable %v: after an hour it has had %d requests and T is %v", repeatable, last, s.Interval)
		}
	}
}

func TestFailingServerIsEjected(t *testing.T) {
	b := balance.New(balance.JBQ, 2, rng())
	for i := range 5 {
		if stat(b, 0, 0).Ejected {
			t.Fatalf("ejected after %d failures", i)
		}
		request(b, 0, 0, 0, true)
	}
	now := time.Duration(0)
	for _, period := range []int{1, 2, 4, 8, 16, 30, 30} {
		long := time.Duration(period) * time.Second
		if s, due := b.Probe(at(now+long-1), servers(b)); due && s == 0 {
			t.Fatalf("a probe before %v are over", long)
		}
		now += long
		if s, due := b.Probe(at(now), []int{0}); !due || s != 0 {
			t.Fatalf("no probe after %v", long)
		}
		b.Sent(0, at(now))
		if s, due := b.Probe(at(now), []int{0}); due {
			t.Fatalf("a second probe to %d", s)
		}
		b.Ended(0, at(now), balance.Failed)
	}
	now += 31 * time.Second
	request(b, 0, now, time.Millisecond, false)
	if stat(b, 0, now).Ejected {
		t.Error("ejected after its probe was answered")
	}
	// The next ejection is a first ejection, whatever older requests fail later.
	for range 9 {
		b.Sent(0, at(now))
	}
	for range 9 {
		b.Ended(0, at(now), balance.Failed)
	}
	if _, due := b.Probe(at(now+time.Second), []int{0}); !due {
		t.Error("no probe after a second")
	}
}

func TestTiesAreBrokenAtRandom(t *testing.T) {
	b := balance.New(balance.JBQ, 4, rng())
	var got [4]int
	for range 4000 {
		got[b.Pick(0, servers(b))]++
	}
	if slices.Min(got[:]) < 850 {
		t.Errorf("of 4000 each got %v", got)
	}
}

func TestAllEjectedTheFirstGetsOneAtATime(t *testing.T) {
	b := balance.New(balance.JBQ, 3, rng())
	for _, server := range []int{2, 0, 1} {
		for range 5 {
			request(b, server, time.Duration(10-server), 0, true)
		}
	}
	now := at(20)
	if got := b.Pick(now, servers(b)); got != 2 {
		t.Fatalf("picked %d, want the first ejected", got)
	}
	b.Sent(2, now)
	testkit.MustEqual(t, b.Pick(now, servers(b)), -1, "picked beside the one")
	b.Ended(2, now, balance.Failed)
	testkit.MustEqual(t, b.Pick(now, servers(b)), 1, "picked after the first failed again")
	testkit.MustEqual(t, b.Pick(now, []int{0}), 0, "picked of 0 alone")
	request(b, 1, time.Second, 0, false)
	testkit.MustEqual(t, b.Pick(at(time.Second), servers(b)), 1, "picked, where 1 answered")
}

func TestAddAndRemove(t *testing.T) {
	b := balance.New(balance.JBQ, 1, rng())
	request(b, 0, 0, 7*time.Millisecond, false)
	one := b.Add(at(1))
	testkit.Equal(t, stat(b, one, 1).Interval, 7*time.Millisecond, "T of a new server, the median")
	b.Sent(0, at(2))
	b.Remove(0)
	testkit.Equal(t, b.Pick(at(2), servers(b)), one, "picked after 0 was removed")
	if got := b.Add(at(3)); got == 0 {
		t.Error("a number was reused while a request has it")
	}
	b.Ended(0, at(4), balance.Answered)
	testkit.Equal(t, b.Add(at(5)), 0, "the number was not reused")
	if s := stat(b, 0, 5); s.Sent != 0 {
		t.Errorf("a new server has the old one's %+v", s)
	}
	testkit.Equal(t, b.Pick(at(5), []int{}), -1, "picked of none")
}

func TestRoundRobinAndLeastBusyPick(t *testing.T) {
	rr := balance.New(balance.RoundRobin, 3, rng())
	busy := balance.New(balance.Busy, 3, rng())
	var turns, least []int
	for i := range 6 {
		s := rr.Pick(at(0), servers(rr))
		rr.Sent(s, at(0))
		turns = append(turns, s)
		s = busy.Pick(at(0), servers(busy))
		busy.Sent(s, at(0))
		least = append(least, s)
		if i == 3 {
			busy.Ended(2, at(0), balance.Answered)
		}
	}
	testkit.EqualSlices(t, turns, []int{0, 1, 2, 0, 1, 2}, "rr")
	testkit.EqualSlices(t, least, []int{0, 1, 2, 0, 2, 1}, "busy")
	for _, k := range []balance.Kind{balance.JBQ, balance.Busy, balance.RoundRobin} {
		var got balance.Kind
		if err := got.Set(k.String()); got != k || err != nil {
			t.Errorf("%v: %v, %v", k, got, err)
		}
		if err := got.Set("best"); err == nil || got != k {
			t.Errorf("best was accepted: %v", got)
		}
	}
}

func TestNothingAllocates(t *testing.T) {
	for _, kind := range []balance.Kind{balance.JBQ, balance.Busy, balance.RoundRobin} {
		b := balance.New(kind, 50, rng())
		fits := []int{3, 4, 5, 49}
		now := mono.Time(0)
		dst, every := make([]balance.Stat, 0, 50), servers(b)
		testkit.Equal(t, testing.AllocsPerRun(1000, func() {
			now += 1000
			b.Probe(now, fits)
			b.Sent(b.Pick(now, every), now)
			if s := b.Pick(now, fits); s >= 0 {
				b.Sent(s, now)
				b.Reported(s, 5, now)
				b.Ended(s, now, outcome(now%7000 == 0))
			}
			b.Stats(now, dst)
		}), 0, "%v: allocations", kind)
	}
}

func BenchmarkDecision(b *testing.B) {
	for _, kind := range []balance.Kind{balance.JBQ, balance.Busy} {
		b.Run(kind.String()+"/50", func(b *testing.B) {
			b.ReportAllocs()
			bal := balance.New(kind, 50, rng())
			now, every := mono.Time(0), servers(bal)
			for b.Loop() {
				now += 1000
				s := bal.Pick(now, every)
				bal.Sent(s, now)
				bal.Ended(s, now+500, balance.Answered)
			}
		})
	}
}

// outcome is the outcome of a request whose client waits.
func outcome(failed bool) balance.Outcome {
	if failed {
		return balance.Failed
	}
	return balance.Answered
}
