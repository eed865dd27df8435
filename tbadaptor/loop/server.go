// Package loop runs the tbadaptor. It serves GrantService, passes reports of brokers to a
// tbadaptor/adaptor.Machine, which decides, and sends the machine's grants to the brokers. Once a
// period it lets the machine tune the topics. The package knows brokers only by their ids. It runs in
// the daemon tbadaptor or embedded in the loaddistributor; nsqd/agent is the other end.
//
// After a restart the ledger is empty and brokers continue with their shares. Their hellos report the
// shares, and the loaddistributor restores the contracts with SetContract.adopt. The ledger awaits
// every broker that may hold a part of such a contract: until then no share grows beyond the part that
// is proven to be free, since an unheard broker may be using any part of the contract.
package loop

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Defaults of Config.
const (
	DefaultPeriod     = time.Second
	DefaultWindow     = 10 * time.Second
	DefaultAckTimeout = 5 * time.Second
	// DefaultFlex is the part of an adaptive topic's shares under lease, in thousandths. This part
	// moves to other brokers within seconds of a broker's silence, and all brokers lose it while the
	// adaptor is disconnected. The paper's contract is 1.1 times the load, so the part must be less
	// than a tenth (figures in docs/evaluation/trouble.md).
	DefaultFlex = 50
)

// slewed: two clocks drift apart by 1/slewed of a lease, if NTP slews them in opposite directions by
// the maximum of 500 ppm each.
const slewed = 1000

// DefaultLeases returns the default leases.
func DefaultLeases() ledger.Leases {
	return ledger.Leases{Flex: 3 * time.Second, Session: 30 * time.Second, ClockBound: 200 * time.Millisecond}
}

// grantQueue bounds the messages that wait for one broker. A topic has at most one unacknowledged
// grant, so grantQueue is the maximum number of a broker's topics.
const grantQueue = 100_000

// Config is fixed at start.
type Config struct {
	// time between proposals of shares
	Period time.Duration
	// Proposals use the loads of the last Window.
	Window time.Duration
	// maximum wait of SetContract for acknowledgements
	AckTimeout time.Duration
	// Leases of the brokers. Flex is the part of shares that ends with the leases, in thousandths;
	// topics with the static rule have none.
	Leases ledger.Leases
	Flex   ledger.Permille
	// Term is this adaptor's leadership; nil: it leads alone, as long as the process lives. ByMandate: the
	// adaptor leads only in the terms that Lead lends.
	Term      Term
	ByMandate bool
	Log       *slog.Logger
	Metrics   prometheus.Registerer // nil: not exported
}

// Term is a term of leadership, in which an adaptor may act. Its methods may be called at any time.
type Term interface {
	// Number is greater than the number of any earlier term.
	Number() uint64
	// Until is the end of the term by this process's clock, unless the term is extended before. No
	// other term begins earlier. A term that is over stays over.
	Until() mono.Time
}

// alone is the term of an adaptor that no other adaptor can replace.
type alone struct{ number uint64 }

func (a alone) Number() uint64 { return a.number }
func (alone) Until() mono.Time { return mono.Never }

// Validate returns all problems at once.
func (c Config) Validate() error { return c.Faults("period", "window", "acknowledgement timeout") }

// Faults is Validate with the flag names of the settings. If ackTimeout is empty, the caller checks the
// acknowledgement timeout.
func (c Config) Faults(period, window, ackTimeout string) error {
	var f faults.List
	checkRange := func(name string, value, low, high time.Duration) {
		f.If(value < low || value > high, "%s %v: want %v to %v", name, value, low, high)
	}
	checkRange(period, c.Period, time.Millisecond, time.Hour)
	f.If(c.Window < max(c.Period, time.Millisecond) || c.Window > time.Hour,
		"%s %v: want 1ms to 1h, and at least the %v of %s", window, c.Window, c.Period, period)
	if ackTimeout != "" {
		checkRange(ackTimeout, c.AckTimeout, time.Millisecond, time.Hour)
	}
	if err := c.Leases.Validate(); err != nil {
		f.Add(err)
	} else {
		checkRange("--flex-lease", c.Leases.Flex, 10*time.Millisecond, 24*time.Hour)
		checkRange("--session-lease", c.Leases.Session, 10*time.Millisecond, 24*time.Hour)
		minimum := c.Leases.Session / slewed
		f.If(c.Leases.ClockBound < minimum, "--clock-bound %v is less than 0.1 %% of --session-lease %v, by which two clocks that NTP slews may come apart: want at least %v",
			c.Leases.ClockBound, c.Leases.Session, minimum)
	}
	f.If(c.Flex < 0 || c.Flex > 1000, "--flex-percent %g: want 0 to 100", float64(c.Flex)/10)
	f.If(c.Log == nil, "no logger")
	return f.Err()
}

