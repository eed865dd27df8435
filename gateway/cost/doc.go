// Package cost knows the cost of requests and the capacity of servers, in the units of
// gateway/schedule: percent of a reference server. It starts with the policy's costs, and learns from
// servers' load reports (ORCA). Without either it uses a request's service time and bytes. A server's
// report of its own utilization corrects the server's capacity.
//
// The operator chooses the units: a capacity is in units per second, a request's cost in units. A
// request holds its percentage while it is served. 100 percent is the work of Window. A configured
// capacity bounds the work at a server at any time. gateway/limit bounds the number of requests there.
//
// The package is pure, and one lock of the caller guards it. Read Table next, then ParseReport.
package cost
