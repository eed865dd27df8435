// Package scenario turns a scenario file into a simulation and its report: it
// reads brokers and their calibration, builds the load, profiles contracts,
// places publishers as the loaddistributor would, runs tools/sim/engine and
// adds up what came of it. It decides nothing itself: placement, shares and the
// SLO's statistic are the production's.
//
// spec.go is the file's form, calibration.go how fast brokers are, build.go what a
// scenario is made into, run.go the run and report.go its account; fit.go runs a
// search of loaddistributor/tuner on it, as loaddistributor/controller does live.
package scenario
