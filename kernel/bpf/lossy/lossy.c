//go:build ignore

// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//
// A bad network and its witness, for the tests of kernel/hook.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define NEXT -1 // on to the next program: TCX_NEXT of newer headers
#define MARK 0x5e7 // on a copy, so that it is not copied again

volatile const __u32 lose_permille = 0;
volatile const __u32 double_permille = 0;

// What the witness saw come.
struct seen {
	__u64 at; // CLOCK_MONOTONIC, ns
	__u32 seq;
	__u32 len; // of the payload
	__u16 port; // the receiver's
	__u16 unused[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} witness SEC(".maps");

// Segments dropped, doubled, and seen but not noted since witness was full.
enum { LOST, DOUBLED, UNSEEN, COUNTERS };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

static __always_inline void count(__u32 key)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &key);

	if (n)
		__sync_fetch_and_add(n, 1);
}

struct segment {
	__u32 seq;
	__u32 len;
	__u16 port;
};

// parse fills s for a TCP segment over Ethernet that carries data.
static __always_inline int parse(struct __sk_buff *skb, struct segment *s)
{
	__u8 ip[40], tcp[14];
	__u32 at = ETH_HLEN, total, head;

	if (bpf_skb_load_bytes(skb, at, ip, 20))
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (ip[9] != IPPROTO_TCP)
			return 0;
		head = (ip[0] & 15) * 4;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (ip[6] != IPPROTO_TCP)
			return 0;
		head = 40;
	} else {
		return 0;
	}
	// The length in the header is 0 for the largest super-segments.
	total = skb->len - at;
	at += head;
	if (bpf_skb_load_bytes(skb, at, tcp, sizeof(tcp)))
		return 0;
	head += (tcp[12] >> 4) * 4;
	if (total <= head || tcp[13] & 2)
		return 0;
	s->len = total - head;
	s->seq = (__u32)tcp[4] << 24 | (__u32)tcp[5] << 16 | (__u32)tcp[6] << 8 | tcp[7];
	s->port = (__u16)tcp[2] << 8 | tcp[3];
	return 1;
}

// bad drops and doubles data segments at random. It must be on the receiver's
// ingress: of a loss on its own egress the sender is told, and holds back what
// follows.
SEC("tc")
int bad(struct __sk_buff *skb)
{
	struct segment s;
	__u32 dice;

	if (skb->mark == MARK || !parse(skb, &s))
		return NEXT;
	dice = bpf_get_prandom_u32() % 1000;
	if (dice < lose_permille) {
		count(LOST);
		return TC_ACT_SHOT;
	}
	if (dice < lose_permille + double_permille) {
		count(DOUBLED);
		skb->mark = MARK;
		bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
	}
	return NEXT;
}

// watch notes data segments on the receiver's ingress, after bad, before TCP
// gets them.
SEC("tc")
int watch(struct __sk_buff *skb)
{
	struct segment s;
	struct seen *e;

	if (!parse(skb, &s))
		return NEXT;
	e = bpf_ringbuf_reserve(&witness, sizeof(*e), 0);
	if (!e) {
		count(UNSEEN);
		return NEXT;
	}
	e->at = bpf_ktime_get_ns();
	e->seq = s.seq;
	e->len = s.len;
	e->port = s.port;
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return NEXT;
}
