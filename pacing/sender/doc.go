// Package sender implements a paced publisher: Bucket keeps a publisher to the rate and burst that
// a broker advised. The package has no clock and does not wait. Its users, the client library and
// the simulator, wait. pacing/fair computes the advice.
package sender
