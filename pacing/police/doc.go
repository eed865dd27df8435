// Package police is who is who among a topic's publishers, what weight each may
// have, and whether it sends more than it was told. No header field is trusted for it:
// its rate is measured, its weight is the lesser of its wish and what it is entitled
// to, and all connections of one identity are one publisher. What an identity is worth
// is for its issuer to know: a client_id, or an address behind which many
// are, is only as good as the network.
//
// The package is pure. What the publishers are told is pacing/fair's.
package police
