// Package plan is `srtm plan`: it places a topic described in a file, without a cluster,
// for capacity planning and for checking the placement. The package reads a scenario,
// calls loaddistributor/placement, and prints the plan. Read loaddistributor/placement
// next.
package plan
