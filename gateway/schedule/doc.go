// Package schedule decides which waiting request goes next, and which servers may take it. It
// implements mQoS (Lin et al., "Multiple-resource request scheduling for differentiated QoS at website
// gateway", Computer Communications 31, 2008) with corrections. While requests wait, classes share
// every resource of the servers in proportion to their weights.
//
// A request's cost is a vector: percent of a server's capacity, by resource. The request's type is the
// resource with the largest entry. Each class has a queue for each type. RAC (resource availability
// counter) is the free part of a resource. DC (deficit counter) is the amount of a resource that a
// class may still take. A trigger sends at most one request:
//
//	J: the types of which a request waits
//	j: the type of J that was passed over 8 times, else the one of which most is free,
//	   summed over the servers; ties take turns
//	h: the head, of the first class from pointer[j], whose vector the DCs of its class
//	   cover; else so with the type after j; if no type has any, all DCs of all classes
//	   that have requests are raised together by the fewest whole quanta that make one
//	if h fits no server, nothing goes before a completion, and the pointer stays
//	else it goes, and its vector is taken from the DCs of its class and from the RACs
//
// The paper's own algorithm and its faults: paperScheduler in tools/sim/web.
//
// A class that begins to wait gets the quantum of the present round, as the other classes did, and goes
// next: at most one quantum a round. In addition to RACs, SetLimit bounds the number of requests at a
// server.
//
// Guarantee: consider a period in which G quanta are granted, and a class that always has requests
// waiting. The class takes of every resource at most G of its quanta plus a cap (a quantum and the
// largest request). If a resource holds the class back at each grant and at the end, the class takes at
// least G quanta less the largest request of this resource. If measured costs exceed the estimates, the
// class may take the excess in addition. Then the class is in debt: its DC is below 0, and later quanta
// pay the debt.
//
// The guarantee has a price: classes that always have requests waiting advance together, even if they
// want different resources. For example, class A uses all of one resource, and class B with a sixth of
// A's weight wants another resource. B gets a sixth of the other resource, and the rest stays idle.
//
// The caller knows the time, and chooses the best of the servers that fit: Next takes the choice as an
// argument, and gateway/balance makes it. Read Scheduler next.
package schedule
