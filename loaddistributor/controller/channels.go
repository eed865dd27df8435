package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/nsq/wire"
)

// A broker receives all channels of a topic with PrepareTopic, and each later change with
// a ChannelOrder. Both contain committed state and are sent in commit order. So an order
// after a PrepareTopic in the same session completes the PrepareTopic.
//
// Every holder of the topic receives the order. A broker without a session receives the
// channels with its next PrepareTopic.

// channelOrder is an unanswered ChannelOrder.
type channelOrder struct {
	number uint64
	topic  string
	waits  []*channelWait
}

// maxChannelOrders limits the unanswered orders of a broker.
const maxChannelOrders = 100_000

// channelWait waits until brokers have applied the committed channels of a topic. Guarded
// by the controller's lock.
type channelWait struct {
	topic    string
	version  uint64 // catalog version that must be committed first
	started  bool
	brokers  map[string]int // number of missing answers, by broker
	finished func()         // called once, with the lock held, after all answers
}

// settle records an answer of a broker, or the end of its session.
func (w *channelWait) settle(broker string) {
	if w.brokers[broker]--; w.brokers[broker] <= 0 {
		delete(w.brokers, broker)
	}
	if len(w.brokers) == 0 && w.started {
		w.finished()
	}
}

// channels informs brokers of the catalog's channels. The caller of a method holds the
// controller's lock, which guards changed and waiting.
type channels struct {
	cat     *pipeline
	brokers *brokers
	life    *lifetime
	changed map[string]map[string]bool // channel names by topic: changes that are applied but not sent yet
	waiting []*channelWait             // for a version of the catalog, oldest first
}

// noteChannels records a change of channels for tellChannels.
func (ch *channels) noteChannels(e catalog.ChannelsChanged) {
	if ch.changed == nil {
		ch.changed = map[string]map[string]bool{}
	}
	names := ch.changed[e.Topic]
	if names == nil {
		names = make(map[string]bool, len(e.Names))
		ch.changed[e.Topic] = names
	}
	for _, name := range e.Names {
		names[name] = true
	}
}

// tellChannels sends the changed channels to the brokers of each topic. Waits for the
// committed version then continue as waits for the brokers' answers.
func (ch *channels) tellChannels() {
	for _, name := range slices.Sorted(maps.Keys(ch.changed)) {
		topic, found := ch.cat.committed.Topic(name)
		if !found {
			continue
		}
		names := slices.Sorted(maps.Keys(ch.changed[name]))
		for _, id := range topic.Holders() {
			if s := ch.brokers.sessions[id]; s != nil {
				ch.orderChannels(s, topic, names)
			}
		}
	}
	ch.changed = nil
	for len(ch.waiting) > 0 && ch.waiting[0].version <= ch.cat.committed.Version() {
		ch.awaitBrokers(ch.waiting[0])
		ch.waiting = ch.waiting[1:]
	}
}

// orderChannels sends a broker the named channels as in the catalog.
func (ch *channels) orderChannels(s *Session, topic catalog.Topic, names []string) {
	if len(s.orders) >= maxChannelOrders {
		s.out.End(ErrNoAnswer)
		return
	}
	ch.brokers.lastRequest++
	order := &srtmv1.ChannelOrder{Request: ch.brokers.lastRequest, Topic: topic.Spec.Name(), Identity: ch.cat.identity(topic), Version: ch.cat.committed.Version()}
	for _, name := range names {
		if c, found := topic.Channel(name); found {
			order.Channels = append(order.Channels, channelProto(c))
		} else {
			order.Deleted = append(order.Deleted, name)
		}
	}
	s.orders = append(s.orders, &channelOrder{number: order.Request, topic: order.Topic})
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_ChannelOrder{ChannelOrder: order}})
}

// whenApplied arranges that finished is called, with the lock held, after the staged
// changes of a topic's channels are committed and the connected brokers of the topic have
// applied them.
func (ch *channels) whenApplied(topic string, finished func()) *channelWait {
	w := &channelWait{topic: topic, version: ch.cat.next.Version(), finished: finished}
	if ch.cat.committed.Version() >= w.version {
		ch.awaitBrokers(w)
	} else {
		ch.waiting = append(ch.waiting, w)
	}
	return w
}

