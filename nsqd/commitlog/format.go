package commitlog

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// All numbers are unsigned and big-endian; crc is CRC-32C (Castagnoli).
//
// A segment file, <offset of its first record, 20 digits>.seg:
//
//	offset  bytes
//	     0      8  magic "SRTMSEG\n"                           header
//	     8      4  version: 2, or 3 if a record may have an attribute
//	    12      8  base: the first record's offset, as in the name
//	    20      8  base of the previous segment; all ones: none
//	    28      8  salt, random for each segment
//	    36      4  maximum length of a record's data
//	    40      4  crc of bytes 0-39
//	    44         records; then, in a durable log until the segment is
//	               sealed, zeros
//	   end     76  footer, once the segment is sealed
//
// A record that begins at o, with n bytes of data, 1 <= n <= the maximum length:
//
//	0      4  crc of bytes 4 to 8+n, continued from the crc of the segment's
//	          base and salt, XOR the low 32 bits of o
//	4      4  n
//	8      n  data
//
// Its data:
//
//	 0      1  flags of the bracketed fields present: 1 due, 2 access, 4 channel,
//	          8 attribute
//	 1      1  source of the arrival time (stamp.Source)
//	 2      2  attempts so far
//	 4      4  its offset, less the segment's base
//	 8     16  message id
//	24      8  timestamp, ns since the Unix epoch
//	32      8  arrival, ns since the Unix epoch: the monotonic clock restarts
//	          with the machine
//	40     [8] due, ns since the Unix epoch
//	       [8] access delay in ns, plus 1
//	     [1+c] length and name of a channel
//	     [1+a] length and bytes of the attribute
//	           body
//
// The checksum includes the base, the salt and the place, so the bytes of a record in another
// file or place are not a record here. After a loss of power a file system may show blocks of
// deleted files in a file that was being written. It may also show zeros, which are not a record,
// because an empty record is not allowed.
//
// The footer that begins at o and ends the file:
//
//	 0      4  crc of bytes 4-75, XOR the low 32 bits of o
//	 4      4  0xffffffff, which is no record's length
//	 8      8  base     ┐
//	16      8  before   ├ as in the header, to read the segment without it
//	24      8  salt     │
//	32      4  maximum  ┘
//	36      8  number of records
//	44      8  offset after the last record
//	52      8  earliest timestamp of a record
//	60      8  latest
//	68      8  magic "SRTMEND\n"
//
// Two files, cursors.0 and cursors.1, hold the snapshot of the cursors; saves alternate between
// them. The intact snapshot with the higher number is valid. A durable log also has cursors.new, whose
// content is worthless until the file is renamed to one of the other names.
//
//	 0      8  magic "SRTMCUR\n"
//	 8      4  version, 2
//	12      8  number of the snapshot
//	20      8  the log's next offset
//	28      4  n
//	32      n  the saved bytes
//	32+n    4  crc of all before; the bytes after it belong to an older snapshot
//
// Version 1 was the format of the disk queues that preceded the log. Releases before attributes
// refuse a segment of version 3, because they would take its records for damage.
const (
	segmentMagic   = "SRTMSEG\n"
	footerMagic    = "SRTMEND\n"
	cursorMagic    = "SRTMCUR\n"
	version        = 2
	withAttributes = 3 // version of a segment

	headerSize  = 44
	recordExtra = 8  // bytes of a record beside its data
	dataHeader  = 40 // bytes of data that every record has
	footerSize  = 76
	cursorExtra = 36
	footerMark  = 0xffffffff
	noSegment   = math.MaxUint64 // value of before in the first segment
)

const (
	hasDue = 1 << iota
	hasAccess
	hasChannel
	hasAttribute
)

// maxRecordLimit bounds the data of a record, in bytes. Lengths stay far from footerMark, and
// sums of a few lengths stay within 32 bits.
const maxRecordLimit = 1 << 30

// LargestBody is the maximum of Config.MaxBody: a little less than 1 GiB.
const LargestBody = maxRecordLimit - maxExtra

// maxExtra is the maximum length of a record's data beside its body.
const maxExtra = dataHeader + 8 + 8 + 1 + MaxChannel + 1 + wire.MaxAttribute

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// identity is the common part of a segment's header and footer.
type identity struct {
	base      Offset
	before    uint64 // base of the previous segment, or noSegment
	salt      uint64
	maxRecord uint32
}

// layout distinguishes a segment's records from other bytes.
type layout struct {
	seed uint32 // the checksum of base and salt
	max  uint32 // maximum length of a record's data
	from int64  // beginning of the records
}

func newLayout(base, salt uint64, maxRecord uint32, from int64) layout {
	var b [16]byte
	binary.BigEndian.PutUint64(b[0:], base)
	binary.BigEndian.PutUint64(b[8:], salt)
	return layout{seed: crc32.Checksum(b[:], castagnoli), max: maxRecord, from: from}
}

func (id identity) layout() layout {
	return newLayout(uint64(id.base), id.salt, id.maxRecord, headerSize)
}

