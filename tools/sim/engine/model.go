package engine

import "fmt"

// MaxServers bounds a model's servers.
const MaxServers = 1024

// Model is a broker as a queue: first come, first served, by Servers that each
// work on one message at a time. What a publisher sends back to back costs Wake
// once, for a connection that has to be woken and read, and Message for each
// message; Overhead is spent beside the queue and delays only the message itself
// (a wake-up, the way to the subscriber).
//
// A message that waits for a token is worked on when it has it: the work is that
// of releasing, fanning out and writing. Reading, which a broker does at once, is
// counted in with it; so under a bucket that holds much back the model is a
// little late, never early.
type Model struct {
	Servers  int
	Wake     Dist
	Message  Dist
	Overhead Dist
}

// Validate reports a model that cannot work.
func (m Model) Validate() error {
	if m.Servers < 1 || m.Servers > MaxServers {
		return fmt.Errorf("servers: %d, want 1 .. %d", m.Servers, MaxServers)
	}
	return nil
}
