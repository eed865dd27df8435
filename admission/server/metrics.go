package server

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
)

// metrics holds counters with resolved labels, so that counting needs no label lookup.
type metrics struct {
	admitted, denied, admittedDefault, deniedDefault, shadow, noRoom prometheus.Counter

	malformed, badMAC, hellos, repeated, old, busy, moved, waiting, expired, cancelled prometheus.Counter
	lookups, lookupErrors, pollErrors, saveErrors                                      prometheus.Counter
	savedCredits, leaseErrors                                                          prometheus.Counter
	sent, refused, sendErrors                                                          prometheus.Counter
}

func (m *metrics) init(s *Server, reg prometheus.Registerer) {
	auto := promauto.With(reg) // reg may be nil
	counter := func(name, help string) prometheus.Counter {
		return auto.NewCounter(prometheus.CounterOpts{Name: "srtm_admission_" + name, Help: help})
	}
	decisions := auto.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_admission_decisions_total",
		Help: "Requests decided, by verdict (admit, deny) and reason: rule, default (a default rule, or none), shadow (admitted though the rule would deny), full (no room for the key; counted beside default).",
	}, []string{"verdict", "reason"})
	m.admitted = decisions.WithLabelValues("admit", "rule")
	m.denied = decisions.WithLabelValues("deny", "rule")
	m.admittedDefault = decisions.WithLabelValues("admit", "default")
	m.deniedDefault = decisions.WithLabelValues("deny", "default")
	m.shadow = decisions.WithLabelValues("admit", "shadow")
	datagrams := auto.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_admission_datagrams_total",
		Help: "Datagrams that were not decided, by reason: malformed, mac (wrong, or by an unknown key), hello (a session was issued), again (answered or being decided already), old (no longer remembered), busy (no room, no store, or being moved), moved (another server owns the key), waiting (its key is looked up), late (looked up when its asker had denied it: not charged), cancelled (its asker had no answer in time, and denied it).",
	}, []string{"reason"})
	m.malformed, m.badMAC = datagrams.WithLabelValues("malformed"), datagrams.WithLabelValues("mac")
	m.hellos, m.repeated = datagrams.WithLabelValues("hello"), datagrams.WithLabelValues("again")
	m.old, m.busy, m.moved = datagrams.WithLabelValues("old"), datagrams.WithLabelValues("busy"), datagrams.WithLabelValues("moved")
	m.waiting, m.expired, m.cancelled = datagrams.WithLabelValues("waiting"), datagrams.WithLabelValues("late"), datagrams.WithLabelValues("cancelled")
	m.leaseErrors = counter("lease_errors_total", "Renewals of the server's lease on its partitions that failed; without one for 5 s it denies strict keys.")
	m.noRoom = counter("keys_without_room_total", "Requests answered by --full-reply, since there was no room for their key.")
	m.lookups = counter("lookups_total", "Keys looked up in the store.")
	m.lookupErrors = counter("lookup_errors_total", "Keys that could not be looked up; their requests were answered with busy.")
	m.pollErrors = counter("poll_errors_total", "Looks for edited rules that failed.")
	m.saveErrors = counter("checkpoint_errors_total", "Check-points that failed.")
	m.savedCredits = counter("checkpoint_keys_total", "Keys whose credits were saved by check-points.")
	m.sent = counter("replicated_keys_total", "Keys whose credits were sent to the follower.")
	m.refused = counter("replication_refused_total", "Keys whose credits the follower did not keep, for want of room or since it knew newer ones.")
	m.sendErrors = counter("replication_errors_total", "Rounds of replication that failed.")
	gauge := func(name, help string, is func() float64) {
		auto.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_admission_" + name, Help: help}, is)
	}
	age := func(stamp *atomic.Int64) func() float64 {
		return func() float64 { return s.cfg.Now().Mono.Sub(mono.Time(stamp.Load())).Seconds() }
	}
	gauge("rules_age_seconds", "Time since edited rules were last looked for with success.", age(&s.rules.polled))
	gauge("checkpoint_age_seconds", "Time since the last check-point.", age(&s.saved))
	gauge("replication_lag_seconds", "Time since all that had changed was last with the follower, if there is one.", age(&s.replicated))
	gauge("certain_seconds", "For how long decisions on strict keys are certain yet; below 0 since when they are denied.", func() float64 { return s.certainUntil().Sub(s.cfg.Boot()).Seconds() })
	gauge("partitions", "Partitions of keys, of 4096, that this server owns.", func() float64 { return float64(s.ownedPartitions.Load()) })
	gauge("keys", "Keys in memory.", func() float64 { return float64(s.shards.len()) })
}

func (m *metrics) decided(v *table.Verdict) {
	switch {
	case v.Admit && v.Denied:
		m.shadow.Inc()
	case v.Admit && v.Default:
		m.admittedDefault.Inc()
	case v.Admit:
		m.admitted.Inc()
	case v.Default:
		m.deniedDefault.Inc()
	default:
		m.denied.Inc()
	}
}
