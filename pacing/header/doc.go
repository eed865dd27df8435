// Package header implements the two wire formats of advice, big-endian: the OK with which a broker
// answers a publisher after PACE, and the header that the paper's routers fill in, for the
// simulator.
//
//	OK, 20 bytes
//	 0 'O' 'K'        2 u8 version 1      3 u8 flags: 1 paced  2 overload: multiply by 0.875
//	 4 u8 weight      5 u8 0              6 u16 t_s, ms
//	 8 u64 rate, milli-messages/s         16 u32 burst, messages
//
//	Packet, 32 bytes; rates in bytes/s
//	 0 u8 version 1   1 u8 ToS            2 u16 0
//	 4 u32 cur_rtt, µs                    8 u64 cur_thr
//	16 u64 exp_fair_thr, all ones: Num_  24 u32 avg_rtt, µs            28 u32 0
//
// The package is pure. Packages fair and sender define the meaning of the numbers.
package header
