//go:build race

package rawfd

import "syscall"

// Read reads what is there. EAGAIN: nothing. In this build it goes through
// package syscall, whose reads and writes are events to the race detector, as
// those of package net are.
func Read(fd int, b []byte) (int, syscall.Errno) { return again(syscall.Read, fd, b) }

// Write writes what is taken. EAGAIN: nothing is.
func Write(fd int, b []byte) (int, syscall.Errno) { return again(syscall.Write, fd, b) }

func again(call func(int, []byte) (int, error), fd int, b []byte) (int, syscall.Errno) {
	for {
		n, err := call(fd, b)
		if err == nil {
			return n, 0
		}
		errno, ok := err.(syscall.Errno) // errors.As would allocate
		if !ok {
			panic("rawfd: " + err.Error()) // package syscall has no other errors
		}
		if errno != syscall.EINTR {
			return 0, errno
		}
	}
}
