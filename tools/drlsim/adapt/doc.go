// Package adapt simulates how shares follow the traffic: brokers with the buckets
// that production has, reports every step, the adaptor's windows, rules, dead band
// and ledger, and arrivals whose spread over the brokers changes. It computes on
// what it is given and does no I/O; all algorithms are tbadaptor/share's,
// tbadaptor/ledger's and tokenbucket's own.
package adapt
