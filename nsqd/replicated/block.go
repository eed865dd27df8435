package replicated

import (
	"encoding/binary"
	"errors"
	"iter"

	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// A block is one message of a part's stream. All numbers are unsigned and big-endian.
//
//	 0      1  0xB1
//	 1      1  version: 1, or 2 if a record has an attribute, so that earlier releases refuse the block
//	 2      2  0
//	 4      8  epoch of the owner
//	12      8  owner: random number, drawn at the claim
//	20      8  offset of the first record, or the log's next offset without records
//	28      8  offset after the last record
//	36         records: length (4) and data (commitlog.AppendData, less the first offset)
//
// A block without records claims the part for its owner.
const (
	blockMagic     = 0xB1
	blockVersion   = 1
	withAttributes = 2
	blockHeader    = 36
	recordHeader   = 4
)

// errBlock: the message is not a block.
var errBlock = errors.New("not a block of records")

// owner identifies the writer of a part.
type owner struct{ epoch, nonce uint64 }

type head struct {
	owner       owner
	first, next commitlog.Offset
	attributes  bool // a record has an attribute
}

func (h head) append(dst []byte) []byte {
	version := byte(blockVersion)
	if h.attributes {
		version = withAttributes
	}
	dst = append(dst, blockMagic, version, 0, 0)
	dst = binary.BigEndian.AppendUint64(dst, h.owner.epoch)
	dst = binary.BigEndian.AppendUint64(dst, h.owner.nonce)
	dst = binary.BigEndian.AppendUint64(dst, uint64(h.first))
	return binary.BigEndian.AppendUint64(dst, uint64(h.next))
}

func parseHead(b []byte) (head, error) {
	if len(b) < blockHeader || b[0] != blockMagic || b[1] != blockVersion && b[1] != withAttributes {
		return head{}, errBlock
	}
	h := head{
		owner: owner{epoch: binary.BigEndian.Uint64(b[4:]), nonce: binary.BigEndian.Uint64(b[12:])},
		first: commitlog.Offset(binary.BigEndian.Uint64(b[20:])),
		next:  commitlog.Offset(binary.BigEndian.Uint64(b[28:])),

		attributes: b[1] == withAttributes,
	}
	if h.next < h.first {
		return head{}, errBlock
	}
	return h, nil
}

// appendRecord appends a record to a block that begins at offset first.
func appendRecord(dst []byte, r *commitlog.Record, first commitlog.Offset) []byte {
	start := len(dst)
	dst = commitlog.AppendData(append(dst, 0, 0, 0, 0), r, first)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-recordHeader))
	return dst
}

// records yields the records of a block, up to the first invalid record. Channels, attributes and
// bodies are slices of b.
func records(b []byte, h head) iter.Seq[commitlog.Record] {
	return func(yield func(commitlog.Record) bool) {
		offset := h.first
		for b = b[blockHeader:]; len(b) >= recordHeader; {
			n := uint64(binary.BigEndian.Uint32(b))
			if b = b[recordHeader:]; n > uint64(len(b)) {
				return
			}
			var r commitlog.Record
			if !commitlog.ParseData(b[:n:n], h.first, &r) || r.Offset < offset || r.Offset >= h.next || !yield(r) {
				return
			}
			offset, b = r.Offset+1, b[n:]
		}
	}
}
