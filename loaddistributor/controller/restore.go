package controller

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// Export returns the catalog as text, for Import. Errors: ErrUnread, *NotLeaderError.
func (r *View) Export() ([]byte, error) {
	if err := r.knowledge.following(); err != nil {
		return nil, err
	}
	r.mu.RLock()
	dump := r.cat.shown.Dump()
	r.mu.RUnlock()
	return store.Export(dump)
}

// Imported is the result of Import.
type Imported struct {
	Topics, Brokers int
	LeftOut         []string // topics, with reasons
}

// Import adds topics and brokers from the text of Export that are missing from the
// catalog. Errors: *BadMessage; *NotLeaderError, ErrNotCommitted, ErrClosing: then repeat
// the import.
func (c *Controller) Import(text []byte) (done Imported, err error) {
	if err := c.knowledge.following(); err != nil {
		return done, err
	}
	dump, err := store.Import(text)
	if err == nil {
		_, err = catalog.Load(dump) // consistent as a whole
	}
	if err != nil {
		return done, &BadMessage{Field: "text", Problem: err.Error()}
	}
	for _, b := range dump.Brokers {
		was := c.said(b.Broker.ID)
		if err := c.cat.commit(catalog.BrokerRestored{BrokerDump: b}); err != nil {
			return done, fmt.Errorf("import broker %s: %w", b.Broker.ID, err)
		}
		if c.said(b.Broker.ID) != was {
			done.Brokers++
		}
	}
	for _, t := range dump.Topics {
		if t.Phase != catalog.Active {
			continue
		}
		err := c.restore(t)
		switch {
		case errors.Is(err, ErrNotCommitted) || errors.Is(err, ErrClosing):
			return done, fmt.Errorf("import topic %s: %w", t.Spec.Name(), err)
		case err != nil:
			done.LeftOut = append(done.LeftOut, err.Error())
		default:
			done.Topics++
		}
	}
	c.cfg.Log.Warn("imported", "topics", done.Topics, "brokers", done.Brokers, "left_out", len(done.LeftOut))
	return done, nil
}

// said returns the part of a broker that an import can restore: its existence and its
// operator settings.
func (c *Controller) said(id string) (of struct {
	known, draining, forced bool
	calibrated              int64
}) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, known := c.cat.next.Broker(id)
	of.known, of.draining, of.forced, of.calibrated = known, b.Draining, b.Forced, b.Calibrated
	return of
}

// restore commits a topic from another log. The catalog may refuse it.
func (c *Controller) restore(t catalog.TopicDump) error {
	name := t.Spec.Name()
	c.mu.Lock()
	if c.topics.owned(name) || c.topics.peek(name).creating != nil {
		c.mu.Unlock()
		return fmt.Errorf("topic %s is being created or deleted: %w", name, catalog.ErrTopicExists)
	}
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
