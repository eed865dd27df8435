package broker

import (
	"strings"

	"github.com/srtm-io/srtm/pacing/police"
)

// Publisher is a connection that publishes to a topic.
type Publisher struct {
	// Set once.
	to     *intake
	visits bool

	// Guarded by to.mu.
	clientID  string
	host      string
	forwarder string // the broker that forwards for the publisher; empty: connected here
	// number is the publisher's number in the capture with the id named; 0: not looked up.
	// The lookup happens once per capture, not per message.
	named  uint64
	number uint32
	// Pacing: identity, requested weight (0: none), and the entry in pacer, if pacer is the
	// topic's current pacer.
	identity police.Identity
	wish     uint8
	pacer    *pacer
	paced    *police.Publisher
	told     uint64 // interval of the last advice
	wasPaced bool   // whether the last advice was to pace

	// Only the connection's steps write ok, and read it between steps.
	ok []byte // pending advice
}

// Forwarded sets the broker that forwards for the publisher. Requires: nothing is published
// yet.
func (p *Publisher) Forwarded(by string) { p.forwarder = by }

// AddPublisher counts a connection as a publisher until Leave, which may be called once.
// clientID is from IDENTIFY and may be empty; host is the connection's address; as is the
// identity for pacing.
func (in *intake) AddPublisher(clientID, host string, as police.Identity) *Publisher {
	in.addPublisher(1)
	return &Publisher{to: in, clientID: clientID, host: host, identity: as}
}

// name is PublisherName. A capture distinguishes owners.
func (p *Publisher) name() string { return PublisherName(p.clientID, p.identity) }

// PublisherName is the control plane's name of a publisher: its client_id, which determines
// its placement. Without a client_id, the name is "auth:", "cert:" or "addr:" plus the
// identity. A client_id with such a prefix gets the prefix "client:". An empty name means
// an unknown publisher.
func PublisherName(clientID string, identity police.Identity) string {
	switch kind, _, found := strings.Cut(clientID, ":"); {
	case found && (kind == "auth" || kind == "cert" || kind == "addr" || kind == "client"):
		return "client:" + clientID
	case clientID != "" || identity.ID == "":
		return clientID
	default:
		return strings.ToValidUTF8(identity.Kind+":"+identity.ID, "?") // a certificate's identity may be invalid UTF-8
	}
}

// owner returns the identity that is responsible for the publisher. Any client can invent
// client_ids, so without authentication the owner is the host.
func (p *Publisher) owner() police.Identity {
	if p.identity.Kind == "auth" || p.identity.Kind == "cert" {
		return p.identity
	}
	return police.Identity{Kind: "addr", ID: p.host}
}

// Visit is AddPublisher for a publication without a connection, such as HTTP. The publisher
// is paced, but does not count as one of the topic's publishers.
func (in *intake) Visit(as police.Identity) *Publisher {
	return &Publisher{to: in, identity: as, visits: true}
}

// Leave removes the connection from the topic's publishers.
func (p *Publisher) Leave() {
	if !p.visits {
		p.to.addPublisher(-1)
	}
	p.unpace(p.identity)
}

// unpace removes the connection from the pacer, and changes its identity.
func (p *Publisher) unpace(as police.Identity) {
	p.to.runner.mu.Lock()
	defer p.to.runner.mu.Unlock()
	if p.pacer != nil {
		p.pacer.table.Leave(p.paced, p.to.runner.shared.now())
	}
	p.pacer, p.paced, p.identity = nil, nil, as
}

// Rename changes the client_id: IDENTIFY may come late, and more than once.
func (p *Publisher) Rename(clientID string, as police.Identity) {
	p.unpace(as)
	p.to.runner.mu.Lock()
	p.clientID, p.named = clientID, 0
	p.to.runner.mu.Unlock()
}

func (in *intake) addPublisher(n int) {
	in.runner.mu.Lock()
	in.publishers += n
	in.runner.mu.Unlock()
}
