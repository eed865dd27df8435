// Package ledger keeps who holds which share of which contract, and grants
// shares so that the contract holds whatever happens to the messages or the
// brokers in between. It is pure: events go in, grants come out, and what time it
// is is an argument; it knows no stream and no rule by which shares are chosen.
// tbadaptor/share chooses them, tbadaptor/loop carries events in and grants out;
// read these next, and tokenbucket and nsqd/queue for what a broker does with a
// grant.
//
// # Base, flexible part, leases
//
// A share has a base, which the broker keeps on its disk, and a flexible part,
// which ends with the broker's lease unless it is renewed every few seconds. So
// the part of a broker that is cut off goes to others soon, and all brokers can
// go on with their bases when it is this side that is away. A broker counts its
// lease from when it asked for it, the ledger from when it heard the question,
// plus the clock bound: by the time the ledger counts a lease as over, it is over
// at the broker. The session ends with it; what the broker then holds it says in
// its next hello.
//
// What becomes of a base is the broker's policy. A Strict broker stops when it
// was not renewed for Session, and soon after that its base is free. An Available
// broker goes on, and so its base stays its own until its id belongs to a later process,
// an operator says Forget, or it is presumed dead.
//
// # One id, one process
//
// A broker's id belongs to one process at a time (internal/identity). While that process may
// live, Hello refuses every other process. The end of a process is proven by the lock on its
// data folder, which the next process holds, by Ended and by Forget. Without proof the id is
// free once the lease is over: of a Strict broker Session + ClockBound after the last renewal, of
// any other one Flex + ClockBound. Once the id belongs to a later process, nothing that the
// earlier one says changes the ledger.
//
// Where it is proven that a process has Ended, all it held is free at once, base and
// all. For that a process must not go on with the bases of the one before, unless that
// one had been without a renewal for 2 * Flex, and has left word of it: what it notes no
// sooner than that after a renewal came to it, the ledger takes no later than Flex after
// it sent that renewal.
//
// # Invariant
//
// A broker may be using what it acknowledged last, or what was granted to it
// since: of each, rate and burst, its part is the larger of the two, and stays
// reserved for it until it says otherwise; but only the bases of the two once its
// lease is over, and nothing once its base is. For each topic with contract (r, b)
//
//	(1)  the sum over brokers of the rate reserved   <= r
//	(2)  the sum over brokers of the burst reserved  <= b
//	(3)  tokens in the pool  <=  b - the sum of (2)
//
// So a share grows only out of decreases that were acknowledged and leases that
// are over. checkInvariants checks this in the tests after every step of random
// schedules.
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
// at most b + r*dt messages get tokens at all brokers in any interval of length
// dt: the contract, as one bucket would keep it. They leave later than that, by as
// much as a broker may backdate (nsqd --max-backdating).
//
// # The first burst
//
// A new contract's pool holds b tokens and its brokers none, so that the first
// shares come with full buckets. That is within the contract because no broker has
// released anything under it: it is (3) with equality, and the bucket of an
// unused contract is full. It happens once per contract. A topic of which some
// broker already reports a share was used before, and starts with an empty
// pool. A topic that was removed can be set again only after every broker gave
// up its share of the old contract (Busy).
//
// # What it relies on
//
// A broker applies grants of a topic in order of epoch, and a grant whose epoch
// is not above the one in force not at all. A new instance that has the
// id means that the old one holds nothing any more. The new one starts with the old one's
// bases, if it is Available and the old one was alone, and with empty buckets. An old one that
// was frozen releases nothing before the adaptor has answered it (nsqd/agent). A base that shrinks is on the disk before
// it is acknowledged. A broker ends its old session before it says hello in a new
// one: a grant of an old session that it had not applied at its hello, it never
// will. Two monotonic clocks come apart by at most ClockBound in Session; a host
// that is suspended stops its clock and breaks that.
//
// # The worst case
//
// None, as long as the ledger keeps its memory, Forget and Ended are told the truth, and
// PresumeDead is 0: partitions, crashes, restarts, loss, delay, duplicates and
// reordering in any number cost rate, never the contract. What they cost is what
// is reserved for brokers that cannot use it: of a Strict broker its flexible part
// for Flex + ClockBound and its base for Session + ClockBound; of an Available one
// its base until it is back.
//
// The memory is not durable. The owner of the contracts keeps, too, which brokers are Freed
// or Strict, and which brokers may still hold shares of a contract that was lowered or
// removed. After a loss of memory brokers report what they hold. The reports count as
// reserved, even where their sum exceeds the contract; then nothing grows until decreases
// have brought the sum back. A contract that is brought back, or changed before that, awaits
// all brokers that are named with it (Adopt, Change). Until an awaited broker has said what it
// holds, shares grow only by what is proven to be free: if all brokers together held at most
// Terms.Former, the awaited ones hold at most Former less what the others reported. Without a
// Former no share grows until then. Decreases never wait. A removed contract is not forgotten before the
// brokers that are named with the removal were heard (Remove). A broker (r_l, b_l) that was
// no member any more, had not acknowledged it, and is not named, is not waited for: until it
// says hello, at most b_l + r_l*dt messages more than the contract leave in any dt. So it is
// with an Available broker that Forget or PresumeDead took for dead and that lives, and with
// one that runs, cut off, while another process gets its id: its base is its b_l, r_l.
package ledger
