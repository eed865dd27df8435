package bucket

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/internal/mono"
)

// Arrival is a line of the file: the arrival of a message.
type Arrival struct {
	At        mono.Time // whole nanoseconds on the file's own clock
	Key       string    // correlation key; empty: in the pool, without a key
	Publisher string    // empty: unknown
}

const (
	// Max is the maximum number of arrivals, because all are held in memory.
	Max = 50_000_000
	// MaxSeconds is the largest time, before and after 0. Both Unix time and a
	// clock since boot fit; the rest of the 292 years is room for delays.
	MaxSeconds = 4_000_000_000

	maxLine = 4096 // bytes
)

// Error is a fault in a line of a file.
type Error struct {
	File string
	Line int // from 1; 0 for the file as a whole
	Err  error
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.File + ": " + e.Err.Error()
	}
	return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// ReadFile reads the named file, through gzip if its name ends in .gz, or stdin for "-".
// Every error names the file.
func ReadFile(name string, stdin io.Reader) (read []Arrival, err error) {
	if name == "-" {
		return Read("standard input", stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err // names the file already
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if !strings.HasSuffix(name, ".gz") {
		return Read(name, f)
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, &Error{File: name, Err: err}
	}
	read, err = Read(name, z)
	if err != nil {
		return nil, err
	}
	return read, z.Close()
}

// Read reads lines of the form
//
//	seconds[,key[,publisher]]
//
// in any order. It ignores blank lines, and spaces around a field. Seconds are a decimal
// number, rounded to the nearest nanosecond, or in scientific notation, exact to 16
// digits. Errors are of type *Error and use name for the file. With an error Read returns
// no arrivals.
func Read(name string, r io.Reader) ([]Arrival, error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 0, maxLine), maxLine)
	var read []Arrival
	// Names repeat in every line: keep one copy of each, which does not keep a line
	// alive.
	names := map[string]string{}
	intern := func(s string) string {
		s = strings.TrimSpace(s)
		if number, ok := names[s]; ok {
			return number
		}
		s = strings.Clone(s)
		names[s] = s
		return s
	}
	line := 0
	for in.Scan() {
		line++
		text := strings.TrimSpace(in.Text())
		if text == "" {
			continue
		}
		if len(read) == Max {
			return nil, &Error{File: name, Line: line, Err: fmt.Errorf("more than %d arrivals", Max)}
		}
		fields := strings.Split(text, ",")
		if len(fields) > 3 {
			return nil, &Error{File: name, Line: line, Err: fmt.Errorf("%d fields, want seconds[,key[,publisher]]", len(fields))}
		}
		at, err := seconds(strings.TrimSpace(fields[0]))
		if err != nil {
			return nil, &Error{File: name, Line: line, Err: err}
		}
		a := Arrival{At: at}
		if len(fields) > 1 {
			a.Key = intern(fields[1])
		}
		if len(fields) > 2 {
			a.Publisher = intern(fields[2])
		}
		read = append(read, a)
	}
	if err := in.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			err = fmt.Errorf("longer than %d bytes", maxLine)
		}
		return nil, &Error{File: name, Line: line + 1, Err: err}
	}
	if len(read) == 0 {
		return nil, &Error{File: name, Err: errors.New("no arrivals in it")}
	}
	return read, nil
}

// seconds parses a time. A float64 would cost a Unix time 200 ns, so seconds parses a
// plain decimal digit by digit.
func seconds(text string) (mono.Time, error) {
	if ns, ok := decimal(text); ok {
		return inRange(text, ns)
	}
	s, err := strconv.ParseFloat(text, 64)
	// 1e999 gives infinity with an error, "inf" without.
	if err != nil && !errors.Is(err, strconv.ErrRange) || err == nil && math.IsInf(s, 0) || math.IsNaN(s) || strings.ContainsAny(text, "xX_") {
		return 0, fmt.Errorf("%q is not a time in seconds", text)
	}
	if math.Abs(s) > MaxSeconds {
		return inRange(text, math.MaxInt64)
	}
	return inRange(text, int64(math.Round(s*1e9)))
}

func inRange(text string, ns int64) (mono.Time, error) {
	if ns > MaxSeconds*1e9 || ns < -MaxSeconds*1e9 {
		return 0, fmt.Errorf("%s s is out of range, want -%d to %d", text, int64(MaxSeconds), int64(MaxSeconds))
	}
	return mono.Time(ns), nil
}

// decimal parses [+-]digits[.digits] to the nearest nanosecond, halves away from 0. It
// reports false for any other form. For a number out of range it returns a value that is
// also out of range.
func decimal(text string) (ns int64, ok bool) {
	digits, negative := strings.CutPrefix(text, "-")
	if !negative {
		digits = strings.TrimPrefix(text, "+")
	}
	whole, fraction, _ := strings.Cut(digits, ".")
	if digits == "" || digits == "." || strings.Trim(whole, "0123456789") != "" || strings.Trim(fraction, "0123456789") != "" {
		return 0, false
	}
	seconds, err := strconv.ParseInt("0"+whole, 10, 64)
	if err != nil || seconds > MaxSeconds {
		seconds = MaxSeconds + 1
	}
	tenths, _ := strconv.ParseInt((fraction + "0000000000")[:10], 10, 64) // of a nanosecond
	ns = seconds*1e9 + (tenths+5)/10
	if negative {
		ns = -ns
	}
	return ns, true
}
