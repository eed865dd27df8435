//go:build !linux

package broker

func newSharpTimer() (timer, error) { return newCoarseTimer() }
