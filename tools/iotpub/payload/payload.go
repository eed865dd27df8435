// Package payload encodes the body of an emulated message. From the body the receiver
// computes the latency, and checks that the message arrives exactly once. The package is
// pure. Intended is read from internal/clock, so sender and receiver must share a host.
package payload

import (
	"encoding/binary"
	"fmt"

	"github.com/srtm-io/srtm/internal/mono"
)

// Size is the minimum length of a body. Longer bodies are padded.
const Size = 24

const magic = "SRTP"

// Payload identifies one message of one run.
type Payload struct {
	// Run distinguishes runs that share a topic.
	Run uint32
	// Source is the publisher's number in its fleet.
	Source uint32
	// Seq counts the publisher's messages from 0.
	Seq uint32
	// Intended is the scheduled send time. Latency counts from Intended.
	Intended mono.Time
}

// Append appends a body of size bytes, big endian:
//
//	offset 0      4     8        12    16         24
//	       "SRTP" run   source   seq   intended   zeros ...
//
// Requires: size >= Size.
func Append(dst []byte, p Payload, size int) []byte {
	if size < Size {
		panic(fmt.Sprintf("a body of %d bytes: the minimum is %d", size, Size))
	}
	dst = append(dst, magic...)
	dst = binary.BigEndian.AppendUint32(dst, p.Run)
	dst = binary.BigEndian.AppendUint32(dst, p.Source)
	dst = binary.BigEndian.AppendUint32(dst, p.Seq)
	dst = binary.BigEndian.AppendUint64(dst, uint64(p.Intended))
	for size -= Size; size > 0; {
		n := min(size, len(zeros))
		dst = append(dst, zeros[:n]...)
		size -= n
	}
	return dst
}

const zeros = "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" +
	"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// Parse decodes a body that Append encoded. It returns false for other bodies.
func Parse(body []byte) (Payload, bool) {
	if len(body) < Size || string(body[:4]) != magic {
		return Payload{}, false
	}
	return Payload{
		Run:      binary.BigEndian.Uint32(body[4:]),
		Source:   binary.BigEndian.Uint32(body[8:]),
		Seq:      binary.BigEndian.Uint32(body[12:]),
		Intended: mono.Time(binary.BigEndian.Uint64(body[16:])),
	}, true
}
