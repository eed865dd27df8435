// Package crash kills nsqd and looks at what it acknowledged: each test stops the
// real process, kindly or not, at a random moment under load, starts it again
// over the same files, and counts by id what was lost, what came twice, and what
// came out of order. It also does to a broker what machines and clients do: a
// full disk, no descriptors left, subscribers that take nothing, publishers that
// send by the byte, all of them at once, and for a long time (make soak, make
// stress).
package crash
