package wire

import (
	"encoding/binary"
	"strconv"
)

// Encoders for the commands that our clients send. Each Append function appends one command to dst
// and returns the extended slice. The caller checks names and sizes; the server refuses invalid
// ones.

// AppendMagic appends the magic, which opens a connection.
func AppendMagic(dst []byte) []byte { return append(dst, Magic...) }

// AppendIdentify appends IDENTIFY with the JSON of an IdentifyRequest.
//
//	I D E N T I F Y \n [size uint32][json]
func AppendIdentify(dst, json []byte) []byte {
	return appendBody(append(dst, "IDENTIFY\n"...), json)
}

// AppendPub appends the publish of one message.
//
//	P U B ' ' topic \n [size uint32][body]
func AppendPub(dst []byte, topic string, body []byte) []byte {
	dst = append(dst, "PUB "...)
	dst = append(dst, topic...)
	return appendBody(append(dst, '\n'), body)
}

// AppendMpub appends the publish of several messages, all or none.
//
//	M P U B ' ' topic \n [body size uint32][count uint32] ([size uint32][body])...
func AppendMpub(dst []byte, topic string, bodies [][]byte) []byte {
	dst = append(dst, "MPUB "...)
	dst = append(dst, topic...)
	dst = append(dst, '\n')
	size := sizeLength
	for _, b := range bodies {
		size += sizeLength + len(b)
	}
	dst = binary.BigEndian.AppendUint32(dst, uint32(size))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(bodies)))
	for _, b := range bodies {
		dst = appendBody(dst, b)
	}
	return dst
}

// AppendSub appends a subscription.
//
//	S U B ' ' topic ' ' channel \n
func AppendSub(dst []byte, topic, channel string) []byte {
	dst = append(dst, "SUB "...)
	dst = append(dst, topic...)
	dst = append(dst, ' ')
	dst = append(dst, channel...)
	return append(dst, '\n')
}

// AppendRdy sets how many messages may be in flight.
//
//	R D Y ' ' count \n
func AppendRdy(dst []byte, count int) []byte {
	dst = strconv.AppendInt(append(dst, "RDY "...), int64(count), 10)
	return append(dst, '\n')
}

// AppendFin acknowledges a message.
//
//	F I N ' ' id(16) \n
func AppendFin(dst []byte, id MessageID) []byte {
	return append(append(append(dst, "FIN "...), id[:]...), '\n')
}

// AppendNop answers a heartbeat.
//
//	N O P \n
func AppendNop(dst []byte) []byte { return append(dst, "NOP\n"...) }

// AppendPace requests advice about the sending rate, as a publisher of that weight, at least 1.
//
//	P A C E ' ' version 1 ' ' weight \n
func AppendPace(dst []byte, weight uint8) []byte {
	dst = strconv.AppendUint(append(dst, "PACE 1 "...), uint64(weight), 10)
	return append(dst, '\n')
}

func appendBody(dst, body []byte) []byte {
	return append(binary.BigEndian.AppendUint32(dst, uint32(len(body))), body...)
}
