//go:build !linux

package rawfd

import (
	"net"
	"net/netip"

	"github.com/srtm-io/srtm/internal/mono"
)

// SharesPort and the rest of this file: see udp_linux.go.
const SharesPort = false

// UDP reads one datagram at a time.
type UDP struct {
	conn *net.UDPConn
	from Address
	in   []byte
	n    int
}

// Address is a peer's address.
type Address struct{ netip.AddrPort }

// ListenUDP opens a socket.
func ListenUDP(address string, _, size int) (*UDP, error) {
	conn, err := net.ListenPacket("udp", address)
	if err != nil {
		return nil, err
	}
	return &UDP{conn: conn.(*net.UDPConn), in: make([]byte, size)}, nil
}

// Addr returns the listen address.
func (u *UDP) Addr() netip.AddrPort { return u.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

// Receive waits for a datagram.
func (u *UDP) Receive(mono.Time) (n int, err error) {
	if u.n, u.from.AddrPort, err = u.conn.ReadFromUDPAddrPort(u.in); err != nil {
		return 0, err
	}
	return 1, nil
}

// Datagram returns the datagram of Receive.
func (u *UDP) Datagram(int) ([]byte, Address) { return u.in[:u.n], u.from }

// Queue sends d.
func (u *UDP) Queue(d []byte, to Address) { u.Send(d, to) }

// Flush does nothing.
func (u *UDP) Flush() {}

// Send sends a datagram.
func (u *UDP) Send(d []byte, to Address) { u.conn.WriteToUDPAddrPort(d, to.AddrPort) }

// Stop ends Receive.
func (u *UDP) Stop() { u.conn.Close() }

// Close frees the socket.
func (u *UDP) Close() error { return u.conn.Close() }
