package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// Purity lists the names that a pure package may use. A pure package only computes. It has no clock,
// timer, goroutine, channel, lock, I/O, logging, own randomness or own state, and no decision depends
// on the order of a map.
type Purity struct {
	// Packages lists the pure packages: exact paths, relative to the module.
	Packages []string
	// Std lists the packages of the standard library that pure packages may import, with the reason why
	// the package is harmless if the reason is not obvious.
	Std map[string]string
	// Banned lists functions and variables of these packages that pure packages may not use, such as
	// "time.Now", with the reason.
	Banned map[string]string
	// Allowed lists the harmless functions of packages that also have harmful functions. Types and
	// methods are always allowed.
	Allowed map[string][]string
	Why     string
}

// CheckPurity returns the places where pure packages break the rule.
func (m *Module) CheckPurity(rule Purity) ([]Finding, error) {
	found := m.missing(rule.Packages, rule.Why)
	for _, p := range m.Packages {
		if !slices.Contains(rule.Packages, p.Path) {
			continue
		}
		for _, path := range p.Imports {
			if rel, ours := m.ours(path); ours {
				if !slices.Contains(rule.Packages, rel) {
					found = append(found, Finding{p.Path, "is pure and imports " + rel + ", which is not", rule.Why})
				}
			} else if _, ok := rule.Std[path]; !ok {
				found = append(found, Finding{p.Path, "is pure and imports " + path,
					"a pure package imports pure packages and what rules_test.go allows of the standard library"})
			}
		}
		for _, file := range p.Ignored {
			found = append(found, Finding{filepath.Join(p.Path, file), "a file of a pure package that this build leaves out",
				"what is not built here is not checked here, and pure code has no reason to differ between platforms"})
		}
	}
	loaded, err := m.typed()
	if err != nil {
		return nil, err
	}
	for _, pkg := range loaded {
		if !slices.Contains(rule.Packages, m.relative(pkg.PkgPath)) {
			continue
		}
		for _, file := range pkg.Syntax {
			c := &purityCheck{rule: rule, module: m, pkg: pkg, file: file}
			c.run()
			found = append(found, c.found...)
		}
	}
	return found, nil
}

// purityCheck checks one file.
type purityCheck struct {
	rule   Purity
	module *Module
	pkg    *packages.Package
	file   *ast.File
	stack  []ast.Node // from the file to the current node
	found  []Finding
}

func (c *purityCheck) run() {
	ast.Inspect(c.file, func(n ast.Node) bool {
		if n == nil {
			c.stack = c.stack[:len(c.stack)-1]
			return true
		}
		c.stack = append(c.stack, n)
		c.node(n)
		return true
	})
}

func (c *purityCheck) report(position token.Pos, why, format string, args ...any) {
	p := c.pkg.Fset.Position(position)
	file, err := filepath.Rel(c.module.Dir, p.Filename)
	if err != nil {
		file = p.Filename
	}
	c.found = append(c.found, Finding{fmt.Sprintf("%s:%d", file, p.Line), fmt.Sprintf(format, args...), why})
}

const (
	whyConcurrency = "a pure package is called by its owner's goroutine and has none of its own"
	whyOrder       = "Go's map order is random; sort the keys, or say in an `// order:` comment why it makes no difference"
	whyState       = "a pure package's result depends on its arguments alone, so its variables are constant"
)

func (c *purityCheck) node(n ast.Node) {
	switch n := n.(type) {
	case *ast.GoStmt:
		c.report(n.Pos(), whyConcurrency, "go statement")
	case *ast.SelectStmt:
		c.report(n.Pos(), whyConcurrency, "select statement")
	case *ast.SendStmt:
		c.report(n.Pos(), whyConcurrency, "channel send")
	case *ast.ChanType:
		c.report(n.Pos(), whyConcurrency, "channel type")
	case *ast.UnaryExpr:
		if n.Op == token.ARROW {
			c.report(n.Pos(), whyConcurrency, "channel receive")
		}
	case *ast.RangeStmt:
		c.ranging(n)
	case *ast.CallExpr:
		c.call(n)
	case *ast.Ident:
		c.ident(n)
	}
}

