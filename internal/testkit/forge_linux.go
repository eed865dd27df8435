package testkit

import (
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// Forger sends segments of a connection through a raw socket, without its TCP, like a
// hostile client on its own machine. The receiver's TCP drops the segments because of the
// properties in Forgery.
type Forger struct {
	t        testing.TB
	raw      int
	to       unix.SockaddrInet4
	from     [4]byte
	ports    [2]uint16 // from, to
	ack      uint32
	stampNow uint32 // of the TCP timestamp option; 0: none

	// Next is the sequence number of the first unwritten byte at the call of Forge.
	Next uint32
}

// Forgery is one segment of Size bytes 'F' from sequence number Seq on.
type Forgery struct {
	Seq    uint32
	Size   int
	Flags  byte // besides ACK
	Old    bool // the timestamp is old
	BadSum bool
}

// TCP flags of a Forgery.
const (
	FIN = 0x01
	RST = 0x04
	PSH = 0x08
	URG = 0x20
)

// Forge returns a Forger for the client's end of an IPv4 connection with empty queues. It
// skips the test without root privileges.
func Forge(t testing.TB, client *net.TCPConn) *Forger {
	t.Helper()
	raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err == unix.EPERM {
		t.Skip("needs CAP_NET_RAW, to forge segments")
	}
	if err != nil {
		t.Fatalf("raw socket: %v", err)
	}
	t.Cleanup(func() { unix.Close(raw) })
	f := &Forger{t: t, raw: raw}
	from, to := client.LocalAddr().(*net.TCPAddr), client.RemoteAddr().(*net.TCPAddr)
	copy(f.from[:], from.IP.To4())
	copy(f.to.Addr[:], to.IP.To4())
	f.ports = [2]uint16{uint16(from.Port), uint16(to.Port)}
	rc, err := client.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var repair error
	err = rc.Control(func(fd uintptr) {
		const recvQueue, sendQueue, off, withTimestamps = 1, 2, -1, 1
		set := func(option, value int) {
			if repair == nil {
				repair = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value)
			}
		}
		get := func(option int) uint32 {
			v := 0
			if repair == nil {
				v, repair = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option)
			}
			return uint32(v)
		}
		set(unix.TCP_REPAIR, 1)
		if repair == unix.EPERM {
			return
		}
		set(unix.TCP_REPAIR_QUEUE, sendQueue)
		f.Next = get(unix.TCP_QUEUE_SEQ)
		set(unix.TCP_REPAIR_QUEUE, recvQueue)
		f.ack = get(unix.TCP_QUEUE_SEQ)
		set(unix.TCP_REPAIR, off)
		var info *unix.TCPInfo
		if repair == nil {
			info, repair = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}
		if repair == nil && info.Options&withTimestamps != 0 {
			f.stampNow = get(unix.TCP_TIMESTAMP)
		}
	})
	if repair == unix.EPERM {
		t.Skip("needs CAP_NET_ADMIN, to learn a connection's sequence numbers")
	}
	if err != nil || repair != nil {
		t.Fatal(err, repair)
	}
	return f
}

// Send sends a forged segment. On loopback the segment has arrived when Send returns.
func (f *Forger) Send(g Forgery) {
	f.t.Helper()
	const ip, tcp, ack = 20, 32, 0x10
	if g.Old && f.stampNow == 0 {
		f.t.Skip("TCP timestamps are switched off here")
	}
	b := make([]byte, ip+tcp+g.Size)
	b[0], b[8], b[9] = 4<<4|ip/4, 64, unix.IPPROTO_TCP
	copy(b[12:], f.from[:])
	copy(b[16:], f.to.Addr[:])
	seg := b[ip:]
	binary.BigEndian.PutUint16(seg, f.ports[0])
	binary.BigEndian.PutUint16(seg[2:], f.ports[1])
	binary.BigEndian.PutUint32(seg[4:], g.Seq)
	binary.BigEndian.PutUint32(seg[8:], f.ack)
	seg[12], seg[13] = tcp/4<<4, ack|g.Flags
	binary.BigEndian.PutUint16(seg[14:], 0xffff)
	binary.BigEndian.PutUint32(seg[20:], 0x0101_080a) // two fillers, then the timestamp option
	stamp := f.stampNow
	if g.Old {
		stamp -= 1 << 24
	}
	binary.BigEndian.PutUint32(seg[24:], stamp)
	for i := range g.Size {
		seg[tcp+i] = 'F'
	}
	sum := uint32(unix.IPPROTO_TCP) + uint32(len(seg))
	add := func(p []byte) {
		for ; len(p) > 1; p = p[2:] {
			sum += uint32(p[0])<<8 | uint32(p[1])
		}
		if len(p) == 1 {
			sum += uint32(p[0]) << 8
		}
	}
	add(b[12:ip])
	add(seg)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if g.BadSum {
		sum ^= 0x5555
	}
	binary.BigEndian.PutUint16(seg[16:], ^uint16(sum))
	if err := unix.Sendto(f.raw, b, 0, &f.to); err != nil {
		f.t.Fatal(fmt.Errorf("forge a segment of %d bytes: %w", g.Size, err))
	}
}
