package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

var (
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`^#+ +(.*)$`)
	id      = regexp.MustCompile(`<a id="([^"]+)">`)
	// slugDrops matches the characters that GitHub leaves out of a heading's anchor.
	slugDrops = regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
)

// anchors returns the anchors of a Markdown page.
func anchors(text string) (found []string) {
	for line := range proseLines(text) {
		if m := heading.FindStringSubmatch(line); m != nil {
			found = append(found, strings.ReplaceAll(slugDrops.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
		}
		for _, m := range id.FindAllStringSubmatch(line, -1) {
			found = append(found, m[1])
		}
	}
	return found
}

// proseLines yields the lines of a Markdown page outside code blocks.
func proseLines(text string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		code := false
		for line := range strings.Lines(text) {
			switch {
			case strings.HasPrefix(strings.TrimSpace(line), "```"):
				code = !code
			case !code && !yield(strings.TrimRight(line, "\n")):
				return
			}
		}
	}
}

// CheckLinks finds links of Markdown pages to files and anchors that do not exist. Links to other
// sites do not count.
func CheckLinks(root string, paths []string, why string) (found []Finding, err error) {
	for _, path := range paths {
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			return nil, err
		}
		for line := range proseLines(string(text)) {
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				destination := m[1]
				if strings.Contains(destination, "://") {
					continue
				}
				file, anchor, _ := strings.Cut(destination, "#")
				target := filepath.Join(root, filepath.Dir(path), file)
				if file == "" {
					target = filepath.Join(root, path)
				}
				if info, err := os.Stat(target); err != nil {
					found = append(found, Finding{path, "links to " + destination + ", which does not exist", why})
					continue
				} else if anchor == "" || info.IsDir() || filepath.Ext(target) != ".md" {
					continue
				}
				page, err := os.ReadFile(target)
				if err != nil {
					return nil, err
				}
				if !slices.Contains(anchors(string(page)), anchor) {
					found = append(found, Finding{path, "links to " + destination + ", an anchor that does not exist", why})
				}
			}
		}
	}
	return found, nil
}
