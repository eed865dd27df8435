//go:build !paced

package conn

// loopGather is the maximum size of a loop's write in bytes, unless a message is larger.
const loopGather = 64 << 10

// work does nothing without the build tag paced.
func work(int) {}
