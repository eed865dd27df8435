package console

import (
	"io/fs"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A link of a page to the glossary reaches an entry, and so does each link within the glossary.
func TestLinksToTheGlossary(t *testing.T) {
	entries, text := map[string]bool{}, ""
	for _, s := range parsedGlossary() {
		for _, w := range s.Words {
			entries[w.Anchor] = true
			text += string(w.Text)
			if w.Text == "" || strings.ContainsAny(string(w.Text), "[]`") {
				t.Errorf("%s: %s", w.Name, w.Text)
			}
		}
	}
	templates := testkit.Result(fs.Glob(files, "templates/*.html")).Must(t)
	for _, name := range templates {
		page := string(testkit.Result(fs.ReadFile(files, name)).Must(t))
		for _, m := range regexp.MustCompile(`term "([^"]+)"`).FindAllStringSubmatch(page, -1) {
			if !entries[anchor(m[1])] {
				t.Errorf("%s: the glossary has no %q", name, m[1])
			}
		}
	}
	for _, m := range regexp.MustCompile(`href="#([^"]+)"`).FindAllStringSubmatch(text, -1) {
		if !entries[m[1]] {
			t.Errorf("the glossary links to #%s, which it does not have", m[1])
		}
	}
	if len(entries) < 40 {
		t.Errorf("the glossary has %d entries", len(entries))
	}
}
