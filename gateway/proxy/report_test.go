package proxy

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A server's report may be kilobytes of JSON, and all requests pass the dispatcher's lock. So the
// report is read before the lock is taken.
func TestReportsAreReadWithoutTheLock(t *testing.T) {
	file := testkit.Result(parser.ParseFile(token.NewFileSet(), "dispatch.go", nil, 0)).Must(t)
	read := 0
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok {
			continue
		}
		locked := strings.HasSuffix(f.Name.Name, "Locked")
		ast.Inspect(f, func(n ast.Node) bool { // in the order of the text
			if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "Lock" {
				locked = true
			} else if ok && s.Sel.Name == "ParseReport" {
				read++
				if locked {
					t.Errorf("%s reads a report with the lock", f.Name.Name)
				}
			}
			return true
		})
	}
	if read == 0 {
		t.Error("nothing reads reports")
	}
}
