package console

import (
	"context"
	"fmt"
	"html"
	"html/template"
	"net/url"
	"regexp"
	"strings"
	"sync"

	"github.com/srtm-io/srtm/docs"
)

// glossary shows the words of docs/glossary.md.
func glossary(context.Context, url.Values, user) (view, error) {
	return view{Template: "glossary", Title: "Glossary", Data: parsedGlossary()}, nil
}

// section is a group of words.
type section struct {
	Title string
	Words []entry
}

// entry is a word with its explanation.
type entry struct {
	Anchor, Name string
	Text         template.HTML
}

var (
	parsedGlossary = sync.OnceValue(func() []section { return parseGlossary(docs.Glossary) })
	mdLink         = regexp.MustCompile(`\[([^\]]+)\]\(([^)]+)\)`)
	mdCode         = regexp.MustCompile("`([^`]+)`")
	mdStress       = regexp.MustCompile(`\*([^*]+)\*`)
)

// parseGlossary parses the page: a section for each heading of the second level, and a word for each
// heading of the third level. A sentence that only refers to another page ("See ...") is left out, since
// the console has no other page of docs/.
func parseGlossary(page string) (all []section) {
	for _, part := range strings.Split(page, "\n## ")[1:] {
		words := strings.Split(part, "\n### ")
		s := section{Title: strings.TrimSpace(words[0])}
		for _, text := range words[1:] {
			name, text, _ := strings.Cut(text, "\n")
			s.Words = append(s.Words, entry{anchor(name), name, inline(strings.Join(strings.Fields(text), " "))})
		}
		all = append(all, s)
	}
	return all
}

// anchor returns the anchor that a heading has on a page of docs/.
func anchor(heading string) string { return strings.ReplaceAll(strings.ToLower(heading), " ", "-") }

var reference = regexp.MustCompile(` See \[[^\]]+\]\([a-z][^)]*\)\.`)

// inline renders the text of a paragraph.
func inline(text string) template.HTML {
	text = html.EscapeString(reference.ReplaceAllString(text, ""))
	text = mdLink.ReplaceAllStringFunc(text, func(link string) string {
		m := mdLink.FindStringSubmatch(link)
		if !strings.HasPrefix(m[2], "#") {
			return m[1]
		}
		return fmt.Sprintf(`<a href="%s">%s</a>`, m[2], m[1])
	})
	text = mdCode.ReplaceAllString(text, "<code>$1</code>")
	return template.HTML(mdStress.ReplaceAllString(text, "<em>$1</em>")) // escaped above
}
