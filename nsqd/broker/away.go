package broker

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

// After a start of the broker, a topic is away until its stream answers. Until then the
// topic exists with its recorded properties, and accepts no messages.

// awayRetry is the interval at which unavailable streams are tried.
const awayRetry = time.Second

// await creates a topic that is away. Requires: the broker is not in use yet.
func (b *Broker) await(name string) {
	_, err := b.Topic([]byte(name))
	t := b.restoreTopic(name)
	t.runner.mu.Lock()
	t.store.unrecorded = t.store.unrecorded || err != nil
	t.runner.disk.away = true
	t.runner.mu.Unlock()
	t.store.noted(restoring, ErrAway)
	b.shared.cfg.Storage.cfg.Log.Error("JetStream stream unavailable; the topic refuses publishes until the stream is back", obs.KeyTopic, name)
}

// restoreAway restores the topics that are away, until none is left or the broker is
// closed.
func (b *Broker) restoreAway() {
	tick := time.NewTicker(awayRetry)
	defer tick.Stop()
	for {
		away := slices.DeleteFunc(b.stores(), func(st *store) bool { return !st.runner.isAway() })
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
	has, err := b.shared.cfg.Storage.cfg.Replicated.Has(st.runner.name)
	switch {
	case err == nil && has:
		err = st.restore()
	case err == nil:
		b.beginEmpty(st)
	}
	st.noted(restoring, err)
	if err == nil {
		b.shared.changed()
		b.shared.cfg.Storage.cfg.Log.Info("JetStream stream available again; the topic accepts publishes", obs.KeyTopic, st.runner.name)
	}
	return err
}

// beginEmpty makes a topic available whose replicated log is gone (see yieldTaken). In a
// cluster, beginEmpty deletes the topic.
func (b *Broker) beginEmpty(st *store) {
	t, err := b.Topic([]byte(st.runner.name))
	if err != nil {
		return
	}
	if !b.shared.cfg.AutoCreate && b.forget(t, t.runner.awayLocked) {
		t.close(true)
		return
	}
	t.runner.mu.Lock()
	t.runner.disk.away = false
	t.runner.mu.Unlock()
}