// Server implements GrantService. Make a Server with New, register it, and call Run.
type Server struct {
	srtmv1.UnimplementedGrantServiceServer

	// Set once.
	cfg     Config
	metrics *metrics
	mandate *mandate      // nil: the term is not lent
	closed  chan struct{} // closed by Run when it ends

	streams *service.Server

	mu struct {
		sync.Mutex
		stopped           bool      // the leadership is over: every call is refused
		lastLead          mono.Time // last call of Lead; 0: none
		machine           *adaptor.Machine
		sessions          map[string]*session  // by broker
		disconnectedSince map[string]time.Time // end of the last session, by broker
		refused           map[string]string    // instance refused last, by the broker whose id another process has
		histories         map[string]*history  // by topic
		// changed is closed and replaced with every change of the ledger; revision counts the changes.
		changed     chan struct{}
		revision    uint64
		ledgerStart time.Time // wall clock when the ledger was made
	}
}

type session struct {
	broker string
	out    *service.Queue[*srtmv1.GrantMessage]
}

// New checks the configuration. Requires: brokers have seen no epochs above the wall clock. If the wall
// clock was set back by more than the uptime of earlier adaptors, brokers ignore grants until their
// next hello.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("adaptor: %w", err)
	}
	s := &Server{cfg: cfg, metrics: newMetrics(), streams: service.NewServer(), closed: make(chan struct{})}
	switch {
	case cfg.ByMandate:
		s.mandate = &mandate{instance: rand.Text()}
		s.cfg.Term = s.mandate
	case cfg.Term == nil:
		s.cfg.Term = alone{uint64(time.Now().UnixMilli())}
	}
	s.mu.sessions = map[string]*session{}
	s.mu.changed = make(chan struct{})
	s.emptyLocked()
	if cfg.Metrics != nil {
		if err := errors.Join(s.metrics.register(cfg.Metrics), cfg.Metrics.Register(collector{s})); err != nil {
			return nil, fmt.Errorf("adaptor: %w", err)
		}
	}
	return s, nil
}

// emptyLocked replaces the ledger by an empty ledger, without reports of brokers. Requires: mu held; no
// sessions.
func (s *Server) emptyLocked() {
	s.mu.ledgerStart = time.Now()
	s.mu.machine = adaptor.New(uint64(clock.Wall()), adaptor.Config{Leases: s.cfg.Leases, Flex: s.cfg.Flex, Window: s.cfg.Window})
	s.mu.histories = map[string]*history{}
	s.mu.disconnectedSince = map[string]time.Time{}
	s.mu.refused = map[string]string{}
	s.mu.revision = uint64(clock.Wall()) // above the revisions of earlier leaders
}

// Run proposes shares until ctx ends. Then it ends the sessions and the waiting calls, and returns
// after them. Brokers keep their shares. When the leadership is over, Run ends the sessions at once,
// and every call is refused.
func (s *Server) Run(ctx context.Context) error {
	ticker := time.NewTicker(s.cfg.Period)
	defer ticker.Stop()
	wasLeading := s.mandate == nil
	// expiry bounds the delay until the end of a lease or term is noticed; a late notice is safe.
	expiry := time.NewTicker(max(s.cfg.Leases.Flex/20, 10*time.Millisecond))
	defer expiry.Stop()
	for {
		select {
		case <-ticker.C:
			s.tune(false)
			continue
		case <-expiry.C:
			leads := s.expire(clock.Mono())
			if wasLeading && !leads {
				s.cfg.Log.Error("lost leadership: the sessions of all brokers are over", "term", s.cfg.Term.Number())
			}
			wasLeading = leads
			s.tune(true)
			continue
		case <-ctx.Done():
		}
		break
	}
	close(s.closed)
	s.streams.Close(errClosing)
	return nil
}

