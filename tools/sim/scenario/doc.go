// Package scenario turns a scenario file into a simulation and a report. It reads brokers
// and their calibration, builds the load, profiles contracts, places publishers like the
// loaddistributor, runs tools/sim/engine and summarizes the result. Placement, shares and
// the SLO's statistic are the production's.
//
// spec.go has the file format, calibration.go the speed of brokers, build.go the
// preparation, run.go the run, report.go the report. fit.go runs a search of
// loaddistributor/tuner, like loaddistributor/controller does live.
package scenario
