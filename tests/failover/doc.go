// Package failover tests a whole cluster of real processes while publishers move, and while
// loaddistributors and their store are killed: no message and no acknowledged request is lost, and
// contracts hold. The tests use the cluster as its users do, through the client library, the API and
// the brokers' stats.
//
// TestMeasureFailureEffects (make trouble) measures what publishers notice of it, and asserts nothing.
package failover
