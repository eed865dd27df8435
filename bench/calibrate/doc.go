//go:build linux

// Package calibrate measures an nsqd on this machine and writes the calibration
// with which the simulator's broker comes closest to it:
//
//	make build && go run ./bench calibrate --out=calibration.json
//	bin/drlsim run --scenario=FILE    # whose "calibration" names that file
//
// For each load it starts bin/nsqd afresh and measures it as srtm broker calibrate
// does (tools/srtm/calibrate): an open loop by a Poisson schedule, the broker's own
// latencies (/stats), and here its processor time, too. tools/sim/calibrate fits;
// then every load is simulated as drlsim run does it, with another seed, and the
// file says how far that is off. Publishers, subscriber and broker share the
// processors, so the additional latency is that of a broker in such company.
//
// measure.go runs the broker, file.go makes the calibration.
package calibrate
