package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tbadaptor/holder"
	"github.com/srtm-io/srtm/tokenbucket"
)

type (
	controlLink = link[srtmv1.BrokerMessage]
	grantLink   = link[srtmv1.NodeMessage]
)

// Names of the sessions, in logs and metrics.
const (
	controlSession = "control"
	grantSession   = "grants"
)

// owner is the only goroutine that uses the node and the holdings. Only orders.go also calls the node:
// Node.ChangeChannels.
type owner struct {
	// Set once.
	*core
	ctx      context.Context // ends when the agent stops
	sessions *sync.WaitGroup // the agent's goroutines

	// Owned by run.
	holdings *holder.Holdings
	lease    holder.Lease
	fresh    bool        // the broker has never been in a cluster
	anew     bool        // the broker was removed from the cluster and has no shares since
	term     uint64      // largest term that an adaptor sent
	alarm    *time.Timer // for the lease
	retry    mono.Time   // when to repeat a failed Store.SetAlone
	// disk has the bases in the store. unsaved has the tokens released by grants that are not
	// acknowledged, because the store does not have their bases yet.
	disk     map[string]Base
	unsaved  map[string]tokenbucket.Tokens
	records  map[string][]byte        // the loaddistributor's records of topics, if there is no store
	captures map[string]*captureState // by topic; empty while control is nil
	flushes  uint64                   // number of calls of flushCaptures
	flush    *time.Timer              // for the next pieces; stopped without captures
	channels channels
	control  *controlLink // nil while down
	grants   *grantLink   // nil while down
	ticker   *time.Ticker
	interval time.Duration
	last     time.Time // time of the last Node.Report
	// changes: the last report was sent to the loaddistributor. takesChanges: the loaddistributor
	// accepts reports of changes.
	changes, takesChanges bool

	grantAddress string
	stopGrants   context.CancelFunc // stops the reconnector of grantAddress

	controlError, grantsError string // why the last session ended
	controlClaim, grantsClaim claim
	taken                     error     // *TakenError: run must end
	woken                     mono.Time // when the pulse found that the process had not run; 0: running
	reconnectors              uint64    // number started; seeds the next reconnector
}

func newOwner(c *core, ctx context.Context, sessions *sync.WaitGroup) *owner {
	return &owner{
		core: c, ctx: ctx, sessions: sessions, fresh: c.cfg.Fresh,
		holdings: holder.New(), lease: holder.Lease{Strict: c.cfg.Policy == Strict},
		disk: map[string]Base{}, unsaved: map[string]tokenbucket.Tokens{},
		records:  map[string][]byte{},
		channels: newChannels(),
		captures: map[string]*captureState{}, interval: DefaultReportInterval, stopGrants: func() {},
	}
}

// run returns nil when ctx ends, and *TakenError when the broker's id belongs to another
// process.
func (o *owner) run(ctx context.Context) error {
	o.ticker = time.NewTicker(o.interval)
	defer o.ticker.Stop()
	defer func() { o.stopGrants() }()
	o.alarm = time.NewTimer(time.Hour)
	defer o.alarm.Stop()
	o.flush = time.NewTimer(time.Hour)
	o.flush.Stop()
	defer func() { o.endCaptures() }()
	defer func() {
		o.connected.Store(false)
		o.channelsDown()
		o.channels.retry.Stop()
	}()
	o.last = time.Now()
	o.resume()
	o.publish()
	for {
		o.setAlarm()
		select {
		case <-o.alarm.C:
			o.keepLease(clock.Mono())
		case <-o.flush.C:
			o.flushCaptures(clock.Mono())
		case <-o.channels.retry.C:
			o.requestChannels()
		case f := <-o.events:
			f(o)
		case <-o.ticker.C:
			// Not the tick's time: after a Reset an older tick may follow.
			o.report(time.Now())
			o.saveAgain()
			o.publish()
		case <-ctx.Done():
			return nil
		}
		if o.taken != nil {
			o.publish()
			return o.taken
		}
	}
}

