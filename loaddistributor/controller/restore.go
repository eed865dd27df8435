package controller

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// Export returns the catalog as text, for Import. ErrUnread, *NotLeaderError.
func (c *Controller) Export() ([]byte, error) {
	if err := c.following(); err != nil {
		return nil, err
	}
	c.mu.RLock()
	dump := c.mu.cat.Dump()
	c.mu.RUnlock()
	return store.Export(dump)
}

// Imported is what Import has done.
type Imported struct {
	Topics, Brokers int
	LeftOut         []string // topics, and why
}

// Import brings back what text, which Export made, has and the catalog has not.
// Errors: *BadMessage, *NotLeaderError, ErrNotCommitted, ErrClosing: repeat it then.
func (c *Controller) Import(text []byte) (done Imported, err error) {
	if err := c.following(); err != nil {
		return done, err
	}
	dump, err := store.Import(text)
	if err == nil {
		_, err = catalog.Load(dump) // sound as a whole
	}
	if err != nil {
		return done, &BadMessage{"text", err.Error()}
	}
	for _, b := range dump.Brokers {
		c.mu.RLock()
		_, known := c.mu.next.Broker(b.Broker.ID)
		c.mu.RUnlock()
		if err := c.commit(catalog.BrokerRestored{BrokerDump: b}); err != nil {
			return done, fmt.Errorf("import broker %s: %w", b.Broker.ID, err)
		}
		if !known {
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

// restore commits a topic that another log had. Refusals are the catalog's.
func (c *Controller) restore(t catalog.TopicDump) error {
	name := t.Spec.Name()
	c.mu.Lock()
	if c.mu.names[name] != nil || c.mu.creating[name] != nil {
		c.mu.Unlock()
		return fmt.Errorf("topic %s is being created or deleted: %w", name, catalog.ErrTopicExists)
	}
	restored, err := c.stageLocked(catalog.TopicRestored{TopicDump: t})
	if err == nil {
		c.mu.empty = false
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return restored.wait()
}
