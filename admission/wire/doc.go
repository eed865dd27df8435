// Package wire encodes admission's datagrams, big-endian, over UDP: a question of 48 bytes and a key,
// and an answer of 48 bytes. No answer is longer than its question.
//
//	question                                 answer
//	 0 u8  0xAD    1 u8 version 3             0 u8 0xAD    1 u8 3
//	 2 u8  kind: 0 hello 1 ask 7 cancel       2 u8 kind: 2 reply 3 session 4 moved 5 busy
//	                                                6 waiting
//	 3 u8  flags: 1 retry 2 peek              3 u8 flags: 1 admit 2 default 4 shadow 8 never
//	 4 u64 session   12 u64 number            4 u64 session   12 u64 number
//	20 u32 cost      24 u32 wait, ms         20 u32 credits left; if moved, hash of the owner
//	28 u16 MAC key id                        24 u64 ms until the bucket is full, or if denied until
//	30 u16 key length  32 key                       it has the cost; if moved, the owner's epoch
//	 + 16  MAC                               32  16 MAC
//
// A question's wait is how long its asker waits for the answer. A server that must look up the key
// answers with kind waiting, and decides within the wait or not at all. If an asker denies a
// question because no answer came, it sends cancel with the question's number, key and cost. The
// server then does not charge the question, or gives its cost back. A cancel gets no answer.
//
// The MAC is the first 16 bytes of HMAC-SHA-256 (RFC 2104, FIPS 180-4) over all bytes before the MAC
// (mac.go). Without keys, which is for loopback only, the MAC is 16 zeroes.
//
// A session proves that the asker receives datagrams sent to its address (session.go). An asker without
// a session sends a hello and receives a session. The number of a question is the second in which the
// asker started << 32 | a count, so the number grows through restarts. A question that is sent again
// has the same number, and is charged once.
//
// The package is pure. Nothing is encrypted: clients that must hide keys hash them.
package wire
