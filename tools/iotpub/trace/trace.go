// Package trace reads recorded events and replays them as a schedule. A replay can be
// faster by a factor, and can superpose several rotated copies. A Trace is an immutable
// recording. A Replay is a stream of tools/iotpub/schedule, and the same seed gives the
// same stream. The package sends nothing.
//
// A trace is CSV, plain or gzip, sorted by time, with the header
//
//	offset_seconds,publisher_id,correlation_key,payload_bytes
package trace

import (
	"bufio"
	"compress/gzip"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Bounds of a trace, to reject other files early.
const (
	MaxEvents     = 50_000_000
	MaxPublishers = 1_000_000
	MaxName       = 64 // bytes of an id or a key
	MaxPayload    = 64 << 20
	MaxOffset     = 10 * 365 * 24 * time.Hour
)

var header = []string{"offset_seconds", "publisher_id", "correlation_key", "payload_bytes"}

// Error is a fault in the input. A faulty file is rejected as a whole.
type Error struct {
	File string
	// Line counts from 1; 0 means the whole file.
	Line    int
	Problem string
	// Cause is the underlying read error, or nil.
	Cause error
}

func (e *Error) Error() string {
	where := e.File
	if e.Line > 0 {
		where = fmt.Sprintf("%s:%d", e.File, e.Line)
	}
	return where + ": " + e.Problem
}

func (e *Error) Unwrap() error { return e.Cause }

// Publisher is one publisher of a trace.
type Publisher struct {
	ID, Key string
}

// Trace is a recording. A Trace is immutable.
type Trace struct {
	publishers []Publisher // ordered by first event
	events     []event     // ordered by time
}

type event struct {
	at        time.Duration
	publisher int32
	size      int32
}

// Last returns the offset of the last event.
func (t *Trace) Last() time.Duration { return t.events[len(t.events)-1].at }

// Open reads the file at path. Faults in the content are of type *Error. Every error names
// the file.
func Open(path string) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer f.Close() // read only
	return Read(f, path)
}

// Read reads a gzip or plain trace from r. Errors are of type *Error and name file.
func Read(r io.Reader, file string) (*Trace, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	if start, _ := in.Peek(2); string(start) == "\x1f\x8b" {
		unzipped, err := gzip.NewReader(in)
		if err != nil {
			return nil, &Error{File: file, Problem: "damaged gzip header: " + err.Error(), Cause: err}
		}
		in = bufio.NewReaderSize(unzipped, 64<<10)
	}
	rows := csv.NewReader(in)
	rows.ReuseRecord = true
	rows.FieldsPerRecord = -1 // checked below, for a better message

	first, err := rows.Read()
	switch {
	case err == io.EOF:
		return nil, &Error{File: file, Problem: "empty; want the header " + strings.Join(header, ",")}
	case err != nil:
		return nil, readError(file, 1, err)
	case !slices.Equal(first, header):
		return nil, &Error{File: file, Line: 1, Problem: fmt.Sprintf("header %q, want %q",
			shorten(strings.Join(first, ",")), strings.Join(header, ","))}
	}

	p := parser{index: map[string]int32{}}
	line := 1
	for {
		row, err := rows.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, readError(file, line+1, err)
		}
		line, _ = rows.FieldPos(0)
		if problem := p.add(row); problem != "" {
			return nil, &Error{File: file, Line: line, Problem: problem}
		}
	}
	if len(p.trace.events) == 0 {
		return nil, &Error{File: file, Problem: "no events after the header"}
	}
	return &p.trace, nil
}

// readError describes an error of the CSV or gzip layer. line is the first unread line, for
// errors without a line.
func readError(file string, line int, err error) *Error {
	if p, ok := errors.AsType[*csv.ParseError](err); ok {
		return &Error{File: file, Line: p.Line, Problem: fmt.Sprintf("column %d: %v", p.Column, p.Err), Cause: err}
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) {
		return &Error{File: file, Line: line, Problem: "gzip data is cut off or damaged: " + err.Error(), Cause: err}
	}
	return &Error{File: file, Line: line, Problem: "read: " + err.Error(), Cause: err}
}

type parser struct {
	trace Trace
	index map[string]int32 // publisher id to its number
}

// add adds a row, and returns a description of a fault, or "". Stored strings are copied,
// since the reader reuses the row.
func (p *parser) add(row []string) (problem string) {
	if len(row) != len(header) {
		return fmt.Sprintf("%d fields, want %d: %s", len(row), len(header), strings.Join(header, ","))
	}
	seconds, err := strconv.ParseFloat(row[0], 64)
	if err != nil || math.IsNaN(seconds) || seconds < 0 || seconds > MaxOffset.Seconds() {
		return fmt.Sprintf("offset_seconds %q: want a number of seconds, 0 .. %.0f", shorten(row[0]), MaxOffset.Seconds())
	}
	at := time.Duration(math.Round(seconds * float64(time.Second)))
	if n := len(p.trace.events); n > 0 && at < p.trace.events[n-1].at {
		return fmt.Sprintf("offset_seconds %s comes after %v: want rows sorted by time", row[0], p.trace.events[n-1].at.Seconds())
	}
	id, key := row[1], row[2]
	if id == "" || len(id) > MaxName || !utf8.ValidString(id) {
		return fmt.Sprintf("publisher_id %q: want 1 .. %d bytes of UTF-8", shorten(id), MaxName)
	}
	if len(key) > MaxName || !utf8.ValidString(key) {
		return fmt.Sprintf("correlation_key %q: want up to %d bytes of UTF-8", shorten(key), MaxName)
	}
	size, err := strconv.ParseUint(row[3], 10, 32)
	if err != nil || size > MaxPayload {
		return fmt.Sprintf("payload_bytes %q: want a number, 0 .. %d", shorten(row[3]), MaxPayload)
	}
	if len(p.trace.events) == MaxEvents {
		return fmt.Sprintf("more than %d events", MaxEvents)
	}

	n, known := p.index[id]
	switch {
	case !known && len(p.trace.publishers) == MaxPublishers:
		return fmt.Sprintf("more than %d publishers", MaxPublishers)
	case !known:
		n = int32(len(p.trace.publishers))
		id = strings.Clone(id)
		p.index[id] = n
		p.trace.publishers = append(p.trace.publishers, Publisher{id, strings.Clone(key)})
	case p.trace.publishers[n].Key != key:
		return fmt.Sprintf("publisher %q has the correlation key %q here and %q before: want one", id, key, p.trace.publishers[n].Key)
	}
	p.trace.events = append(p.trace.events, event{at, n, int32(size)})
	return ""
}

// shorten truncates a quoted piece of input.
func shorten(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
