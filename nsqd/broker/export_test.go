package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// HexOf is hexOf.
var HexOf = hexOf

// Held returns a message that the channel holds.
func (t *Topic) Held(channel string) *queue.Message {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.core.Kept(t.mu.core.Channel(channel).Line())[0].Message
}

// Spilling returns how many of the topic's lines have a goroutine for their disk.
func (t *Topic) Spilling() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, sp := range t.mu.spillers {
		if sp.running {
			n++
		}
	}
	return n
}
