// Package fake holds small real servers for tests of publishers: a broker with the V2
// protocol over a socket, and a loaddistributor with the PlacementService. By default the
// servers behave like the real ones. On request they misbehave: they withhold answers,
// refuse, hang up, or move a publisher. They keep everything in memory and have no rate
// limit.
package fake