func (a *core) controlReconnector(ctx context.Context) reconnector[srtmv1.BrokerMessage, srtmv1.ControllerMessage] {
	var orders *orderQueue // worker of the current session
	return reconnector[srtmv1.BrokerMessage, srtmv1.ControllerMessage]{
		name: controlSession, addresses: a.cfg.loadDistributors(), options: a.cfg.DialOptions, log: a.cfg.Log, rng: a.rng(0),
		open: func(ctx context.Context, conn *grpc.ClientConn) (grpc.BidiStreamingClient[srtmv1.BrokerMessage, srtmv1.ControllerMessage], error) {
			return srtmv1.NewBrokerServiceClient(conn).Session(ctx, grpc.WaitForReady(true))
		},
		up: func(l *controlLink) {
			orders = startOrders(a.node, func(upTo uint64, faults []*srtmv1.ChannelFault) {
				a.do(ctx, func(o *owner) { o.channelsApplied(l, upTo, faults) })
			})
			a.do(ctx, func(o *owner) { o.controlUp(l) })
		},
		in: func(l *controlLink, m *srtmv1.ControllerMessage) {
			if order := m.GetChannelOrder(); order != nil {
				orders.put(order)
				return
			}
			if !changesTopic(m) {
				a.do(ctx, func(o *owner) { o.controlIn(l, m) })
				return
			}
			orders.wait()
			done := make(chan struct{})
			a.do(ctx, func(o *owner) {
				defer close(done)
				o.controlIn(l, m)
			})
			select {
			case <-done:
			case <-ctx.Done():
			}
		},
		down: func(l *controlLink, err error) {
			a.do(ctx, func(o *owner) { o.controlDown(l, err) })
			orders.end() // the next session's PrepareTopic may have a later version
		},
	}
}

// changesTopic reports whether m must be ordered with ChannelOrders.
func changesTopic(m *srtmv1.ControllerMessage) bool {
	switch m.Message.(type) {
	case *srtmv1.ControllerMessage_Prepare, *srtmv1.ControllerMessage_Remove, *srtmv1.ControllerMessage_Seek, *srtmv1.ControllerMessage_TakeOver:
		return true
	}
	return false
}

func (o *owner) controlUp(l *controlLink) {
	cfg := &o.cfg
	topics := o.node.Topics()
	slices.Sort(topics)
	o.control, o.changes, o.takesChanges = l, false, false
	o.controlClaim.lastHello = clock.Mono()
	o.connected.Store(true)
	l.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Hello{Hello: &srtmv1.BrokerHello{
		BrokerId: cfg.BrokerID, Instance: cfg.Instance,
		TcpAddress: cfg.TCPAddress, HttpAddress: cfg.HTTPAddress, MqttAddress: cfg.MQTTAddress, MqttsAddress: cfg.MQTTSAddress,
		Version: cfg.Version, Mcap: cfg.Mcap, Topics: topics, Hostname: cfg.Hostname, Anew: o.anew, Seeks: true,
		Durability: o.cfg.Durability, Stamp: uint64(o.controlClaim.lastHello), DataPath: cfg.DataPath, Lock: cfg.Lock,
		Fresh: o.fresh && len(topics) == 0,
	}}})
}

func (o *owner) controlDown(l *controlLink, err error) {
	if o.control == l {
		o.control = nil
		o.connected.Store(false)
		o.channelsDown()
		o.endCaptures()
		o.controlError = err.Error()
		if service.Reason(err) == brokerRemoved {
			o.leave()
		}
		o.refused(&o.controlClaim, err, clock.Mono())
		o.metrics.connected.WithLabelValues(controlSession).Set(0)
		o.publish()
	}
}

// brokerRemoved is the reason that a loaddistributor gives when an operator has removed this broker.
const brokerRemoved = "BROKER_REMOVED"

// leave gives up every share, as other brokers hold the shares now. Then the broker may join again.
func (o *owner) leave() {
	o.cfg.Log.Error("this broker was removed from the cluster; it drops its shares and joins as a new broker", "topics", len(o.holdings.Topics()))
	o.anew = o.giveUp(errRemoved)
}

