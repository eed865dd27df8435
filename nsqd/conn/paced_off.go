//go:build !paced

package conn

// loopGather is what one write of a loop gathers, in bytes, unless a message is larger.
const loopGather = 64 << 10

// work does nothing: see the build tag paced.
func work(int) {}
