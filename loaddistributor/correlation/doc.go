// Package correlation learns which publishers fire together from when their
// messages arrived: the correlation keys that the SRTM paper (section 4.3) has users
// declare. It is pure: a stream of (publisher, time) comes in, groups go out. It does
// not know what they are for; loaddistributor/placement splits each over the brokers.
//
// # What a group is
//
// A publisher fires when it sends after a silence of Quiet; what follows at once is
// of the same firing. Its last Firings firings of the last Horizon are kept, 16 µs
// exact, and nothing else: what is older is forgotten.
//
// Two publishers are compared over the time that both records cover. Each of the n
// firings of the one that fires less is joint if the other fires within a width of
// it: 0.26, 1.05, 4.2 or 16.8 ms. By chance a firing is joint with the larger of
//
//   - twice the width times the other's mean rate, and
//   - a seventh of the firings of the other from one to eight widths away: what is
//     common to both for longer than a burst, such as a busy hour, is no joint firing;
//
// and, if the firing before it was joint, with the smaller of the two publishers'
// regularities at least: the part of gaps between firings that equal, to two widths,
// one of the three gaps before. So two clocks of one period that meet once meet ever
// after, and that counts as meeting once. Of J joint firings where E were to be
// expected, chance has a probability of at most exp(-(J ln(J/E) - J + E)), Chernoff's
// bound, which holds for trials that depend on those before. The two are linked if
// this is at most Significance divided by the number of pairs there are and of widths,
// and if the joint firings beyond chance are a fifth of those of the one that fires
// more.
//
// # Busy together
//
// A bucket that was split also suffers from publishers that send more in the same tenths of
// a second without firing together: what is beyond a broker's part of the burst waits until
// its share has earned that back beside what goes on arriving, b/(r-λ), 56 ms of the recorded
// vehicles over any k. So of each publisher it is kept in which of the last 2048 windows of
// 67 ms (137 s) it sent. Two whose firings do not link them, and whose gaps between firings
// differ at least half as much as those of chance (a clock's phase is no burst), are linked
// by windows in which both sent. By chance there are the larger of
//
//   - the product of how many each sent in over the windows known, more where all send
//     together more in some windows than in others, and
//   - the most there are if one is moved by 32 to 128 windows: what is common for more than
//     two seconds, or again and again.
//
// The bound and the part to be linked are as above, but a tenth suffices. Windows of 50 to
// 500 ms find much the same of the recorded traffic.
//
// # Groups
//
// A group is made of links, the strongest first, and never of a chain of them: one
// publisher joins a group if it is linked to at least half of those asked, eight
// spread over the group; two groups join if that holds both ways for their members
// (of more than 64, for 64 spread over them), one of sixteen excepted; of a group that has
// a label, the oldest are asked. Publishers that fire with two groups join the one
// that they fire with more, and do not join the two.
//
// Periodic publishers are linked by regularity alone (E without it is small, with it
// is not): whether their clocks were started together or met by chance, one cannot see
// from a pair. A group of such links is one if so many clocks of their period among
// all regular publishers would be within their spread (of mean offsets) at any phase
// with a probability of at most Significance; else there is no group. One that was
// found before stays one while its members are linked.
//
// Hence, of publishers that are independent, Poisson, periodic with random phases or
// in between, a learning finds any group at all with a probability of at most
// Significance.
//
// # Stability
//
// A group keeps its label as long as its oldest members stay together; who is in a
// group stays there as long as it is linked to it, even if another would suit better
// now; and one that has fired less than Settled times since it was taken up (after a
// restart, or because it is silent) keeps the group it had. A group is forgotten when
// its members have fired Firings times without each other, and normally sooner.
//
// A publisher that feigns to belong to a group, by firing whenever that fires, moves
// itself there. It cannot move those who were a group before it came: labels belong to
// the oldest members; two groups of Mature learnings do not join; those that do join
// need links from the members of each to the oldest of the other, which a third publisher
// cannot make; and a group grows at most twofold, or by eight, in a learning. Who feigns
// from a group's first learning on is one of its founders, and may take the label along
// when it leaves; the others are then together under a new one.
//
// # Limits
//
// It takes joint firings to see a group: 10 for a pair that fires once a second among
// 1,000 publishers at no noise, 13 among 100,000; with noise as much as 1/8 of the gap
// between firings nothing is found. Publishers with fewer than eight firings, rates
// below eight firings in Horizon, or above one per Quiet, are in no group; those whose
// rates differ more than fivefold are not linked (tenfold by windows). Who sends in bursts
// whose beginnings are of a clock, with a period of 8 s or more, is linked to those whose
// clock is of the same period and phase by chance. Few periodic publishers of the same
// period that are a little apart in phase cannot be told from chance: of 1,000 a second
// there must be five within 0.06 ms, nine within 0.3 ms.
//
// # Cost
//
// A message costs a look-up and no allocation. A learning is linear in the firings
// kept: at most 64 neighbours are looked at for each of 16 firings of a publisher, and 16
// pairs compared. By windows all pairs of the 4,096 publishers that are busy most are looked
// at, some 30 ns each, and the 12 best of each compared. 0.1 s for 1,000 publishers with
// full records, some seconds for 100,000. Who learns not more often than 100 times what it took stays below 1 % of a
// processor. Memory is at most BytesPerPublisher and the id for each of at most
// Config.Publishers publishers, and three times that while it learns.
package correlation
