package header

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Version is the version of both formats, and the first argument of PACE.
const Version = 1

// Sizes of the formats in bytes.
const (
	OKSize     = 20
	PacketSize = 32
)

// ErrMalformed reports a wrong size or version, or invalid values.
var ErrMalformed = errors.New("malformed pacing header")

const (
	paced    = 1 << 0
	overload = 1 << 1
)

// OK is the advice to a publisher. Rate and Burst apply if Paced.
type OK struct {
	Paced    bool
	Overload bool             // multiply the send rate by 0.875; for senders with windows
	Weight   uint8            // effective weight, 1 to 255; may be less than requested
	Interval time.Duration    // t_s, in whole milliseconds up to 65.535 s; advice expires after 10 intervals
	Rate     tokenbucket.Rate // at most MaxRate; at least 1 if paced
	Burst    int64            // messages, at most MaxBurst; at least 1 if paced
}

// AppendOK appends o. It limits values to their ranges.
func AppendOK(dst []byte, o OK) []byte {
	flags, rate, burst := byte(0), int64(o.Rate), o.Burst
	minimum := int64(0)
	if o.Paced {
		flags, minimum = paced, 1
	}
	if o.Overload {
		flags |= overload
	}
	rate = min(max(rate, minimum), int64(tokenbucket.MaxRate))
	burst = min(max(burst, minimum), tokenbucket.MaxBurst)
	ms := min(max(o.Interval/time.Millisecond, 1), math.MaxUint16)
	dst = append(dst, 'O', 'K', Version, flags, max(o.Weight, 1), 0)
	dst = binary.BigEndian.AppendUint16(dst, uint16(ms))
	dst = binary.BigEndian.AppendUint64(dst, uint64(rate))
	return binary.BigEndian.AppendUint32(dst, uint32(burst))
}

// IsOK reports whether a response is an OK, either NSQ's or with advice. ParseOK may still refuse
// the advice.
func IsOK[T ~string | ~[]byte](response T) bool {
	return (len(response) == 2 || len(response) == OKSize) && response[0] == 'O' && response[1] == 'K'
}

// ParseOK parses an OK of OKSize bytes, or returns ErrMalformed. It ignores flags of later brokers.
func ParseOK(d []byte) (OK, error) {
	if len(d) != OKSize || d[0] != 'O' || d[1] != 'K' || d[2] != Version {
		return OK{}, ErrMalformed
	}
	rate, burst := binary.BigEndian.Uint64(d[8:]), int64(binary.BigEndian.Uint32(d[16:]))
	o := OK{
		Paced:    d[3]&paced != 0,
		Overload: d[3]&overload != 0,
		Weight:   d[4],
		Interval: time.Duration(binary.BigEndian.Uint16(d[6:])) * time.Millisecond,
		Rate:     tokenbucket.Rate(min(rate, uint64(math.MaxInt64))),
		Burst:    burst,
	}
	absent := o.Rate < 1 || burst < 1
	if o.Weight == 0 || o.Interval == 0 || o.Rate > tokenbucket.MaxRate || burst > tokenbucket.MaxBurst || o.Paced && absent {
		return OK{}, ErrMalformed
	}
	return o, nil
}

// Num is the expected fair throughput with which a router signals overload. Other routers do not
// overwrite it.
const Num = math.MaxUint64

// Packet is the paper's header (its figure 1).
type Packet struct {
	ToS            uint8  // weight
	RTT            uint32 // of the sender, latest, µs
	Throughput     uint64 // of the sender, bytes/s
	FairThroughput uint64 // bytes/s; the lowest of the routers on the path, or Num; 0: unknown
	MeanRTT        uint32 // at the router that set FairThroughput, µs
}

// Lower stores a router's feedback: the fair throughput of a virtual flow in bytes/s, or Num, and
// the mean RTT in µs. As in the paper's section 2, the lowest fair throughput on the path remains,
// and no router overwrites Num. A fair throughput of 0 means unknown and changes nothing.
func (p *Packet) Lower(fair uint64, meanRTT uint32) {
	if fair == 0 || p.FairThroughput == Num || fair != Num && p.FairThroughput != 0 && p.FairThroughput <= fair {
		return
	}
	p.FairThroughput, p.MeanRTT = fair, meanRTT
}

// AppendPacket appends p.
func AppendPacket(dst []byte, p Packet) []byte {
	dst = append(dst, Version, p.ToS, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, p.RTT)
	dst = binary.BigEndian.AppendUint64(dst, p.Throughput)
	dst = binary.BigEndian.AppendUint64(dst, p.FairThroughput)
	dst = binary.BigEndian.AppendUint32(dst, p.MeanRTT)
	return binary.BigEndian.AppendUint32(dst, 0)
}

// ParsePacket parses the result of AppendPacket, or returns ErrMalformed.
func ParsePacket(d []byte) (Packet, error) {
	if len(d) != PacketSize || d[0] != Version {
		return Packet{}, ErrMalformed
	}
	return Packet{
		ToS:            d[1],
		RTT:            binary.BigEndian.Uint32(d[4:]),
		Throughput:     binary.BigEndian.Uint64(d[8:]),
		FairThroughput: binary.BigEndian.Uint64(d[16:]),
		MeanRTT:        binary.BigEndian.Uint32(d[24:]),
	}, nil
}