// awaitBrokers makes w wait for the outstanding answers of the topic's connected brokers.
func (ch *channels) awaitBrokers(w *channelWait) {
	w.brokers = map[string]int{}
	topic, found := ch.cat.committed.Topic(w.topic)
	if found {
		for _, id := range topic.Holders() {
			if s := ch.brokers.sessions[id]; s != nil {
				w.await(s)
			}
		}
	}
	if w.started = true; len(w.brokers) == 0 {
		w.finished()
	}
}

func (w *channelWait) await(s *Session) {
	for _, r := range s.requests {
		if r.topic == w.topic && r.prepares && !r.answered {
			r.waits = append(r.waits, w)
			w.brokers[s.broker]++
		}
	}
	for i := len(s.orders) - 1; i >= 0; i-- { // the answer to the last order answers all
		if s.orders[i].topic == w.topic {
			s.orders[i].waits = append(s.orders[i].waits, w)
			w.brokers[s.broker]++
			return
		}
	}
}

// applied handles a broker's answer to orders. A failed order is repeated by
// PrepareTopic.
func (ch *channels) applied(s *Session, m *srtmv1.ChannelsApplied) (faults []*srtmv1.ChannelFault, err error) {
	if m.Request > ch.brokers.lastRequest {
		return nil, &BadMessage{Field: "channels_applied.request", Problem: fmt.Sprintf("%d was never sent", m.Request)}
	}
	failed := map[uint64]*srtmv1.ChannelFault{}
	for _, f := range m.Faults {
		failed[f.GetRequest()] = f
	}
	for len(s.orders) > 0 && s.orders[0].number <= m.Request {
		order := s.orders[0]
		s.orders = s.orders[1:]
		if f := failed[order.number]; f != nil {
			faults = append(faults, f)
			s.unprepared[order.topic] = true
		}
		for _, w := range order.waits {
			w.settle(s.broker)
		}
	}
	return faults, nil
}

// checkChannels returns the first fault in a broker's list of channels.
func checkChannels(field string, list []*srtmv1.TopicChannel) error {
	if n := len(list); n > catalog.MaxChannels {
		return &BadMessage{Field: field, Problem: fmt.Sprintf("%d, at most %d", n, catalog.MaxChannels)}
	}
	seen := make(map[string]bool, len(list))
	for i, c := range list {
		if name := c.GetName(); !wire.ValidChannelName(name) || wire.Ephemeral(name) || seen[name] {
			return &BadMessage{Field: fmt.Sprintf("%s[%d]", field, i), Problem: fmt.Sprintf("%.80q is no name of a durable channel, or appears twice", name)}
		}
		seen[c.GetName()] = true
	}
	return nil
}

// createChannels stages the channels that the topic lacks, up to the limit, and returns
// the names of the rest. Requires: the catalog has the topic.
func (ch *channels) createChannels(topic catalog.Topic, list []*srtmv1.TopicChannel) (refused []string, err error) {
	var fresh []catalog.Channel
	for _, c := range list {
		switch _, found := topic.Channel(c.GetName()); {
		case found:
		case len(topic.Channels)+len(fresh) >= catalog.MaxChannels:
			refused = append(refused, c.GetName())
		default:
			fresh = append(fresh, catalog.Channel{Name: c.GetName(), Paused: c.GetPaused()})
		}
	}
	if fresh != nil {
		_, err = ch.cat.stage(catalog.ChannelsCreated{Topic: topic.Spec.Name(), Channels: fresh})
	}
	return refused, err
}

// adoptChannels adds a broker's channels of a topic to the catalog, and calls finished after the
// brokers of the topic have them. It returns the channels beyond the limit.
func (ch *channels) adoptChannels(topic string, list []*srtmv1.TopicChannel, finished func()) (refused []string) {
	is, found := ch.cat.next.Topic(topic)
	if !found || is.State == catalog.Deleting {
		finished()
		return nil
	}
	refused, err := ch.createChannels(is, list)
	if err != nil { // only at the journal's end: the next controller gets the channels again
		finished()
		return refused
	}
	ch.whenApplied(topic, finished)
	return refused
}