// leadsLocked returns nil while this adaptor leads. Once the leadership is over, it ends all sessions
// and returns errNotLeading: another adaptor may grant the same shares from then on. It reads the clock
// at each call, because the process may have been stopped for long. Requires: mu held.
func (s *Server) leadsLocked() error {
	if !s.mu.stopped && clock.Mono().Before(s.cfg.Term.Until()) {
		return nil
	}
	if !s.mu.stopped {
		s.mu.stopped = true
		for _, open := range s.mu.sessions {
			open.out.End(errNotLeading)
		}
		s.metrics.sessions.Sub(float64(len(s.mu.sessions)))
		clear(s.mu.sessions)
		s.emptyLocked() // the new leader's ledger counts now
		s.changedLocked()
	}
	return errNotLeading
}

// change runs one step of the ledger, sends the resulting grants, and wakes goroutines waiting for a
// change. f runs with mu held. reason is recorded with the grants.
func (s *Server) change(reason string, f func(*adaptor.Machine) ([]ledger.Grant, error)) error {
	s.mu.Lock()
	err := s.leadsLocked()
	if err != nil {
		s.mu.Unlock()
		return err
	}
	grants, err := f(s.mu.machine)
	s.sendLocked(reason, grants)
	// A renewal or a run of a rule changes nothing without grants.
	if err == nil && (len(grants) > 0 || reason != reasonLease && reason != reasonRule) {
		s.changedLocked()
	}
	s.mu.Unlock()
	s.logGrants(reason, grants)
	return err
}

// changedLocked wakes the waiting goroutines. Requires: mu held.
func (s *Server) changedLocked() {
	s.mu.revision++
	close(s.mu.changed)
	s.mu.changed = make(chan struct{})
}

// sendLocked records grants and sends them to connected brokers. Requires: mu held.
func (s *Server) sendLocked(reason string, grants []ledger.Grant) {
	now := time.Now()
	for _, g := range grants {
		s.noteLocked(g.Topic, change{time: now, broker: g.Broker, share: g.Share, flex: g.Flex, epoch: g.Epoch, tokens: g.Tokens, event: eventGranted, reason: reason})
		// A missing session is just ending: the ledger learns this next, and repeats the grant after
		// the next hello.
		if open := s.mu.sessions[g.Broker]; open != nil {
			open.out.Put(&srtmv1.GrantMessage{Message: &srtmv1.GrantMessage_Grant{Grant: &srtmv1.Grant{
				Topic: g.Topic, Epoch: g.Epoch, Share: service.ShareProto(g.Share), Flex: service.ShareProto(g.Flex), TokensMilli: int64(g.Tokens),
				Term: s.cfg.Term.Number(),
			}}})
		}
	}
}

func (s *Server) logGrants(reason string, grants []ledger.Grant) {
	for _, g := range grants {
		s.metrics.grants.Inc()
		s.cfg.Log.Info("grant", obs.KeyTopic, g.Topic, obs.KeyBroker, g.Broker, obs.KeyEpoch, g.Epoch,
			obs.KeyRate, g.Share.Rate.PerSecond(), obs.KeyBurst, g.Share.Burst,
			"base_rate", g.Base().Rate.PerSecond(), "base_burst", g.Base().Burst,
			"tokens_milli", int64(g.Tokens), obs.KeyReason, reason)
	}
}

// expire ends the leases that are over, and reports whether this adaptor leads.
func (s *Server) expire(now mono.Time) bool {
	s.mu.Lock()
	if s.leadsLocked() != nil {
		s.mu.Unlock()
		return false
	}
	lapses, grants := s.mu.machine.Ledger.Expire(now)
	for _, lapse := range lapses {
		if open := s.mu.sessions[lapse.Broker]; open != nil && lapse.Session {
			open.out.End(errLapsed)
			s.removeSessionLocked(lapse.Broker)
		}
		s.noteLapseLocked(lapse)
	}
	s.sendLocked(reasonLease, grants)
	if len(lapses) > 0 {
		s.changedLocked()
	}
	s.mu.Unlock()
	for _, lapse := range lapses {
		s.metrics.lapsed.Inc()
		s.cfg.Log.Warn("lease over", obs.KeyBroker, lapse.Broker, "session_ended", lapse.Session, "flex_freed", lapse.Flex, "base_freed", lapse.Base)
	}
	s.logGrants(reasonLease, grants)
	return true
}

