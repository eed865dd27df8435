// Package cost knows what requests take and what servers have, and puts both in
// gateway/schedule's terms: percent of a reference server. It starts from what the
// policy says, learns from what servers report of a request (ORCA), and has a request's
// service time and bytes where it knows nothing else. What a server reports of itself
// corrects its capacity.
//
// Units are the operator's: a capacity has them per second, a request's cost as such. A
// request holds its percentage while it is served. 100 percent is the work of Window. A
// configured capacity bounds how much work is at a server at a time. How many requests are
// there is decided by gateway/limit.
//
// It is pure, and one lock of its caller guards it. Read Table next, then ParseReport.
package cost
