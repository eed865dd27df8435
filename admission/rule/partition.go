package rule

import "hash/crc32"

// Partitions is the number of partitions in a store; fixed when the store is made.
const Partitions = 4096

// Partition returns CRC-32/IEEE of the key, unsigned, modulo the number of partitions (Janus, section
// II.B). With one partition on each server, Partition is the paper's choice of a server.
func Partition[K string | []byte](key K, partitions int) int {
	return int(crc32.ChecksumIEEE([]byte(key)) % uint32(partitions))
}
