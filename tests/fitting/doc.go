// Package fitting has a loaddistributor fit a topic on brokers whose consumers are
// slow, with real processes: it stays where it is. It is all tests. What the searches decide is tested in
// loaddistributor/tuner, and how the controller follows them in
// loaddistributor/controller; bench/convergence measures how long they take.
package fitting
