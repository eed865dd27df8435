// Package screen shows text that changes, in place on a terminal. It knows nothing of
// what is shown; a screen belongs to one goroutine.
package screen

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/srtm-io/srtm/internal/obs"
)

// Screen is a part of a terminal, or what stands for one where there is none.
type Screen struct {
	w        io.Writer
	Terminal bool                       // w is one
	Size     func() (columns, rows int) // of the terminal; 0: not known
	lines    int                        // of the text that is on it
}

// New returns a screen on w, which is a terminal or not.
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

// Safe returns w for text that others have written, of which only what is printable comes
// there.
func Safe(w io.Writer) io.Writer { return safe{w} }

type safe struct{ w io.Writer }

func (s safe) Write(p []byte) (int, error) {
	if _, err := io.WriteString(s.w, obs.Printable(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Draw shows lines in place of those that it showed before, cut to what fits. Without a
// terminal it prints them after those.
func (s *Screen) Draw(text string) error {
	text = obs.Printable(text)
	if s.Terminal {
		text = clip(text, s.Size)
	}
	text = s.up() + text
	if s.Terminal {
		s.lines = strings.Count(text, "\n")
	}
	_, err := io.WriteString(s.w, text)
	return err
}

// Clear removes the lines from a terminal.
func (s *Screen) Clear() {
	if up := s.up(); up != "" {
		fmt.Fprint(s.w, up) // what cannot be shown is not worth failing for
	}
	s.lines = 0
}

// Leave has the lines stay: the next are shown after them.
func (s *Screen) Leave() { s.lines = 0 }

// up goes to the begin of what is shown, and clears all from there on.
func (s *Screen) up() string {
	if s.lines == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\x1b[J", s.lines)
}

// clip cuts every line to the width, so that none wraps and the number of lines on the
// screen is known, and leaves out those that are below it.
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
