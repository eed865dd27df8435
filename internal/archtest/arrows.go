package archtest

import (
	"fmt"
	"slices"
	"strings"
)

// Arrow is a rule on imports. Patterns are as in `go list`, relative to the module: "tokenbucket",
// "nsqd/...", "...". A pattern whose first part has a dot ("google.golang.org/grpc/...") names packages
// of another module. A pattern that begins with "std:" ("std:log") names packages of the standard
// library.
type Arrow struct {
	// From names the packages that the rule binds. Except names exceptions from From.
	From, Except []string
	// Only, if not nil, lists the packages of this module that the bound packages may import. Only does
	// not restrict other modules and the standard library.
	Only []string
	// Never lists the packages that the bound packages may not import.
	Never []string
	// Tests extends the rule to test files.
	Tests bool
	// Why is printed with each finding.
	Why string
}

// CheckArrows returns the imports that break the rules, and the rules that name a package that does not
// exist.
func (m *Module) CheckArrows(arrows []Arrow) []Finding {
	var found []Finding
	for _, a := range arrows {
		for _, patterns := range [][]string{a.From, a.Except, a.Only, a.Never} {
			own := slices.DeleteFunc(slices.Clone(patterns), foreign)
			found = append(found, m.missing(own, a.Why)...)
		}
		for _, p := range m.Packages {
			if !matchAny(a.From, p.Path) || matchAny(a.Except, p.Path) {
				continue
			}
			found = append(found, m.checkImports(a, p, p.Imports, "imports")...)
			if a.Tests {
				found = append(found, m.checkImports(a, p, p.TestImports, "imports, in a test,")...)
			}
		}
	}
	return found
}

func (m *Module) checkImports(a Arrow, p *Package, imports []string, verb string) []Finding {
	var found []Finding
	for _, path := range imports {
		rel, ours := m.ours(path)
		if ours && rel == p.Path {
			continue // a package's external test
		}
		if matchAny(a.Never, rel) || !ours && matchAny(a.Never, "std:"+path) || ours && a.Only != nil && !matchAny(a.Only, rel) {
			found = append(found, Finding{p.Path, fmt.Sprintf("%s %s", verb, rel), a.Why})
		}
	}
	return found
}

func foreign(pattern string) bool {
	if strings.HasPrefix(pattern, "std:") {
		return true
	}
	first, _, _ := strings.Cut(pattern, "/")
	return strings.Contains(strings.TrimSuffix(first, "..."), ".")
}
