// Package upstream runs NSQ's own programs against ours: nsqadmin on a cluster and on one broker, the
// command line tools on both sides of a broker, and a folder that NSQ's nsqd wrote and our nsqd takes
// over. The package contains only tests, on processes and loopback. tests/go.mod pins the version of
// NSQ. tests/conformance compares the behaviour of nsqd itself.
package upstream
