// Package plan is `srtm plan`: it places a topic described in a file, without
// touching a cluster, for capacity planning and for checking the placement. It
// reads a scenario, asks loaddistributor/placement, and writes the answer; it
// decides nothing itself. lease.go is `srtm admission plan`, by tokenbucket's theory. Read loaddistributor/placement next.
package plan