// giveUp removes every share from the node and from the disk, and reports whether none is left. giveUp
// cuts the grant session with cause, because its hello listed the shares.
func (o *owner) giveUp(cause error) (empty bool) {
	for _, topic := range o.holdings.Topics() {
		if o.holdings.Of(topic).Prepared {
			// An unknown topic has no share.
			_, _ = o.node.Grant(topic, tokenbucket.Share{}, tokenbucket.Share{}, mono.Never, mono.Never, 0)
		}
		o.holdings.GivenUp(topic)
	}
	empty = true
	for topic := range maps.Clone(o.disk) {
		empty = o.save(topic) && empty
	}
	clear(o.unsaved)
	if o.grants != nil {
		o.grants.cut(cause)
		o.grantsOver()
	}
	return empty
}

func (o *owner) controlIn(l *controlLink, m *srtmv1.ControllerMessage) {
	switch m := m.Message.(type) {
	case *srtmv1.ControllerMessage_Hello:
		o.welcome(l, m.Hello)
	case *srtmv1.ControllerMessage_Prepare:
		unknown, err := o.prepare(m.Prepare)
		o.resultWith(l, m.Prepare.Request, unknown, err)
	case *srtmv1.ControllerMessage_Remove:
		o.result(l, m.Remove.Request, o.remove(m.Remove))
	case *srtmv1.ControllerMessage_Keep:
		if exists, _ := o.node.Has(m.Keep.Topic); exists {
			o.saveRecord(m.Keep.Topic, m.Keep.Record)
		}
	case *srtmv1.ControllerMessage_Recall:
		l.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Records{Records: o.recall(m.Recall.Topics)}})
	case *srtmv1.ControllerMessage_Seek:
		r := o.node.Seek(m.Seek.Topic, m.Seek.Channel, m.Seek.To, m.Seek.Empty)
		r.Request = m.Seek.Request
		l.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_SeekResult{SeekResult: r}})
	case *srtmv1.ControllerMessage_ChannelAnswer:
		o.channelAnswer(m.ChannelAnswer)
	case *srtmv1.ControllerMessage_TakeOver:
		o.takeOver(l, m.TakeOver)
	case *srtmv1.ControllerMessage_Drain:
		o.drain(m.Drain)
	case *srtmv1.ControllerMessage_Nudge:
		o.nudge(m.Nudge)
	case *srtmv1.ControllerMessage_Capture:
		o.capture(m.Capture, clock.Mono())
	}
	// Other messages are from a later version, which must not rely on this agent.
}

func (o *owner) remove(m *srtmv1.RemoveTopic) (err error) {
	if m.IfUnused {
		err = o.node.RemoveUnused(m.Topic, m.Uncreated)
	} else {
		err = o.node.Remove(m.Topic)
	}
	if err == nil {
		o.holdings.Removed(m.Topic)
		o.save(m.Topic)
	}
	if err == nil || m.Uncreated { // no topic must be rebuilt from the record of a failed creation
		o.saveRecord(m.Topic, nil)
	}
	return err
}

// saveRecord stores the loaddistributor's record of a topic. Without a store the record is lost
// when the process ends.
func (o *owner) saveRecord(topic string, record []byte) {
	if store := o.cfg.Store; store != nil {
		if err := store.Keep(topic, record); err != nil {
			o.cfg.Log.Error("cannot save the loaddistributor's record of the topic", obs.KeyTopic, topic, obs.KeyError, err)
		}
	} else if len(record) > 0 {
		o.records[topic] = record
	} else {
		delete(o.records, topic)
	}
}

// maxRecords bounds an answer to RecallTopics in bytes, except for the first record.
const maxRecords = 1 << 20

