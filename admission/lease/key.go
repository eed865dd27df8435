package lease

import (
	"strconv"
	"time"

	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	// Length is how long a share lasts after its holder asked.
	Length = 2 * time.Second
	// Quiet is for how long shares of another owner may last: Length, and by how much two
	// clocks may come apart in it.
	Quiet      = Length + clockBound
	clockBound = 200 * time.Millisecond

	// maxHolders bounds those of a key; others are refused, and go on asking.
	maxHolders = 256
	maxEpoch   = 1 << 62 // of what a peer says; a wall clock gets there in 2116

	period = time.Second // between looks at who wants how much
	window = 4 * period  // in which that counts

	owner = "owner" // the broker id of the owner's part; those of holders are numbers
)

// Key is a key that several hold.
type Key struct {
	name    string
	machine *adaptor.Machine
	// contract is what is divided; the zero Share: nothing, as long as it is not known
	// what others hold, or since there is no such rule any more.
	contract tokenbucket.Share
	own      tokenbucket.Bucket // the owner's part
	offered  uint64             // to it, since tuned
	tuned    mono.Time
	joins    int       // so far, and one: with each, all are expected to be asked alike
	holders  []*member // by number
}

// member is a holder, or a free place of one, with the zero holder.
type member struct {
	broker   string
	holder   uint64
	pending  ledger.Grant // not acknowledged yet; Epoch 0: none
	offered  uint64       // to it, since reported
	reported mono.Time
}

// New divides a key. The owner holds its whole contract, with so many tokens; the zero
// Share: nothing, and others may. Requires: epoch is above 0, and above those of an owner
// before as far as their holders do not say them.
func New(now mono.Time, epoch uint64, name string, contract tokenbucket.Share, tokens tokenbucket.Tokens) *Key {
	k := &Key{name: name, tuned: now, joins: 1, machine: adaptor.New(epoch, adaptor.Config{
		Leases: ledger.Leases{Flex: Length, Session: Length, ClockBound: clockBound}, Window: window,
	})}
	s := ledger.Session{Broker: owner, Said: mono.Said{Process: owner}}
	if !contract.IsZero() {
		s.Held = []ledger.Held{{Topic: name, Share: contract, Epoch: epoch}}
		k.own.Retune(now, contract, tokens)
	}
	k.settle(now, must(k.machine.Hello(now, s)))
	k.follow(now, contract)
	return k
}

func must(grants []ledger.Grant, err error) []ledger.Grant {
	if err != nil {
		panic("admission/lease: the ledger refuses what the owner says: " + err.Error())
	}
	return grants
}

// settle has grants in force: the owner's at once, a holder's when it has asked.
func (k *Key) settle(now mono.Time, grants []ledger.Grant) {
	must(nil, k.machine.Settle(grants, func(g ledger.Grant) (tokenbucket.Tokens, bool) {
		if g.Broker == owner {
			return k.own.Retune(now, g.Share, g.Tokens), true
		}
		k.at(g.Broker).pending = g
		return 0, false
	}))
}

func (k *Key) at(broker string) *member {
	i, _ := strconv.Atoi(broker) // as member has made it
	return k.holders[i]
}

// member returns a holder's, or a free one; nil if there is none.
func (k *Key) member(holder uint64) (free *member) {
	for _, m := range k.holders {
		if m.holder == holder {
			return m
		}
		if m.holder == 0 && free == nil {
			free = m
		}
	}
	if free == nil && len(k.holders) < maxHolders {
		free = &member{broker: strconv.Itoa(len(k.holders))}
		k.holders = append(k.holders, free)
	}
	return free
}

// place divides the contract among those who are there. What it has too few credits for
// is nothing for those who came last.
func (k *Key) place(now mono.Time) {
	if k.contract.IsZero() {
		return
	}
	all := []share.Load{{Broker: owner}}
	for _, m := range k.holders {
		if m.holder != 0 && int64(len(all)) < min(k.contract.Burst, int64(k.contract.Rate)) {
			all = append(all, share.Load{Broker: m.broker})
		}
	}
	even, err := share.Split(share.Static, k.contract, all)
	must(nil, err)
	c := &adaptor.Contract{Topic: k.name, Total: k.contract, Rule: share.Default}
	for _, a := range even {
		c.Placed = append(c.Placed, share.Placed{Broker: a.Broker, Publishers: k.joins, Quota: a.Share})
	}
	k.settle(now, must(k.machine.Update(now, c)))
}

