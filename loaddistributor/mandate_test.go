package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
)

// fakeAdaptor is an adaptor with its own clock. It receives mandates as loop.Server does.
type fakeAdaptor struct {
	name  string
	skew  time.Duration // of the adaptor's clock
	until mono.Time     // by the adaptor's clock
	term  uint64
}

func (a *fakeAdaptor) lead(now mono.Time, r *srtmv1.LeadRequest) *srtmv1.LeadResponse {
	now = now.Add(a.skew)
	if until := mono.Time(r.Stamp).Add(r.Lease.AsDuration()); r.Instance == a.name && now.Before(until) {
		if !now.Before(a.until) {
			if r.Term <= a.term {
				panic("an old term")
			}
			a.term = r.Term
		}
		a.until = max(a.until, until)
	}
	return &srtmv1.LeadResponse{Instance: a.name, Stamp: uint64(now), Leads: now.Before(a.until), Term: a.term}
}

// Whichever instances answer, and whenever, two instances never act at once, and in the end the
// instance that answers acts.
func TestOneInstanceActsAtATime(t *testing.T) {
	const lease, bound, step = time.Second, 50 * time.Millisecond, 10 * time.Millisecond
	for _, fresh := range []bool{true, false} {
		first, second := &fakeAdaptor{name: "a", skew: time.Hour}, &fakeAdaptor{name: "b", skew: 2 * time.Hour}
		now := mono.Time(0).Add(time.Hour)
		begin := func(term uint64, before bool) *mandate {
			m := &mandate{lease: lease, bound: bound, term: term}
			if before {
				m.until = now.Add(lease + bound)
			}
			return m
		}
		m := begin(100, !fresh)
		// run lets an instance answer for a time, with a fixed delay of every answer.
		run := func(d time.Duration, adaptor *fakeAdaptor, delay time.Duration, lost bool) (acted time.Duration) {
			for end := now.Add(d); now.Before(end); now = now.Add(lease / 4) {
				r := m.next(now)
				now = now.Add(delay / 2)
				answer := adaptor.lead(now, r)
				now = now.Add(delay / 2)
				if lost {
					m.response = nil
				} else {
					m.answer(answer, now)
				}
				a, b := now.Add(first.skew).Before(first.until), now.Add(second.skew).Before(second.until)
				if a && b {
					t.Fatal("both act")
				}
				if answer.Leads {
					acted += lease / 4
				}
			}
			return acted
		}
		if acted := run(5*lease, first, step, false); fresh && acted < 4*lease || acted < 2*lease || !fresh && acted > 4*lease {
			t.Errorf("new %v: the first acts for %v", fresh, acted)
		}
		run(lease/2, second, lease/4, true)
		if acted := run(5*lease, second, lease/8, false); acted < lease || first.term >= second.term {
			t.Errorf("the second acts for %v, in term %d after %d", acted, second.term, first.term)
		}
		// Another loaddistributor: the acting instance continues.
		m = begin(200, true)
		oldTerm := second.term
		if acted := run(2*lease, second, step, false); acted < 2*lease || second.term != oldTerm {
			t.Errorf("the second leads for another %v, in term %d after %d", acted, second.term, oldTerm)
		}
		// A loaddistributor has to wait for the acting instance.
		m = begin(300, true)
		run(3*lease, first, step, false)
		if first.term <= 300 {
			t.Errorf("the first acts again in term %d", first.term)
		}
	}
}

// starting is a tbadaptor before the first order to act.
type starting struct {
	srtmv1.UnimplementedGrantServiceServer
	asked atomic.Int32
}

func (s *starting) SetContract(context.Context, *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error) {
	if s.asked.Add(1) == 1 {
		return nil, status.Error(codes.Unavailable, "this adaptor does not lead any more")
	}
	return &srtmv1.SetContractResponse{}, nil
}

// The log line is a sentence, with an error only if there is an error. The health says the same, with
// the consequences.
func TestTheLogAndTheHealthSayWhetherTheAdaptorActs(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	h := &adaptorHealth{address: "a:4180"}
	health := func(want string) {
		t.Helper()
		text := ""
		if err := h.Err(); err != nil {
			text = err.Error()
		}
		if text != want {
			t.Errorf("health is %q, want %q", text, want)
		}
	}
	health("")
	h.note(log, false, nil, time.Second)
	health("the tbadaptor at a:4180 does not act yet, for at most 1s: brokers release by the bases of their shares, and contracts do not change")
	h.note(log, false, nil, time.Second)
	h.note(log, true, nil, 0)
	health("")
	h.note(log, false, errors.New("refused\nindeed"), time.Second)
	health("the tbadaptor does not answer at a:4180 (refused indeed): brokers release by the bases of their shares, and contracts do not change; start the tbadaptor, or correct --tbadaptor-address")
	h.note(log, false, errors.New("refused again"), time.Second)
	text := regexp.MustCompile("(?m)^time=[^ ]* ").ReplaceAllString(out.String(), "")
	testkit.Equal(t, text, `level=INFO msg="the tbadaptor does not act yet" wait=1s
level=INFO msg="the tbadaptor acts"
level=WARN msg="the tbadaptor does not answer" error="refused\nindeed"
`)
}

func TestATbadaptorThatStartsIsAskedAgain(t *testing.T) {
	ln, starts, server := testkit.Listen(t), new(starting), grpc.NewServer()
	srtmv1.RegisterGrantServiceServer(server, starts)
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	defer func() { server.Stop(); <-done }()
	conn, err := dial(ln.Addr().String(), []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())})
	testkit.Must(t, err)
	defer conn.Close()
	remote := controller.Remote{Client: srtmv1.NewGrantServiceClient(conn)}
	if err := remote.Set(t.Context(), &adaptor.Contract{Topic: "t"}, adaptor.Create); err != nil || starts.asked.Load() != 2 {
		t.Errorf("after %d calls: %v", starts.asked.Load(), err)
	}
}
