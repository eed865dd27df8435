// Package ledger keeps who holds which share of which contract, and grants
// shares so that the contract holds whatever happens to the messages or the
// brokers in between. It is pure: events go in, grants come out; it knows no
// time, no stream and no rule by which shares are chosen. tbadaptor/share
// chooses them, tbadaptor/loop carries events in and grants out; read these
// next, and tokenbucket for what a broker does with a grant.
//
// # Invariant
//
// A broker may be using what it acknowledged last, or what was granted to it
// since: of each, rate and burst, its part is the larger of the two, and stays
// reserved for it until it says otherwise. For each topic with contract (r, b)
//
//	(1)  the sum over brokers of the rate reserved   <= r
//	(2)  the sum over brokers of the burst reserved  <= b
//	(3)  tokens in the pool  <=  b - the sum of (2)
//
// So a share grows only out of decreases that were acknowledged, and a broker
// that is silent, crashed or cut off keeps its part. checkInvariants checks
// this in the tests after every step of random schedules.
//
// # Why the contract follows
//
// Take any instant s. Tokens that exist are in buckets, in the pool, or on
// their way: granted and not yet in force, or given up and not yet
// acknowledged. A bucket with burst b_l holds at most b_l. A grant from burst
// b0 to b1 > b0 carries at most b1-b0 tokens, a decrease from b0 to b1 gives up
// at most b0-b1. So a broker's tokens with those on their way to and from it
// are at most the burst reserved for it, and with (2) and (3) all tokens that
// exist at s are at most b. From s on buckets earn at most the rates reserved,
// by (1) at most r together; neither a grant nor a retune creates a token. So
// at most b + r*dt messages leave all brokers in any interval of length dt:
// the contract, as one bucket would keep it.
//
// # The first burst
//
// A new contract's pool holds b tokens and its brokers none, so that the first
// shares come with full buckets. That is within the contract because nobody has
// released anything under it: it is (3) with equality, and the bucket of an
// unused contract is full. It happens once per contract. A topic of which some
// broker already reports a share was used before, and starts with an empty
// pool. A topic that was removed can be set again only after every broker gave
// up its share of the old contract (Busy).
//
// # What it relies on
//
// A broker applies grants of a topic in order of epoch, and a grant whose epoch
// is not above the one in force not at all. A broker's id belongs to one
// process at a time, so a new instance means that the old one holds nothing any
// more. A broker ends its old session before it says hello in a new one: a
// grant of an old session that it had not applied at its hello, it never will.
//
// The ledger's memory is not durable. After its loss brokers report what they
// hold, which counts as reserved, even where the sum exceeds the contract;
// then nothing grows until decreases have brought it back. Over-admission is
// bounded by one burst b and for as long as one broker of the topic has not
// reported, its part: SetContract cannot know of a holder that has not called.
//
// Leases are not built. Grant has the place for a part that is held on one, and
// reserve is the one function that would count it.
package ledger
