package engine

import "fmt"

// MaxServers limits a model's servers.
const MaxServers = 1024

// Model is a broker as a first-come-first-served queue with Servers servers, each serving
// one message at a time. A batch that a publisher sends back to back costs Wake once, to
// wake and read the connection, and Message for each message. Overhead is spent outside
// the queue and delays only the message itself (a wake-up, the way to the subscriber).
//
// The work on a message begins when the message has its token, and stands for releasing,
// fanning out and writing. It includes the reading, which a real broker does on arrival.
// So for a bucket that holds many messages back the model is slightly late, never early.
type Model struct {
	Servers  int
	Wake     Dist
	Message  Dist
	Overhead Dist
}

// Validate reports a model that cannot serve.
func (m Model) Validate() error {
	if m.Servers < 1 || m.Servers > MaxServers {
		return fmt.Errorf("servers: %d, want 1 .. %d", m.Servers, MaxServers)
	}
	return nil
}
