package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// CheckComments returns the packages without exactly one package comment.
func (m *Module) CheckComments(why string) ([]Finding, error) {
	var found []Finding
	for _, p := range m.Packages {
		if len(p.Files) == 0 {
			continue // tests only
		}
		var have []string
		for _, name := range p.Files {
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.PackageClauseOnly)
			if err != nil {
				return nil, err
			}
			if file.Doc != nil {
				have = append(have, name)
				want := "Package " + p.Name + " "
				if p.Main() {
					want = "Command " + filepath.Base(p.Dir) + " "
				}
				if !strings.HasPrefix(file.Doc.Text(), want) {
					found = append(found, Finding{p.Path, fmt.Sprintf("the package comment in %s does not begin with %q", name, strings.TrimSpace(want)), why})
				}
			}
		}
		switch {
		case len(have) == 0:
			found = append(found, Finding{p.Path, "no package comment", why})
		case len(have) > 1:
			found = append(found, Finding{p.Path, "a package comment in each of " + strings.Join(have, ", "), why})
		}
	}
	return found, nil
}

// Shun is a function or variable of another package that the module must not use.
type Shun struct {
	Path, Name string // "net/http", "DefaultServeMux"
	// From names the bound packages, as in Arrow. Except names exceptions from From.
	From, Except []string
	// TestsOnly binds only the test files. Otherwise the rule binds only the other files.
	TestsOnly bool
	Why       string
}

// CheckShuns returns the uses of shunned names. CheckShuns looks for the qualified name, under the
// file's local name of the import.
func (m *Module) CheckShuns(shuns []Shun) ([]Finding, error) {
	var found []Finding
	for _, s := range shuns {
		found = append(found, m.missing(s.From, s.Why)...)
		found = append(found, m.missing(s.Except, s.Why)...)
	}
	for _, p := range m.Packages {
		for _, tests := range []bool{false, true} {
			var bound []Shun
			for _, s := range shuns {
				if s.TestsOnly == tests && matchAny(s.From, p.Path) && !matchAny(s.Except, p.Path) {
					bound = append(bound, s)
				}
			}
			names := p.Files
			if tests {
				names = p.Tests
			}
			if len(bound) == 0 {
				continue
			}
			for _, name := range names {
				more, err := shunned(filepath.Join(p.Dir, name), p.Path+"/"+name, bound)
				if err != nil {
					return nil, err
				}
				found = append(found, more...)
			}
		}
	}
	return found, nil
}

var majorVersion = regexp.MustCompile(`/v[0-9]+$`)

func shunned(path, shown string, shuns []Shun) ([]Finding, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	imported := map[string]string{} // local name to import path
	for _, spec := range file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return nil, err
		}
		name := majorVersion.ReplaceAllString(path, "")
		name = name[strings.LastIndex(name, "/")+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		imported[name] = path
	}
	var found []Finding
	ast.Inspect(file, func(n ast.Node) bool {
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		x, ok := selector.X.(*ast.Ident)
		if !ok {
			return true
		}
		for _, s := range shuns {
			if imported[x.Name] == s.Path && selector.Sel.Name == s.Name {
				found = append(found, Finding{
					fmt.Sprintf("%s:%d", shown, fset.Position(n.Pos()).Line), s.Path + "." + s.Name, s.Why,
				})
			}
		}
		return true
	})
	return found, nil
}
