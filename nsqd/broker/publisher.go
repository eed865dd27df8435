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
	forwarder string // the broker that forwards for it; "": it is connected here
	// number is the publisher's in the capture of the id named; 0: not looked up
	// yet. It is once for each capture, not with each message.
	named  uint64
	number uint32
	// Of pacing: who it is, what weight it asked for (0: it did not), and as what it
	// is known to pacer, if that is the topic's.
	identity police.Identity
	wish     uint8
	pacer    *pacer
	paced    *police.Publisher
	told     uint64 // the interval of which it was told
	wasPaced bool   // what it was told then

	// Written by the steps of the connection alone, and read between them.
	ok []byte // what it is to be told
}

// Forwarded says which broker forwards what the publisher publishes. It is called before that.
func (p *Publisher) Forwarded(by string) { p.forwarder = by }

// AddPublisher counts a connection that publishes here until it leaves, which
// may be called once. clientID is that of its IDENTIFY, empty without; host is where it
// comes from; as is who is paced.
func (in *intake) AddPublisher(clientID, host string, as police.Identity) *Publisher {
	in.addPublisher(1)
	return &Publisher{to: in, clientID: clientID, host: host, identity: as}
}

// name is PublisherName. A capture tells owners apart.
func (p *Publisher) name() string { return PublisherName(p.clientID, p.identity) }

// PublisherName is what the control plane calls a publisher: its client_id, by which it is placed.
// Without a client_id, the name is "auth:", "cert:" or "addr:" and the identity. A client_id that
// looks like that gets "client:" before it. Empty: the publisher is not known.
func PublisherName(clientID string, identity police.Identity) string {
	switch kind, _, found := strings.Cut(clientID, ":"); {
	case found && (kind == "auth" || kind == "cert" || kind == "addr" || kind == "client"):
		return "client:" + clientID
	case clientID != "" || identity.ID == "":
		return clientID
	default:
		return strings.ToValidUTF8(identity.Kind+":"+identity.ID, "?") // of a certificate, say
	}
}

// owner is who answers for it. Any client can think up client_ids: of those it is the host.
func (p *Publisher) owner() police.Identity {
	if p.identity.Kind == "auth" || p.identity.Kind == "cert" {
		return p.identity
	}
	return police.Identity{Kind: "addr", ID: p.host}
}

// Visit is AddPublisher for a publish that is no connection's, such as by HTTP: it is
// paced, and not one of the topic's publishers.
func (in *intake) Visit(as police.Identity) *Publisher {
	return &Publisher{to: in, identity: as, visits: true}
}

// Leave takes the connection off the topic's publishers.
func (p *Publisher) Leave() {
	if !p.visits {
		p.to.addPublisher(-1)
	}
	p.unpace(p.identity)
}

// unpace takes the connection off what the pacer knows it as, and gives it another
// identity.
func (p *Publisher) unpace(as police.Identity) {
	p.to.mu.Lock()
	defer p.to.mu.Unlock()
	if p.pacer != nil {
		p.pacer.table.Leave(p.paced, p.to.shared.now())
	}
	p.pacer, p.paced, p.identity = nil, nil, as
}

// Rename gives it another client_id: IDENTIFY may come late, and more than once.
func (p *Publisher) Rename(clientID string, as police.Identity) {
	p.unpace(as)
	p.to.mu.Lock()
	p.clientID, p.named = clientID, 0
	p.to.mu.Unlock()
}

func (in *intake) addPublisher(n int) {
	in.mu.Lock()
	in.publishers += n
	in.mu.Unlock()
}
