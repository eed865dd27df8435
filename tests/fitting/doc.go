// Package fitting makes a loaddistributor fit a topic on brokers whose consumers are slow, with real
// processes, and checks that the topic then stays in place. The package contains only tests.
// loaddistributor/tuner tests the decisions of the searches, loaddistributor/controller tests how the
// controller follows them, and bench/convergence measures their duration.
package fitting
