// Package limit finds how many requests a server needs in flight to stay busy. More would
// wait in the server's own queue, where the weights of classes do not count.
//
// By Little's law, of n requests in flight the part
//
//	least latency / latency
//
// is being served, and the rest waits. A Limit therefore keeps as many in flight as are
// being served (the knee of throughput against latency) and a headroom of about its square
// root. The estimate needs the latency that a request has without waiting, its base:
//
//   - A request that leaves with few others in flight, at most 3/4 of the knee, has not
//     waited. Its latency teaches the base of its route. If the base was too high, and with
//     it the knee, the next bases are measured with 3/4 as many in flight, so an error of
//     the base heals instead of growing.
//   - If the server always has as many as it may, the Limit sends two batches of 32 with 3/4
//     of the knee in flight. A worker or more is idle meanwhile, which costs 1 to 2 percent
//     of the throughput. Nothing is rejected for it.
//   - Below half of the knee that was found last, requests count as having not waited. If a
//     server becomes slower, its base follows and the limit does not collapse.
//
// Each route has its own base, and a latency counts for at most three times the base. So
// neither a route that becomes slow nor a long tail shrinks the limit: by Little's law a
// slow request occupies its place by being served.
//
// The designs that lost: a gradient of short over long averages follows its own queue
// upwards under steady load; a periodic measurement with one or few requests in flight
// stalls the traffic meanwhile; a comparison of throughputs needs hundreds of answers for
// each step.
//
// It is pure. Read Limit next.
package limit
