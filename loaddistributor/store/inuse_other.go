//go:build !linux

package store

func lockOwner(string) string { return "another process" }
