package broker

// Publisher is a connection that publishes to a topic.
type Publisher struct {
	// Set once.
	topic *Topic

	// Guarded by topic.mu.
	clientID string
	// number is the publisher's in the capture of the id named; 0: not looked up
	// yet. It is once for each capture, not with each message.
	named  uint64
	number uint32
}

// AddPublisher counts a connection that publishes here until it leaves, which
// may be called once. clientID is that of its IDENTIFY, empty without.
func (t *Topic) AddPublisher(clientID string) *Publisher {
	t.addPublisher(1)
	return &Publisher{topic: t, clientID: clientID}
}

// Leave takes the connection off the topic's publishers.
func (p *Publisher) Leave() { p.topic.addPublisher(-1) }

// Rename gives it another client_id: IDENTIFY may come late, and more than once.
func (p *Publisher) Rename(clientID string) {
	p.topic.mu.Lock()
	p.clientID, p.named = clientID, 0
	p.topic.mu.Unlock()
}

func (t *Topic) addPublisher(n int) {
	t.mu.Lock()
	t.mu.publishers += n
	t.mu.Unlock()
}
