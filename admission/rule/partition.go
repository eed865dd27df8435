package rule

import "hash/crc32"

// Partitions is how many partitions a store has; it is fixed when the store is made.
const Partitions = 4096

// Partition is CRC-32/IEEE of the key, unsigned, modulo the number of partitions
// (Janus, section II.B). With as many partitions as servers and partition i on
// server i it is the paper's choice of a server.
func Partition[K string | []byte](key K, partitions int) int {
	return int(crc32.ChecksumIEEE([]byte(key)) % uint32(partitions))
}