// tune proposes shares for every topic whose rule is not static. With moving it takes only topics
// whose publishers have just moved.
func (s *Server) tune(moving bool) {
	s.mu.Lock()
	topics := s.mu.machine.Adaptive(clock.Mono(), moving)
	s.mu.Unlock()
	for _, topic := range topics { // mu is free between two topics
		var result string
		err := s.change(reasonRule, func(m *adaptor.Machine) (grants []ledger.Grant, err error) {
			grants, result, err = m.Tune(clock.Mono(), topic)
			return grants, err
		})
		if errors.Is(err, errNotLeading) {
			return
		}
		s.metrics.proposals.WithLabelValues(result).Inc()
		if err != nil {
			s.cfg.Log.Warn("no proposal", obs.KeyTopic, topic, obs.KeyError, err)
		}
	}
}

// lendLocked sends a broker the renewal of its lease. Requires: mu held.
func (s *Server) lendLocked(open *session, stamp uint64) {
	open.out.Put(&srtmv1.GrantMessage{Message: &srtmv1.GrantMessage_Lease{Lease: &srtmv1.Lease{
		Stamp: stamp, Flex: durationpb.New(s.cfg.Leases.Flex), Session: durationpb.New(s.cfg.Leases.Session),
		Term: s.cfg.Term.Number(), Sent: uint64(clock.Mono()),
	}}})
}

// Session serves one broker.
func (s *Server) Session(stream grpc.BidiStreamingServer[srtmv1.NodeMessage, srtmv1.GrantMessage]) error {
	return toStatus(service.Serve(s.streams, stream, s.begin))
}

func (s *Server) begin(m *srtmv1.NodeMessage) (service.Session[srtmv1.NodeMessage, srtmv1.GrantMessage], error) {
	refused := service.Session[srtmv1.NodeMessage, srtmv1.GrantMessage]{}
	hello := m.GetHello()
	if hello == nil {
		var bad badRequest
		bad.Add("hello", "the first message of a session is its hello")
		return refused, bad
	}
	held, err := checkHello(hello)
	if err != nil {
		return refused, err
	}
	s.mu.Lock()
	err = s.leadsLocked()
	s.mu.Unlock()
	if err != nil {
		return refused, err // whatever the term in hello
	}
	if term := s.cfg.Term.Number(); hello.Term > term {
		s.cfg.Log.Error("broker refused: it has followed an adaptor that leads later", obs.KeyBroker, hello.BrokerId, "term", hello.Term, "own", term)
		return refused, fmt.Errorf("%w: broker %q has followed an adaptor of term %d, this one has %d", errOldTerm, hello.BrokerId, hello.Term, term)
	}
	open := &session{broker: hello.BrokerId, out: service.NewQueue[*srtmv1.GrantMessage](grantQueue)}
	err = s.change(reasonHello, func(m *adaptor.Machine) ([]ledger.Grant, error) {
		policy, _ := policies.Value(hello.Policy) // checkHello has refused unknown values
		grants, err := m.Hello(clock.Mono(), ledger.Session{
			Broker: hello.BrokerId, Stamp: mono.Stamp{Process: hello.Instance, At: mono.Time(hello.Stamp)}, Policy: policy, Shares: held,
			Place: placeOf(hello),
		})
		if err != nil {
			return nil, err
		}
		if hello.Policy != srtmv1.LeasePolicy_LEASE_POLICY_UNSPECIFIED {
			s.lendLocked(open, hello.Stamp)
		}
		if old := s.mu.sessions[open.broker]; old != nil {
			old.out.End(errReplaced)
		} else {
			s.metrics.sessions.Inc()
		}
		s.mu.sessions[open.broker] = open
		delete(s.mu.disconnectedSince, open.broker)
		return grants, nil
	})
	if err != nil {
		s.refused(hello, err)
		return refused, err
	}
	s.cfg.Log.Info("broker's share session opened", obs.KeyBroker, open.broker, obs.KeyInstance, hello.Instance, "held", len(held), obs.KeyPolicy, hello.Policy)
	return service.Session[srtmv1.NodeMessage, srtmv1.GrantMessage]{
		Out:    open.out,
		Handle: func(m *srtmv1.NodeMessage) error { return s.handle(open, m) },
		Over:   func() { s.closeSession(open) },
	}, nil
}

