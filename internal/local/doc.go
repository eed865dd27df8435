// Package local runs programs on this machine as child processes on loopback:
// one of them (Start), an nsqd on free ports (NSQD), or a whole cluster with the
// binaries and flags an operator would use (StartCluster). `srtm up`, the
// benchmarks and the tests start everything with it. It knows the programs' flags,
// their logs and the public API, nothing of their insides.
package local
