package controller

import (
	"context"
	"fmt"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/nsq/wire"
)

// SeekChannel moves a channel on the brokers of a topic, or only on the broker named by
// only. It returns the results by broker, sorted by id. Without a place (to) the brokers
// discard the channel's messages. Brokers without the channel are left out, unless no
// broker has the channel. Errors, before any broker is asked: catalog.ErrTopicUnknown,
// ErrChannelUnknown, ErrBrokerUnknown, *BadMessage, ErrBrokerGone, ErrBrokerOld.
func (c *Controller) SeekChannel(ctx context.Context, topic, channel string, to *srtmv1.Place, only string) ([]*srtmv1.SeekOutcome, error) {
	if err := c.knowledge.following(); err != nil {
		return nil, err
	}
	is, err := c.view.Topic(topic)
	if err != nil {
		return nil, err
	}
	if _, found := is.Channel(channel); !found && !wire.Ephemeral(channel) {
		return nil, fmt.Errorf("topic %s, channel %q: %w", topic, channel, catalog.ErrChannelUnknown)
	}
	waits, err := c.orderSeek(topic, channel, to, only)
	if err != nil {
		return nil, err
	}
	limit, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	outcomes := make([]*srtmv1.SeekOutcome, len(waits))
	for i, w := range waits {
		var r *srtmv1.SeekResult
		select {
		case r = <-w.done:
		case <-limit.Done():
			r = c.giveUp(w)
		}
		outcomes[i] = &srtmv1.SeekOutcome{BrokerId: w.session.broker, Offset: r.Offset, Reason: r.Reason, Error: r.Error}
	}
	lacks := func(o *srtmv1.SeekOutcome) bool { return o.Reason == "CHANNEL_UNKNOWN" }
	if slices.ContainsFunc(outcomes, func(o *srtmv1.SeekOutcome) bool { return !lacks(o) }) {
		outcomes = slices.DeleteFunc(outcomes, lacks)
	}
	if to == nil {
		c.cfg.Log.Info("channel emptied", obs.KeyTopic, topic, obs.KeyChannel, channel, "brokers", len(waits))
		return outcomes, nil
	}
	c.cfg.Log.Info("channel moved", obs.KeyTopic, topic, obs.KeyChannel, channel, "to", to.String(), "brokers", len(waits))
	return outcomes, nil
}

// seekWait is an unanswered order.
type seekWait struct {
	session *Session
	number  uint64
	done    <-chan *srtmv1.SeekResult
}

// orderSeek sends the order to all of the brokers, or to none.
func (c *Controller) orderSeek(topic, channel string, to *srtmv1.Place, only string) (waits []seekWait, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.closing {
		return nil, ErrClosing
	}
	for _, b := range c.cat.shown.Brokers() {
		if only != "" && b.ID != only || !slices.Contains(c.cat.shown.Placed(b.ID), topic) {
			continue
		}
		s := c.brokers.sessions[b.ID]
		if s == nil {
			return nil, fmt.Errorf("broker %s of topic %s is away, nothing was done: %w", b.ID, topic, ErrBrokerGone)
		}
		if !s.canSeek {
			return nil, fmt.Errorf("broker %s of topic %s, release %s, nothing was done: %w", b.ID, topic, b.Version, ErrBrokerOld)
		}
		waits = append(waits, seekWait{session: s})
	}
	if len(waits) == 0 {
		return nil, fmt.Errorf("topic %s is not on broker %q: %w", topic, only, catalog.ErrBrokerUnknown)
	}
	if _, offset := to.GetTo().(*srtmv1.Place_Offset); offset && len(waits) > 1 {
		return nil, &BadMessage{Field: "to.offset", Problem: fmt.Sprintf("offsets are of each broker's own log, and the topic has %d: name one in broker_id", len(waits))}
	}
	for i, w := range waits {
		c.brokers.lastRequest++
		done := make(chan *srtmv1.SeekResult, 1)
		waits[i].number, waits[i].done = c.brokers.lastRequest, done
		w.session.seeks[c.brokers.lastRequest] = done
		w.session.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Seek{Seek: &srtmv1.SeekOrder{
			Request: c.brokers.lastRequest, Topic: topic, Channel: channel, To: to, Empty: to == nil,
		}}})
	}
	return waits, nil
}

// sought handles an answer. It ignores late answers.
func (s *Session) sought(r *srtmv1.SeekResult) {
	if done := s.seeks[r.Request]; done != nil {
		done <- r
		delete(s.seeks, r.Request)
	}
}

// giveUp stops waiting for an answer, and returns it if it has just arrived.
func (c *Controller) giveUp(w seekWait) *srtmv1.SeekResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case r := <-w.done:
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
