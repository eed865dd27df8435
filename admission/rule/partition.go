package rule

import (
	"hash/crc32"
	"slices"
)

// Partitions is how many partitions a store has; it is fixed when the store is made.
const Partitions = 4096

// Partition is CRC-32/IEEE of the key, unsigned, modulo the number of partitions
// (Janus, section II.B). With as many partitions as servers and partition i on
// server i it is the paper's choice of a server.
func Partition[K string | []byte](key K, partitions int) int {
	return int(crc32.ChecksumIEEE([]byte(key)) % uint32(partitions))
}

// Nobody owns a partition that no server has.
const Nobody = -1

// Spread returns a new owner for each partition, so that no server has two more than
// another, and moves as few partitions as that takes. owners[p] indexes servers, or
// is Nobody; an index that is not one of servers counts as Nobody.
func Spread(owners []int, servers []int) []int {
	next := slices.Clone(owners)
	if len(servers) == 0 {
		for p := range next {
			next[p] = Nobody
		}
		return next
	}
	servers = slices.Sorted(slices.Values(servers))
	servers = slices.Compact(servers)
	has := make(map[int]int, len(servers))
	for _, s := range servers {
		has[s] = 0
	}
	for _, s := range owners {
		if _, ok := has[s]; ok {
			has[s]++
		}
	}
	// Who has most keeps one more, where the division leaves a remainder.
	byHad := slices.Clone(servers)
	slices.SortStableFunc(byHad, func(a, b int) int { return has[b] - has[a] })
	quota := make(map[int]int, len(servers))
	for i, s := range byHad {
		quota[s] = len(owners) / len(servers)
		if i < len(owners)%len(servers) {
			quota[s]++
		}
	}
	var free []int
	for p, s := range owners {
		if quota[s] > 0 {
			quota[s]--
		} else {
			free = append(free, p)
		}
	}
	for _, s := range servers {
		for ; quota[s] > 0; quota[s]-- {
			next[free[0]] = s
			free = free[1:]
		}
	}
	return next
}
