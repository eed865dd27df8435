// Package crash kills nsqd and looks at what it promised: each test stops the
// real process, kindly or not, at a random moment under load, starts it again
// over the same files, and counts by id what was lost, what came twice, and what
// came out of order.
package crash
