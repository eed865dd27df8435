package controller

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// Brokers store a copy of the catalog's data with each topic, and return it to a
// loaddistributor that does not know the topic. If the store was lost, topics are rebuilt
// from these copies. The newest copy is the last committed state if all members are
// present, because each member received that state. The copy of a former member could be
// older than the topic's last move.

// kept is a broker's copy of a topic.
type kept struct {
	log   uint64
	topic *catalog.TopicDump // nil: no readable copy
}

// entrusted is the copy that brokers must store, with its epoch.
type entrusted struct {
	epoch uint64
	text  []byte
}

// maxRecord limits the copy, about 25,000 named publishers. Larger copies are not stored.
const maxRecord = 1 << 20

// recallTopics is the maximum number of topics in one request to a broker.
const recallTopics = 1000

// text returns the copy that brokers must store; nil: none.
func (st *state) text(cat *catalog.Catalog, topic string) []byte {
	dump, ok := cat.DumpTopic(topic)
	if !ok {
		return nil
	}
	if had := st.topics.see(topic).record; had.epoch == dump.Epoch {
		return had.text
	}
	// Prepared members depend on sessions, and a move is not complete yet, so the copy
	// omits both. It omits channels, because each broker returns all channels itself.
	dump.Prepared, dump.Next, dump.NextPrepared, dump.Channels = make([]bool, len(dump.Prepared)), nil, nil, nil
	text, err := store.EncodeTopic(cat.Log(), dump)
	if err != nil || len(text) > maxRecord {
		text = nil
	}
	st.topics.at(topic).record = entrusted{dump.Epoch, text}
	return text
}

// entrust sends the new copy of a topic to the topic's brokers.
func (st *state) entrust(name string) {
	topic, ok := st.cat.Topic(name)
	if !ok {
		return
	}
	if topic.State == catalog.Preparing {
		return // sent with PrepareTopic
	}
	for _, id := range topic.Holders() {
		s := st.sessions[id]
		if s == nil {
			continue
		}
		if text := st.text(st.cat, name); text != nil {
			s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Keep{Keep: &srtmv1.KeepRecord{Topic: name, Record: text}}})
		}
	}
}

// recall requests the broker's next copies of unknown topics. Requires: the lock held, or
// the session not shown yet.
func (s *Session) recall() {
	var ask []string
	for _, name := range slices.Sorted(maps.Keys(s.unknown)) {
		if _, told := s.kept[name]; !told && len(ask) < recallTopics {
			ask = append(ask, name)
		}
	}
	if len(ask) > 0 {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Recall{Recall: &srtmv1.RecallTopics{Topics: ask}}})
	}
}

// readRecords parses a broker's copies, by topic name.
func readRecords(log *slog.Logger, s *Session, m *srtmv1.TopicRecords) map[string]kept {
	parsed := map[string]kept{}
	for _, r := range m.Records {
		parsed[r.Topic] = kept{}
		if len(r.Record) == 0 {
			continue
		}
		of, topic, err := store.DecodeTopic(r.Record)
		if err == nil && topic.Spec.Name() != r.Topic {
			err = fmt.Errorf("it is of topic %q", topic.Spec.Name())
		}
		if err != nil {
			log.Warn("what a broker keeps of a topic cannot be read", obs.KeyBroker, s.broker, obs.KeyTopic, r.Topic, obs.KeyError, err)
			continue
		}
		parsed[r.Topic] = kept{of, &topic}
	}
	return parsed
}

// keep stores a broker's copies of unknown topics.
func (st *state) keep(s *Session, records map[string]kept) {
	news := false
	for _, name := range slices.Sorted(maps.Keys(records)) {
		if !s.unknown[name] {
			continue
		}
		k := records[name]
		if k.topic != nil && k.log == st.next.Log() {
			if k.topic.Created <= st.next.Version() {
				k.topic = nil // it was deleted
			} else {
				// The store is a copy of an earlier state: name it as a new log.
				log := rand.Uint64() | 1
				st.cat.Name(log)
				st.next.Name(log)
				for _, l := range st.topics {
					l.record = entrusted{}
				}
			}
		}
		s.kept[name] = k
		news = true
	}
	if news {
		s.recall()
	}
}

// rebuilds returns a broker with a copy from which the topic is about to be rebuilt, or
// "".
func (st *state) rebuilds(topic string) (broker string) {
	if time.Now().Before(st.settled) {
		for id, s := range st.sessions {
			if s.kept[topic].topic != nil {
				broker = max(broker, id)
			}
		}
	}
	return broker
}

// rebuild restores the topics whose members are all present and agree, after the other
// brokers had time to join.
func (c *Controller) rebuild(now time.Time) {
	notes := map[string]string{} // by topic: why it is not rebuilt
	var rebuilt []string
	defer func() {
		for _, name := range rebuilt {
			c.cfg.Log.Warn("topic rebuilt from what its brokers keep of it", obs.KeyTopic, name)
		}
		for name, why := range notes {
			c.cfg.Log.Warn("topic not rebuilt from what its brokers keep of it; publishers stay where they are", obs.KeyTopic, name, obs.KeyReason, why)
		}
	}()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Before(c.mu.settled) {
		return
	}
	copies := map[string][]kept{} // by topic, in the order of the brokers
	for _, id := range slices.Sorted(maps.Keys(c.mu.sessions)) {
		for name, k := range c.mu.sessions[id].kept {
			if k.topic != nil {
				copies[name] = append(copies[name], k)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(copies)) {
		if _, known := c.mu.next.Topic(name); !known && !c.mu.owned(name) && c.mu.topics.see(name).creating == nil {
			if why := c.mu.rebuild(name, copies[name]); why != "" {
				if l := c.mu.topics.at(name); l.waiting != why {
					notes[name], l.waiting = why, why
				}
				continue
			}
			rebuilt = append(rebuilt, name)
		}
		c.mu.topics.at(name).waiting = ""
		for _, s := range c.mu.sessions {
			delete(s.kept, name)
			delete(s.unknown, name)
		}
	}
}

// rebuild restores a topic, or returns the reason why it cannot.
func (st *state) rebuild(name string, copies []kept) (why string) {
	newest := copies[0]
	for _, k := range copies[1:] {
		if k.log != newest.log {
			return "its brokers had it from different stores"
		}
		if k.topic.Epoch > newest.topic.Epoch {
			newest = k
		}
	}
	topic := *newest.topic
	for _, q := range topic.Plan.Quotas {
		s := st.sessions[q.Broker]
		if s == nil || s.kept[name].topic == nil {
			return "broker " + q.Broker + " has not come with it"
		}
	}
	topic.Retiring = slices.DeleteFunc(slices.Clone(topic.Retiring), func(id string) bool {
		_, known := st.next.Broker(id)
		return !known
	})
	if _, err := st.stage(catalog.TopicRestored{TopicDump: topic}); err != nil {
		return err.Error()
	}
	return ""
}
