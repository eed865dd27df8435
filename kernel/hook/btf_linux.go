package hook

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const kernelBTF = "/sys/kernel/btf/vmlinux"

// tcpSock returns the offsets of rcv_nxt and bytes_received in this kernel's struct tcp_sock.
func tcpSock() (offsets [2]uint32, err error) {
	f, err := os.Open(kernelBTF)
	if err != nil {
		return offsets, fmt.Errorf("kernel type information: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return offsets, fmt.Errorf("kernel type information: %w", err)
	}
	// The file is read once, into memory outside the heap, so that the heap does not grow. Older
	// kernels cannot map the file itself.
	if info.Size() < 1 || info.Size() > 1<<28 {
		return offsets, fmt.Errorf("kernel type information: %d bytes", info.Size())
	}
	mem, err := unix.Mmap(-1, 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return offsets, fmt.Errorf("kernel type information: memory: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	if _, err := io.ReadFull(f, mem); err != nil {
		return offsets, fmt.Errorf("kernel type information: %w", err)
	}
	found, err := membersAt(mem, "tcp_sock", "rcv_nxt", "bytes_received")
	if err != nil {
		return offsets, fmt.Errorf("kernel type information: %w", err)
	}
	return [2]uint32(found), nil
}
