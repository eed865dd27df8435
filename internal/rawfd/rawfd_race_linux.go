//go:build race

package rawfd

import "syscall"

// Read reads the available bytes. EAGAIN: none. This build uses package syscall, whose
// reads and writes are events for the race detector, like the calls of package net.
func Read(fd int, b []byte) (int, syscall.Errno) { return again(syscall.Read, fd, b) }

// Write writes as many bytes as the descriptor accepts. EAGAIN: none.
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
