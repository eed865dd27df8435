// Package screen redraws changing text in place on a terminal. A screen belongs to one
// goroutine.
package screen

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/srtm-io/srtm/internal/program"
)

// Screen is a part of a terminal, or a plain writer.
type Screen struct {
	w        io.Writer
	Terminal bool                       // whether w is a terminal
	Size     func() (columns, rows int) // of the terminal; 0: unknown
	lines    int                        // lines of text on the terminal
}

// New returns a screen on w. w may be a terminal.
func New(w io.Writer) *Screen {
	s := &Screen{w: w, Size: func() (int, int) { return 0, 0 }}
	if f, ok := w.(*os.File); ok {
		s.Terminal = term.IsTerminal(int(f.Fd()))
		s.Size = func() (int, int) {
			columns, rows, err := term.GetSize(int(f.Fd()))
			if err != nil {
				return 0, 0
			}
			return columns, rows
		}
	}
	return s
}

// Safe returns a writer for text from others: it passes only printable text to w.
func Safe(w io.Writer) io.Writer { return safe{w} }

type safe struct{ w io.Writer }

func (s safe) Write(p []byte) (int, error) {
	if _, err := io.WriteString(s.w, program.Printable(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Draw replaces the shown lines by text, cut to the terminal's size. Without a terminal
// it appends text.
func (s *Screen) Draw(text string) error {
	text = program.Printable(text)
	if s.Terminal {
		text = clip(text, s.Size)
	}
	text = s.cursorUp() + text
	if s.Terminal {
		s.lines = strings.Count(text, "\n")
	}
	_, err := io.WriteString(s.w, text)
	return err
}

// Clear removes the lines from a terminal.
func (s *Screen) Clear() {
	if up := s.cursorUp(); up != "" {
		fmt.Fprint(s.w, up) // best effort
	}
	s.lines = 0
}

// Leave keeps the shown lines: the next Draw starts below them.
func (s *Screen) Leave() { s.lines = 0 }

// cursorUp moves to the start of the shown lines and clears from there on.
func (s *Screen) cursorUp() string {
	if s.lines == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\x1b[J", s.lines)
}

// clip cuts every line to the terminal's width and drops lines below the last row. So no
// line wraps, and the number of lines on the screen is known.
func clip(text string, size func() (columns, rows int)) string {
	columns, rows := size()
	if columns <= 0 {
		return text
	}
	var b strings.Builder
	n := 0
	for line := range strings.Lines(text) {
		if n++; n == rows {
			break // the last row is the cursor's
		}
		if r := []rune(strings.TrimSuffix(line, "\n")); len(r) > columns {
			line = string(r[:columns]) + "\n"
		}
		b.WriteString(line)
	}
	return b.String()
}
