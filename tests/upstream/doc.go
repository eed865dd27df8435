// Package upstream runs NSQ's own programs against ours: nsqadmin on a cluster and on one
// broker, the command line tools on both sides of a broker, and a folder that NSQ's nsqd
// wrote and our nsqd takes over. It is all tests, on processes and loopback. tests/go.mod
// pins the version of NSQ. What nsqd itself does is compared in tests/conformance.
package upstream