// channelRequest handles changes of channels by clients of a broker.
func (ch *channels) channelRequest(s *Session, m *srtmv1.ChannelRequest) error {
	if err := checkChannels("channel_request.channels", m.Channels); err != nil {
		return err
	}
	answer := &srtmv1.ChannelAnswer{Request: m.Request}
	stage := func() {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_ChannelAnswer{ChannelAnswer: answer}})
	}
	refuse := func(reason, text string) {
		answer.Reason, answer.Error = reason, text
		stage()
	}
	topic, found := ch.cat.next.Topic(m.Topic)
	if !found || topic.State == catalog.Deleting || !ch.cat.next.Holds(m.Topic, s.broker) && !ofMQTTSession(m) {
		refuse("TOPIC_UNKNOWN", fmt.Sprintf("the control plane does not have topic %s on this broker", m.Topic))
		return nil
	}
	var err error
	if m.Change == srtmv1.ChannelChange_CHANNEL_CHANGE_CREATE {
		if answer.Refused, err = ch.createChannels(topic, m.Channels); len(answer.Refused) > 0 {
			answer.Reason = "TOO_MANY_CHANNELS"
			answer.Error = fmt.Sprintf("topic %s has %d channels, as many as a topic may have", m.Topic, catalog.MaxChannels)
		}
		// Send channels that are already in the catalog: the broker does not know that.
		if shown, found := ch.cat.committed.Topic(m.Topic); found {
			var names []string
			for _, c := range m.Channels {
				if known, found := shown.Channel(c.GetName()); found && known.Created != c.GetCreated() {
					names = append(names, c.GetName())
				}
			}
			if names != nil {
				ch.orderChannels(s, shown, names)
			}
		}
	} else {
		err = ch.changeChannels(topic, s.broker, m.Change, m.Channels)
	}
	switch {
	case errors.Is(err, catalog.ErrChannelUnknown):
		refuse("CHANNEL_UNKNOWN", err.Error())
	case errors.Is(err, errChannelInUse):
		refuse("CHANNEL_IN_USE", err.Error())
	case err != nil:
		refuse("FAILED", err.Error())
	default:
		ch.whenApplied(m.Topic, stage)
	}
	return nil
}

// ofMQTTSession reports whether a request claims or deletes channels of MQTT clients. A client may be
// connected to a broker without the topic.
func ofMQTTSession(m *srtmv1.ChannelRequest) bool {
	switch m.Change {
	case srtmv1.ChannelChange_CHANNEL_CHANGE_CLAIM, srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE, srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED:
		return !slices.ContainsFunc(m.Channels, func(c *srtmv1.TopicChannel) bool { return !strings.HasPrefix(c.GetName(), names.ChannelPrefix) })
	}
	return false
}

// errChannelInUse reports that a channel has consumers, or belongs to a session at another broker.
var errChannelInUse = errors.New("the channel has consumers, or a session at another broker")

// requireUnused returns errChannelInUse if a broker reports consumers of one of the channels, or if another
// broker has claimed the channel after requester.
func (ch *channels) requireUnused(topic catalog.Topic, requester string, list []*srtmv1.TopicChannel) error {
	read := ch.brokers.read(topic.Spec.Name(), topic.Holders())
	for _, c := range list {
		known, _ := topic.Channel(c.GetName())
		user := ""
		if known.Session != requester {
			user = known.Session
		}
		for broker, channels := range read {
			if slices.Contains(channels, c.GetName()) {
				user = broker
			}
		}
		if user != "" {
			return fmt.Errorf("topic %s, channel %q, broker %s: %w", topic.Spec.Name(), c.GetName(), user, errChannelInUse)
		}
	}
	return nil
}

// changeChannels stages a pause, an unpause, a claim or a deletion, if it changes anything. requester
// is a broker; empty: an operator. Deleting a missing channel changes nothing.
func (ch *channels) changeChannels(topic catalog.Topic, requester string, change srtmv1.ChannelChange, list []*srtmv1.TopicChannel) error {
	name := topic.Spec.Name()
	if change == srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED {
		if err := ch.requireUnused(topic, requester, list); err != nil {
			return err
		}
		change = srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE
	}
	var changed []catalog.Channel
	for _, c := range list {
		known, found := topic.Channel(c.GetName())
		set := known
		switch change {
		case srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE:
			if found {
				changed = append(changed, catalog.Channel{Name: known.Name})
			}
			continue
		case srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE, srtmv1.ChannelChange_CHANNEL_CHANGE_UNPAUSE:
			set.Paused = change == srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE
		case srtmv1.ChannelChange_CHANNEL_CHANGE_CLAIM:
			set.Session = requester
		default:
			return fmt.Errorf("topic %s: this release does not know change %d of channels", name, change)
		}
		if !found {
			return fmt.Errorf("topic %s, channel %q: %w", name, c.GetName(), catalog.ErrChannelUnknown)
		}
		if set != known {
			set.Created = 0
			changed = append(changed, set)
		}
	}
	if changed == nil {
		return nil
	}
	var err error
	if change == srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE {
		_, err = ch.cat.stage(catalog.ChannelsDeleted{Topic: name, Channels: changed})
	} else {
		_, err = ch.cat.stage(catalog.ChannelsSet{Topic: name, Channels: changed})
	}
	return err
}

