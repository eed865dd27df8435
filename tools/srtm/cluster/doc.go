// Package cluster runs a whole SRTM cluster on this machine as child
// processes on loopback: a tbadaptor, a loaddistributor and brokers, the very
// binaries an operator would run. It knows their flags and the public API,
// nothing of their insides.
package cluster
