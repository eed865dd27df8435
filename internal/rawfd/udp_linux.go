package rawfd

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
)

// SharesPort means that several UDPs can share one address: the kernel assigns each peer
// to one of them.
const SharesPort = true

// UDP is a socket that one goroutine reads and answers. When datagrams arrive closely,
// one system call handles all of them (recvmmsg, sendmmsg). Otherwise recvfrom and sendto
// handle a single datagram in a tenth less processor time. UDP allocates nothing after
// ListenUDP.
//
// Receive blocks its thread (see Blocking).
type UDP struct {
	fd      int
	addr    netip.AddrPort
	closing atomic.Bool

	// Owned by the reader.
	blocking Blocking
	last     mono.Time // now of the last Receive
	in, out  batch
	queued   int // datagrams in out
}

// closely is the maximum distance of datagrams that may arrive together.
const closely = 50 * time.Microsecond

// Address is a peer's address in the kernel's form.
type Address struct {
	raw unix.RawSockaddrInet6 // or an Inet4, which is shorter
	len uint32
}

type batch struct {
	heads   []head // refer to the other fields
	iovs    []unix.Iovec
	sources []unix.RawSockaddrInet6
	bytes   []byte
	size    int // of each datagram in bytes
}

// head is C's struct mmsghdr.
type head struct {
	unix.Msghdr
	len uint32
}

func newBatch(n, size int) batch {
	b := batch{heads: make([]head, n), iovs: make([]unix.Iovec, n), sources: make([]unix.RawSockaddrInet6, n), bytes: make([]byte, n*size), size: size}
	for i := range b.heads {
		b.iovs[i].Base = &b.bytes[i*size]
		b.iovs[i].SetLen(size)
		b.heads[i].Iov = &b.iovs[i]
		b.heads[i].SetIovlen(1)
		b.heads[i].Name = (*byte)(unsafe.Pointer(&b.sources[i]))
		b.heads[i].Namelen = unix.SizeofSockaddrInet6
	}
	return b
}

// ListenUDP opens a socket that receives n datagrams at a time, of up to size bytes each.
// Longer datagrams are cut off. Requires: n, size > 0.
func ListenUDP(address string, n, size int) (_ *UDP, err error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var set error
		err := c.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		if err != nil {
			return err
		}
		return set
	}}
	conn, err := config.ListenPacket(context.Background(), "udp", address)
	if err != nil {
		return nil, err
	}
	defer conn.Close() // UDP uses another descriptor, unknown to Go's poller
	u := &UDP{addr: conn.LocalAddr().(*net.UDPAddr).AddrPort(), in: newBatch(n, size), out: newBatch(n, size)}
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	var dup error
	if err = raw.Control(func(fd uintptr) { u.fd, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err == nil {
		err = dup
	}
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(u.fd, false); err != nil {
		_ = unix.Close(u.fd)
		return nil, err
	}
	u.blocking.Begin()
	return u, nil
}

// Addr returns the listen address.
func (u *UDP) Addr() netip.AddrPort { return u.addr }

// Receive waits for a datagram and returns the number of datagrams. now is the
// approximate time of the call, such as the time when the previous datagrams were
// handled. Error: net.ErrClosed after Stop; other errors are temporary.
func (u *UDP) Receive(now mono.Time) (n int, err error) {
	u.blocking.Blocks(now)
	wantsBatch := now.Sub(u.last) < closely
	u.last = now
	for {
		var size uintptr
		var errno unix.Errno
		first := &u.in.heads[0]
		if n = 1; wantsBatch {
			size, _, errno = unix.Syscall6(unix.SYS_RECVMMSG, uintptr(u.fd), uintptr(unsafe.Pointer(first)), uintptr(len(u.in.heads)), unix.MSG_WAITFORONE, 0, 0)
			n = int(size)
		} else {
			size, _, errno = unix.Syscall6(unix.SYS_RECVFROM, uintptr(u.fd), uintptr(unsafe.Pointer(first.Iov.Base)), uintptr(u.in.size), 0, uintptr(unsafe.Pointer(first.Name)), uintptr(unsafe.Pointer(&first.Namelen)))
			first.len = uint32(size)
		}
		switch {
		case u.closing.Load():
			return 0, net.ErrClosed
		case errno == 0:
			return n, nil
		case errno != unix.EINTR:
			return 0, errno
		}
	}
}

// Datagram returns the ith datagram of Receive, valid until the next Receive.
func (u *UDP) Datagram(i int) (d []byte, from Address) {
	h := &u.in.heads[i]
	from = Address{u.in.sources[i], h.Namelen}
	h.Namelen = unix.SizeofSockaddrInet6 // for the next datagram
	offset := i * u.in.size
	return u.in.bytes[offset : offset+int(h.len)], from
}

// Queue sends d with the next Flush or earlier. Requires: len(d) is at most ListenUDP's
// size.
func (u *UDP) Queue(d []byte, to Address) {
	if u.queued == len(u.out.heads) {
		u.Flush()
	}
	i := u.queued
	u.queued++
	u.out.iovs[i].SetLen(copy(u.out.bytes[i*u.out.size:][:u.out.size], d))
	u.out.sources[i], u.out.heads[i].Namelen = to.raw, to.len
}

// Flush sends the queued datagrams. Datagrams that the socket refuses are lost, as on the
// network.
func (u *UDP) Flush() {
	if u.queued == 1 {
		h := &u.out.heads[0]
		u.send(h.Iov.Base, int(h.Iov.Len), h.Name, h.Namelen)
		u.queued = 0
	}
	for sent := 0; sent < u.queued; {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(u.fd), uintptr(unsafe.Pointer(&u.out.heads[sent])), uintptr(u.queued-sent), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			sent += int(n)
		case unix.EINTR:
		default:
			sent++ // skip the first datagram
		}
	}
	u.queued = 0
}