// Channels returns the durable channels of a topic, by name. Errors:
// catalog.ErrTopicUnknown, ErrUnread.
func (r *View) Channels(topic string) ([]*srtmv1.TopicChannel, error) {
	t, err := r.Topic(topic)
	return channelsProto(t.Channels), err
}

// ChangeChannel creates, pauses, unpauses or deletes channels of a topic. It returns when
// the change is committed and the connected brokers of the topic have applied it, or
// after Config.PrepareTimeout. pending lists the brokers of the topic that will apply it
// later, by id. Errors: *NotLeaderError, ErrClosing, ErrNotCommitted;
// catalog.ErrTopicUnknown, ErrTopicState, ErrChannelUnknown; *catalog.ChannelsError.
func (c *Controller) ChangeChannel(ctx context.Context, topic string, change srtmv1.ChannelChange, names ...string) (pending []string, err error) {
	if err := c.knowledge.following(); err != nil {
		return nil, err
	}
	list := make([]*srtmv1.TopicChannel, len(names))
	for i, name := range names {
		list[i] = &srtmv1.TopicChannel{Name: name}
	}
	finished := make(chan struct{})
	c.mu.Lock()
	w, err := c.channels.orderChange(topic, change, list, func() { close(finished) })
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	limit, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	select {
	case <-finished:
	case <-limit.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !w.started {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		return nil, ErrNotCommitted
	}
	t, _ := c.cat.committed.Topic(topic)
	if t.Spec == nil {
		return nil, nil // deleted meanwhile, with its channels
	}
	for _, id := range t.Holders() {
		if w.brokers[id] > 0 || c.brokers.sessions[id] == nil {
			pending = append(pending, id)
		}
	}
	c.cfg.Log.Info("channel changed", obs.KeyTopic, topic, obs.KeyChannel, names, "change", change.String(), "pending", pending)
	return pending, nil
}

// orderChange stages a change requested by an operator.
func (ch *channels) orderChange(topic string, change srtmv1.ChannelChange, list []*srtmv1.TopicChannel, finished func()) (*channelWait, error) {
	if ch.life.closing {
		return nil, ErrClosing
	}
	if ch.cat.halted != nil {
		return nil, ch.cat.halted
	}
	is, found := ch.cat.next.Topic(topic)
	switch {
	case !found:
		return nil, fmt.Errorf("topic %s: %w", topic, catalog.ErrTopicUnknown)
	case is.State == catalog.Deleting:
		return nil, fmt.Errorf("topic %s is %v: %w", topic, is.State, catalog.ErrTopicState)
	}
	if change == srtmv1.ChannelChange_CHANNEL_CHANGE_CREATE {
		fresh := slices.DeleteFunc(slices.Clone(list), func(c *srtmv1.TopicChannel) bool { _, found := is.Channel(c.Name); return found })
		if len(is.Channels)+len(fresh) > catalog.MaxChannels {
			return nil, &catalog.ChannelsError{Topic: topic, Present: len(is.Channels), New: len(fresh)}
		}
		if _, err := ch.createChannels(is, fresh); err != nil {
			return nil, err
		}
		return ch.whenApplied(topic, finished), nil
	}
	if change == srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE {
		for _, c := range list {
			if _, found := is.Channel(c.Name); !found {
				return nil, fmt.Errorf("topic %s, channel %q: %w", topic, c.Name, catalog.ErrChannelUnknown)
			}
		}
	}
	if err := ch.changeChannels(is, "", change, list); err != nil {
		return nil, err
	}
	return ch.whenApplied(topic, finished), nil
}

// SeekChannel moves a channel on the brokers of a topic, or only on the broker named by
// broker. It returns the results by broker, sorted by id. Without a place the brokers
// discard the channel's messages. Brokers without the channel are left out, unless no
// broker has the channel. Errors, before any broker gets a request: catalog.ErrTopicUnknown,
// ErrChannelUnknown, ErrBrokerUnknown, *BadMessage, ErrBrokerGone, ErrBrokerOld.
func (c *Controller) SeekChannel(ctx context.Context, topic, channel string, place *srtmv1.Place, broker string) ([]*srtmv1.SeekOutcome, error) {
	if err := c.knowledge.following(); err != nil {
		return nil, err
	}
	t, err := c.view.Topic(topic)
	if err != nil {
		return nil, err
	}
	if _, found := t.Channel(channel); !found && !wire.Ephemeral(channel) {
		return nil, fmt.Errorf("topic %s, channel %q: %w", topic, channel, catalog.ErrChannelUnknown)
	}
	waits, err := c.orderSeek(topic, channel, place, broker)
	if err != nil {
		return nil, err
	}
	limit, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	outcomes := make([]*srtmv1.SeekOutcome, len(waits))
	for i, w := range waits {
		var r *srtmv1.SeekResult
		select {
		case r = <-w.result:
		case <-limit.Done():
			r = c.giveUp(w)
		}
		outcomes[i] = &srtmv1.SeekOutcome{BrokerId: w.session.broker, Offset: r.Offset, Reason: r.Reason, Error: r.Error}
	}
	lacksChannel := func(o *srtmv1.SeekOutcome) bool { return o.Reason == "CHANNEL_UNKNOWN" }
	if slices.ContainsFunc(outcomes, func(o *srtmv1.SeekOutcome) bool { return !lacksChannel(o) }) {
		outcomes = slices.DeleteFunc(outcomes, lacksChannel)
	}
	if place == nil {
		c.cfg.Log.Info("channel emptied", obs.KeyTopic, topic, obs.KeyChannel, channel, "brokers", len(waits))
		return outcomes, nil
	}
	c.cfg.Log.Info("channel moved", obs.KeyTopic, topic, obs.KeyChannel, channel, "to", place.String(), "brokers", len(waits))
	return outcomes, nil
}

// seekWait is an unanswered order.
type seekWait struct {
	session *Session
	number  uint64
	result  <-chan *srtmv1.SeekResult
}

// orderSeek sends the order to all of the brokers, or to none.
func (c *Controller) orderSeek(topic, channel string, place *srtmv1.Place, broker string) (waits []seekWait, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.closing {
		return nil, ErrClosing
	}
	for _, b := range c.cat.committed.Brokers() {
		if broker != "" && b.ID != broker || !slices.Contains(c.cat.committed.Placed(b.ID), topic) {
			continue
		}
		s := c.brokers.sessions[b.ID]
		if s == nil {
			return nil, fmt.Errorf("broker %s of topic %s is disconnected; no broker got a request: %w", b.ID, topic, ErrBrokerGone)
		}
		if !s.canSeek {
			return nil, fmt.Errorf("broker %s of topic %s, release %s, nothing was done: %w", b.ID, topic, b.Version, ErrBrokerOld)
		}
		waits = append(waits, seekWait{session: s})
	}
	if len(waits) == 0 {
		return nil, fmt.Errorf("topic %s is not on broker %q: %w", topic, broker, catalog.ErrBrokerUnknown)
	}
	if _, offset := place.GetTo().(*srtmv1.Place_Offset); offset && len(waits) > 1 {
		return nil, &BadMessage{Field: "to.offset", Problem: fmt.Sprintf("offsets are of each broker's own log, and the topic has %d: name one in broker_id", len(waits))}
	}
	for i, w := range waits {
		c.brokers.lastRequest++
		result := make(chan *srtmv1.SeekResult, 1)
		waits[i].number, waits[i].result = c.brokers.lastRequest, result
		w.session.seeks[c.brokers.lastRequest] = result
		w.session.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Seek{Seek: &srtmv1.SeekOrder{
			Request: c.brokers.lastRequest, Topic: topic, Channel: channel, To: place, Empty: place == nil,
		}}})
	}
	return waits, nil
}

// sought handles an answer. It ignores late answers.
func (s *Session) sought(r *srtmv1.SeekResult) {
	if result := s.seeks[r.Request]; result != nil {
		result <- r
		delete(s.seeks, r.Request)
	}
}

// giveUp stops waiting for an answer, and returns it if it has just arrived.
func (c *Controller) giveUp(w seekWait) *srtmv1.SeekResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case r := <-w.result:
		return r
	default:
		delete(w.session.seeks, w.number)
		return failedSeek(ErrNoAnswer)
	}
}

// failedSeek is the result of a broker that may have carried out the order.
func failedSeek(err error) *srtmv1.SeekResult {
	return &srtmv1.SeekResult{Reason: "BROKER_FAILED", Error: err.Error()}
}
