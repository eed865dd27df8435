package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// metric is a metric that a program defines.
type metric struct{ name, help, at string }

// metricsOf finds the metrics that a package's files define. A definition is a name and a help text,
// as literals side by side, in a call of prometheus.NewDesc or in a struct of options. A definition
// may also be a call of a function of the package, declared or a variable, that puts a prefix before
// the first of two such literals.
func metricsOf(fset *token.FileSet, files []*ast.File) (found []metric) {
	prefixes := map[string]string{} // by function
	helper := func(name string, body *ast.BlockStmt) {
		ast.Inspect(body, func(n ast.Node) bool {
			if sum, ok := n.(*ast.BinaryExpr); ok && sum.Op == token.ADD {
				_, rest := sum.Y.(*ast.Ident)
				if prefix := literal(sum.X); rest && strings.HasPrefix(prefix, "srtm_") {
					prefixes[name] = prefix
				}
			}
			return true
		})
	}
	each := func(do func(ast.Node)) {
		for _, file := range files {
			ast.Inspect(file, func(n ast.Node) bool { do(n); return true })
		}
	}
	each(func(n ast.Node) {
		switch n := n.(type) {
		case *ast.FuncDecl:
			// A method that defines many metrics may contain such functions, but is not such a
			// function.
			if n.Recv == nil && n.Body != nil && len(n.Body.List) == 1 {
				helper(n.Name.Name, n.Body)
			}
		case *ast.AssignStmt:
			if f, ok := n.Rhs[0].(*ast.FuncLit); ok {
				if id, ok := n.Lhs[0].(*ast.Ident); ok {
					helper(id.Name, f.Body)
				}
			}
		}
	})
	add := func(at token.Pos, prefix, name, help string) {
		if name != "" && strings.HasPrefix(prefix+name, "srtm_") {
			found = append(found, metric{prefix + name, help, fset.Position(at).String()})
		}
	}
	each(func(n ast.Node) {
		switch n := n.(type) {
		case *ast.CallExpr:
			prefix, called := "", ""
			switch f := n.Fun.(type) {
			case *ast.Ident:
				called = f.Name
				prefix = prefixes[called]
			case *ast.SelectorExpr:
				called = f.Sel.Name
			}
			if len(n.Args) >= 2 && (prefix != "" || called == "NewDesc") {
				add(n.Pos(), prefix, literal(n.Args[0]), literal(n.Args[1]))
			}
		case *ast.CompositeLit:
			fields := map[string]string{}
			for _, e := range n.Elts {
				if kv, ok := e.(*ast.KeyValueExpr); ok {
					if key, ok := kv.Key.(*ast.Ident); ok {
						fields[key.Name] = literal(kv.Value)
					}
				}
			}
			if _, isMetric := fields["Help"]; isMetric {
				add(n.Pos(), "", fields["Name"], fields["Help"])
			}
		}
	})
	return found
}

// literal is the value of a literal string; "" of anything else.
func literal(e ast.Expr) string {
	if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
		text, _ := strconv.Unquote(l.Value)
		return text
	}
	return ""
}

// elsewhere matches words by which a help text depends on another help text, if they are among its
// first five words. Later such words refer to a noun in the sentence.
var elsewhere = regexp.MustCompile(`(?i)^(\S+ ){0,4}(it|its|they|them|their|those|these|likewise|same)\b`)

// alone returns why a reader cannot understand a help text without other help texts, as in a tool that
// shows one metric. It returns "" for a clear help text.
func alone(help string) string {
	switch {
	case len(strings.Fields(help)) < 3:
		return "is too short"
	case !strings.HasSuffix(help, "."):
		return "is no sentence"
	case elsewhere.MatchString(help):
		return "begins with something that it does not name"
	}
	return ""
}

func TestHelpTextStandsAlone(t *testing.T) {
	for help, want := range map[string]bool{
		"Messages accepted from publishers.": true, "Subscribers.": false, "Bytes of messages in them.": false,
		"Of those, with a delivery latency above the SLO's.": false, "Bytes that they may take.": false, "Grants received, by what became of them.": true, "Brokers with a session": false, "": false,
	} {
		if got := alone(help); (got == "") != want {
			t.Errorf("%q: %q", help, got)
		}
	}
}

// The operator's pages list every metric by its full name, and each help text is clear by itself.
func TestMetricsAreExplained(t *testing.T) {
	root := filepath.Join("..", "..")
	var pages string
	for _, page := range []string{"metrics.md", "gateway.md", "admission.md"} {
		text := testkit.Result(os.ReadFile(filepath.Join(root, "docs", page))).Must(t)
		pages += string(text)
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `srtm_.*\\| +\\|$").FindAllString(pages, -1) {
		t.Errorf("docs: nothing is said of %s", row)
	}
	fset := token.NewFileSet()
	packages := map[string][]*ast.File{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{"testdata", "api", "bench", "build", ".git"}, d.Name()):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(fset, path, nil, 0)
		packages[filepath.Dir(path)] = append(packages[filepath.Dir(path)], file)
		return err
	})
	testkit.Must(t, err)
	count := 0
	for _, files := range packages {
		for _, m := range metricsOf(fset, files) {
			count++
			if !regexp.MustCompile(`\b` + m.name + `\b`).MatchString(pages) {
				t.Errorf("%s: %s is on none of these pages of docs", m.at, m.name)
			}
			testkit.Equal(t, alone(m.help), "", "%s: the help of %s %q", m.at, m.name, m.help)
		}
	}
	if count < 90 {
		t.Errorf("only %d metrics found: this test does not see how they are defined", count)
	}
}
