package router

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
)

const (
	maxQuestions = 100 // of one request

	// Rules are shown as they were up to ruleAge ago. Of a store that does not say in
	// ruleWait nothing is asked for as long.
	ruleAge  = 2 * time.Second
	ruleWait = 100 * time.Millisecond
	maxKnown = 10_000 // rules; then all are read again
)

type question struct {
	key  string
	cost uint32
}

// Asker asks for HTTP and Envoy, and counts what they are told. It looks rules up for
// answers that name them, and for those who reach no server.
type Asker struct {
	client  *client.Client
	rules   Rules
	replies *prometheus.CounterVec

	mu       sync.Mutex
	since    time.Time            // when there was nothing yet of what follows
	known    map[string]rule.Rule // by key; the zero Rule where there is none
	defaults *rule.Defaults       // nil: not read; never changed
	failed   bool                 // the store
}

// NewAsker returns an Asker. reg may be nil.
func NewAsker(c *client.Client, rules Rules, reg prometheus.Registerer) *Asker {
	a := &Asker{client: c, rules: rules, replies: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_admission_router_replies_total",
		Help: "Keys decided for HTTP and Envoy, by verdict (admit, deny) and by whom: server, or fallback where no server answered in time.",
	}, []string{"verdict", "by"})}
	if reg != nil {
		reg.MustRegister(a.replies)
	}
	return a
}

// askAll decides each question by itself: what one is admitted stays taken if another
// is denied.
func (a *Asker) askAll(ctx context.Context, questions []question) []client.Decision {
	decisions := make([]client.Decision, len(questions))
	var asking sync.WaitGroup
	for i, q := range questions[1:] {
		asking.Go(func() { decisions[i+1] = a.ask(ctx, q) })
	}
	decisions[0] = a.ask(ctx, questions[0])
	asking.Wait()
	return decisions
}

func (a *Asker) ask(ctx context.Context, q question) client.Decision {
	d := a.client.Ask(ctx, q.key, q.cost)
	verdict, by := "deny", "server"
	if d.Unanswered {
		by = "fallback"
		d.Admit = d.Admit || a.rule(ctx, q.key).FailOpen
	}
	if d.Admit {
		verdict = "admit"
	}
	a.replies.WithLabelValues(verdict, by).Inc()
	return d
}

// rule returns a key's rule, its own or the default; the zero Rule if there is none or
// the store does not say.
func (a *Asker) rule(ctx context.Context, key string) rule.Rule {
	a.mu.Lock()
	if now := time.Now(); now.Sub(a.since) > ruleAge || len(a.known) >= maxKnown {
		a.since, a.known, a.defaults, a.failed = now, make(map[string]rule.Rule), nil, false
	}
	since, defaults := a.since, a.defaults
	r, known := a.known[key]
	known = known || a.failed
	a.mu.Unlock()
	if known {
		return r
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ruleWait)
	defer cancel()
	r, err := a.rules.Rule(ctx, key)
	if errors.Is(err, store.ErrNoRule) {
		if err = nil; defaults == nil {
			var all []rule.Rule
			all, err = a.rules.Defaults(ctx)
			defaults = new(rule.Defaults)
			for i := range all {
				defaults.Set(all[i])
			}
		}
		r = defaults.For(key)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if since == a.since {
		if a.known[key], a.failed = r, a.failed || err != nil; err == nil {
			a.defaults = defaults
		}
	}
	return r
}