func (id identity) append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(id.base))
	dst = binary.BigEndian.AppendUint64(dst, id.before)
	dst = binary.BigEndian.AppendUint64(dst, id.salt)
	return binary.BigEndian.AppendUint32(dst, id.maxRecord)
}

func parseIdentity(b []byte) identity {
	return identity{
		base:      Offset(binary.BigEndian.Uint64(b[0:])),
		before:    binary.BigEndian.Uint64(b[8:]),
		salt:      binary.BigEndian.Uint64(b[16:]),
		maxRecord: binary.BigEndian.Uint32(b[24:]),
	}
}

func appendHeader(dst []byte, id identity, version uint32) []byte {
	from := len(dst)
	dst = append(dst, segmentMagic...)
	dst = binary.BigEndian.AppendUint32(dst, version)
	dst = id.append(dst)
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[from:], castagnoli))
}

// parseHeader returns false unless b is an intact header. Error: *VersionError for an intact
// header of an unknown version. Requires: len(b) == headerSize.
func parseHeader(b []byte) (id identity, ok bool, err error) {
	if string(b[:8]) != segmentMagic || binary.BigEndian.Uint32(b[40:]) != crc32.Checksum(b[:40], castagnoli) {
		return identity{}, false, nil
	}
	if v := binary.BigEndian.Uint32(b[8:]); v != version && v != withAttributes {
		return identity{}, false, &VersionError{Version: v}
	}
	id = parseIdentity(b[12:])
	return id, id.maxRecord <= maxRecordLimit, nil
}

// extent summarizes the records of a segment.
type extent struct {
	records     int64     // readable records, as far as known
	next        Offset    // after the last record that ever existed
	first, last mono.Wall // earliest and latest timestamp
}

func (e *extent) add(o Offset, t mono.Wall) {
	if e.records == 0 {
		e.first, e.last = t, t
	}
	e.first, e.last = min(e.first, t), max(e.last, t)
	e.records++
	e.next = max(e.next, o+1)
}

// appendFooter appends the footer that begins at off of its file.
func appendFooter(dst []byte, id identity, e extent, off int64) []byte {
	from := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, footerMark)
	dst = id.append(dst)
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.records))
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.next))
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.first))
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.last))
	dst = append(dst, footerMagic...)
	binary.BigEndian.PutUint32(dst[from:], crc32.Checksum(dst[from+4:], castagnoli)^uint32(off))
	return dst
}

// parseFooter returns false unless b is an intact footer with a possible number of records.
// Requires: len(b) == footerSize.
func parseFooter(b []byte, off int64) (id identity, e extent, ok bool) {
	if binary.BigEndian.Uint32(b) != crc32.Checksum(b[4:], castagnoli)^uint32(off) ||
		binary.BigEndian.Uint32(b[4:]) != footerMark || string(b[68:]) != footerMagic {
		return identity{}, extent{}, false
	}
	id = parseIdentity(b[8:])
	count := binary.BigEndian.Uint64(b[36:])
	e = extent{
		records: int64(count),
		next:    Offset(binary.BigEndian.Uint64(b[44:])),
		first:   mono.Wall(binary.BigEndian.Uint64(b[52:])),
		last:    mono.Wall(binary.BigEndian.Uint64(b[60:])),
	}
	if id.maxRecord > maxRecordLimit || off < headerSize || count > uint64(off-headerSize)/(recordExtra+dataHeader) ||
		e.next < id.base || uint64(e.next-id.base) < count {
		return identity{}, extent{}, false
	}
	return id, e, true
}

// sizeOf returns the size of a record in a file, in bytes.
func sizeOf(r *Record) int64 {
	n := recordExtra + dataHeader + len(r.Body)
	if r.Due != 0 {
		n += 8
	}
	if r.Access != 0 {
		n += 8
	}
	if len(r.Channel) > 0 {
		n += 1 + len(r.Channel)
	}
	if len(r.Attribute) > 0 {
		n += 1 + len(r.Attribute)
	}
	return int64(n)
}

// appendRecord appends the record that begins at off of the segment's file. Requires: dst has
// room.
func (l layout) appendRecord(dst []byte, r *Record, base Offset, off int64) []byte {
	from := len(dst)
	dst = AppendData(append(dst, 0, 0, 0, 0, 0, 0, 0, 0), r, base)
	binary.BigEndian.PutUint32(dst[from+4:], uint32(len(dst)-from-recordExtra))
	binary.BigEndian.PutUint32(dst[from:], l.check(dst[from+4:], off))
	return dst
}