// follow brings the key to another contract.
func (k *Key) follow(now mono.Time, contract tokenbucket.Share) {
	view, known := k.machine.Topic(k.name)
	switch {
	case contract == k.contract, known && view.Removing && !contract.IsZero(): // again once all have given it up
	case contract.IsZero():
		k.contract = contract
		k.settle(now, k.machine.Remove(k.name, nil, nil))
	default:
		k.contract = contract
		k.place(now)
	}
}

// Renew takes what a holder says, and how many credits it was asked for since it said so
// last, and returns what it may hold. It reports false for one that cannot hold anything.
func (k *Key) Renew(now mono.Time, h wire.Held, offered uint32) (g wire.Grant, ok bool) {
	m := k.member(h.Holder)
	if m == nil || h.Holder == 0 || h.Epoch >= maxEpoch {
		return g, false
	}
	if !k.machine.Connected(m.broker) {
		s := ledger.Session{Broker: m.broker, Said: mono.Said{Process: strconv.Itoa(k.joins)}, Place: identity.Place{Lock: m.broker}, Policy: ledger.Strict}
		if h.Epoch > 0 {
			s.Held = []ledger.Held{{Topic: k.name, Share: h.Share, Epoch: h.Epoch}}
		}
		grants, err := k.machine.Hello(now, s)
		if err != nil {
			return g, false
		}
		*m = member{broker: m.broker, holder: h.Holder, reported: now}
		k.settle(now, grants)
		k.joins++
		k.place(now)
	} else {
		grants, err := k.machine.Ack(m.broker, k.name, h.Epoch, h.Share, h.Released)
		if err != nil {
			return g, false // and so its lease ends
		}
		if m.pending.Epoch <= h.Epoch {
			m.pending = ledger.Grant{}
		}
		k.settle(now, grants)
		_, grants = k.machine.Ledger.Renew(m.broker, now)
		k.settle(now, grants)
		m.offered += uint64(offered)
		if length := now.Sub(m.reported); length >= Length/8 {
			k.machine.Report(m.broker, k.name, step(now, length, m.offered))
			m.offered, m.reported = 0, now
		}
	}
	if p := m.pending; p.Epoch > h.Epoch {
		return wire.Grant{Epoch: p.Epoch, Share: p.Share, Tokens: p.Tokens}, true
	}
	return wire.Grant{Epoch: h.Epoch, Share: h.Share}, true
}

// step is what was asked for in a time. It may have come at once: no more burst is needed.
func step(now mono.Time, length time.Duration, offered uint64) share.Step {
	return share.Step{At: now, Length: length, Offered: offered, Peak: max(1, int64(min(offered, uint64(tokenbucket.MaxBurst))))}
}

// Admit decides by the owner's part; what is denied may make sense again after retry. With
// peek it takes nothing.
func (k *Key) Admit(n int64, now mono.Time, peek bool) (ok bool, left int64, retry time.Duration) {
	b := k.own // a copy, so that to peek is to ask
	ok, retry = b.Admit(n, now)
	if !peek {
		k.offered += uint64(n)
		k.own = b
	}
	return ok, int64(max(0, b.Tokens(now)) / tokenbucket.Token), min(retry, period)
}

// Step is to be called several times a second: it ends leases, follows the contract, and
// moves shares to where they are wanted. It reports whether the owner holds all, with so
// many tokens, and no holder asks for a part.
func (k *Key) Step(now mono.Time, contract tokenbucket.Share) (tokens tokenbucket.Tokens, whole bool) {
	lapses, grants := k.machine.Expire(now)
	for _, l := range lapses {
		*k.at(l.Broker) = member{broker: l.Broker}
	}
	k.settle(now, grants)
	if len(lapses) > 0 {
		k.place(now)
	}
	k.follow(now, contract)
	if length := now.Sub(k.tuned); length >= period {
		k.machine.Report(owner, k.name, step(now, length, k.offered))
		k.offered, k.tuned = 0, now
		grants, _, _ := k.machine.Tune(now, k.name) // what is impossible stays as it is
		k.settle(now, grants)
	}
	for _, m := range k.holders {
		if m.holder != 0 {
			return 0, false
		}
	}
	return k.own.Tokens(now), k.own.Share() == contract
}
