//go:build !linux

package fleet

func newPoller() (poller, error) { return newPortable(), nil }
