// Package calibrate finds the broker of the simulator that comes closest to a
// measured one: from processing delays and processor time at several loads, how
// long the engine's broker works and what it adds beside its queue. It is pure:
// the same measurements give the same parameters. It does not know who measured,
// nor the calibration's file. Read bench/calibrate next for both.
package calibrate
