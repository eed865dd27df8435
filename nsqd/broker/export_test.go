package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// HexOf is hexOf.
var HexOf = hexOf

// Held returns a message that the channel has ready.
func (t *Topic) Held(channel string) *queue.Message {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.core.Channel(channel).Peek(1)[0]
}

// Spilling returns how many goroutines the topic has for its disk.
func (t *Topic) Spilling() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.store != nil && t.store.running {
		n++
	}
	return n
}
