// Package fake holds small real servers for tests of whatever publishes: a
// broker that speaks the V2 protocol over a socket, and a loaddistributor that
// serves the PlacementService. They do what the real ones do in the good case
// and can be told to misbehave: to withhold answers, refuse, hang up, move a
// publisher. They keep everything in memory and know no rate limit.
package fake