// refused logs the first refusal of each process whose broker id belongs to another process.
func (s *Server) refused(hello *srtmv1.NodeHello, err error) {
	if !errors.As(err, new(*identity.InUse)) && !errors.As(err, new(*identity.Lost)) {
		return
	}
	s.mu.Lock()
	logged := s.mu.refused[hello.BrokerId] == hello.Instance
	s.mu.refused[hello.BrokerId] = hello.Instance
	s.mu.Unlock()
	if !logged {
		s.cfg.Log.Error("share session refused: the broker's id belongs to another process", obs.KeyBroker, hello.BrokerId, obs.KeyInstance, hello.Instance, obs.KeyError, err)
	}
}

func placeOf(h *srtmv1.NodeHello) identity.Place {
	return identity.Place{Address: h.TcpAddress, Host: h.Hostname, Folder: h.DataPath, Lock: h.Lock}
}

func checkHello(h *srtmv1.NodeHello) ([]ledger.HeldShare, error) {
	var bad badRequest
	bad.Name("hello.broker_id", h.BrokerId)
	if _, found := policies.Value(h.Policy); !found {
		bad.Add("hello.policy", "%d: it has no meaning here", h.Policy)
	}
	if h.Instance == "" || len(h.Instance) > 128 {
		bad.Add("hello.instance", "%d bytes: want 1 to 128", len(h.Instance))
	}
	placeOf(h).Check(bad.Add)
	held := make([]ledger.HeldShare, 0, len(h.Held))
	topics := map[string]bool{}
	for i, reported := range h.Held {
		field := func(field string) string { return fmt.Sprintf("hello.held[%d].%s", i, field) }
		share, flex := service.ShareOf(reported.Share), service.ShareOf(reported.Flex)
		if reported.Topic == "" || topics[reported.Topic] {
			bad.Add(field("topic"), "%q is empty or appears twice", reported.Topic)
		}
		topics[reported.Topic] = true
		if err := share.Validate(); err != nil {
			bad.Add(field("share"), "%v", err)
		}
		base := share.Less(flex)
		if share.Validate() != nil {
			// already reported
		} else if flex.Rate < 0 || flex.Burst < 0 || base.Validate() != nil || h.Policy == srtmv1.LeasePolicy_LEASE_POLICY_UNSPECIFIED && base != share {
			bad.Add(field("flex"), "%v cannot be a part of the share", reported.Flex)
		}
		if reported.Epoch == 0 || reported.Epoch > ledger.MaxEpoch {
			bad.Add(field("epoch"), "%d is no grant's", reported.Epoch)
		}
		held = append(held, ledger.HeldShare{Topic: reported.Topic, Share: share, Flex: flex, Epoch: reported.Epoch})
	}
	return held, bad.Err()
}

func (s *Server) handle(open *session, m *srtmv1.NodeMessage) error {
	switch m := m.Message.(type) {
	case *srtmv1.NodeMessage_Ack:
		return s.change(reasonRest, func(machine *adaptor.Machine) ([]ledger.Grant, error) {
			if s.mu.sessions[open.broker] != open {
				return nil, errReplaced
			}
			grants, err := machine.Ledger.Ack(open.broker, m.Ack.Topic, m.Ack.Epoch, service.ShareOf(m.Ack.Share), tokenbucket.Tokens(m.Ack.ReleasedTokensMilli))
			if err != nil {
				return nil, badSequence{err}
			}
			s.noteLocked(m.Ack.Topic, change{
				time: time.Now(), broker: open.broker, share: service.ShareOf(m.Ack.Share), epoch: m.Ack.Epoch,
				tokens: tokenbucket.Tokens(m.Ack.ReleasedTokensMilli), event: eventAcknowledged,
			})
			return grants, nil
		})
	case *srtmv1.NodeMessage_Renew:
		return s.change(reasonLease, func(machine *adaptor.Machine) ([]ledger.Grant, error) {
			if s.mu.sessions[open.broker] != open {
				return nil, errReplaced
			}
			now := clock.Mono()
			if sent := mono.Time(m.Renew.Heard); sent > 0 && sent <= now {
				machine.Ledger.RenewalReceived(open.broker, sent)
			}
			renewed, grants := machine.Ledger.Renew(open.broker, now)
			if !renewed {
				return nil, errLapsed
			}
			s.lendLocked(open, m.Renew.Stamp)
			return grants, nil
		})
	case *srtmv1.NodeMessage_Report:
		return s.report(open, m.Report, clock.Mono())
	case *srtmv1.NodeMessage_Hello:
		var bad badRequest
		bad.Add("hello", "a session has one hello")
		return bad
	}
	return nil // a message of a later version, which must not rely on this adaptor
}