// AppendData appends a record's data, as above, with its offset less base. Requires: 0 <=
// r.Offset-base < 1<<32.
func AppendData(dst []byte, r *Record, base Offset) []byte {
	from, flags := len(dst), byte(0)
	dst = append(dst, 0, byte(r.Source))
	dst = binary.BigEndian.AppendUint16(dst, r.Attempts)
	dst = binary.BigEndian.AppendUint32(dst, uint32(r.Offset-base))
	dst = append(dst, r.ID[:]...)
	dst = binary.BigEndian.AppendUint64(dst, uint64(r.Timestamp))
	dst = binary.BigEndian.AppendUint64(dst, uint64(r.Arrival))
	if r.Due != 0 {
		flags |= hasDue
		dst = binary.BigEndian.AppendUint64(dst, uint64(r.Due))
	}
	if r.Access != 0 {
		flags |= hasAccess
		dst = binary.BigEndian.AppendUint64(dst, uint64(r.Access))
	}
	if len(r.Channel) > 0 {
		flags |= hasChannel
		dst = append(append(dst, byte(len(r.Channel))), r.Channel...)
	}
	if len(r.Attribute) > 0 {
		flags |= hasAttribute
		dst = wire.AppendAttribute(dst, r.Attribute)
	}
	dst[from] = flags
	return append(dst, r.Body...)
}

// ParseData is the inverse of AppendData. Channel, Attribute and Body are slices of b. It returns false if
// AppendData did not write b.
func ParseData(b []byte, base Offset, r *Record) bool {
	if len(b) < dataHeader || b[0] >= hasAttribute<<1 || int(b[1]) >= stamp.Sources {
		return false
	}
	r.Source = stamp.Source(b[1])
	r.Attempts = binary.BigEndian.Uint16(b[2:])
	r.Offset = base + Offset(binary.BigEndian.Uint32(b[4:]))
	r.ID = [16]byte(b[8:24])
	r.Timestamp = mono.Wall(binary.BigEndian.Uint64(b[24:]))
	r.Arrival = mono.Wall(binary.BigEndian.Uint64(b[32:]))
	r.Due, r.Access, r.Channel, r.Attribute = 0, 0, nil, nil
	flags, b := b[0], b[dataHeader:]
	if flags&hasDue != 0 {
		if len(b) < 8 {
			return false
		}
		r.Due, b = mono.Wall(binary.BigEndian.Uint64(b)), b[8:]
	}
	if flags&hasAccess != 0 {
		if len(b) < 8 {
			return false
		}
		r.Access, b = time.Duration(binary.BigEndian.Uint64(b)), b[8:]
	}
	if flags&hasChannel != 0 {
		if len(b) < 1 || len(b) < 1+int(b[0]) {
			return false
		}
		n := 1 + int(b[0])
		r.Channel, b = b[1:n:n], b[n:]
	}
	if flags&hasAttribute != 0 {
		var ok bool
		if r.Attribute, b, ok = wire.CutAttribute(b); !ok {
			return false
		}
	}
	r.Body = b
	return r.Offset >= base
}

// check returns a record's checksum. b is the record's length and data, off its place.
func (l layout) check(b []byte, off int64) uint32 {
	return crc32.Update(l.seed, castagnoli, b) ^ uint32(off)
}

// size returns the size of the record that begins at off with the bytes in b. It returns false if
// the length is impossible: more than the segment allows, or beyond end. Requires: len(b) >=
// recordExtra.
func (l layout) size(b []byte, off, end int64) (int64, bool) {
	n := binary.BigEndian.Uint32(b[4:])
	size := recordExtra + int64(n)
	return size, n > 0 && n <= l.max && size <= end-off
}

// intact reports whether b is exactly the record that begins at off.
func (l layout) intact(b []byte, off int64) bool {
	return binary.BigEndian.Uint32(b) == l.check(b[4:], off)
}

// snapshot is the content of one of the files of the cursors.
type snapshot struct {
	number uint64
	next   Offset
	data   []byte
}

func appendSnapshot(dst []byte, s snapshot) []byte {
	from := len(dst)
	dst = append(dst, cursorMagic...)
	dst = binary.BigEndian.AppendUint32(dst, version)
	dst = binary.BigEndian.AppendUint64(dst, s.number)
	dst = binary.BigEndian.AppendUint64(dst, uint64(s.next))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(s.data)))
	dst = append(dst, s.data...)
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[from:], castagnoli))
}

// parseSnapshot parses a file of cursors, with results as in parseHeader. The data is a slice of
// b.
func parseSnapshot(b []byte) (s snapshot, ok bool, err error) {
	if len(b) < cursorExtra || string(b[:8]) != cursorMagic {
		return snapshot{}, false, nil
	}
	n := int64(binary.BigEndian.Uint32(b[28:]))
	if n > int64(len(b))-cursorExtra {
		return snapshot{}, false, nil
	}
	sum := b[32+n:]
	if binary.BigEndian.Uint32(sum) != crc32.Checksum(b[:32+n], castagnoli) {
		return snapshot{}, false, nil
	}
	if v := binary.BigEndian.Uint32(b[8:]); v != version {
		return snapshot{}, false, &VersionError{Version: v}
	}
	return snapshot{
		number: binary.BigEndian.Uint64(b[12:]),
		next:   Offset(binary.BigEndian.Uint64(b[20:])),
		data:   b[32 : 32+n : 32+n],
	}, true, nil
}

// VersionError means that an intact file has an unknown format version, written by a later
// release.
type VersionError struct {
	Version uint32
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("file format version %d, this program knows versions up to %d only", e.Version, withAttributes)
}
