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
//	J: the types with a waiting request
//	j: the type in J that was passed over 8 times; otherwise the type with the largest free
//	   amount, summed over the servers; types take turns at ties
//	h: the first head in the queues of type j, from class pointer[j] on, whose vector the DCs
//	   of its class cover; if there is none, the same with the type after j; if no type has
//	   one, all DCs of all classes with requests are raised together by the fewest whole
//	   quanta that cover a head
//	if h fits no server, nothing goes before a completion, and the pointer stays
//	otherwise h goes, and its vector is subtracted from the DCs of its class and the RACs
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
