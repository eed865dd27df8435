package controller

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// Brokers store a copy of the catalog's data with each topic, and return it to a
// loaddistributor that does not know the topic. If the store was lost, topics are rebuilt
// from these copies. The newest copy is the last committed state if all members are
// present, because each member received that state. The copy of a former member could be
// older than the topic's last move.

// copiedTopic is a broker's copy of a topic.
type copiedTopic struct {
	log   uint64
	topic *catalog.TopicDump // nil: no readable copy
}

// copies exchanges copies of topics with brokers.
type copies struct {
	// Set once.
	log       *slog.Logger
	mu        *sync.RWMutex
	cat       *pipeline
	brokers   *brokers
	topics    *topics
	knowledge *knowledge
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
func (c *copies) text(cat *catalog.Catalog, topic string) []byte {
	dump, ok := cat.DumpTopic(topic)
	if !ok {
		return nil
	}
	if record := c.topics.peek(topic).record; record.epoch == dump.Epoch {
		return record.text
	}
	// Prepared members depend on sessions, and a move is not complete yet, so the copy
	// omits both. It omits channels, because each broker returns all channels itself.
	dump.Prepared, dump.Next, dump.NextPrepared, dump.Channels = make([]bool, len(dump.Prepared)), nil, nil, nil
	text, err := store.EncodeTopic(cat.Log(), dump)
	if err != nil || len(text) > maxRecord {
		text = nil
	}
	c.topics.entry(topic).record = entrusted{dump.Epoch, text}
	return text
}

// entrust sends the new copy of a topic to the topic's brokers.
func (c *copies) entrust(name string) {
	topic, ok := c.cat.committed.Topic(name)
	if !ok {
		return
	}
	if topic.State == catalog.Preparing {
		return // sent with PrepareTopic
	}
	for _, id := range topic.Holders() {
		s := c.brokers.sessions[id]
		if s == nil {
			continue
		}
		if text := c.text(c.cat.committed, name); text != nil {
			s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Keep{Keep: &srtmv1.KeepRecord{Topic: name, Record: text}}})
		}
	}
}

// recall requests the broker's next copies of unknown topics. Requires: the lock held, or
// the session not committed yet.
func (s *Session) recall() {
	var missing []string
	for _, name := range slices.Sorted(maps.Keys(s.unknown)) {
		if _, received := s.copies[name]; !received && len(missing) < recallTopics {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Recall{Recall: &srtmv1.RecallTopics{Topics: missing}}})
	}
}

// readRecords parses a broker's copies, by topic name.
func readRecords(log *slog.Logger, s *Session, m *srtmv1.TopicRecords) map[string]copiedTopic {
	parsed := map[string]copiedTopic{}
	for _, r := range m.Records {
		parsed[r.Topic] = copiedTopic{}
		if len(r.Record) == 0 {
			continue
		}
		created, topic, err := store.DecodeTopic(r.Record)
		if err == nil && topic.Spec.Name() != r.Topic {
			err = fmt.Errorf("it is of topic %q", topic.Spec.Name())
		}
		if err != nil {
			log.Warn("what a broker keeps of a topic cannot be read", obs.KeyBroker, s.broker, obs.KeyTopic, r.Topic, obs.KeyError, err)
			continue
		}
		parsed[r.Topic] = copiedTopic{created, &topic}
	}
	return parsed
}

// storeCopies stores a broker's copies of unknown topics.
func (c *copies) storeCopies(s *Session, records map[string]copiedTopic) {
	news := false
	for _, name := range slices.Sorted(maps.Keys(records)) {
		if !s.unknown[name] {
			continue
		}
		k := records[name]
		if k.topic != nil && k.log == c.cat.next.Log() {
			if k.topic.Created <= c.cat.next.Version() {
				k.topic = nil // it was deleted
			} else {
				// The store is a copy of an earlier state: name it as a new log.
				log := rand.Uint64() | 1
				c.cat.committed.Name(log)
				c.cat.next.Name(log)
				for _, l := range c.topics.byName {
					l.record = entrusted{}
				}
			}
		}
		s.copies[name] = k
		news = true
	}
	if news {
		s.recall()
	}
}

// holder returns a broker with a copy from which the topic is about to be rebuilt, or
// "".
func (c *copies) holder(topic string) (broker string) {
	if time.Now().Before(c.knowledge.settled) {
		for id, s := range c.brokers.sessions {
			if s.copies[topic].topic != nil {
				broker = max(broker, id)
			}
		}
	}
	return broker
}

// others returns the connected brokers outside a plan that have a topic which the catalog
// lacks. They may have messages, so the topic retires from them.
func (c *copies) others(topic string, plan placement.Plan) (ids []string) {
	// order: TopicRestored sorts
	for id, s := range c.brokers.sessions {
		if s.unknown[topic] && plan.On(id) < 0 {
			ids = append(ids, id)
		}
	}
	return ids
}

