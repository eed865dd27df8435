// Package lease divides a key between its owner and holders elsewhere, who then decide
// without a hop. It is pure: a Key is an adaptor.Machine with the key as its only topic,
// and the bucket of what the owner keeps for those who ask it. admission/server gives it
// questions and the time; admission/client holds.
//
// Guarantee, for a rule (A, C) and any interval t: the requests that owner and holders admit
// have together a cost of at most C + A*t, the ledger's proof (tbadaptor/ledger), with
// every holder Strict: what it holds ends Length after it last asked with success, and is
// free here ClockBound later. Nothing is kept on a disk: the server that becomes a key's owner
// grants nothing for Quiet, in which holders say what they hold, and counts on no credit
// from before.
package lease
