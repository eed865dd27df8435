// Package local runs programs on this machine as child processes on loopback: a single
// program (Start), an nsqd on free ports (NSQD), or a whole cluster with an operator's
// binaries and flags (StartCluster). `srtm up`, the benchmarks and the tests use it. It
// depends only on the programs' flags, their logs and the public API.
package local
