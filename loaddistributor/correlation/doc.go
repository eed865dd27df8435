// Package correlation learns from arrival times which publishers fire together: the
// correlation keys that users declare in the SRTM paper (section 4.3). The package is
// pure: a stream of (publisher, time) comes in, groups come out.
// loaddistributor/placement uses the groups and splits each group over the brokers.
//
// # What a group is
//
// A publisher fires when it sends after a silence of Quiet. Messages without such a
// silence belong to the same firing. The learner keeps the last Firings firings of the
// last Horizon, exact to 16 µs, and nothing else.
//
// Two publishers are compared over the time that both records cover. Let n be the number
// of firings of the publisher with fewer firings. Each of these n firings is joint if the
// other publisher fires within a width: 0.26, 1.05, 4.2 or 16.8 ms. By chance a firing is
// joint with the larger of two probabilities:
//
//   - twice the width times the other publisher's mean rate, and
//   - a seventh of the other publisher's firings at a distance of one to eight widths.
//     Activity that both share for longer than a burst, such as a busy hour, is no joint
//     firing.
//
// If the previous firing was joint, the chance is at least the smaller of the two
// publishers' regularities. Regularity is the part of gaps between firings that equal one
// of the three previous gaps, to two widths. Two clocks of one period that meet once meet
// ever after, and this rule counts them as meeting once. For J joint firings where E are
// expected, the probability of chance is at most exp(-(J ln(J/E) - J + E)). This is
// Chernoff's bound, valid also for trials that depend on earlier trials. Two publishers
// are linked under two conditions. The bound is at most Significance divided by the
// number of pairs and of widths. The joint firings beyond chance are at least a fifth of
// the firings of the publisher with more firings.
//
// # Busy together
//
// A split bucket also suffers from publishers that send more in the same tenths of a
// second without firing together. Messages beyond a broker's part of the burst wait until
// the broker's share has earned the tokens beside the arriving messages. This takes
// b/(r-λ), 56 ms for the recorded vehicles, over any k. So the learner records for each
// publisher in which of the last 2048 windows of 67 ms (137 s) it sent. A pair not linked
// by firings is linked by windows in which both sent, if the gaps between firings of both
// vary at least half as much as random gaps (a clock's phase is no burst). The number of
// such windows by chance is the larger of:
//
//   - the product of the two publishers' busy windows over the known windows, increased
//     if all publishers send more in some windows than in others, and
//   - the maximum over shifts of one publisher by 32 to 128 windows. Activity common for
//     more than two seconds, or recurring activity, is no evidence.
//
// The bound and the required part are as above, but a tenth suffices. Windows of 50 to
// 500 ms give much the same result for the recorded traffic.
//
// Firings alone find few groups among the recorded vehicles. Over six brokers the
// simulated p99 of the delivery latency is 15.9 ± 6.0 ms then, and 11.2 ± 0.8 ms with
// windows. Declared groups give 10.5 ms, and no groups 20.6 ± 7.3 ms (make figures
// ONLY=learned, "learned: detectors").
//
// # Groups
//
// A group grows from links, the strongest first, and never along a chain of links:
//
//   - A publisher joins a group if it is linked to at least half of the sampled members.
//     Eight members, spread over the group, are sampled. In a group with a label, the eight
//     oldest members are sampled.
//   - Two groups join if this holds in both directions for their members, or for 64
//     members spread over a group of more than 64. One of sixteen members may fail.
//   - A publisher that fires with two groups joins the group that it fires with more. The
//     two groups stay apart.
//
// Periodic publishers are linked by regularity alone: E is small without regularity and
// large with it. A pair does not show whether its clocks were started together or met by
// chance. So a group of such links is accepted only if chance is improbable: the
// probability that so many clocks of their period, among all regular publishers, lie
// within their spread of mean offsets at any phase is at most Significance. A group that
// was accepted before stays while its members are linked.
//
// Hence, if publishers are independent (Poisson, periodic with random phases, or in
// between), one learning finds any group with a probability of at most Significance.
//
// # Stability
//
// A group keeps its label as long as its oldest members stay together. A member stays as
// long as it is linked to the group, even if another group would now fit better. A
// publisher keeps its previous group until it has fired Settled times since its record
// began. A record begins after a restart, or after a silence longer than Horizon. A group
// is forgotten when its members have fired Firings times without each other, and usually
// sooner.
//
// A publisher can feign membership by firing whenever a group fires. It then joins the
// group, but it cannot move the earlier members. Labels belong to the oldest members. Two
// groups of Mature learnings do not join. Other groups join only by links from the
// members of each group to the oldest members of the other, and a third publisher cannot
// make such links. A group grows at most twofold, or by eight, in one learning. A
// publisher that feigns from a group's first learning on is a founder, and may take the
// label along when it leaves. The other members are then together under a new label.
//
// # Limits
//
// Finding a group takes joint firings. A pair that fires once a second needs 10 among
// 1,000 publishers without noise, and 13 among 100,000. With noise of 1/8 of the gap
// between firings the learner finds nothing. Other limits:
//
//   - A publisher with fewer than eight firings in Horizon, or with more than one firing
//     per Quiet, is in no group.
//   - Publishers whose rates differ more than fivefold (tenfold by windows) are not
//     linked.
//   - A publisher whose bursts start by a clock with a period of 8 s or more is linked to
//     publishers whose clock has the same period and phase by chance.
//   - A small group of periodic publishers of one period with slightly different phases
//     looks like chance. Of 1,000 publishers a second, the group needs five within 0.06
//     ms, or nine within 0.3 ms.
//
// # Cost
//
// A message costs a look-up and no allocation. A learning is linear in the kept firings:
// for each of 16 firings of a publisher it examines at most 64 neighbours, and it
// compares 16 pairs. By windows it examines all pairs of the 4,096 busiest publishers,
// about 30 ns each, and compares the 12 best of each. A learning takes 0.1 s for 1,000
// publishers with full records, and some seconds for 100,000. A pause of 100 times the
// learning's duration keeps the cost below 1 % of a processor. Memory is at most
// BytesPerPublisher plus the id for each of at most Config.Publishers publishers, and
// three times as much during a learning.
package correlation
