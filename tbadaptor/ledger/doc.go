// Package ledger records the brokers' shares of contracts. It grants shares so that the contract holds
// whatever happens to the messages and the brokers. The package is pure: the caller passes in events
// and the time, and gets grants back. It knows no streams and no rule for choosing shares:
// tbadaptor/share chooses shares, and tbadaptor/loop carries events in and grants out. Read these next.
// tokenbucket and nsqd/queue show how a broker applies a grant.
//
// # Base, flexible part, leases
//
// A share has a base and a flexible part. The broker keeps the base on disk. The flexible part ends
// with the broker's lease. The broker renews the lease every few seconds. So the flexible part of a
// disconnected broker soon goes to other brokers, and if the adaptor is disconnected, all brokers
// continue with their bases. A broker counts a lease from the request; the ledger counts the lease from
// the receipt of the request, plus the clock bound. So when the lease is over for the ledger, it is
// over at the broker, too. The session ends with the lease; the broker reports its shares in the next
// hello.
//
// The broker's policy decides about the base. A Strict broker stops when its lease has not been renewed
// for Session; soon afterwards its base is free. An Available broker continues, so its base stays
// reserved until its id belongs to a later process, an operator calls Forget, or the broker is presumed
// dead.
//
// # One id, one process
//
// A broker's id belongs to one process at a time (internal/identity). While the process may live, Hello
// refuses every other process. Three things prove the end of a process: the lock on its data folder,
// which the next process holds; Ended; and Forget. Without proof the id is free once the lease is over:
// for a Strict broker Session + ClockBound after the last renewal, for other brokers Flex + ClockBound.
// Once the id belongs to a later process, reports of the earlier process no longer change the ledger.
//
// If Ended proves the end of a process, all its shares are free at once, including the bases. So the
// next process must not use the earlier process's bases, with one exception: the earlier process had no
// renewal for 2 * Flex and noted this on its disk. The process writes this note no sooner than 2 * Flex
// after it received a renewal; the ledger accepts Ended only less than Flex after it sent a renewal
// that the process received.
//
// # Invariant
//
// A broker may be using its last acknowledged share or a grant made since then. The larger of the two,
// separately in rate and in burst, stays reserved for the broker until the broker reports otherwise.
// Once the broker's lease is over, only the larger of the two bases is reserved. Once the base's lease
// is over, nothing is. For each topic with contract (r, b)
//
//	(1)  the sum over brokers of the rate reserved   <= r
//	(2)  the sum over brokers of the burst reserved  <= b
//	(3)  tokens in the pool  <=  b - the sum of (2)
//
// So a share grows only from acknowledged decreases and expired leases. Tests call checkInvariants
// after every step of random schedules.
//
// # Why the contract follows
//
// Take any instant s. Each token is in a bucket, in the pool, or in transit: granted and not yet in
// force, or released and not yet acknowledged. A bucket with burst b_l holds at most b_l tokens. A
// grant from burst b0 to b1 > b0 carries at most b1-b0 tokens; a decrease from b0 to b1 releases at
// most b0-b1. So a broker's tokens, including its tokens in transit, are at most the burst reserved for
// the broker. With (2) and (3) all tokens at s are at most b. After s buckets earn at most the reserved
// rates, by (1) at most r together; neither a grant nor a retune creates a token. So in any interval of
// length dt at most b + r*dt messages get tokens at all brokers. One bucket would keep the same
// contract. The messages leave later, by at most the time a broker may backdate (nsqd
// --max-backdating).
//
// # The first burst
//
// A new contract's pool holds b tokens and its brokers hold none, so the first shares come with full
// buckets. This is within the contract: no broker has released a message under it, the bucket of an
// unused contract is full, and (3) holds with equality. It happens once per contract. If some broker
// already reports a share of the topic, the topic was used before and starts with an empty pool. After
// a topic was removed, it can be set again only once every broker has given up its share of the old
// contract (Busy).
//
// # What it relies on
//
// A broker applies the grants of a topic in order of epoch, and ignores a grant whose epoch is not
// above the epoch in force. When a new instance has the id, the old instance holds nothing any more.
// The new instance starts with empty buckets, and with the old bases if it is Available and the old
// instance had lost contact. A frozen old instance releases nothing before the adaptor has answered it
// (nsqd/agent). A smaller base is on the disk before it is acknowledged. A broker ends its old session
// before it sends a hello in a new session: it never applies a grant of the old session afterwards. Two
// monotonic clocks drift apart by at most ClockBound in Session. A suspended host stops its clock and
// breaks the assumption.
//
// # The worst case
//
// The contract is never exceeded while the ledger keeps its memory, the evidence of Forget and Ended is
// true, and PresumeDead is 0. Any number of partitions, crashes, restarts, losses, delays, duplicates
// and reorderings costs rate only. The cost is the share reserved for brokers that cannot use it: for a
// Strict broker the flexible part for Flex + ClockBound and the base for Session + ClockBound; for an
// Available broker the base until the broker is back.
//
// The memory is not durable. The owner of the contracts also stores which brokers are Freed or Strict,
// and which brokers may still hold shares of a contract that was lowered or removed. After a loss of
// memory brokers report their shares. The reports count as reserved, even if their sum exceeds the
// contract; then no share grows until decreases have brought the sum back. A contract that is adopted
// or changed after the loss awaits all named brokers (Adopt, Change). Until an awaited broker has
// reported, shares grow only by the part that is proven to be free: if all brokers together held at
// most Terms.Former, the awaited brokers hold at most Former less the reports of the other brokers.
// Without a Former no share grows until then. Decreases never wait. A removed contract is kept until
// all brokers named with the removal have reported (Remove).
//
// The ledger does not wait for a broker (r_l, b_l) that is not named, is no member any more, and had
// not acknowledged its removal. Until this broker sends a hello, at most b_l + r_l*dt messages more than
// the contract leave in any dt. The same bound holds, with the base as (r_l, b_l), for a live Available
// broker that Forget or PresumeDead declared dead, and for an Available broker that runs disconnected
// while another process gets the id.
package ledger
