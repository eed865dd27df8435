// Package wire is admission's datagrams, big-endian, over UDP: a question of 44
// bytes and a key, and an answer of 44 bytes, so that no answer is longer than what
// asked for it.
//
//	question                                 answer
//	 0 u8  0xAD    1 u8 version 1             0 u8 0xAD    1 u8 1
//	 2 u8  kind: 0 hello 1 ask 6 lease        2 u8 kind: 2 answer 3 hello 4 moved 5 busy 7 granted
//	 3 u8  flags: 1 retry 2 peek              3 u8 flags: 1 admit 2 default 4 shadow 8 leased 16 fail open
//	 4 u64 session   12 u64 number            4 u64 session   12 u64 number
//	20 u32 cost      24 u16 MAC key id       20 u32 retry after, ms; if admitted, credits left
//	26 u16 key length  28 key                24 u32 epoch of the owner table
//	 + 16  MAC                               28  16 MAC
//
// A lease question has 40 bytes more before its MAC, u64 each: holder, and of what it
// holds epoch, rate (milli-credits/s), burst, released (milli-credits). Granted has 32:
// epoch, rate, burst, tokens (milli-credits); its bytes 20 to 23 are how long that lasts,
// ms. The rules by which both sides go are tbadaptor/ledger's.
//
// The MAC is the first 16 bytes of HMAC-SHA-256 (RFC 2104, FIPS 180-4) over all that
// precedes it (mac.go). Without keys, which is for loopback only, it is 16 zeroes.
//
// A session proves that the asker gets what is sent to its address (session.go): an
// asker that has none sends a hello, and gets it. The number of a question is the
// second in which the asker started << 32 | a count, so that it grows through
// restarts; a question that is sent again has the same number, and is charged once.
//
// The package is pure. Nothing is encrypted: clients that must hide keys hash them.
package wire
