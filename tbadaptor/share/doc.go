// Package share divides a contract (r, b) into shares (r_l, b_l), one per
// broker, by rules that have names. It is pure: it sees loads and answers with
// shares; it knows no time, no network and not who may have which share when.
// That is the ledger's business: read tbadaptor/ledger next.
//
// Every rule is two lists of weights, one for r and one for b; what follows is
// the same for all: exact sums in integers (r in milli-msg/s, b in messages),
// floors under the brokers in use, paid by the others, and the rounding
// remainder to one named broker, the one of the largest weight (of several,
// the one whose id sorts first).
package share
