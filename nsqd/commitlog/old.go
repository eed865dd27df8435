package commitlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"iter"
	"math"
	"path/filepath"
	"slices"
)

// Before there was a log, a topic and each of its channels had a queue in a folder of
// its own, of segments in version 1 of the format. They are numbered from 1, in their
// names as well, and a record's data is what the queue's user made of it. What differs
// from format.go:
//
//	header:    version 1; 12 number (8); 20 salt (8); 28 maximum (4); 32 crc (4)
//	checksums: of the number, in place of the base
//	footer:    4 mark; 8 number (8); 16 salt (8); 24 maximum (4); 28 records (8); 36 magic
//	cursor:    a file of that name: 0 magic "SRTMCUR\n", 8 version 1 (4), 12 number of a
//	           segment (8), 20 a place in it (8), 28 records before it (8), 36 crc (4):
//	           what is before that place is done with
const (
	oldVersion    = 1
	oldHeaderSize = 36
	oldFooterSize = 44
	oldCursor     = "cursor"
	oldCursorSize = 40
)

// ErrUnreadable says that something cannot be read, and never will.
var ErrUnreadable = errors.New("not readable")

// OldQueue goes through the records of a queue's folder that are not done with, in
// their order. The data is valid until the next one. An error that is ErrUnreadable
// is about a place that is stepped over; any other one, of the disk, is the last.
// Nothing is changed.
func OldQueue(disk Disk, folder string) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		names, err := disk.List(folder)
		if err != nil {
			yield(nil, err)
			return
		}
		first, at, err := readOldCursor(disk, folder)
		if err != nil && !yield(nil, err) || err != nil && !errors.Is(err, ErrUnreadable) {
			return
		}
		var numbers []Offset
		bad := map[Offset]bool{}
		for _, name := range names {
			if number, isBad, ok := parseSegmentName(name); ok && number >= first {
				numbers = append(numbers, number)
				bad[number] = isBad
			}
		}
		slices.Sort(numbers)
		for _, number := range slices.Compact(numbers) {
			from := int64(oldHeaderSize)
			if number == first {
				from = at
			}
			s := segment{identity: identity{base: number}, bad: bad[number]}
			if !readOldSegment(disk, filepath.Join(folder, s.name()), number, from, yield) {
				return
			}
		}
	}
}

func readOldCursor(disk Disk, folder string) (segment Offset, at int64, err error) {
	file, err := disk.Open(filepath.Join(folder, oldCursor))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	b := make([]byte, oldCursorSize+1)
	n, err := readFull(file, b, 0)
	if err = errors.Join(err, file.Close()); err != nil {
		return 0, 0, err
	}
	if n != oldCursorSize || string(b[:8]) != cursorMagic || binary.BigEndian.Uint32(b[36:]) != crc32.Checksum(b[:36], castagnoli) ||
		binary.BigEndian.Uint32(b[8:]) != oldVersion || binary.BigEndian.Uint64(b[20:]) > math.MaxInt64 {
		return 0, 0, fmt.Errorf("cursor: %w: all messages there come again", ErrUnreadable)
	}
	return Offset(binary.BigEndian.Uint64(b[12:])), max(oldHeaderSize, int64(binary.BigEndian.Uint64(b[20:]))), nil
}

// readOldSegment goes through the records from a place on, and reports whether to go
// on with the next segment.
func readOldSegment(disk Disk, path string, number Offset, from int64, yield func([]byte, error) bool) (more bool) {
	file, err := disk.Open(path)
	if err != nil {
		return yield(nil, err) && false
	}
	defer file.Close() // it was only read
	size, err := file.Size()
	if err != nil {
		return yield(nil, err) && false
	}
	head, foot := make([]byte, oldHeaderSize), make([]byte, oldFooterSize)
	n, err := readFull(file, head, 0)
	if err != nil {
		return yield(nil, err) && false
	}
	end := size
	var salt uint64
	var maximum uint32
	known := n == len(head) && string(head[:8]) == segmentMagic && binary.BigEndian.Uint32(head[8:]) == oldVersion &&
		binary.BigEndian.Uint32(head[32:]) == crc32.Checksum(head[:32], castagnoli) && binary.BigEndian.Uint64(head[12:]) == uint64(number)
	if known {
		salt, maximum = binary.BigEndian.Uint64(head[20:]), binary.BigEndian.Uint32(head[28:])
	}
	if off := size - oldFooterSize; off >= oldHeaderSize {
		if _, err := readFull(file, foot, off); err != nil {
			return yield(nil, err) && false
		}
		if binary.BigEndian.Uint32(foot) == crc32.Checksum(foot[4:], castagnoli)^uint32(off) && binary.BigEndian.Uint32(foot[4:]) == footerMark &&
			string(foot[36:]) == footerMagic && binary.BigEndian.Uint64(foot[8:]) == uint64(number) {
			known, end = true, off
			salt, maximum = binary.BigEndian.Uint64(foot[16:]), binary.BigEndian.Uint32(foot[24:])
		}
	}
	if !known {
		if empty, err := zeros(file, 0, size); err != nil || size < oldHeaderSize || empty { // it was just begun
			return err == nil || yield(nil, err) && false
		}
		return yield(nil, fmt.Errorf("%s: %w: %d B without a header", path, ErrUnreadable, size))
	}
	w := walker{layout: newLayout(uint64(number), salt, min(maximum, maxRecordLimit), oldHeaderSize), r: file, off: from, end: end, window: readWindow}
	for {
		data, err := w.next()
		switch {
		case err == nil:
			if !yield(data, nil) {
				return false
			}
		case errors.Is(err, io.EOF):
			return true
		case errors.Is(err, errDamaged):
			at, found, err := w.search(file, w.off, end)
			if err != nil {
				return yield(nil, err) && false
			}
			if found == nothing && end == size {
				return true // where a write was interrupted
			}
			lost := fmt.Errorf("%s: %w: from %d on", path, ErrUnreadable, w.off)
			if found != certain {
				return yield(nil, lost)
			}
			w.off = at
			if !yield(nil, lost) {
				return false
			}
		default:
			return yield(nil, err) && false
		}
	}
}