func (o *owner) recall(topics []string) *srtmv1.TopicRecords {
	answer := &srtmv1.TopicRecords{}
	size := 0
	for _, topic := range topics {
		record := o.records[topic]
		if store := o.cfg.Store; store != nil {
			record = store.Kept(topic)
		}
		if size += len(topic) + len(record); size > maxRecords && len(answer.Records) > 0 {
			break
		}
		answer.Records = append(answer.Records, &srtmv1.TopicRecord{Topic: topic, Record: record})
	}
	return answer
}

func (o *owner) drain(d *srtmv1.DrainPublishers) {
	if o.cfg.DrainPublishers == nil {
		return
	}
	n := o.cfg.DrainPublishers(d.Topic, setOf(d.ClientIds))
	o.cfg.Log.Info("publishers move", obs.KeyTopic, d.Topic, obs.KeyCount, len(d.ClientIds), "connections", n)
}

// takeOver answers when the take-over is complete, which may take long.
func (o *owner) takeOver(l *controlLink, m *srtmv1.TakeOver) {
	if o.cfg.TakeOver == nil {
		o.result(l, m.Request, errors.New("this broker has no replicated topics (--durability=replicated)"))
		return
	}
	o.cfg.Log.Info("taking over a topic of another broker", obs.KeyTopic, m.Topic, obs.KeyBroker, m.FromBrokerId)
	go func() {
		start := time.Now()
		n, err := o.cfg.TakeOver(m)
		o.do(o.ctx, func(o *owner) {
			if err == nil {
				o.cfg.Log.Info("took over a topic of another broker", obs.KeyTopic, m.Topic, obs.KeyBroker, m.FromBrokerId, obs.KeyCount, n, obs.KeyDuration, time.Since(start))
			}
			o.result(l, m.Request, err)
		})
	}()
}

func (o *owner) nudge(d *srtmv1.NudgeConsumers) {
	if o.cfg.NudgeConsumers == nil {
		return
	}
	n := o.cfg.NudgeConsumers(d.Topic, setOf(d.Channels))
	o.cfg.Log.Info("consumers are to look for another broker", obs.KeyTopic, d.Topic, "channels", len(d.Channels), "connections", n)
}

func setOf(names []string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

func (o *owner) result(l *controlLink, request uint64, err error) { o.resultWith(l, request, nil, err) }

// resultWith is result with the channels that the control plane does not know.
func (o *owner) resultWith(l *controlLink, request uint64, unknown []*srtmv1.TopicChannel, err error) {
	r := &srtmv1.PrepareResult{Request: request, Channels: unknown}
	if err != nil {
		r.Error = err.Error()
	}
	l.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_PrepareResult{PrepareResult: r}})
}

// welcome handles the loaddistributor's hello, which has the report interval and the grant address.
func (o *owner) welcome(l *controlLink, h *srtmv1.ControllerHello) {
	log := o.cfg.Log
	o.anew, o.fresh, o.takesChanges = false, false, h.GetReportChanges()
	o.controlClaim.accepted()
	if key := h.GetForwardKey(); len(key) > 0 && o.cfg.ForwardKey != nil {
		o.cfg.ForwardKey(key)
	}
	o.metrics.connected.WithLabelValues(controlSession).Set(1)
	if d := h.GetReportInterval().AsDuration(); d >= minReportInterval && d <= maxReportInterval {
		if d != o.interval {
			o.interval = d
			o.ticker.Reset(d)
		}
	} else {
		log.Warn("report interval out of range; kept the old one", obs.KeyDuration, d, "kept", o.interval)
	}
	address := h.GetGrantAddress()
	if address == "" {
		address = l.address
	}
	log.Info("joined the loaddistributor", obs.KeyAddress, l.address, "grants", address, "interval", o.interval)
	if address != o.grantAddress {
		o.stopGrants()
		o.grantsOver()
		o.grantAddress = address
		ctx, stop := context.WithCancel(o.ctx)
		o.stopGrants = stop
		o.reconnectors++
		k := o.grantReconnector(ctx, address, o.reconnectors)
		o.sessions.Go(func() { k.run(ctx) })
	}
	o.publish()
}

