// Package schedule decides which waiting request goes next, and to which servers it
// may: mQoS (Lin et al., "Multiple-resource request scheduling for differentiated QoS
// at website gateway", Computer Communications 31, 2008), corrected. Classes get every
// resource of the servers in the proportions of their weights while requests wait.
//
// A request takes a vector, percent of a server's capacity by resource; its type is the
// resource that it takes most of. Each class has a queue for each type. RAC (resource
// availability counter) is what of a resource is free; DC (deficit counter) what a class
// may still take of it. A trigger sends at most one request:
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
// What the paper has otherwise, and what comes of it: tools/sim/web's paperScheduler.
//
// A class that begins to wait gets the quantum of the round, which the others got before,
// and goes next: at most one quantum a round. Besides RACs, SetLimit bounds how many
// requests a server has.
//
// Guarantee: while G quanta are granted, a class that always has requests waiting takes
// of every resource at most G quanta of its own and a cap, a quantum and the largest
// request; and, of a resource that holds it back each time that quanta are granted and
// at the end, at least G quanta less the largest request. By what measured costs exceed
// the estimates it may take more, and is in debt then: a DC below 0, which is paid from
// later quanta.
//
// The guarantee has a price: classes that always have requests waiting advance together,
// also where they want different resources. Beside a class that has all of one, a class of
// a sixth of its weight gets a sixth of another, and the rest of that is idle.
//
// Only the caller knows the time, and which of the servers that fit is the best: the
// second is the argument of Next, and gateway/balance's business. Read Scheduler next.
package schedule
