//go:build ignore

// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//
// Notes when each TCP data segment of a tracked connection reached this host.
//
// It is a socket filter on a listening socket; connections inherit it. The
// kernel runs it in tcp_v4_rcv and tcp_v6_rcv, in softirq, before the socket
// lock, the backlog and the receive queue. So whenever user space has read a
// byte, the record of the segment that delivered it is already written.
//
// In this program type the data starts at the TCP header, for IPv4 and IPv6
// alike, and a super-segment (GRO, TSO) is one run and one record. It must
// return -1 on every path: 0 would drop the segment, less would cut it.
//
// Two CPUs may run it for one connection at once (a sender on loopback that
// migrates, a flow that moves between receive queues). Hence the atomic
// reservation of an index, and the lap mark that publishes a record.

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// The kernel hands bpf_skc_to_tcp_sock to GPL-compatible programs only.
char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define KEEP -1
#define EARLY_RECORDS 8
#define LISTEN 10 // TCP_LISTEN of the kernel's enum

// Set by the loader before loading, so constants to the verifier: records per
// ring less one, and how many bits of a slot number count inside a chunk.
volatile const __u32 ring_mask = 63;
volatile const __u32 chunk_bits = 0;

// A record. meta = seq(32) << 32 | first(1) << 31 | len(19) << 12 | mark(12).
// The lap mark is the low bits of the record's index; meta is stored last.
// first says that the segment begins at or beyond top.
struct record {
	__u64 ts; // CLOCK_MONOTONIC, ns
	__u64 meta;
};

// A slot of a chunk: this header, one cache line, then the ring of records.
struct slot {
	__u64 head;    // indices reserved so far
	__u64 cookie;  // the connection's; written by user space, 0 when free
	__u32 base;    // sequence number of stream offset 0; arrival_plain: segments
	__u32 base_ok; // set after base
	__u32 top;     // the furthest end of a segment so far
	__u32 unused[9];
	struct record ring[];
};

// What is kept of a connection that has no slot: its last few segments.
struct early {
	__u32 base;
	__u32 base_ok;
	__u32 head;
	__u32 top;
	struct record ring[EARLY_RECORDS];
};

enum counter {
	COUNT_EARLY,      // segments of connections without a slot
	COUNT_EARLY_LOST, // of those, segments that found no place
	COUNT_NO_BASE,    // segments met while the base could not be told
	COUNT_FOREIGN,    // segments whose slot belongs to another connection
	COUNT_LISTEN,     // data segments met by a listening socket
	COUNTERS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

// Socket cookie to slot number. Filled by user space only.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u32);
} conns SEC(".maps");

// The slots, in chunks that user space adds as connections come and maps into
// its memory. Sizes are set by the loader.
struct chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct slot) + 64 * sizeof(struct record));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__array(values, struct chunk);
} chunks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, struct early);
} early SEC(".maps");

// Where the running kernel has these members of its struct tcp_sock. Set by
// the loader, which looks them up: relocations would do the same, but make the
// loader decode all of the kernel's type information, at the cost of megabytes.
volatile const __u32 rcv_nxt_at = 0;
volatile const __u32 bytes_received_at = 0;

static __always_inline void count(enum counter c)
{
	__u32 key = c;
	__u64 *n = bpf_map_lookup_elem(&counters, &key);

	if (n)
		*n += 1;
}

static __always_inline __u32 rcv_nxt(void *tp)
{
	return *(volatile __u32 *)(tp + rcv_nxt_at);
}

// tell_base stores the sequence number of stream offset 0, which is what was
// received so far before what is expected next. The filter does not hold the
// socket lock: the value counts only if rcv_nxt did not move meanwhile. A FIN
// adds one to both, so it does not disturb.
static __always_inline void tell_base(void *tp, __u32 *base, __u32 *base_ok)
{
	__u32 next = rcv_nxt(tp);
	__u64 received = *(volatile __u64 *)(tp + bytes_received_at);

	if (next != rcv_nxt(tp)) {
		count(COUNT_NO_BASE);
		return;
	}
	*base = next - (__u32)received;
	__sync_lock_test_and_set(base_ok, 1);
}

// past moves *top to the end of the segment, if that is further, and reports
// whether none of the segment's bytes had come before. index is its record's.
static __always_inline int past(__u32 *top, __u64 index, __u32 seq, __u32 len)
{
	__u32 end = seq + len, was;

	if (index == 0) { // nothing is known of before
		*top = end;
		return 0;
	}
#pragma unroll
	for (int i = 0; i < 4; i++) { // losing four times to other CPUs: not certain
		was = *(volatile __u32 *)top;
		if ((__s32)(end - was) <= 0)
			return 0;
		if (__sync_val_compare_and_swap(top, was, end) == was)
			return (__s32)(seq - was) >= 0;
	}
	return 0;
}

// segment is what is noted of one.
struct segment {
	__u64 ts;
	__u32 seq;
	__u32 len;
	__u32 parts; // segments that it was merged from, as TCP counts them
};

