package broker

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

// A topic is away from the start of the broker until its stream answers. Until then it is there,
// with what is recorded of it, and takes nothing.

// awayRetry is how often the streams that are away are asked.
const awayRetry = time.Second

// await makes a topic that is away. Called before the broker is used.
func (b *Broker) await(name string) {
	_, err := b.Topic([]byte(name))
	t := b.restoreTopic(name)
	t.mu.Lock()
	t.store.unrecorded = t.store.unrecorded || err != nil
	t.disk.away = true
	t.mu.Unlock()
	t.store.noted(restoring, ErrAway)
	b.cfg.Storage.cfg.Log.Error("the topic's stream does not answer: it takes nothing until that is back", obs.KeyTopic, name)
}

// restoreAway restores what is away, until nothing is any more, or the broker is closed.
func (b *Broker) restoreAway() {
	tick := time.NewTicker(awayRetry)
	defer tick.Stop()
	for {
		away := slices.DeleteFunc(b.stores(), func(st *store) bool { return !st.isAway() })
		if len(away) == 0 {
			return
		}
		select {
		case <-b.closing:
			return
		case <-tick.C:
		}
		_ = inParallel(away, b.restoreIfBack) // health has the reasons
	}
}

func (b *Broker) restoreIfBack(st *store) error {
	has, err := b.cfg.Storage.cfg.Replicated.Has(st.name)
	switch {
	case err == nil && has:
		err = st.restore()
	case err == nil:
		b.beginEmpty(st)
	}
	st.noted(restoring, err)
	if err == nil {
		b.changed()
		b.cfg.Storage.cfg.Log.Info("the topic's stream is back", obs.KeyTopic, st.name)
	}
	return err
}

// beginEmpty is for a topic of whose messages nothing is left where they are replicated: see
// yieldTaken.
func (b *Broker) beginEmpty(st *store) {
	t, err := b.Topic([]byte(st.name))
	if err != nil {
		return
	}
	if !b.cfg.AutoCreate && b.forget(t, t.awayLocked) {
		t.close(true)
		return
	}
	t.mu.Lock()
	t.disk.away = false
	t.mu.Unlock()
}
