// Package share divides a contract (r, b) into shares (r_l, b_l), one per
// broker, by rules that have names. It is pure: it sees loads and answers with
// shares; it knows no time, no network and not who may have which share when.
// That is the ledger's business: read tbadaptor/ledger next.
//
// Sums are exact in integers (r in milli-msg/s, b in messages), and a broker in use
// has at least one of each. Static and Proportional are two lists of weights, one for
// r and one for b, with floors, paid by the others, and the rounding remainder to one
// named broker, the one of the largest weight (of several, the one whose id sorts
// first).
//
// # What Robust and Sqrt aim at
//
// Demands first, max-min fairly, and only then what is left. Of all divisions of r
// they find the one that is best by the first of these of which two differ; each is a
// list of numbers, one of each broker, and that list is better whose least is
// greater, or if they are the same, whose next is (the lexicographic order of sorted
// lists, so that none could have more except at the expense of one that has less):
//
//	(1)  min(r_l, a_l) / q_l, where a_l is what arrives, with headroom, and q_l the
//	     quota: the part of r that the placement gave for the broker's publishers
//	(2)  of what (1) leaves, min(s_l, backlog_l / Drain)
//	(3)  of what (2) leaves, as long as a broker has not been seen, what those that
//	     do not retire are short of q_l, / q_l
//	(4)  Sqrt: of what (3) leaves, the sum over brokers that do not retire of
//	     -v_l / s_l, where s_l is the part of it and v_l the arrival rate times its
//	     dispersion: the least mean delay of parallel queues (Kleinrock)
//
// By (1) a broker whose publishers keep to their part (a_l <= q_l) has what they
// send, whatever the others send or have waiting, since the quotas sum to r. Of b the
// same with, for (1), the burst that the arrivals of the last minute needed, and the
// weights of (4) for what that leaves. Rounding may take up to one unit of each (one
// milli-msg/s, one message) from that. The tests compare with every division of small
// contracts.
//
// The design that lost divided r in proportion to what was needed, backlogs included:
// a broker that came back with the backlog of its publishers took a healthy one from
// 2,000 msg/s to 357, and its burst to 1. Filling up (1) with backlogs before dividing
// lost, too: one with less than its even part is safe then, one with more is not.
//
// # Whose traffic it is
//
// A Tuner keeps the windows that loads are made of. They belong to a placement epoch:
// what was seen of a broker before its publishers moved is not looked at any more, but
// it is known to have moved with them. A broker that was moved to is expected to get
// it, and keeps its quota until it has been seen for itself; one that was moved away
// from has what its backlog needs, and nothing of what is left over. While publishers
// follow, for a fraction of a second, it has in addition what they will leave there yet
// as a backlog, and half of the burst that goes with them; and until it has reported a step of its own,
// what one in seven of them sends. As long as a
// broker that is away holds on to its part, those are short of it that were placed
// last, not those that stayed where they were.
package share
