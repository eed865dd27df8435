// Package payload is what an emulated message carries so that its receiver
// can tell how late it is and whether it came exactly once. It is pure; the
// clock of Intended is the one that internal/clock reads, so sender and
// receiver must share a host.
package payload