// rebuild restores the topics whose members are all present and agree, after the other
// brokers had time to join.
func (c *copies) rebuild(now time.Time) {
	notes := map[string]string{} // by topic: why it is not rebuilt
	var rebuilt []string
	defer func() {
		for _, name := range rebuilt {
			c.log.Warn("topic rebuilt from what its brokers keep of it", obs.KeyTopic, name)
		}
		for name, problem := range notes {
			c.log.Warn("topic not rebuilt from what its brokers keep of it; publishers stay where they are", obs.KeyTopic, name, obs.KeyReason, problem)
		}
	}()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Before(c.knowledge.settled) {
		return
	}
	copies := map[string][]copiedTopic{} // by topic, in the order of the brokers
	for _, id := range slices.Sorted(maps.Keys(c.brokers.sessions)) {
		for name, k := range c.brokers.sessions[id].copies {
			if k.topic != nil {
				copies[name] = append(copies[name], k)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(copies)) {
		if _, found := c.cat.next.Topic(name); !found && !c.topics.owned(name) && c.topics.peek(name).creating == nil {
			if problem := c.restore(name, copies[name]); problem != "" {
				if l := c.topics.entry(name); l.waiting != problem {
					notes[name], l.waiting = problem, problem
				}
				continue
			}
			rebuilt = append(rebuilt, name)
		}
		c.topics.entry(name).waiting = ""
		for _, s := range c.brokers.sessions {
			delete(s.copies, name)
			delete(s.unknown, name)
		}
	}
}

// restore restores a topic, or returns the reason why it cannot.
func (c *copies) restore(name string, copies []copiedTopic) (problem string) {
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
		s := c.brokers.sessions[q.Broker]
		if s == nil || s.copies[name].topic == nil {
			return "broker " + q.Broker + " has not come with it"
		}
	}
	for _, id := range topic.Retiring {
		if _, found := c.cat.next.Broker(id); !found {
			// The broker has messages of the topic, and has not joined yet. Its capacity is not known.
			b := catalog.BrokerDump{Broker: catalog.Broker{ID: id, Configured: 1, Mcap: 1}}
			if _, err := c.cat.stage(catalog.BrokerRestored{BrokerDump: b}); err != nil {
				return err.Error()
			}
		}
	}
	topic.Retiring = append(slices.Clone(topic.Retiring), c.others(name, topic.Plan)...)
	if _, err := c.cat.stage(catalog.TopicRestored{TopicDump: topic}); err != nil {
		return err.Error()
	}
	return ""
}

// Export returns the catalog as text, for Import. Errors: ErrUnread, *NotLeaderError.
func (r *View) Export() ([]byte, error) {
	if err := r.knowledge.following(); err != nil {
		return nil, err
	}
	r.mu.RLock()
	dump := r.cat.committed.Dump()
	r.mu.RUnlock()
	return store.Export(dump)
}

// Imported is the result of Import.
type Imported struct {
	Topics, Brokers int
	LeftOut         []string // topics, with reasons
}

// Import adds topics and brokers from the text of Export that are missing from the
// catalog. Import leaves out a topic that is about to be rebuilt from a broker's copy: the
// topic may have moved since the export, and the brokers of the older placement lack its
// messages. Errors: *BadMessage; *NotLeaderError, ErrNotCommitted, ErrClosing: then repeat
// the import.
func (c *Controller) Import(text []byte) (imported Imported, err error) {
	if err := c.knowledge.following(); err != nil {
		return imported, err
	}
	dump, err := store.Import(text)
	if err == nil {
		_, err = catalog.Load(dump) // consistent as a whole
	}
	if err != nil {
		return imported, &BadMessage{Field: "text", Problem: err.Error()}
	}
	for _, b := range dump.Brokers {
		previous := c.settingsOf(b.Broker.ID)
		if err := c.cat.commit(catalog.BrokerRestored{BrokerDump: b}); err != nil {
			return imported, fmt.Errorf("import broker %s: %w", b.Broker.ID, err)
		}
		if c.settingsOf(b.Broker.ID) != previous {
			imported.Brokers++
		}
	}
	for _, t := range dump.Topics {
		if t.Phase != catalog.Active {
			continue
		}
		err := c.restore(t)
		switch {
		case errors.Is(err, ErrNotCommitted) || errors.Is(err, ErrClosing):
			return imported, fmt.Errorf("import topic %s: %w", t.Spec.Name(), err)
		case err != nil:
			imported.LeftOut = append(imported.LeftOut, err.Error())
		default:
			imported.Topics++
		}
	}
	c.cfg.Log.Warn("imported", "topics", imported.Topics, "brokers", imported.Brokers, "left_out", len(imported.LeftOut))
	return imported, nil
}

// settingsOf returns the part of a broker that an import can restore: its existence and its
// operator settings.
func (c *Controller) settingsOf(id string) (settings struct {
	exists, draining, forced bool
	calibrated               int64
}) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, found := c.cat.next.Broker(id)
	settings.exists, settings.draining, settings.forced, settings.calibrated = found, b.Draining, b.Forced, b.Calibrated
	return settings
}

// restore commits a topic from another log. The catalog may refuse it.
func (c *Controller) restore(t catalog.TopicDump) error {
	name := t.Spec.Name()
	c.mu.Lock()
	if c.topics.owned(name) || c.topics.peek(name).creating != nil {
		c.mu.Unlock()
		return fmt.Errorf("topic %s is being created or deleted: %w", name, catalog.ErrTopicExists)
	}
	if id := c.copies.holder(name); id != "" {
		c.mu.Unlock()
		return fmt.Errorf("topic %s: broker %s keeps it, and it comes back by itself: %w", name, id, catalog.ErrUnread)
	}
	t.Retiring = append(slices.Clone(t.Retiring), c.copies.others(name, t.Plan)...)
	restored, err := c.cat.stage(catalog.TopicRestored{TopicDump: t})
	if err == nil {
		c.knowledge.empty = false
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return restored.wait()
}