// closeSession ends a session, unless a later session has replaced it.
func (s *Server) closeSession(open *session) {
	err := s.change(reasonRest, func(m *adaptor.Machine) ([]ledger.Grant, error) {
		if s.mu.sessions[open.broker] != open {
			return nil, errReplaced
		}
		s.removeSessionLocked(open.broker)
		return m.Ledger.Disconnect(open.broker), nil
	})
	if err == nil {
		s.cfg.Log.Info("broker's share session ended", obs.KeyBroker, open.broker)
	}
}

// removeSessionLocked records the end of a broker's session. Requires: mu held.
func (s *Server) removeSessionLocked(broker string) {
	delete(s.mu.sessions, broker)
	s.metrics.sessions.Dec()
	s.mu.disconnectedSince[broker] = time.Now()
}

func (s *Server) report(open *session, r *srtmv1.NodeReport, now mono.Time) error {
	var bad badRequest
	for i, t := range r.Topics {
		if d := t.Step.AsDuration(); d <= 0 || d > time.Hour {
			bad.Add(fmt.Sprintf("report.topics[%d].step", i), "%v: want above 0, up to 1h", d)
		}
		if limit := uint64(1) << 62; t.Offered > limit || t.MaxBacklog > limit || t.Backlog > limit || t.BurstNeeded > limit {
			bad.Add(fmt.Sprintf("report.topics[%d]", i), "counts above 2^62")
		}
	}
	if err := bad.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.sessions[open.broker] != open {
		return errReplaced
	}
	for _, l := range r.Topics {
		s.mu.machine.Report(open.broker, l.Topic, share.Step{
			At: now, Length: l.Step.AsDuration(), Offered: l.Offered,
			MaxBacklog: int64(l.MaxBacklog), Backlog: int64(l.Backlog), Peak: int64(l.BurstNeeded),
		})
	}
	return nil
}

var policies = service.Enum[srtmv1.LeasePolicy, ledger.Policy]{
	srtmv1.LeasePolicy_LEASE_POLICY_UNSPECIFIED: ledger.Leaseless,
	srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE:   ledger.Available,
	srtmv1.LeasePolicy_LEASE_POLICY_STRICT:      ledger.Strict,
}

type metrics struct {
	sessions  prometheus.Gauge
	lapsed    prometheus.Counter
	grants    prometheus.Counter
	proposals *prometheus.CounterVec // by result
}

func newMetrics() *metrics {
	return &metrics{
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "srtm_tbadaptor_sessions", Help: "Brokers that are connected.",
		}),
		lapsed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "srtm_tbadaptor_leases_lapsed_total", Help: "Leases of brokers that ended without a renewal.",
		}),
		grants: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "srtm_tbadaptor_grants_total", Help: "Grants sent to brokers.",
		}),
		proposals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "srtm_tbadaptor_proposals_total", Help: "Runs of a share rule over a topic, by what became of them.",
		}, []string{"result"}),
	}
}

func (m *metrics) register(reg prometheus.Registerer) error {
	return errors.Join(reg.Register(m.sessions), reg.Register(m.lapsed), reg.Register(m.grants), reg.Register(m.proposals))
}

// State is the content of /debug/state: the ledger, and the topics that await hellos.
type State struct {
	Topics    []ledger.TopicView `json:"topics"`
	Connected []string           `json:"connected"`
	Adopting  []string           `json:"adopting"`
}

// State returns a copy of the adaptor's state.
func (s *Server) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := State{Topics: s.mu.machine.Ledger.View(), Connected: slices.AppendSeq([]string{}, maps.Keys(s.mu.sessions)), Adopting: []string{}}
	slices.Sort(state.Connected)
	for _, v := range state.Topics {
		if len(v.Awaited) > 0 {
			state.Adopting = append(state.Adopting, v.Topic)
		}
	}
	return state
}
