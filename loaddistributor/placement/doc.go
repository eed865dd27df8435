// Package placement decides which brokers carry a topic, how much of its rate
// each gets, and which publishers go where (SRTM paper, sections 4.2 and 4.3).
// It is pure: a snapshot of brokers and a demand come in, a Plan or the reason
// why there is none goes out. It does not know who applies the plan, and does
// not measure: loaddistributor/controller commits, fitting verifies.
//
// A policy answers three questions, each with its own file:
//
//	             which brokers (quota.go)   how much (quota.go)        who (assign.go)
//	srtm         fewest, largest rcap       max-min                    each group in proportion
//	maxmin       fewest, largest rcap       max-min                    at random
//	conc         fewest, largest rcap       equal total load           at random
//	loadbalance  all                        equal parts of the topic   at random
//
// Read demand.go for what may be asked, place.go for how the answers are put
// together.
package placement
