//go:build poison

package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// poison overwrites a message that is given back. A later reader gets nonsense, and the
// race detector reports the reader.
func poison(m *queue.Message) {
	for i := range m.ID {
		m.ID[i] = '?'
	}
	body := m.Body[:cap(m.Body)]
	for i := range body {
		body[i] = 0xDB
	}
	m.Timestamp, m.Access, m.Arrival = -1, -1, -1
}
