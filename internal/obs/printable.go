package obs

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable is text without what a terminal would obey: control characters but for line
// feeds are written as \u001b. In JSON, where they are in strings, it says the same.
func Printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == utf8.RuneError && text[i] >= 0x80 && text[i] < 0xa0: // a control character of other encodings
			fmt.Fprintf(&b, `\u%04x`, text[i])
		case r != '\n' && unicode.IsControl(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}
