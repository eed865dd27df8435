// Package placement decides which brokers carry a topic, how much of the topic's rate
// each broker gets, and which publishers use which broker (SRTM paper, sections 4.2 and
// 4.3). The package is pure: Place turns a snapshot of brokers and a demand into a Plan,
// or explains why no plan exists. loaddistributor/controller commits the plan, and
// fitting verifies it.
//
// A policy answers three questions, each with its own file:
//
//	             which brokers (place.go)   how much (place.go)        publishers (assign.go)
//	srtm         fewest, largest rcap       max-min                    each group in proportion
//	maxmin       fewest, largest rcap       max-min                    at random
//	conc         fewest, largest rcap       equal total load           at random
//	loadbalance  all                        equal parts of the topic   at random
//
// Start with demand.go for the input, then read place.go for the algorithm.
package placement
