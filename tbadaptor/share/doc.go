// Package share divides a contract (r, b) into shares (r_l, b_l), one per broker, by a
// named rule. The package is pure: it turns loads into shares, without clock or network.
// tbadaptor/ledger decides which broker may have which share when: read it next.
//
// Sums are exact in integers (r in milli-msg/s, b in messages), and a broker in use has
// at least one unit of each. Static and Proportional weigh the brokers, separately for r
// and for b. The other brokers pay for a broker that is raised to its floor. The broker
// with the largest weight gets the rounding remainder (among equals, the smallest id).
//
// # Objective of Robust and Sqrt
//
// Robust and Sqrt meet demands first, max-min fairly, and then divide the rest.
// Objectives (1) to (3) are lists with one number per broker. The better of two lists has
// the larger minimum; if the minima are equal, the next smallest numbers decide
// (lexicographic order of the sorted lists). So no broker could have more except at the
// expense of a broker that has less. The rules apply the objectives in this order:
//
//	(1)  min(r_l, a_l) / q_l, where a_l is the arrival rate with headroom, and q_l
//	     the quota: the part of r that the placement gave for the broker's publishers
//	(2)  from the rest of (1): min(s_l, backlog_l / Drain)
//	(3)  from the rest of (2), while the load of some broker is unseen: what the
//	     brokers that do not retire lack of q_l, divided by q_l
//	(4)  Sqrt: from the rest of (3), the sum over brokers that do not retire of
//	     -v_l / s_l, where s_l is the broker's part of this rest and v_l the arrival
//	     rate times its dispersion: the minimum mean delay of parallel queues
//	     (Kleinrock)
//
// The quotas sum to r. By (1), a broker whose publishers keep to their part (a_l <= q_l)
// therefore has their full rate, whatever the other publishers send or have waiting. b is
// divided in the same way: (1) uses the burst that the arrivals of the last minute
// needed, and the weights of (4) divide the rest. Rounding may reduce a share by up to one
// milli-msg/s and one message. The tests compare the results with every
// division of small contracts.
//
// Two designs lost. The first divided r in proportion to the need, including backlogs: a
// reconnected broker with its publishers' backlog took a healthy broker from 2,000 msg/s
// to 357, and its burst to 1. The second filled (1) up with backlogs before dividing: it
// protected only brokers with less than an even part.
//
// # Epochs and moves
//
// A Tuner keeps the windows from which loads are computed. Windows belong to a placement
// epoch. When the publishers of a broker change, the Tuner drops the broker's window and
// assumes the traffic moved with the publishers.
//
// A broker that gains publishers is expected to receive their traffic, and keeps its
// quota until its own load has been seen. A broker that loses the topic gets enough for
// its backlog, and nothing of the rest. Publishers take a fraction of a second to follow.
// During this time the old broker also gets tokens for the backlog still to come, and
// half of the moving burst. Until the old broker has reported a step after the move, it
// also gets the rate of one publisher in seven.
//
// A disconnected broker holds its share. The shortage falls on the brokers whose
// publishers were placed last, not on the brokers whose publishers stayed.
package share