// cut takes from a segment what was received in order before, which this is a
// mere copy of, and reports whether anything is left. The kernel may have got
// further meanwhile: then the copy is noted.
static __always_inline int cut(struct segment *g, __u32 next)
{
	__s32 old = next - g->seq;

	if (old <= 0)
		return 1;
	if ((__u32)old >= g->len)
		return 0;
	g->seq += old;
	g->len -= old;
	return 1;
}

static __always_inline void store(struct record *r, struct segment *g, int first, __u64 index)
{
	r->ts = g->ts;
	// An exchange is ordered after the store above on every architecture.
	__sync_lock_test_and_set(&r->meta,
				 (__u64)g->seq << 32 | (__u64)first << 31 | (__u64)g->len << 12 | (index & 0xfff));
}

// into_slot notes a segment of a connection that has a slot, and reports
// whether the connection does. tp tells the base; without it the parts are
// counted in its place.
static __always_inline int into_slot(void *tp, __u64 cookie, struct segment *g)
{
	__u32 *slot_of = bpf_map_lookup_elem(&conns, &cookie);
	__u32 at, chunk_at;
	struct record *r;
	struct slot *s;
	void *chunk;
	__u64 head;

	if (!slot_of)
		return 0;
	at = *slot_of;
	chunk_at = at >> chunk_bits;
	chunk = bpf_map_lookup_elem(&chunks, &chunk_at);
	if (!chunk)
		return 1;
	at &= (1U << chunk_bits) - 1;
	s = bpf_map_lookup_elem(chunk, &at);
	if (!s)
		return 1;
	if (s->cookie != cookie) {
		count(COUNT_FOREIGN);
		return 1;
	}
	if (!tp)
		__sync_fetch_and_add(&s->base, g->parts);
	else if (!s->base_ok)
		tell_base(tp, &s->base, &s->base_ok);
	head = __sync_fetch_and_add(&s->head, 1);
	// The verifier wants to see the bound on the byte offset itself,
	// and without CAP_PERFMON one path to the addition.
	r = (void *)s + sizeof(*s) + (head & ring_mask) * sizeof(*r);
	asm volatile("" : "+r"(r));
	store(r, g, past(&s->top, head, g->seq, g->len), head);
	return 1;
}

// note is the whole program. With by_kernel the base, and what was received,
// come from the kernel's socket. Without, which needs no kernel type information
// and fewer privileges, user space works the base out.
static __always_inline int note(struct __sk_buff *skb, const int by_kernel)
{
	__u8 tcp[16];
	__u32 header, n;
	__u64 cookie;
	struct segment g;
	struct record *r;
	void *tp = 0;

	if (bpf_skb_load_bytes(skb, 0, tcp, sizeof(tcp)))
		return KEEP;
	header = (tcp[12] >> 4) * 4;
	if (skb->len <= header || tcp[13] & 0x02) // nothing but a header, or a SYN
		return KEEP;
	g.ts = bpf_ktime_get_ns();
	g.len = skb->len - header;
	g.parts = skb->gso_segs ? skb->gso_segs : 1;
	g.seq = (__u32)tcp[4] << 24 | (__u32)tcp[5] << 16 | (__u32)tcp[6] << 8 | tcp[7];

	struct bpf_sock *sk = skb->sk;
	if (!sk || sk->state == LISTEN) {
		count(COUNT_LISTEN);
		return KEEP;
	}
	if (by_kernel) {
		tp = bpf_skc_to_tcp_sock(sk);
		if (!tp || !cut(&g, rcv_nxt(tp)))
			return KEEP;
	}
	if (g.len > 0x7ffff)
		g.len = 0x7ffff;

	cookie = bpf_get_socket_cookie(skb);
	if (into_slot(tp, cookie, &g))
		return KEEP;

	count(COUNT_EARLY);
	struct early *e = bpf_map_lookup_elem(&early, &cookie);
	if (!e) {
		struct early none = {};

		// Another CPU may have been faster; then its entry is the one.
		bpf_map_update_elem(&early, &cookie, &none, BPF_NOEXIST);
		e = bpf_map_lookup_elem(&early, &cookie);
		if (!e) {
			count(COUNT_EARLY_LOST);
			return KEEP;
		}
	}
	n = __sync_fetch_and_add(&e->head, 1);
	r = &e->ring[n & (EARLY_RECORDS - 1)];
	asm volatile("" : "+r"(r));
	if (!tp)
		__sync_fetch_and_add(&e->base, g.parts);
	else if (!e->base_ok)
		tell_base(tp, &e->base, &e->base_ok);
	store(r, &g, past(&e->top, n, g.seq, g.len), n);
	// The connection may have got its slot meanwhile, and user space have looked
	// at the early records before this one was there.
	into_slot(tp, cookie, &g);
	return KEEP;
}

SEC("socket")
int arrival(struct __sk_buff *skb)
{
	return note(skb, 1);
}

SEC("socket")
int arrival_plain(struct __sk_buff *skb)
{
	return note(skb, 0);
}
