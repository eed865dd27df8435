package archtest

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Prose counts the words of a text, its pronouns, and its hanging references: pairs of words
// without a noun, which the pattern hanging lists. Retired has the words that the pattern retired finds.
type Prose struct {
	Words, Pronouns, Hanging int
	Retired                  string // each after a space
}

// ProseLimit bounds a Prose.
type ProseLimit struct {
	Pronouns float64 // percent of the words
	Hanging  float64 // per 10,000 words
}

var (
	wordPattern = regexp.MustCompile(`[A-Za-z][A-Za-z'’-]*`)
	pronouns    = strings.Fields("it that those they them this these one what who which its their whose whom whoever whatever")
	hanging     = regexp.MustCompile(`(?i)\b(that of|those of|ones? that|those that|those who|that which|that who|of which|of whom|of what|of whose|what of|likewise|else [0-9])\b`)

	// retired has words of the former vocabulary, without a use in the present one: a process reports,
	// sends and receives.
	retired = regexp.MustCompile(`(?i)\b(acquitted|deaf|hears|liars?|scribbles?|somebody|tells|untold|whoever)\b`)
)

// Add counts the words of a paragraph.
func (p *Prose) Add(paragraph string) {
	for _, w := range wordPattern.FindAllString(paragraph, -1) {
		p.Words++
		if slices.Contains(pronouns, strings.ToLower(w)) {
			p.Pronouns++
		}
	}
	p.Hanging += len(hanging.FindAllString(paragraph, -1))
	for _, w := range retired.FindAllString(paragraph, -1) {
		p.Retired += " " + w
	}
}

func (p *Prose) sum(q Prose) {
	p.Words += q.Words
	p.Pronouns += q.Pronouns
	p.Hanging += q.Hanging
}

// Excess says how the text exceeds a limit; empty: the text is within the limit.
func (p Prose) Excess(limit ProseLimit) string {
	words := float64(max(1, p.Words))
	pron, hang := 100*float64(p.Pronouns)/words, 1e4*float64(p.Hanging)/words
	if pron <= limit.Pronouns && hang <= limit.Hanging {
		return ""
	}
	return fmt.Sprintf("%d words, %.1f %% pronouns (at most %g), %.1f hanging references per 10,000 words (at most %g)",
		p.Words, pron, limit.Pronouns, hang, limit.Hanging)
}

// fewWords is the size below which a text is judged only as a part of the whole, in words.
const fewWords = 200

// judge compares each text with one limit, and all texts together with another.
func judge(texts map[string]Prose, each, whole ProseLimit, all, why string) (found []Finding) {
	var sum Prose
	for name, p := range texts { // order: sorted below
		sum.sum(p)
		if p.Retired != "" {
			found = append(found, Finding{name, "retired words:" + p.Retired, why})
		}
		if excess := p.Excess(each); p.Words >= fewWords && excess != "" {
			found = append(found, Finding{name, excess, why})
		}
	}
	slices.SortFunc(found, func(a, b Finding) int { return strings.Compare(a.Where, b.Where) })
	if excess := sum.Excess(whole); excess != "" {
		found = append(found, Finding{all, excess, why})
	}
	return found
}

// CheckProse compares the comments of each package with a limit, and all comments with another.
// Generated files do not count.
func (m *Module) CheckProse(tests bool, each, whole ProseLimit, why string) ([]Finding, error) {
	texts := map[string]Prose{}
	for _, p := range m.Packages {
		names := slices.Concat(p.Files, p.Ignored)
		if tests {
			names = p.Tests
		}
		var text Prose
		for _, name := range names {
			if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") != tests {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				return nil, err
			}
			if ast.IsGenerated(file) {
				continue
			}
			for _, group := range file.Comments {
				var lines []string
				for line := range strings.Lines(group.Text()) {
					if !strings.HasPrefix(line, "\t") && !strings.HasPrefix(line, "  ") { // else an example
						lines = append(lines, strings.TrimSpace(line))
					}
				}
				text.Add(strings.Join(lines, " "))
			}
		}
		texts[p.Path] = text
	}
	return judge(texts, each, whole, "all packages", why), nil
}

// CheckPages compares Markdown pages with limits. Code, tables and headings do not count.
func CheckPages(root string, paths []string, each, whole ProseLimit, why string) ([]Finding, error) {
	texts := map[string]Prose{}
	for _, path := range paths {
		file, err := os.Open(filepath.Join(root, path))
		if err != nil {
			return nil, err
		}
		var text Prose
		var prose []string
		code := false
		lines := bufio.NewScanner(file)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			line := lines.Text()
			switch {
			case strings.HasPrefix(line, "```"):
				code = !code
			case code, strings.HasPrefix(line, "    "), strings.HasPrefix(line, "|"), strings.HasPrefix(line, "#"), strings.HasPrefix(line, "<!--"):
			default:
				prose = append(prose, strings.TrimSpace(line))
			}
		}
		text.Add(strings.Join(prose, " "))
		if err := file.Close(); err != nil {
			return nil, err
		}
		if err := lines.Err(); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		texts[path] = text
	}
	return judge(texts, each, whole, "all pages", why), nil
}