// outlived reports whether the node's topic of this name is an earlier topic that was deleted.
func (o *owner) outlived(p *srtmv1.PrepareTopic) bool {
	current, stored := p.GetIdentity(), o.node.Identity(p.Topic)
	if current == nil || proto.Equal(current, stored) {
		return false
	}
	exists, _ := o.node.Has(p.Topic)
	return exists && (p.DeletedBefore || stored.GetLog() == current.Log && stored.GetCreated() < current.Created)
}

// flagOf returns a durability as a flag value.
func flagOf(d srtmv1.Durability) string {
	return strings.ToLower(strings.TrimPrefix(d.String(), "DURABILITY_"))
}

func (o *owner) prepare(p *srtmv1.PrepareTopic) (unknown []*srtmv1.TopicChannel, err error) {
	q, latency := p.GetSlo().GetQuantile(), p.GetSlo().GetLatency().AsDuration()
	if !(q > 0 && q < 1) || latency <= 0 {
		return nil, fmt.Errorf("SLO with quantile %v and latency %v: want one in (0, 1) and one above 0", q, latency)
	}
	if d := p.Durability; d != srtmv1.Durability_DURABILITY_UNSPECIFIED && d != o.cfg.Durability {
		return nil, fmt.Errorf("the topic wants --durability=%s, and this broker has %s", flagOf(d), flagOf(o.cfg.Durability))
	}
	if o.outlived(p) {
		o.cfg.Log.Warn("the topic was deleted and recreated while this broker was disconnected; deleting the old topic and its messages", obs.KeyTopic, p.Topic)
		if err := o.node.Remove(p.Topic); err != nil {
			return nil, err
		}
	}
	if _, prepared := o.node.Has(p.Topic); !prepared {
		o.holdings.Missing(p.Topic)
	}
	if unknown, err = o.node.Prepare(p.Topic, p.Channels, p.ChannelsVersion, latency, q, p.OverLimit, p.Identity); err != nil {
		return nil, err
	}
	if err := o.node.Expire(p.Topic, service.ExpiryOf(p.Expiry), service.ChannelExpiryOf(p.ChannelExpiry)); err != nil {
		return nil, err
	}
	o.node.Pace(p.Topic, p.Pacing, p.Weights)
	o.node.Retire(p.Topic, p.Retiring && o.cfg.ForwardKey != nil)
	if len(p.Record) > 0 {
		o.saveRecord(p.Topic, p.Record)
	}
	if g, due := o.holdings.Prepared(p.Topic); due {
		o.apply(g)
		o.save(p.Topic)
	}
	return unknown, nil
}

func (a *core) grantReconnector(ctx context.Context, address string, n uint64) reconnector[srtmv1.NodeMessage, srtmv1.GrantMessage] {
	return reconnector[srtmv1.NodeMessage, srtmv1.GrantMessage]{
		name: grantSession, addresses: []string{address}, options: a.cfg.DialOptions, log: a.cfg.Log, rng: a.rng(n),
		open: func(ctx context.Context, conn *grpc.ClientConn) (grpc.BidiStreamingClient[srtmv1.NodeMessage, srtmv1.GrantMessage], error) {
			return srtmv1.NewGrantServiceClient(conn).Session(ctx, grpc.WaitForReady(true))
		},
		// do uses the reconnector's own context: messages of a replaced reconnector's session must not
		// reach the owner.
		up: func(l *grantLink) { a.do(ctx, func(o *owner) { o.grantUp(ctx, l) }) },
		in: func(l *grantLink, m *srtmv1.GrantMessage) {
			a.do(ctx, func(o *owner) { o.grantIn(l, m) })
		},
		down: func(l *grantLink, err error) { a.do(ctx, func(o *owner) { o.grantDown(l, err) }) },
	}
}

