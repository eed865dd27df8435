package program

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable escapes control characters except line feeds as \u001b, so a terminal does
// not obey them. Within JSON strings the escapes keep the meaning.
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
