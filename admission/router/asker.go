package router

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

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
	maxKnown = 100_000 // rules; then all are read again
)

type question struct {
	key  string
	cost uint32
	deny int // status of a denial by /auth
}

// Asker asks for HTTP and Envoy, and counts what they are told. It looks rules up for
// answers that name them, and for those who reach no server.
type Asker struct {
	client  *client.Client
	rules   Rules
	replies *prometheus.CounterVec

	mu       sync.Mutex
	looked   time.Time            // for edits
	change   uint64               // the last one then; what follows is as of it, or newer
	known    map[string]rule.Rule // by key; the zero Rule where there is none. nil at first
	defaults *rule.Defaults       // nil: not read; never changed
	failed   bool                 // the store, since looked
}

// NewAsker returns an Asker. reg may be nil.
func NewAsker(c *client.Client, rules Rules, reg prometheus.Registerer) *Asker {
	return &Asker{client: c, rules: rules, replies: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_admission_router_replies_total",
		Help: "Keys decided for HTTP and Envoy, by verdict (admit, deny) and by whom: server, or fallback where no server answered in time.",
	}, []string{"verdict", "by"})}
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
	d := a.client.AskOr(ctx, q.key, q.cost, func(key string) bool { return a.client.Fallback(key) || a.rule(ctx, key).FailOpen })
	verdict, by := "deny", "server"
	if d.Unanswered {
		by = "fallback"
	}
	if d.Admit {
		verdict = "admit"
	}
	a.replies.WithLabelValues(verdict, by).Inc()
	return d
}

// rule returns a key's rule, its own or the default; the zero Rule if there is none or
// the store does not say. Rules are kept until any is edited, which is looked for every
// ruleAge: by the first who asks then, while others use what there is.
func (a *Asker) rule(ctx context.Context, key string) rule.Rule {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ruleWait)
	defer cancel()
	a.mu.Lock()
	if now := time.Now(); now.Sub(a.looked) > ruleAge {
		a.looked, a.failed = now, false
		a.mu.Unlock()
		change, err := a.rules.LastChange(ctx)
		a.mu.Lock()
		if a.failed = err != nil; !a.failed && (change != a.change || a.known == nil) {
			a.change, a.known, a.defaults = change, make(map[string]rule.Rule), nil
		}
	}
	r, known := a.known[key]
	known = known || a.failed || a.known == nil
	change, defaults := a.change, a.defaults
	a.mu.Unlock()
	if known {
		return r
	}
	r, err := a.rules.Rule(ctx, key)
	if errors.Is(err, store.ErrNoRule) || r.Default() {
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
	if a.failed = a.failed || err != nil; err == nil && change == a.change {
		if len(a.known) >= maxKnown {
			clear(a.known)
		}
		a.known[key], a.defaults = r, defaults
	}
	return r
}
