package commitlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
)

// recover reads the log's folder. The rules:
//
//   - A segment with a header and a footer is complete. recover reads nothing else of it.
//   - A segment without a footer is read to its end. If no intact record follows the first
//     damaged record, a write was interrupted or zeros were written ahead, and the file is cut
//     there. Otherwise the segment is damaged.
//   - A damaged segment is renamed .bad and otherwise left unchanged. Its readable records are in
//     the log. Once they are trimmed, the segment is renamed .kept and left alone.
//   - The log never appends to a recovered segment, so places in it stay valid.
//   - The next offset is after every readable record, after every record that a damaged end may
//     have held, and not before the next offset in the snapshot of the cursors.
//   - Records missing because a file was cut, emptied or deleted are logged and counted. The log
//     continues without them.
//
// Requires: no other goroutine knows l.
func (l *Files) recover() error {
	names, err := l.folder.disk.List(l.folder.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := l.recoverCursors(); err != nil {
		return err
	}
	bad := make(map[Offset]bool)
	var leftover []string
	for _, name := range names {
		base, isBad, ok := parseSegmentName(name)
		switch {
		case name == spareName && l.cfg.Durable: // its blocks are for the next save of the cursors
		case strings.HasSuffix(name, newSuffix):
			leftover = append(leftover, name)
		case strings.HasSuffix(name, keptSuffix):
			l.kept++
			l.stats.Unreadable += keptRecords(name)
		case ok:
			was, twice := bad[base]
			bad[base] = isBad && (was || !twice)
		}
	}
	if err := l.delete(leftover); err != nil {
		return err
	}
	if err := l.loadAll(slices.Sorted(maps.Keys(bad)), bad); err != nil {
		return err
	}
	for i, s := range l.segments.all {
		l.segments.bytes += s.size()
		// The records without an fsync are in the last segments.
		if s.durable = s.next; i >= len(l.segments.all)-maxUnsynced-2 {
			s.durable = s.base
		}
	}
	return nil
}

// recoverCursors finds the last snapshot and its next offset. Requires: no other goroutine knows
// l.
func (l *Files) recoverCursors() error {
	last, both, err := l.snapshots.recover()
	if err != nil {
		return err
	}
	l.next, l.savedNext = last.next, last.next
	for slot, s := range both {
		if s.number > 0 || s.data == nil {
			continue
		}
		// The process or the power ended during the write, and the other snapshot is valid.
		// Without another snapshot, it was lost, or this write was the first ever.
		l.stats.Torn++
		l.stats.TornBytes += uint64(len(s.data))
		text, kept := "a snapshot of cursors was not written whole; the one before it holds", ""
		if last.number == 0 {
			text, kept = "no snapshot of cursors is intact: channels begin with what there is in the log", fmt.Sprint(cursorName, slot, badSuffix)
			l.stats.KeepErrors++
			if err := l.folder.disk.Rename(l.snapshots.path(slot), l.folder.file(kept)); err != nil {
				return err
			}
		}
		l.cfg.Log.Error(text, keyLog, l.cfg.Name, keyFile, fmt.Sprint(cursorName, slot), "kept", kept)
	}
	return nil
}

// loadAll loads the segments with the given bases. Requires: bases ascend.
func (l *Files) loadAll(bases []Offset, bad map[Offset]bool) error {
	for i, base := range bases {
		end := Offset(noSegment)
		if i+1 < len(bases) {
			end = bases[i+1]
		}
		s, err := l.load(base, end, bad[base])
		if err != nil {
			return fmt.Errorf("segment %d: %w", base, err)
		}
		if i > 0 {
			switch last := l.segments.all[i-1]; {
			case s.before != noSegment && s.before > uint64(last.base):
				l.missing("files are missing: their deletion was not finished, or they are lost", last.next, base)
			case !last.sealed && !last.damaged && last.next < base:
				l.missing("records are missing: the end of their file was cut", last.next, base)
			}
		}
		s.next = min(s.next, end) // it may be an estimate
		l.segments.all = append(l.segments.all, s)
		l.next = max(l.next, s.next)
	}
	// Empty segments before another segment stay, so the next Open does not miss them.
	var empty []string
	for n := len(l.segments.all); n > 0 && l.segments.all[n-1].records == 0 && !l.segments.all[n-1].damaged; n-- {
		empty = append(empty, l.segments.all[n-1].name())
		l.segments.all = l.segments.all[:n-1]
	}
	if n := len(l.segments.all); n > 0 && l.segments.all[n-1].next < l.savedNext {
		l.missing("records are missing: there were more when cursors were saved, unless the power went just then", l.segments.all[n-1].next, l.savedNext)
	}
	return l.delete(empty)
}

// missing counts and logs missing records with offsets in [from, to).
func (l *Files) missing(text string, from, to Offset) {
	l.stats.Missing++
	l.cfg.Log.Error(text, keyLog, l.cfg.Name, "from", uint64(from), "to", uint64(to), "at_most", uint64(to-from))
}

// load inspects a segment's file. end is the base of the next segment.
func (l *Files) load(base, end Offset, bad bool) (*segment, error) {
	s := &segment{
		identity: identity{base: base, before: noSegment}, extent: extent{next: base}, end: headerSize,
		old: true, shut: true, bad: bad, damaged: bad,
	}
	file, err := l.folder.disk.Open(l.folder.file(s.name()))
	if err != nil {
		return nil, err
	}
	err = l.inspect(s, end, file)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	return s, nil
}

// inspect fills s from its file, and cuts off worthless bytes.
func (l *Files) inspect(s *segment, end Offset, file File) error {
	size, err := file.Size()
	if err != nil {
		return err
	}
	k, err := identify(s.base, file, size)
	if err != nil {
		return err
	}
	if !k.header && !k.footer {
		empty, err := zeros(file, 0, size)
		switch {
		case err != nil:
			return err
		case !s.bad && (size < headerSize || empty): // a segment that had just begun
			if err := file.Truncate(0); err != nil {
				return err
			}
			l.torn(s, 0, size)
		default:
			s.next += Offset(max(size, recordExtra+dataHeader) / (recordExtra + dataHeader))
			s.lose(1, []gap{{0, size}}, &l.stats)
			l.quarantine(s, 0, size)
		}
		return nil
	}
	s.identity, s.layout, s.end, s.extent, s.sealed = k.identity, k.layout(), k.end, k.extent, k.footer
	if k.header && k.footer && !s.bad {
		return nil
	}

	f, err := s.survey(file, s.base, end, k.end)
	if err != nil {
		return err
	}
	s.end, s.extent = f.end, f.extent
	s.next = max(s.next, s.base)
	if k.footer {
		s.next = max(s.next, k.next)
	}
	known := s.bad
	if known || !k.header || len(f.gaps) > 0 || f.rest != nothing {
		if !k.header {
			l.quarantine(s, 0, headerSize)
		}
		if f.rest != nothing || f.end < k.end {
			f.gaps = append(f.gaps, gap{f.end, k.end - f.end})
			s.next += Offset((k.end - f.end) / (recordExtra + dataHeader))
		}
		lost := max(0, k.records-f.records)
		if !k.footer {
			if lost, err = s.count(file, f.gaps); err != nil {
				return err
			}
		}
		s.lose(lost, f.gaps, &l.stats)
		for _, g := range f.gaps {
			l.quarantine(s, g.at, g.size)
		}
		if known && s.records > 0 {
			l.cfg.Log.Warn("a damaged segment still has messages to deliver", keyLog, l.cfg.Name, keyFile, s.name(), keyRecords, s.records)
		}
		return nil
	}
	cut := f.end
	if s.records == 0 {
		cut = headerSize
	}
	if cut < size {
		reserved, err := zeros(file, f.end, size)
		if err = errors.Join(err, file.Truncate(cut)); err != nil {
			return err
		}
		if !l.cfg.Durable || !reserved {
			l.torn(s, cut, size-cut)
		}
	}
	if s.records > 0 {
		// Only spares the next Open this work.
		_ = finish(file, s.identity, s.extent, s.end)
	}
	return nil
}

// known is the content of a segment's header and footer.
type known struct {
	header, footer bool // which of the two is intact; the identity comes from an intact one
	identity
	extent       // with a footer
	end    int64 // end of the records, or of the file
}

// identify reads the header and the footer of the segment with the given base.
func identify(base Offset, file File, size int64) (known, error) {
	k := known{end: size}
	if size < headerSize {
		return k, nil
	}
	head := make([]byte, headerSize)
	if _, err := readFull(file, head, 0); err != nil {
		return k, err
	}
	id, ok, err := parseHeader(head)
	if err != nil {
		return k, err
	}
	if ok && id.base == base {
		k.header, k.identity = true, id
	}
	at := size - footerSize
	if at < headerSize {
		return k, nil
	}
	foot := make([]byte, footerSize)
	if _, err := readFull(file, foot, at); err != nil {
		return k, err
	}
	id, e, ok := parseFooter(foot, at)
	if ok && id.base == base && (!k.header || k.identity == id) {
		k.footer, k.identity, k.end, k.extent = true, id, at, e
	}
	return k, nil
}

// torn counts and logs that a segment's file was cut at off.
func (l *Files) torn(s *segment, off, bytes int64) {
	l.stats.Torn++
	l.stats.TornBytes += uint64(bytes)
	l.cfg.Log.Warn("truncated an incomplete write at the end of a segment", keyLog, l.cfg.Name, keyFile, s.name(), keyOffset, off, keyBytes, bytes)
}

// found is the result of a walk over all records of a segment.
type found struct {
	extent
	end  int64    // of the last intact record
	gaps []gap    // unreadable bytes before end
	rest evidence // of records after end
}

// survey reads the records up to size, the end of the file or the beginning of its footer. A
// record with offset end or later is from a failed Append, and its offset was reused.
func (l layout) survey(r io.ReaderAt, base, end Offset, size int64) (found, error) {
	f := found{end: l.from}
	w := walker{layout: l, r: r, off: l.from, end: size, window: 256 << 10}
	var record Record
	for {
		at := w.off
		data, err := w.next()
		switch {
		case err == nil && ParseData(data, base, &record):
			if record.Offset >= end {
				return f, nil
			}
			f.add(record.Offset, record.Timestamp)
			f.end = w.off
		case err == nil: // intact bytes that are not a valid record
			f.gaps = append(f.gaps, gap{at, w.off - at})
			f.end = w.off
		case errors.Is(err, io.EOF):
			return f, nil
		case errors.Is(err, errDamaged):
			at, rest, err := l.search(r, w.off, size)
			if err != nil {
				return f, err
			}
			if rest != certain {
				f.rest = rest
				return f, nil
			}
			f.gaps = append(f.gaps, gap{w.off, at - w.off})
			w.off = at
		default:
			return f, err
		}
	}
}

// count returns the minimum number of records in the gaps: the number of lengths that lead
// through a gap to its end, otherwise one.
func (l layout) count(r io.ReaderAt, gaps []gap) (n int64, err error) {
	for _, g := range gaps {
		records, at, end := int64(0), g.at, g.at+g.size
		for at < end {
			var head [recordExtra]byte
			got, err := readFull(r, head[:], at)
			if err != nil {
				return 0, err
			}
			size, ok := l.size(head[:], at, end)
			if got < len(head) || !ok {
				break
			}
			records++
			at += size
		}
		if at < end {
			records = 1
		}
		n += records
	}
	return n, nil
}

// zeros reports whether the file has only zeros from off on.
func zeros(file File, off, size int64) (bool, error) {
	b := make([]byte, 64<<10)
	zero := make([]byte, len(b))
	for off < size {
		n, err := file.ReadAt(b[:min(size-off, int64(len(b)))], off)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		if n == 0 {
			break
		}
		if !bytes.Equal(b[:n], zero[:n]) {
			return false, nil
		}
		off += int64(n)
	}
	return true, nil
}