// Send sends a datagram at once. Any goroutine may call it.
func (u *UDP) Send(d []byte, to Address) {
	u.send(unsafe.SliceData(d), len(d), (*byte)(unsafe.Pointer(&to.raw)), to.len)
}

func (u *UDP) send(d *byte, n int, to *byte, size uint32) {
	_, _, _ = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(u.fd), uintptr(unsafe.Pointer(d)), uintptr(n), unix.MSG_DONTWAIT, uintptr(unsafe.Pointer(to)), uintptr(size))
}

// Stop ends the present Receive and all later calls.
func (u *UDP) Stop() {
	u.closing.Store(true)
	_ = unix.Shutdown(u.fd, unix.SHUT_RDWR) // returns ENOTCONN, and still wakes Receive
}

// Close frees the socket, once. Requires: no other method is in progress.
func (u *UDP) Close() error {
	fd := u.fd
	if u.fd = -1; fd < 0 {
		return nil
	}
	u.blocking.End()
	return unix.Close(fd)
}

// Accept accepts a connection, in non-blocking mode, from a listener in non-blocking
// mode. It allocates nothing.
func Accept(listener int, from *Address) (fd int, errno unix.Errno) {
	from.raw.Family, from.len = unix.AF_UNSPEC, unix.SizeofSockaddrInet6
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listener), uintptr(unsafe.Pointer(&from.raw)), uintptr(unsafe.Pointer(&from.len)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(n), 0
}

// AddrPort returns the address in package net's form; invalid for a family other than IP.
func (a *Address) AddrPort() netip.AddrPort {
	if a.raw.Family != unix.AF_INET && a.raw.Family != unix.AF_INET6 {
		return netip.AddrPort{}
	}
	port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&a.raw.Port))[:])
	if a.raw.Family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(&a.raw)).Addr), port)
	}
	ip := netip.AddrFrom16(a.raw.Addr)
	if a.raw.Scope_id != 0 {
		ip = ip.WithZone(strconv.Itoa(int(a.raw.Scope_id)))
	}
	return netip.AddrPortFrom(ip, port)
}