func (c *purityCheck) ranging(n *ast.RangeStmt) {
	switch c.pkg.TypesInfo.TypeOf(n.X).Underlying().(type) {
	case *types.Map:
		if !c.orderExplained(n.Pos()) {
			c.report(n.Pos(), whyOrder, "range over a map")
		}
	case *types.Chan:
		c.report(n.Pos(), whyConcurrency, "range over a channel")
	}
}

// call checks for iterators over maps that are not sorted at once.
func (c *purityCheck) call(n *ast.CallExpr) {
	f := c.function(n)
	if f == nil || f.Pkg() == nil || f.Pkg().Path() != "maps" {
		return
	}
	switch f.Name() {
	case "All", "Keys", "Values":
	default:
		return
	}
	if outer, ok := c.parent(1).(*ast.CallExpr); ok {
		if g := c.function(outer); g != nil && g.Pkg() != nil && g.Pkg().Path() == "slices" && strings.HasPrefix(g.Name(), "Sorted") {
			return
		}
	}
	if !c.orderExplained(n.Pos()) {
		c.report(n.Pos(), whyOrder, "maps.%s not sorted at once", f.Name())
	}
}

// function returns the function that n calls by name; nil: none.
func (c *purityCheck) function(n *ast.CallExpr) *types.Func {
	fun := ast.Unparen(n.Fun)
	switch index := fun.(type) {
	case *ast.IndexExpr:
		fun = index.X
	case *ast.IndexListExpr:
		fun = index.X
	}
	var id *ast.Ident
	switch fun := fun.(type) {
	case *ast.Ident:
		id = fun
	case *ast.SelectorExpr:
		id = fun.Sel
	default:
		return nil
	}
	f, _ := c.pkg.TypesInfo.Uses[id].(*types.Func)
	return f
}

var orderComment = regexp.MustCompile(`^// order: \S`)

// orderExplained reports whether a comment block that ends on the line above pos has a line
// "// order: reason".
func (c *purityCheck) orderExplained(pos token.Pos) bool {
	line := c.pkg.Fset.Position(pos).Line
	for _, group := range c.file.Comments {
		if c.pkg.Fset.Position(group.End()).Line != line-1 {
			continue
		}
		for _, comment := range group.List {
			if orderComment.MatchString(comment.Text) {
				return true
			}
		}
	}
	return false
}

// ident checks each use of a function or a variable. A banned function must not be passed as a value
// either.
func (c *purityCheck) ident(id *ast.Ident) {
	if v, ok := c.pkg.TypesInfo.Defs[id].(*types.Var); ok && packageLevel(v) {
		c.declared(id, v)
	}
	obj := c.pkg.TypesInfo.Uses[id]
	if obj == nil {
		return
	}
	if b, ok := obj.(*types.Builtin); ok && (b.Name() == "print" || b.Name() == "println") {
		c.report(id.Pos(), "that is I/O", "builtin %s", b.Name())
	}
	if v, ok := obj.(*types.Var); ok && packageLevel(v) && v.Pkg() == c.pkg.Types {
		c.used(id, v)
		return
	}
	if obj.Pkg() == nil || obj.Pkg() == c.pkg.Types || obj.Parent() != obj.Pkg().Scope() {
		return // predeclared, of this package, or a method or field
	}
	path := obj.Pkg().Path()
	name := path + "." + obj.Name()
	if why, ok := c.rule.Banned[name]; ok {
		c.report(id.Pos(), why, "%s", name)
		return
	}
	_, isType := obj.(*types.TypeName)
	if allowed, ok := c.rule.Allowed[path]; ok && !isType && !slices.Contains(allowed, obj.Name()) {
		c.report(id.Pos(), fmt.Sprintf("of this package a pure one may use only %s", strings.Join(allowed, ", ")), "%s", name)
	}
	if v, ok := obj.(*types.Var); ok && packageLevel(v) {
		c.used(id, v)
	}
}

// parent returns the node i levels above the current node; parent(1) is its parent.
func (c *purityCheck) parent(i int) ast.Node {
	if at := len(c.stack) - 1 - i; at >= 0 {
		return c.stack[at]
	}
	return nil
}

func packageLevel(v *types.Var) bool {
	return !v.IsField() && v.Pkg() != nil && v.Parent() == v.Pkg().Scope()
}