func (o *owner) grantUp(ctx context.Context, l *grantLink) {
	if ctx.Err() != nil {
		return // the reconnector was replaced meanwhile
	}
	o.grants = l
	o.metrics.connected.WithLabelValues(grantSession).Set(1)
	now := clock.Mono()
	o.lapse(now)
	o.lease.Requested, o.lease.Sent = now, 0
	o.grantsClaim.lastHello = now
	l.reply(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Hello{Hello: &srtmv1.NodeHello{
		BrokerId: o.cfg.BrokerID, Instance: o.cfg.Instance,
		Held: o.heldShares(), Policy: policyProto[o.cfg.Policy], Stamp: uint64(now), Term: o.term,
		TcpAddress: o.cfg.TCPAddress, Hostname: o.cfg.Hostname, DataPath: o.cfg.DataPath, Lock: o.cfg.Lock,
	}}})
	o.publish()
}

func (o *owner) grantDown(l *grantLink, err error) {
	if o.grants == l {
		o.grantsError = err.Error()
		o.grantsOver()
		o.refused(&o.grantsClaim, err, clock.Mono())
		o.publish()
	}
}

func (o *owner) grantsOver() {
	o.grants = nil
	o.metrics.connected.WithLabelValues(grantSession).Set(0)
}

func (o *owner) grantIn(l *grantLink, m *srtmv1.GrantMessage) {
	if o.grants != l {
		return
	}
	if term := max(m.GetLease().GetTerm(), m.GetGrant().GetTerm()); term >= o.term {
		o.term = term
	} else if term > 0 {
		o.cfg.Log.Error("the adaptor's term is over: refused", obs.KeyAddress, l.address, "term", term, "seen", o.term)
		o.metrics.grants.WithLabelValues("old_term").Inc()
		l.cut(errOldTerm)
		o.grantsOver()
		return
	}
	o.grantsClaim.accepted()
	if renewed := m.GetLease(); renewed != nil {
		o.renewed(renewed, clock.Mono())
		return
	}
	p := m.GetGrant()
	if p == nil {
		return // from a later version, which must not rely on this agent
	}
	g := holder.Grant{Topic: p.Topic, Epoch: p.Epoch, Share: service.ShareOf(p.Share), Flex: service.ShareOf(p.Flex), Tokens: tokenbucket.Tokens(p.TokensMilli)}
	if err := holder.Check(g); err != nil {
		// The refused grant changes nothing. Acknowledge the share in force.
		o.cfg.Log.Error("grant refused", obs.KeyTopic, p.Topic, obs.KeyEpoch, p.Epoch, obs.KeyError, err)
		o.metrics.grants.WithLabelValues("refused").Inc()
		o.ackPresent(p.Topic)
		return
	}
	v, released := o.holdings.Offer(g)
	o.metrics.grants.WithLabelValues(v.String()).Inc()
	switch v {
	case holder.InForce, holder.Kept:
		if v == holder.InForce {
			released = o.apply(g)
		}
		flexOver, allOver := o.lease.Ended(clock.Mono())
		if o.holdings.LapseOne(g.Topic, flexOver, allOver) {
			o.metrics.lapses.Inc()
		}
		if !o.save(g.Topic) {
			o.unsaved[g.Topic] = released
			return // an ack would confirm a base that is not on disk
		}
		delete(o.unsaved, g.Topic)
		o.ack(g.Topic, g.Epoch, o.holdings.Of(g.Topic).Share, released)
	case holder.Stale:
		o.ackPresent(g.Topic)
	case holder.Dropped:
		o.cfg.Log.Error("grant dropped: too many are kept for topics that do not exist", obs.KeyTopic, g.Topic, obs.KeyCount, o.holdings.Kept())
	}
}

