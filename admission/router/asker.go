// Package router serves admission to programs that do not use its datagrams: HTTP (http.go), Envoy's
// rate limit service (envoy.go) and, for operators, the gRPC service AdmissionAdmin (admin.go). The
// package decides nothing: it forwards questions to the servers with admission/client (asker.go).
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
	maxQuestions = 100 // per request

	// Cached rules may be up to ruleAge old. If the store does not answer within ruleWait, it is not
	// asked again for ruleAge.
	ruleAge  = 2 * time.Second
	ruleWait = 100 * time.Millisecond
	maxKnown = 100_000 // cached rules; beyond this the cache is cleared
)

type question struct {
	key  string
	cost uint32
	deny int // HTTP status of a denial by /auth
}

// Asker sends the questions of HTTP and Envoy to the admission servers, and counts the decisions. It looks up rules for
// answers that name them, and for requests that reach no server.
type Asker struct {
	client  *client.Client
	rules   Rules
	replies *prometheus.CounterVec

	mu       sync.Mutex
	looked   time.Time            // last poll for edits
	change   uint64               // number of the last edit; the fields below are as of change or newer
	cache    map[string]rule.Rule // by key; the zero Rule: no rule. nil at first
	defaults *rule.Defaults       // nil: not read; immutable
	failed   bool                 // the store failed since looked
}

// NewAsker returns an Asker. reg may be nil.
func NewAsker(c *client.Client, rules Rules, reg prometheus.Registerer) *Asker {
	return &Asker{client: c, rules: rules, replies: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_admission_router_replies_total",
		Help: "Keys decided for HTTP and Envoy, by verdict (admit, deny) and by whom: server, or fallback where no server answered in time.",
	}, []string{"verdict", "by"})}
}

// askAll decides each question separately: a charge stays even if another question is denied.
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
	verdict, decidedBy := "deny", "server"
	if d.Unanswered {
		decidedBy = "fallback"
	}
	if d.Admit {
		verdict = "admit"
	}
	a.replies.WithLabelValues(verdict, decidedBy).Inc()
	return d
}

// rule returns a key's own rule or its default. If there is none or the store does not answer, rule
// returns the zero Rule. Rules are cached until any rule is edited. Every ruleAge the first caller
// polls for edits; other callers use the cache meanwhile.
func (a *Asker) rule(ctx context.Context, key string) rule.Rule {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ruleWait)
	defer cancel()
	a.mu.Lock()
	if now := time.Now(); now.Sub(a.looked) > ruleAge {
		a.looked, a.failed = now, false
		a.mu.Unlock()
		change, err := a.rules.LastChange(ctx)
		a.mu.Lock()
		if a.failed = err != nil; !a.failed && (change != a.change || a.cache == nil) {
			a.change, a.cache, a.defaults = change, make(map[string]rule.Rule), nil
		}
	}
	r, known := a.cache[key]
	known = known || a.failed || a.cache == nil
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
		if len(a.cache) >= maxKnown {
			clear(a.cache)
		}
		a.cache[key], a.defaults = r, defaults
	}
	return r
}