// apply puts the share of a prepared topic in force.
func (o *owner) apply(g holder.Grant) (released tokenbucket.Tokens) {
	flexUntil, until := o.lease.Ends()
	if g.Flex == (tokenbucket.Share{}) {
		flexUntil = mono.Never
	}
	released, err := o.node.Grant(g.Topic, g.Share, g.Base(), flexUntil, until, g.Tokens)
	if err != nil {
		// An operator removed the topic through the broker's own API. The broker keeps the share in
		// case the topic comes back.
		o.cfg.Log.Error("no topic for the grant; kept", obs.KeyTopic, g.Topic, obs.KeyEpoch, g.Epoch, obs.KeyError, err)
		o.metrics.grants.WithLabelValues("failed").Inc()
		return o.holdings.Vanished(g)
	}
	o.holdings.Applied(g)
	o.cfg.Log.Debug("share in force", obs.KeyTopic, g.Topic, obs.KeyEpoch, g.Epoch,
		obs.KeyRate, g.Share.Rate.PerSecond(), obs.KeyBurst, g.Share.Burst)
	return released
}

// ackPresent acknowledges the topic's share in force, unless the disk has more.
func (o *owner) ackPresent(topic string) {
	if _, waits := o.unsaved[topic]; waits {
		return
	}
	in := o.holdings.Of(topic)
	o.ack(topic, in.Epoch, in.Share, 0)
}

func (o *owner) ack(topic string, epoch uint64, share tokenbucket.Share, released tokenbucket.Tokens) {
	if o.grants != nil {
		o.grants.reply(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Ack{Ack: &srtmv1.GrantAck{
			Topic: topic, Epoch: epoch, Share: service.ShareProto(share), ReleasedTokensMilli: int64(released),
		}}})
	}
}

// report gets the node's report and sends its parts to the loaddistributor and the adaptor. A report
// that cannot be sent is lost: stats of an interval are worthless after the window.
func (o *owner) report(now time.Time) {
	stats, changes := o.node.Report(!o.changes || !o.takesChanges)
	step := durationpb.New(max(1, now.Sub(o.last)))
	o.last = now
	var loads []*srtmv1.TopicLoad
	listed := make(map[string]bool, len(stats))
	for _, s := range stats {
		if s.Interval == nil {
			s.Interval = step
		}
		listed[s.Topic] = true
		if o.holdings.Of(s.Topic).Prepared {
			loads = append(loads, &srtmv1.TopicLoad{
				Topic: s.Topic, Step: s.Interval, Offered: s.Offered, MaxBacklog: s.MaxBacklog, Backlog: s.Backlog,
				BurstNeeded: s.BurstNeeded,
			})
		}
	}
	if changes {
		for _, topic := range o.holdings.Topics() {
			if !listed[topic] && o.holdings.Of(topic).Prepared {
				loads = append(loads, &srtmv1.TopicLoad{Topic: topic, Step: step})
			}
		}
	}
	o.changes = o.control != nil && o.control.report(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Report{
		Report: &srtmv1.BrokerReport{Topics: stats, Changes: changes}}})
	if !o.changes {
		o.metrics.dropped.WithLabelValues(controlSession).Inc()
	}
	if o.grants == nil || !o.grants.report(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Report{
		Report: &srtmv1.NodeReport{Topics: loads}}}) {
		o.metrics.dropped.WithLabelValues(grantSession).Inc()
	}
}

func (o *owner) publish() {
	s := &State{
		BrokerID: o.cfg.BrokerID, Instance: o.cfg.Instance,
		Control:   SessionState{o.cfg.LoadDistributor, o.control != nil, o.controlError},
		Grants:    SessionState{o.grantAddress, o.grants != nil, o.grantsError},
		Kept:      o.holdings.Kept(),
		Reporting: o.interval,
		Policy:    o.cfg.Policy,
		LeaseLeft: max(0, o.lease.FlexUntil.Sub(clock.Mono())),
		Held:      []HoldingState{},
		Capturing: slices.Sorted(maps.Keys(o.captures)),
	}
	for _, topic := range o.holdings.Topics() {
		in := o.holdings.Of(topic)
		s.Held = append(s.Held, HoldingState{
			Topic: topic, Epoch: in.Epoch, RateMilli: int64(in.Share.Rate), Burst: in.Share.Burst,
			BaseRateMilli: int64(in.Base().Rate), BaseBurst: in.Base().Burst,
		})
	}
	o.state.Store(s)
}
